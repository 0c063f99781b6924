// What products with packed weights share (packed.cpp, strips.cpp): strips of 16 outputs, codes unpacked and multiplied.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>

#include "simd.h"

// How bytes are multiplied: 3: AVX-512 VNNI, 2: AVX-512, 1: AVX2 (its VNNI too, where it is), 4: NEON
// (its dot products too), 0: plain C++.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define QUIRE_DOT 3
#elif defined(__AVX512BW__)
#define QUIRE_DOT 2
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define QUIRE_DOT 1
#elif defined(__aarch64__)
#define QUIRE_DOT 4
#else
#define QUIRE_DOT 0
#endif
#if QUIRE_DOT == 4
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <immintrin.h>
#endif

// Arguments as Python packs them (8 bytes per field). Tensors that a kind does not have are null.
struct Packed {
    const uint8_t *codes, *high;
    const int8_t *scale, *minimum;
    const uint16_t *d, *m;  // float16; d of strips.cpp is float32
};

template <class T>
struct Product {
    Packed weight;
    const T *x, *bias;
    T* y;
    int64_t rows, n, k, x_stride, y_stride, kind, block, group, threads;  // block, group: inputs, for strips.cpp
};

namespace {

constexpr int64_t kStrip = 16;                       // rows of the weight
constexpr int64_t kSpan = 32;                        // inputs that are unpacked at once
constexpr int64_t kFours = kSpan / 4;
constexpr int64_t kVector = kStrip * 4;              // bytes
constexpr int64_t kParts = kStrip / kLanes;          // registers that a strip's vector takes
constexpr int64_t kTile = 32;                        // rows of x: their sums stay in L1
constexpr int64_t kPanel = 64;                       // the same for panels
constexpr int64_t kChunk = 256;                      // inputs that are unpacked for all rows of a panel
constexpr int kAtOnce = kRegisters == 32 ? 8 : 4;    // of them, whose sums are in registers
constexpr int64_t kPieceBytes = 48 * 1024;           // of weight that a thread takes at a time, at least
constexpr int64_t kStreamBytes = 1024 * 1024;        // the same times rows of x: few rows wait for memory, see below
constexpr int64_t kKeptBytes = 256 * 1024;           // the same for several tiles of rows: it stays in L2
constexpr int64_t kAhead = 8192;                     // bytes of codes that are asked for before they are needed
constexpr int64_t kWorthSharing = 512 * 1024;        // multiply-adds: fewer take less time than waking a thread
constexpr int64_t kWorthRounding = 64 * 1024;        // numbers of x: the same
constexpr int64_t kStripKinds = 16;                  // kinds from here on are those of strips.cpp
constexpr int kWideBits = kRegisters == 32 ? 8 : 4;  // codes of as many bits are multiplied two registers at a time
constexpr float kMagic = 12582912;                   // 1.5 * 2^23: the bits of kMagic + i are its own plus i
constexpr int32_t kMagicBits = 0x4b400000;
constexpr float kSmallest = 1e-30f;                  // a block whose largest number is smaller counts as zeros

typedef uint8_t bytes __attribute__((vector_size(kLanes * 4)));
typedef F::i ints;
typedef F::u words;

INLINE float from_half(uint16_t half) {
#if defined(__F16C__)
    return _cvtsh_ss(half);
#else
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
    float value;
    if (rest >= 0x7c00) {  // infinity, or not a number
        const uint32_t bits = sign | 0x7f800000 | (rest & 0x3ff) << 13;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    const uint32_t bits = rest << 13;  // as float32 it is 2^112 times too small; denormals become numbers in the product
    std::memcpy(&value, &bits, 4);
    value *= 0x1p112f;
    return sign ? -value : value;
#endif
}

INLINE vec load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vec out;
    for (int i = 0; i < kLanes; i++) out[i] = from_half(p[i]);
    return out;
#endif
}

template <class B>
INLINE ints load_small(const B* p) {
    ints out;
#if QUIRE_DOT == 2 || QUIRE_DOT == 3
    const __m128i small = _mm_loadu_si128((const __m128i*)p);
    out = (ints)(std::numeric_limits<B>::is_signed ? _mm512_cvtepi8_epi32(small) : _mm512_cvtepu8_epi32(small));
#elif QUIRE_DOT == 1
    const __m128i small = _mm_loadl_epi64((const __m128i*)p);
    out = (ints)(std::numeric_limits<B>::is_signed ? _mm256_cvtepi8_epi32(small) : _mm256_cvtepu8_epi32(small));
#else
    for (int i = 0; i < kLanes; i++) out[i] = p[i];
#endif
    return out;
}

// Whether a * b - c rounds once. Then a sum that begins at kMagic becomes a float while it is scaled, without an
// instruction of its own: s * d = (kMagic + s) * d - kMagic * d, to the bit.
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
#define QUIRE_FUSED 1
#else
#define QUIRE_FUSED 0
#endif

// The same number in every lane, without the addition of `vec{} + x`.
INLINE vec splat(float x) {
#if defined(__AVX512F__)
    return (vec)_mm512_set1_ps(x);
#elif defined(__AVX__)
    return (vec)_mm256_set1_ps(x);
#elif defined(__aarch64__)
    return (vec)vdupq_n_f32(x);
#else
    return vec{} + x;
#endif
}

INLINE vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vec multiply_subtract(vec a, vec b, vec c) { return multiply_add(a, b, -c); }

INLINE vec to_floats(ints v) { return __builtin_convertvector(v, vec); }

// sum += four codes (unsigned, of `bits` bits) times four of x, in every lane.
template <int bits>
INLINE void dot(ints& sum, bytes codes, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
#if QUIRE_DOT == 3
    sum = (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(four));
#elif QUIRE_DOT == 1 && defined(__AVXVNNI__)
    sum = (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(four));
#elif QUIRE_DOT == 1 || QUIRE_DOT == 2 || QUIRE_DOT == 4
    // Two products are added in 16 bits (NEON's dot products take signed bytes), and would saturate with codes of 8
    // bits: those are multiplied as two halves.
    const auto multiply = [&](ints sum, bytes part) FORCED {
#if QUIRE_DOT == 2
        const __m512i pairs = _mm512_maddubs_epi16((__m512i)part, _mm512_set1_epi32(four));
        return sum + (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif QUIRE_DOT == 1
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)part, _mm256_set1_epi32(four));
        return sum + (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
        const int8x16_t codes = (int8x16_t)part, fours = vreinterpretq_s8_s32(vdupq_n_s32(four));
#if defined(__ARM_FEATURE_DOTPROD)
        return (ints)vdotq_s32((int32x4_t)sum, codes, fours);
#else
        const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(fours)), high = vmull_high_s8(codes, fours);
        return (ints)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
#endif
    };
    if constexpr (bits < 8) sum = multiply(sum, codes);
    else sum = multiply(sum, codes & 15) + (multiply(ints{}, (bytes)((words)codes >> 4) & 15) << 4);
#else
    const words lanes = (words)codes;
    for (int i = 0; i < 4; i++) sum += (ints)(lanes >> 8 * i & 255) * int32_t(x[i]);
#endif
}

