// The one inner loop of linear and attention: a register tile c[R][V * L] += sum over k of a[r, k] * b[k, :].
//
// Each step loads V vectors of b and R scalars of a (broadcast for free inside the multiply-add) and does R * V
// multiply-adds. Every element of c is one chain of fused multiply-adds in the order of k, so its bits depend neither
// on R, V and L nor on how k is divided into calls: c stays in float32 between them.
#pragma once

#include "simd.h"

#ifndef QUIRE_BF16_DOT
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
#define QUIRE_BF16_DOT 1
#else
#define QUIRE_BF16_DOT 0
#endif
#endif
#if QUIRE_BF16_DOT
#include <immintrin.h>
#endif
constexpr bool kBf16Dot = QUIRE_BF16_DOT;

// What one step loads from a row of T: a float32, or two adjacent bf16 whose products are added together (vdpbf16ps);
// a lane of b is then such a pair too, and k counts pairs.
template <class T> struct Step { using scalar = float; };
template <> struct Step<bf16> { using scalar = uint32_t; };

template <int L>
INLINE void multiply_add(typename Lanes<L>::f& c, float a, typename Lanes<L>::f b) {
    c += b * a;
}

template <int L>
INLINE void multiply_add(typename Lanes<L>::f& c, uint32_t a, typename Lanes<L>::f b) {
#if QUIRE_BF16_DOT
    using f = typename Lanes<L>::f;
    if constexpr (L == 16) c = (f)_mm512_dpbf16_ps((__m512)c, (__m512bh)b, (__m512bh)_mm512_set1_epi32(a));
    else if constexpr (L == 8) c = (f)_mm256_dpbf16_ps((__m256)c, (__m256bh)b, (__m256bh)_mm256_set1_epi32(a));
    else c = (f)_mm_dpbf16_ps((__m128)c, (__m128bh)b, (__m128bh)_mm_set1_epi32(a));
#endif
}

enum class Order {
    kRows,     // a[r, k] at a[r * stride + k]
    kColumns,  // a[r, k] at a[k * stride + r]
};

// Strides are in numbers. Rows of a from `valid` on are not read (c gets copies of the last one). `prefetch`: distance
// in numbers at which a is software-prefetched for the next call, into L2 (L1 is full of b): the hardware prefetcher
// follows neither R streams at once nor one stream into the next 4 KB page. `b_prefetch` does the same for b.
template <int L, int V, int R, Order order, class T>
INLINE void outer(const T* a, int64_t a_stride, int64_t valid, const float* b, int64_t b_stride, float* c,
                  int64_t c_stride, int64_t count, bool accumulate, int64_t prefetch = 0, int64_t b_prefetch = 0) {
    using Vec = Lanes<L>;
    using Scalar = typename Step<T>::scalar;
    constexpr int64_t per_step = sizeof(Scalar) / sizeof(T);
    typename Vec::f sums[R][V];
    const T* rows[R];
    UNROLL
    for (int r = 0; r < R; r++) {
        rows[r] = a + (r < valid ? r : valid - 1) * (order == Order::kRows ? a_stride : 1);
        UNROLL
        for (int v = 0; v < V; v++)
            sums[r][v] = accumulate ? Vec::load(c + r * c_stride + v * L) : typename Vec::f{};
    }
    auto step = [&](int64_t k) FORCED {
        typename Vec::f bv[V];
        UNROLL
        for (int v = 0; v < V; v++) bv[v] = Vec::load(b + k * b_stride + v * L);
        UNROLL
        for (int r = 0; r < R; r++) {
            Scalar scalar;
            std::memcpy(&scalar, rows[r] + (order == Order::kRows ? k * per_step : k * a_stride), sizeof scalar);
            UNROLL
            for (int v = 0; v < V; v++) multiply_add<L>(sums[r][v], scalar, bv[v]);
        }
    };
    constexpr int64_t line = 64 / sizeof(Scalar);
    int64_t k = 0;
    if (prefetch)
        for (; k + line <= count; k += line) {
            UNROLL
            for (int r = 0; r < R; r++) __builtin_prefetch(rows[r] + k * per_step + prefetch, 0, 2);
            UNROLL_4
            for (int64_t i = 0; i < line; i++) step(k + i);
        }
    for (; k < count; k++) {
        if (b_prefetch)
            UNROLL
            for (int v = 0; v < V; v++) __builtin_prefetch(b + k * b_stride + v * L + b_prefetch, 0, 2);
        step(k);
    }
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) Vec::store(c + r * c_stride + v * L, sums[r][v]);
}
