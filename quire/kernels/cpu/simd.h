// Shared by all kernels: vectors (GCC/Clang vector extensions, so that one source serves AVX-512, AVX2 and
// NEON) and scratch memory.
//
// A Lanes<L>::f is L floats. Arithmetic is lane-wise and every lane does exactly the same IEEE operations for
// any L; so kernels can choose the width by batch size and still give a row the same bits in every batch.
// Compiled with -ffp-contract=fast: a * b + c is one fused operation. Never with -ffast-math: NaN and inf must survive.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX512F__)
constexpr int kLanes = 16;  // floats in the widest register
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

#define FORCED __attribute__((always_inline))
#define INLINE inline FORCED
#define EXPORT extern "C" __attribute__((visibility("default")))

// Register tiles are arrays indexed by loop counters: they are registers only if those loops are unrolled.
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#define UNROLL_4 _Pragma("unroll 4")
#else
#define UNROLL _Pragma("GCC unroll 32")
#define UNROLL_4 _Pragma("GCC unroll 4")
#endif

// Scratch memory of a thread, kept between calls: aligned to a cache line, grown when needed, never shrunk.
struct Scratch {
    float* data = nullptr;
    int64_t size = 0;

    float* get(int64_t floats) {
        if (floats > size) {
            std::free(data);
            size = (floats + 1023) / 1024 * 1024;
            data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
            if (!data) std::abort();
        }
        return data;
    }
    ~Scratch() { std::free(data); }
};

struct bf16 {
    uint16_t bits;
};

// The types of each width, spelled out because GCC's __builtin_convertvector refuses types that depend on a template.
template <int L>
struct LaneTypes;
#define LANE_TYPES(L)                                                               \
    template <>                                                                     \
    struct LaneTypes<L> {                                                           \
        typedef float f __attribute__((vector_size(L * 4)));                        \
        typedef int32_t i __attribute__((vector_size(L * 4)));                      \
        typedef uint32_t u __attribute__((vector_size(L * 4)));                     \
        typedef uint16_t h __attribute__((vector_size(L * 2)));                     \
        static INLINE u widen(h v) { return __builtin_convertvector(v, u); }        \
        static INLINE h narrow(u v) { return __builtin_convertvector(v, h); }       \
    };
LANE_TYPES(4)
LANE_TYPES(8)
LANE_TYPES(16)

template <int L>
struct Lanes : LaneTypes<L> {
    using typename LaneTypes<L>::f;
    using typename LaneTypes<L>::i;
    using typename LaneTypes<L>::u;
    using typename LaneTypes<L>::h;

    static INLINE f load(const float* p) {
        f v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
    static INLINE f load(const bf16* p) {
        h v;
        std::memcpy(&v, p, sizeof v);
        return (f)(Lanes::widen(v) << 16);
    }
    static INLINE void store(float* p, f v) { std::memcpy(p, &v, sizeof v); }
    static INLINE void store(bf16* p, f v) {
        u bits = (u)v;
        u rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
        rounded = (v != v) ? (u{} + 0x7fc0u) : rounded;          // rounding must not carry a NaN into an infinity
        h out = Lanes::narrow(rounded);
        std::memcpy(p, &out, sizeof out);
    }
    // The first n elements (n < L), zeros after: for tails, where a whole vector would leave the array.
    template <class T>
    static INLINE f load_part(const T* p, int64_t n) {
        T buffer[L] = {};
        std::memcpy(buffer, p, n * sizeof(T));
        return load(buffer);
    }
    template <class T>
    static INLINE void store_part(T* p, f v, int64_t n) {
        T buffer[L];
        store(buffer, v);
        std::memcpy(p, buffer, n * sizeof(T));
    }
    static INLINE f max(f a, f b) { return a > b ? a : b; }
};

using F = Lanes<kLanes>;
typedef F::f vec;

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <int L>
INLINE float sum(typename Lanes<L>::f v) {
    float parts[L];
    std::memcpy(parts, &v, sizeof v);
    for (int half = L / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

// e^x to about 1 ulp; exactly 1 at 0, exactly 0 below -87 (so a score of -inf gets no weight), NaN stays NaN.
// 2^n * e^r with |r| <= ln2 / 2: n by adding and subtracting 1.5 * 2^23, e^r by a degree 6 polynomial.
template <int L>
INLINE typename Lanes<L>::f exp(typename Lanes<L>::f x) {
    using V = typename Lanes<L>::f;
    using I = typename Lanes<L>::i;
    const float magic = 12582912.0f;
    V top = V{} + 88.0f;
    V y = x > top ? top : x;
    V shifted = y * 1.44269504f + magic;
    V n = shifted - magic;
    V r = y - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    V p = r * 1.3981999e-3f + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5.0000000e-1f;
    p = p * r * r + r + 1.0f;
    I exponent = ((I)shifted - 0x4b400000 + 127) << 23;
    V result = p * (V)exponent;
    V zero = V{};
    return x < (V{} - 87.0f) ? zero : result;
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, typename Lanes<L>::i{__VA_ARGS__})
#endif

// a0 b0 a1 b1 ... from the lower (upper) halves of a and b.
template <int L>
INLINE typename Lanes<L>::f interleave_low(typename Lanes<L>::f a, typename Lanes<L>::f b) {
    if constexpr (L == 16) return SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    else if constexpr (L == 8) return SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    else return SHUFFLE(a, b, 0, 4, 1, 5);
}
template <int L>
INLINE typename Lanes<L>::f interleave_high(typename Lanes<L>::f a, typename Lanes<L>::f b) {
    if constexpr (L == 16) return SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    else if constexpr (L == 8) return SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
    else return SHUFFLE(a, b, 2, 6, 3, 7);
}

// L x L transpose in registers: log2(L) perfect shuffles of the rows.
template <int L>
INLINE void transpose(typename Lanes<L>::f (&rows)[L]) {
    typename Lanes<L>::f next[L];
    for (int stage = 1; stage < L; stage *= 2) {
        for (int i = 0; i < L / 2; i++) {
            next[2 * i] = interleave_low<L>(rows[i], rows[i + L / 2]);
            next[2 * i + 1] = interleave_high<L>(rows[i], rows[i + L / 2]);
        }
        for (int i = 0; i < L; i++) rows[i] = next[i];
    }
}