// sums[r][j] += fours of codes, load(j, n), times those of row r of x, n from 0 to `fours` - 1. Rows of x lie side by side.
template <int bits, int fours, int count, int wide, class Load>
INLINE void dot_fours(ints (&sums)[count][wide], const Load& load, const int8_t* x) {
    const auto four_of = [&](int n, int r) FORCED {
        int32_t four;
        std::memcpy(&four, x + (n * kAtOnce + r) * 4, 4);
        return four;
    };
#if QUIRE_DOT == 2 || (QUIRE_DOT == 1 && !defined(__AVXVNNI__))
    // Products are added in 16 bits as long as that is exact: two of at most 127 * (2^bits - 1) in each.
    constexpr int most = 32767 / (2 * 127 * ((1 << bits) - 1)), steps = most < fours ? most : fours;
    if constexpr (steps > 2 && fours % steps == 0) {
        for (int begin = 0; begin < fours; begin += steps) {
            ints pairs[count][wide] = {};
            UNROLL
            for (int n = 0; n < steps; n++)
                UNROLL
                for (int r = 0; r < count; r++)
                    UNROLL
                    for (int j = 0; j < wide; j++) {
                        const bytes codes = load(j, begin + n);
#if QUIRE_DOT == 2
                        const __m512i two = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(four_of(begin + n, r)));
                        pairs[r][j] = (ints)_mm512_add_epi16((__m512i)pairs[r][j], two);
#else
                        const __m256i two = _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(four_of(begin + n, r)));
                        pairs[r][j] = (ints)_mm256_add_epi16((__m256i)pairs[r][j], two);
#endif
                    }
            UNROLL
            for (int r = 0; r < count; r++)
                UNROLL
                for (int j = 0; j < wide; j++)
#if QUIRE_DOT == 2
                    sums[r][j] += (ints)_mm512_madd_epi16((__m512i)pairs[r][j], _mm512_set1_epi16(1));
#else
                    sums[r][j] += (ints)_mm256_madd_epi16((__m256i)pairs[r][j], _mm256_set1_epi16(1));
#endif
        }
        return;
    }
