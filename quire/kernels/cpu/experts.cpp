// Mixtures of experts: routing, and the experts.
//
// Work and bytes are those of the GEMMs in linear.cpp, over the experts in use: each one's weights are read once, for
// all of its tokens together. Around them rows are gathered and summed: T * k * (2 H + 3 I) numbers, which stay in
// cache.
//
// Bits: a row's GEMMs do not depend on the batch (linear.cpp), and its experts are added in the order of their indices,
// in float32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace {

// The calls of linear.cpp and elementwise.cpp, as Python packs them.
struct Linear {
    const void *x, *weight, *bias;
    void* y;
    int64_t m, n, k, x_stride, weight_stride, threads;
};
// A stack of matrices as packed.h has one: the first, and bytes from one to the next.
struct PackedStack {
    const char* first[6];
    int64_t strides[6], kind, block, group;
};
struct PackedLinear {
    const void* weight[6];
    const void *x, *bias;
    void* y;
    int64_t rows, n, k, x_stride, y_stride, kind, block, group, threads;
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
void quire_packed_linear_f32(const PackedLinear*);
void quire_packed_linear_bf16(const PackedLinear*);
void quire_silu_mul_f32(const SiluMul*);
void quire_silu_mul_bf16(const SiluMul*);
}

namespace {

void run(const Linear& call, const float*) { quire_linear_f32(&call); }
void run(const Linear& call, const bf16*) { quire_linear_bf16(&call); }
void run(const PackedLinear& call, const float*) { quire_packed_linear_f32(&call); }
void run(const PackedLinear& call, const bf16*) { quire_packed_linear_bf16(&call); }
void run(const SiluMul& call, const float*) { quire_silu_mul_f32(&call); }
void run(const SiluMul& call, const bf16*) { quire_silu_mul_bf16(&call); }

thread_local Scratch sums_scratch, rows_scratch, hidden_scratch, gated_scratch, results_scratch;

// Scratch memory as rows of T.
template <class T>
T* numbers(Scratch& scratch, int64_t count) {
    return reinterpret_cast<T*>(scratch.get((count * sizeof(T) + sizeof(float) - 1) / sizeof(float)));
}

template <class T>
struct Route {
    const T* logits;
    float* weights;
    int32_t* experts;
    int64_t* counts;  // or null
    int64_t rows, width, stride, top_k, renormalise;
};

// Whether a sorts before b: larger first, NaN above everything, as torch sorts.
INLINE bool above(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

template <class T>
void route(const Route<T>& c) {
    std::vector<float> wide(c.width);
    for (int64_t row = 0; row < c.rows; row++) {
        float largest = -INFINITY;
        for (int64_t i = 0; i < c.width; i++) {
            wide[i] = to_float(c.logits[row * c.stride + i]);
            if (above(wide[i], largest)) largest = wide[i];
        }
        float* weights = c.weights + row * c.top_k;
        int32_t* experts = c.experts + row * c.top_k;
        int64_t found = 0;
        for (int64_t i = 0; i < c.width; i++) {  // insertion sort; among equals the lower index stays first
            int64_t at = found;
            while (at > 0 && above(wide[i], wide[experts[at - 1]])) at--;
            if (at == c.top_k) continue;
            if (found < c.top_k) found++;
            for (int64_t j = found - 1; j > at; j--) experts[j] = experts[j - 1];
            experts[at] = int32_t(i);
        }
        float total = 0, kept = 0;
        for (int64_t i = 0; i < c.width; i++) total += std::exp(wide[i] - largest);
        for (int64_t j = 0; j < c.top_k; j++) {
            weights[j] = std::exp(wide[experts[j]] - largest) / total;
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
struct PackedExperts {
    const T* x;
    const float* weights;
    const int32_t* experts;
    T* out;
    PackedStack gate_up, down;
    int64_t rows, hidden, width, count, top_k, x_stride, threads;
};

// y[rows, n] = x[rows, k] times matrix e of a stack.
template <class T>
void multiply(const T* stack, int64_t e, const T* x, T* y, int64_t rows, int64_t n, int64_t k, int64_t threads) {
    run(Linear{x, stack + e * n * k, nullptr, y, rows, n, k, k, k, threads}, x);
}
template <class T>
void multiply(const PackedStack& stack, int64_t e, const T* x, T* y, int64_t rows, int64_t n, int64_t k,
              int64_t threads) {
    PackedLinear call{{}, x, nullptr, y, rows, n, k, k, n, stack.kind, stack.block, stack.group, threads};
    for (int i = 0; i < 6; i++) call.weight[i] = stack.first[i] ? stack.first[i] + e * stack.strides[i] : nullptr;
    run(call, x);
}

// Experts<T> or PackedExperts<T>.
template <class T, class Call>
void experts(const Call& c) {
    const int64_t hidden = c.hidden, width = c.width, pairs = c.rows * c.top_k;
    // The first of each expert's (token, choice) pairs in the list of all pairs, sorted by expert.
    std::vector<int64_t> begin(c.count + 1, 0), order(pairs);
    auto is_local = [&](int64_t pair) { return c.experts[pair] >= 0 && c.experts[pair] < c.count; };
    for (int64_t i = 0; i < pairs; i++)
        if (is_local(i)) begin[c.experts[i] + 1]++;
    for (int64_t e = 0; e < c.count; e++) begin[e + 1] += begin[e];
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (int64_t i = 0; i < pairs; i++)
        if (is_local(i)) order[next[c.experts[i]]++] = i;

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
        T* results = numbers<T>(results_scratch, tokens * hidden);
        multiply(c.gate_up, e, x, gate_up, tokens, 2 * width, hidden, c.threads);
        run(SiluMul{gate_up, gated, tokens, width, 2 * width, c.threads}, x);
        multiply(c.down, e, static_cast<const T*>(gated), results, tokens, hidden, width, c.threads);
        for (int64_t i = 0; i < tokens; i++) {
            float* sum = sums + mine[i] / c.top_k * hidden;
            const float weight = c.weights[mine[i]];
            for (int64_t j = 0; j < hidden; j++) sum[j] += weight * to_float(results[i * hidden + j]);
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
EXPORT void quire_experts_f32(const Experts<float>* call) { experts<float>(*call); }
EXPORT void quire_experts_bf16(const Experts<bf16>* call) { experts<bf16>(*call); }
EXPORT void quire_packed_experts_f32(const PackedExperts<float>* call) { experts<float>(*call); }
EXPORT void quire_packed_experts_bf16(const PackedExperts<bf16>* call) { experts<bf16>(*call); }
