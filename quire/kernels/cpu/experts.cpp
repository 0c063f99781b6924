// Mixtures of experts: which experts a token goes to, and its way through them.
//
// Work and bytes are those of the products in linear.cpp, over the experts that are used: each one's weights are read
// once, for all of its tokens together. Around them rows are gathered and added up: T * k * (2 H + 3 I) numbers, which
// stay in the caches.
//
// Bits: a row's products do not depend on the batch (linear.cpp), and its experts are added in the order of their
// numbers, in float32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "scratch.h"
#include "simd.h"

namespace {

// The calls of linear.cpp and elementwise.cpp, as Python packs them.
struct Linear {
    const void *x, *weight, *bias;
    void* y;
    int64_t m, n, k, x_stride, weight_stride, threads;
};
struct SiluMul {
    const void* gate_up;
    void* out;
    int64_t rows, width, stride, threads;
};

}  // namespace

extern "C" {
void quire_linear_f32(const Linear*);
void quire_linear_bf16(const Linear*);
void quire_silu_mul_f32(const SiluMul*);
void quire_silu_mul_bf16(const SiluMul*);
}

namespace {

void run(const Linear& call, const float*) { quire_linear_f32(&call); }
void run(const Linear& call, const bf16*) { quire_linear_bf16(&call); }
void run(const SiluMul& call, const float*) { quire_silu_mul_f32(&call); }
void run(const SiluMul& call, const bf16*) { quire_silu_mul_bf16(&call); }

thread_local Scratch sums_scratch, rows_scratch, hidden_scratch, gated_scratch, found_scratch;

// Scratch memory as rows of T.
template <class T>
T* numbers(Scratch& scratch, int64_t count) {
    return reinterpret_cast<T*>(scratch.get((count * sizeof(T) + sizeof(float) - 1) / sizeof(float)));
}

INLINE float as_float(float value) { return value; }
INLINE float as_float(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

template <class T>
struct Route {
    const T* logits;
    float* weights;
    int32_t* experts;
    int64_t* counts;  // or null
    int64_t rows, width, stride, top_k, renormalise;
};

// Larger first; NaN is larger than everything, as torch sorts it.
INLINE bool above(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

template <class T>
void route(const Route<T>& c) {
    std::vector<float> wide(c.width);
    for (int64_t row = 0; row < c.rows; row++) {
        float most = -INFINITY;
        for (int64_t i = 0; i < c.width; i++) {
            wide[i] = as_float(c.logits[row * c.stride + i]);
            if (above(wide[i], most)) most = wide[i];
        }
        float* weights = c.weights + row * c.top_k;
        int32_t* experts = c.experts + row * c.top_k;
        int64_t found = 0;
        for (int64_t i = 0; i < c.width; i++) {  // kept in order; among equals the one that came first stays ahead
            int64_t at = found;
            while (at > 0 && above(wide[i], wide[experts[at - 1]])) at--;
            if (at == c.top_k) continue;
            if (found < c.top_k) found++;
            for (int64_t j = found - 1; j > at; j--) experts[j] = experts[j - 1];
            experts[at] = int32_t(i);
        }
        float total = 0, kept = 0;
        for (int64_t i = 0; i < c.width; i++) total += std::exp(wide[i] - most);
        for (int64_t j = 0; j < c.top_k; j++) {
            weights[j] = std::exp(wide[experts[j]] - most) / total;
            kept += weights[j];
            if (c.counts) c.counts[experts[j]]++;
        }
        if (c.renormalise)
            for (int64_t j = 0; j < c.top_k; j++) weights[j] /= kept;
    }
}

template <class T>
struct Experts {
    const T* x;
    const float* weights;
    const int32_t* experts;
    const T *gate_up, *down;
    T* out;
    int64_t rows, hidden, width, count, top_k, x_stride, threads;
};

template <class T>
void experts(const Experts<T>& c) {
    const int64_t hidden = c.hidden, width = c.width, pairs = c.rows * c.top_k;
    // Where each expert's (token, choice) pairs begin in the list of all, sorted by expert.
    std::vector<int64_t> begin(c.count + 1, 0), order(pairs);
    auto is_here = [&](int64_t pair) { return c.experts[pair] >= 0 && c.experts[pair] < c.count; };
    for (int64_t i = 0; i < pairs; i++)
        if (is_here(i)) begin[c.experts[i] + 1]++;
    for (int64_t e = 0; e < c.count; e++) begin[e + 1] += begin[e];
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < pairs; i++)
        if (is_here(i)) order[next[c.experts[i]]++] = i;

    float* sums = sums_scratch.get(c.rows * hidden);
    std::fill(sums, sums + c.rows * hidden, 0.0f);
    for (int64_t e = 0; e < c.count; e++) {
        const int64_t *mine = order.data() + begin[e], tokens = begin[e + 1] - begin[e];
        if (!tokens) continue;
        const T* x = c.x + mine[0] / c.top_k * c.x_stride;
        if (tokens > 1) {
            T* gathered = numbers<T>(rows_scratch, tokens * hidden);
            for (int64_t i = 0; i < tokens; i++)
                std::memcpy(gathered + i * hidden, c.x + mine[i] / c.top_k * c.x_stride, hidden * sizeof(T));
            x = gathered;
        }
        T* gate_up = numbers<T>(hidden_scratch, tokens * 2 * width);
        T* gated = numbers<T>(gated_scratch, tokens * width);
        T* found = numbers<T>(found_scratch, tokens * hidden);
        const T *first = c.gate_up + e * 2 * width * hidden, *second = c.down + e * hidden * width;
        run(Linear{x, first, nullptr, gate_up, tokens, 2 * width, hidden, hidden, hidden, c.threads}, x);
        run(SiluMul{gate_up, gated, tokens, width, 2 * width, c.threads}, x);
        run(Linear{gated, second, nullptr, found, tokens, hidden, width, width, width, c.threads}, x);
        for (int64_t i = 0; i < tokens; i++) {
            float* sum = sums + mine[i] / c.top_k * hidden;
            const float weight = c.weights[mine[i]];
            for (int64_t j = 0; j < hidden; j++) sum[j] += weight * as_float(found[i * hidden + j]);
        }
    }
    for (int64_t i = 0; i < c.rows * hidden; i += kLanes) {
        const int64_t left = c.rows * hidden - i;
        if (left >= kLanes) F::store(c.out + i, F::load(sums + i));
        else F::store_part(c.out + i, F::load_part(sums + i, left), left);
    }
}

}  // namespace

EXPORT void quire_route_f32(const Route<float>* call) { route(*call); }
EXPORT void quire_route_bf16(const Route<bf16>* call) { route(*call); }
EXPORT void quire_experts_f32(const Experts<float>* call) { experts(*call); }
EXPORT void quire_experts_bf16(const Experts<bf16>* call) { experts(*call); }