#endif
    UNROLL
    for (int n = 0; n < fours; n++)
        UNROLL
        for (int r = 0; r < count; r++)
            UNROLL
            for (int j = 0; j < wide; j++) dot<bits>(sums[r][j], load(j, n), x + (n * kAtOnce + r) * 4);
}

// sum += two numbers of 16 bits times two of x, in every lane.
INLINE void dot_pair(ints& sum, ints pair, int32_t x) {
#if QUIRE_DOT == 3
    sum = (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pair, _mm512_set1_epi32(x));
#elif QUIRE_DOT == 2
    sum += (ints)_mm512_madd_epi16((__m512i)pair, _mm512_set1_epi32(x));
#elif QUIRE_DOT == 1
    sum += (ints)_mm256_madd_epi16((__m256i)pair, _mm256_set1_epi32(x));
#else
    sum += (ints)((words)pair << 16) / 65536 * int32_t(int16_t(x)) + (pair >> 16) * (x >> 16);
#endif
}

// Fours of `bits` bits from the vectors of a plane; this register's part of them.
template <int bits>
INLINE void unpack(const uint8_t* plane, bytes (&fours)[kFours]) {
    constexpr uint8_t mask = (1 << bits) - 1;
    UNROLL
    for (int v = 0; v < bits; v++) {
        words packed;
        std::memcpy(&packed, plane + v * kVector, sizeof packed);
        UNROLL
        for (int j = 0; j < 8 / bits; j++) fours[v + bits * j] = (bytes)(packed >> bits * j) & mask;
    }
}

// x in 8 bits: fours of codes, sums of a group's codes and scales of a block, as x_place and chunk_place lay them: rows
// that are multiplied at once, kAtOnce, lie side by side. A lone row has none beside it: it would not stay in L1.
template <class Sum>
struct Rounded {
    int8_t* codes;
    Sum* sums;
    float* scales;
};

INLINE int32_t largest_of(ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t largest = v[0];
    for (int i = 1; i < kLanes; i++) largest = v[i] > largest ? v[i] : largest;
    return largest;
#endif
}

INLINE int32_t sum_of(ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < kLanes; i++) sum += v[i];
    return sum;
#endif
}

// Whether a block is of numbers, and its largest. Bits of floats without their sign are in the order of the floats, and
// those of infinities and NaN above all numbers'.
template <class T>
INLINE bool measure(const T* x, int64_t count, float& largest) {
    ints most{};
    for (int64_t i = 0; i < count; i += kLanes) {
        const ints bits = (ints)F::load(x + i) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    const int32_t bits = largest_of(most);
    std::memcpy(&largest, &bits, 4);
    return bits < 0x7f800000;
}

// The nearest integers, even ones of two that are as near.
INLINE ints to_nearest(vec v) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX__)
    return (ints)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
    return (ints)_mm_cvtps_epi32((__m128)v);
