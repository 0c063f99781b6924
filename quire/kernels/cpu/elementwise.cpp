// Row-wise kernels: one pass over small matrices, bound by memory (or by L2 in a decode). T is float or bf16; the
// arithmetic is float32 throughout. Bytes, with R rows of W numbers of size s:
//   rms_norm      2 R W s           add_rms_norm  4 R W s (x, residual in; residual, result out)
//   silu_mul      3 R W s           prepare_qkv   2 R (H + 2 KV) D s + one line of cosines per token
//   embedding     2 R W s           copy_stream   3 R W s
// A row is always computed by one thread in one order: its bits do not depend on the batch.
#include <cmath>

#include "pool.h"
#include "simd.h"

namespace {

// Waking the thread pool takes some microseconds: about what one thread needs for this many numbers.
constexpr int64_t kWorthSharing = 96 * 1024;
constexpr int64_t kPiece = 16 * 1024;  // numbers

template <class Row>
void for_rows(int64_t rows, int64_t width, int64_t threads, Row row) {
    share_items(rows, std::max<int64_t>(1, kPiece / width), threads, rows * width > kWorthSharing, row);
}

// Calls part(offset, load, store) over `width` numbers: whole vectors, then the tail as a partial one.
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
    sweep(width, [&](int64_t i, auto load, auto store) FORCED {
        store(out + i, load(x + i) * factor * load(weight + i));
    });
}

// Arguments as Python packs them (8 bytes per field).
template <class T>
struct RmsNorm {
    const T *x, *weight;
    T* out;
    int64_t rows, width, x_stride;
    double eps;
    int64_t threads;
};

template <class T>
void rms_norm(const RmsNorm<T>& c) {
    for_rows(c.rows, c.width, c.threads, [&](int64_t row) {
        const T* x = c.x + row * c.x_stride;
        scale_row(x, c.weight, c.out + row * c.width, c.width, inverse_rms(x, c.width, c.eps));
    });
}

template <class T>
struct AddRmsNorm {
    const T* x;
    T* residual;
    const T* weight;
    T* out;
    int64_t rows, width, x_stride, residual_stride;
    double eps;
    int64_t threads;
};

template <class T>
void add_rms_norm(const AddRmsNorm<T>& c) {
    for_rows(c.rows, c.width, c.threads, [&](int64_t row) {
        const T* x = c.x + row * c.x_stride;
        T* sums = c.residual + row * c.residual_stride;
        sweep(c.width, [&](int64_t i, auto load, auto store) FORCED { store(sums + i, load(sums + i) + load(x + i)); });
        scale_row(sums, c.weight, c.out + row * c.width, c.width, inverse_rms(sums, c.width, c.eps));
    });
}

template <class T>
struct CopyStream {
    const T *x, *addend;  // addend may be null
    T* out;
    int64_t rows, width, x_stride, addend_stride, out_stride, threads;
};

template <class T>
void copy_stream(const CopyStream<T>& c) {
    for_rows(c.rows, c.width, c.threads, [&](int64_t row) {
        const T* x = c.x + row * c.x_stride;
        T* out = c.out + row * c.out_stride;
        if (!c.addend) {
            std::memcpy(out, x, c.width * sizeof(T));
            return;
        }
        const T* addend = c.addend + row * c.addend_stride;
        sweep(c.width, [&](int64_t i, auto load, auto store) FORCED { store(out + i, load(x + i) + load(addend + i)); });
    });
}

template <class T>
struct SiluMul {
    const T* gate_up;
    T* out;
    int64_t rows, width, stride, threads;
};

template <class T>
void silu_mul(const SiluMul<T>& c) {
    for_rows(c.rows, 3 * c.width, c.threads, [&](int64_t row) {
        const T *gate = c.gate_up + row * c.stride, *up = gate + c.width;
        T* out = c.out + row * c.width;
        sweep(c.width, [&](int64_t i, auto load, auto store) FORCED {
            const vec g = load(gate + i);
            store(out + i, g / (exp<kLanes>(-g) + 1.0f) * load(up + i));
        });
    });
}

constexpr int64_t kMaxDim = 1024;

// One head: norm (unless weight is null), rotation (unless cosines is null), rounded once at the end.
template <class T>
INLINE void rotate_head(const T* from, T* to, int64_t dim, const T* weight, float eps, const float* cosines,
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
struct PrepareQkv {
    const T* qkv;
    const int64_t* positions;
    const float* cos_sin;          // or null
    const T *q_weight, *k_weight;  // or both null
    T* kv;
    const int64_t* slots;
    T* q;
    int64_t tokens, heads, kv_heads, dim, rotary, qkv_stride, block_size, block_stride;
    double eps;
    int64_t threads;
};

template <class T>
void prepare_qkv(const PrepareQkv<T>& c) {
    const int64_t dim = c.dim, plane = c.block_size * dim;
    for_rows(c.tokens, (c.heads + 2 * c.kv_heads) * dim, c.threads, [&](int64_t token) {
        const T* from = c.qkv + token * c.qkv_stride;
        const float* cosines = c.cos_sin ? c.cos_sin + c.positions[token] * c.rotary : nullptr;
        const int64_t slot = c.slots[token];
        T* keys = c.kv + slot / c.block_size * c.block_stride + slot % c.block_size * dim;
        T* values = keys + c.kv_heads * plane;
        // The slots are not in cache, and scattered over as many pages as there are heads: prefetch them while Q is
        // computed.
        for (int64_t h = 0; h < 2 * c.kv_heads; h++)
            for (int64_t i = 0; i < dim; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(keys + h * plane + i, 1);
        for (int64_t h = 0; h < c.heads; h++, from += dim)
            rotate_head(from, c.q + (token * c.heads + h) * dim, dim, c.q_weight, c.eps, cosines, c.rotary);
        for (int64_t h = 0; h < c.kv_heads; h++, from += dim)
            rotate_head(from, keys + h * plane, dim, c.k_weight, c.eps, cosines, c.rotary);
        for (int64_t h = 0; h < c.kv_heads; h++, from += dim) std::memcpy(values + h * plane, from, dim * sizeof(T));
    });
}

template <class T>
struct Embedding {
    const int64_t* tokens;
    const T* weight;
    T* out;
    int64_t rows, width, threads;
};

template <class T>
void embedding(const Embedding<T>& c) {
    for_rows(c.rows, c.width, c.threads, [&](int64_t row) {
        std::memcpy(c.out + row * c.width, c.weight + c.tokens[row] * c.width, c.width * sizeof(T));
    });
}

}  // namespace

#define BOTH(name, Call)                                                        \
    EXPORT void quire_##name##_f32(const Call<float>* call) { name(*call); }    \
    EXPORT void quire_##name##_bf16(const Call<bf16>* call) { name(*call); }
BOTH(rms_norm, RmsNorm)
BOTH(add_rms_norm, AddRmsNorm)
BOTH(copy_stream, CopyStream)
BOTH(silu_mul, SiluMul)
BOTH(prepare_qkv, PrepareQkv)
BOTH(embedding, Embedding)
