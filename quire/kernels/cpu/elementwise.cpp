// Row-wise kernels: one pass over small matrices, bound by memory (or by L2 in a decode). T is float or bf16; the
// arithmetic is float32 throughout. Bytes, with R rows of W numbers of size s:
//   rms_norm      2 R W s           add_rms_norm  4 R W s (x, residual in; residual, result out)
//   silu_mul      3 R W s           prepare_qkv   2 R (H + 2 KV) D s + one line of cosines a token
// A row is always computed by one thread in one order: its bits do not depend on the batch.
#include <cmath>

#include "simd.h"

namespace {

// Waking the team costs some microseconds: about what one thread needs for this many numbers.
constexpr int64_t kWorthSharing = 32 * 1024;

template <class Row>
void for_rows(int64_t rows, int64_t width, int threads, Row row) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1 && rows * width > kWorthSharing)
    for (int64_t i = 0; i < rows; i++) row(i);
}

// Calls part(offset, load, store) over `width` numbers: whole vectors, then what is left through a partial one.
template <class Part>
INLINE void sweep(int64_t width, Part part) {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes)
        part(i, [](auto* p) FORCED { return F::load(p); }, [](auto* p, vec v) FORCED { F::store(p, v); });
    if (const int64_t left = width - i; left > 0)
        part(i, [=](auto* p) FORCED { return F::load_part(p, left); },
             [=](auto* p, vec v) FORCED { F::store_part(p, v, left); });
}

template <class T>
INLINE float inverse_rms(const T* x, int64_t width, float eps) {
    vec squares{};
    sweep(width, [&](int64_t i, auto load, auto) FORCED {
        const vec v = load(x + i);
        squares += v * v;
    });
    return 1 / std::sqrt(sum<kLanes>(squares) / width + eps);
}

template <class T>
INLINE void scale_row(const T* x, const T* weight, T* out, int64_t width, float factor) {
    sweep(width, [&](int64_t i, auto load, auto store) FORCED { store(out + i, load(x + i) * factor * load(weight + i)); });
}

template <class T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, T* out, int64_t rows, int64_t width, float eps,
              int threads) {
    for_rows(rows, width, threads, [=](int64_t row) {
        const T* from = x + row * x_stride;
        scale_row(from, weight, out + row * width, width, inverse_rms(from, width, eps));
    });
}

template <class T>
void add_rms_norm(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const T* weight, T* out,
                  int64_t rows, int64_t width, float eps, int threads) {
    for_rows(rows, width, threads, [=](int64_t row) {
        const T* from = x + row * x_stride;
        T* sums = residual + row * residual_stride;
        sweep(width, [&](int64_t i, auto load, auto store) FORCED { store(sums + i, load(sums + i) + load(from + i)); });
        scale_row(sums, weight, out + row * width, width, inverse_rms(sums, width, eps));
    });
}

template <class T>
void silu_mul(const T* gate_up, int64_t stride, T* out, int64_t rows, int64_t width, int threads) {
    for_rows(rows, 3 * width, threads, [=](int64_t row) {
        const T *gate = gate_up + row * stride, *up = gate + width;
        sweep(width, [&](int64_t i, auto load, auto store) FORCED {
            const vec g = load(gate + i);
            store(out + row * width + i, g / (exp<kLanes>(-g) + 1.0f) * load(up + i));
        });
    });
}

constexpr int64_t kMaxDim = 1024;

// One head: norm (weight may be null), rotation (cosines may be null), rounded once at the end.
template <class T>
INLINE void place_head(const T* from, T* to, int64_t dim, const T* weight, float eps, const float* cosines,
                       int64_t rotary) {
    float head[kMaxDim];
    const float factor = weight ? inverse_rms(from, dim, eps) : 1;
    sweep(dim, [&](int64_t i, auto load, auto store) FORCED {
        store(head + i, weight ? load(from + i) * factor * load(weight + i) : load(from + i));
    });
    if (cosines) {
        const int64_t half = rotary / 2;
        const float* sines = cosines + half;
        sweep(half, [&](int64_t i, auto load, auto store) FORCED {
            const vec a = load(head + i), b = load(head + half + i), c = load(cosines + i), s = load(sines + i);
            store(head + i, a * c - b * s);
            store(head + half + i, b * c + a * s);
        });
    }
    sweep(dim, [&](int64_t i, auto load, auto store) FORCED { store(to + i, load(head + i)); });
}

template <class T>
void prepare_qkv(const T* qkv, int64_t qkv_stride, const int64_t* positions, const float* cos_sin, int64_t rotary,
                 const T* q_norm, const T* k_norm, float eps, T* kv, int64_t block_stride, int64_t block_size,
                 const int64_t* slots, T* q, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                 int threads) {
    for_rows(tokens, (heads + 2 * kv_heads) * dim, threads, [=](int64_t token) {
        const T* from = qkv + token * qkv_stride;
        const float* cosines = cos_sin ? cos_sin + positions[token] * rotary : nullptr;
        for (int64_t h = 0; h < heads; h++, from += dim)
            place_head(from, q + (token * heads + h) * dim, dim, q_norm, eps, cosines, rotary);
        const int64_t plane = block_size * dim;
        T* keys = kv + slots[token] / block_size * block_stride + slots[token] % block_size * dim;
        T* values = keys + kv_heads * plane;
        for (int64_t h = 0; h < kv_heads; h++, from += dim)
            place_head(from, keys + h * plane, dim, k_norm, eps, cosines, rotary);
        for (int64_t h = 0; h < kv_heads; h++, from += dim) std::memcpy(values + h * plane, from, dim * sizeof(T));
    });
}

}  // namespace

#define ELEMENTWISE(suffix, T)                                                                                         \
    EXPORT void quire_rms_norm_##suffix(const T* x, int64_t x_stride, const T* weight, T* out, int64_t rows,           \
                                        int64_t width, float eps, int threads) {                                       \
        rms_norm(x, x_stride, weight, out, rows, width, eps, threads);                                                 \
    }                                                                                                                  \
    EXPORT void quire_add_rms_norm_##suffix(const T* x, int64_t x_stride, T* residual, int64_t residual_stride,        \
                                            const T* weight, T* out, int64_t rows, int64_t width, float eps,           \
                                            int threads) {                                                             \
        add_rms_norm(x, x_stride, residual, residual_stride, weight, out, rows, width, eps, threads);                  \
    }                                                                                                                  \
    EXPORT void quire_silu_mul_##suffix(const T* gate_up, int64_t stride, T* out, int64_t rows, int64_t width,         \
                                        int threads) {                                                                 \
        silu_mul(gate_up, stride, out, rows, width, threads);                                                          \
    }                                                                                                                  \
    EXPORT void quire_prepare_qkv_##suffix(const T* qkv, int64_t qkv_stride, const int64_t* positions,                 \
                                           const float* cos_sin, int64_t rotary, const T* q_norm, const T* k_norm,     \
                                           float eps, T* kv, int64_t block_stride, int64_t block_size,                 \
                                           const int64_t* slots, T* q, int64_t tokens, int64_t heads,                  \
                                           int64_t kv_heads, int64_t dim, int threads) {                               \
        prepare_qkv(qkv, qkv_stride, positions, cos_sin, rotary, q_norm, k_norm, eps, kv, block_stride, block_size,    \
                    slots, q, tokens, heads, kv_heads, dim, threads);                                                  \
    }
ELEMENTWISE(f32, float)
ELEMENTWISE(bf16, bf16)