#elif defined(__aarch64__)
    return (ints)vcvtnq_s32_f32((float32x4_t)v);
#else
    ints out;
    for (int i = 0; i < kLanes; i++) out[i] = int32_t(__builtin_nearbyintf(v[i]));
    return out;
#endif
}

// Rounds kStrip numbers of x to codes; returns these, added up in the lanes. `inverse`: 0 for a block that counts as zeros.
template <class T>
INLINE ints round_numbers(const T* x, float inverse, int8_t* codes) {
    typedef int8_t small __attribute__((vector_size(kLanes)));
    ints total{};
    if (inverse == 0) {  // it may be of infinities
        std::memset(codes, 0, kStrip);
        return total;
    }
    UNROLL
    for (int i = 0; i < kStrip; i += kLanes) {
        const ints rounded = to_nearest(F::load(x + i) * splat(inverse));
        const small bytes = __builtin_convertvector(rounded, small);
        std::memcpy(codes + i, &bytes, sizeof bytes);
        total += rounded;
    }
    return total;
}

// Where number i of `count` of a row of x is.
template <int beside = kAtOnce>
INLINE int64_t x_place(int64_t row, int64_t i, int64_t count) {
    return (row / beside * count + i) * beside + row % beside;
}

// The same where `each` numbers of all rows of a panel lie together, [rows / kPanel, count / each, rows of the panel /
// beside, each, beside]: a panel reads one piece of memory at a time, not pieces that compete for the same sets of L1.
template <int beside = kAtOnce>
INLINE int64_t chunk_place(int64_t row, int64_t rows, int64_t i, int64_t count, int64_t each) {
    const int64_t m0 = row / kPanel * kPanel, padded = (std::min(kPanel, rows - m0) + beside - 1) / beside * beside;
    const int64_t begin = i / each * each, inside = std::min(each, count - begin);
    return m0 * count + begin * padded + x_place<beside>(row - m0, i - begin, inside);
}

// Calls visit(count, m) for rows m to m + count - 1, as many at once as registers hold, until all `rows` are visited.
template <class Visit>
INLINE void by_count(int64_t rows, const Visit& visit) {
    int64_t m = 0;
    for (; m + kAtOnce <= rows; m += kAtOnce) visit(std::integral_constant<int, kAtOnce>{}, m);
    if constexpr (kAtOnce > 4)
        if (m + 4 <= rows) visit(std::integral_constant<int, 4>{}, m), m += 4;
    if (m + 2 <= rows) visit(std::integral_constant<int, 2>{}, m), m += 2;
    if (m < rows) visit(std::integral_constant<int, 1>{}, m);
}

// Strips that a thread takes at a time. With few rows a product waits for memory, and the hardware's prefetching begins
// anew with every piece: pieces of 48 KiB reach 80 % of the speed of reading, of 1 MiB 92 %. More rows compute longer on
// a piece, and smaller ones end together. Always a multiple of `beside`, the strips that are multiplied together: a strip
// that is left alone takes a fifth longer.
INLINE int64_t strips_at_once(int64_t strips, int64_t strip_bytes, int64_t rows, int64_t threads, int64_t beside = 1) {
    const int64_t piece = rows > kTile ? kKeptBytes : std::max(kPieceBytes, kStreamBytes / rows);
    const int64_t fair = strips / (threads * 8), worth = std::max<int64_t>(1, piece / strip_bytes);
    return std::max<int64_t>(1, std::min(fair, worth) / beside) * beside;
}

// Asks for the `size` bytes of codes kAhead bytes after p. At the end of a matrix these may be of none: a prefetch never
// faults.
template <int64_t size>
INLINE void prefetch_codes(const uint8_t* p) {
    UNROLL
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(p + kAhead + i, 0, 3);
}

}  // namespace

// Products of the kinds of strips.cpp.
void strip_linear(const Product<float>& p);
void strip_linear(const Product<bf16>& p);
