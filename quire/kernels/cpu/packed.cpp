// y[m, n] = sum over k of x[m, k] * weight[n, k] (+ bias[n]) with the weight in GGUF's few bits and x in 8 bits.
//
// Work:  2 * M * N * K integer operations, 128 a step with VNNI.
// Bytes: those of the weight, 4.5 to 8.5 bits a value, read once from memory; x and y are small in comparison.
//
// Layout (kernels/weights/interleaved.py): a strip is 16 rows of the weight side by side, the lanes of a vector. Codes of
// 4 inputs of each row are a lane of 4 bytes, multiplied with the same 4 codes of x, so no sum crosses lanes. The 8
// fours of a span of 32 inputs are packed into as many vectors of 64 bytes as a code has bits; vector v has fours v, v +
// bits, v + 2 * bits, ... at bits 0, bits, 2 * bits, ... of its bytes. Scales lie beside: 16 rows of a group or a block.
//
// x is rounded to 8 bits by blocks of 32 inputs, or 256 where the weight's are: code = round(x * 127 / largest). Within a
// block all sums are exact in int32, scales included (at most 16 * 16 * 63 * 127 * 128 < 2^31); blocks are scaled and
// added in float32, in order.
//
// Bits: a row of x is rounded by itself, and its results are sums in the order of blocks, whatever the batch and the
// threads.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "packed.h"
#include "pool.h"

namespace {

thread_local Scratch codes_scratch, scales_scratch;

enum class Scales { kNone, kBytes, kNibbles };
enum class Minimums { kNone, kBlock, kBytes, kNibbles };

// value = d * scale * (code - zero) - m * minimum, or with kBlock: ... + m. The names are GGUF's.
template <int low, int high, int block, int group, int zero, Scales scales, Minimums minimums>
struct Kind {
    static constexpr int kLow = low, kHigh = high, kBlock = block, kGroup = group, kZero = zero;
    static constexpr Scales kScales = scales;
    static constexpr Minimums kMinimums = minimums;
    static constexpr bool has_scale = scales != Scales::kNone;
    // A sum of codes of x: multiplied with floats, or with integers.
    using Sum = std::conditional_t<minimums == Minimums::kBlock, float, int32_t>;
    static constexpr bool has_minimum = minimums == Minimums::kBytes || minimums == Minimums::kNibbles;
};
using Q4_0 = Kind<4, 0, 32, 32, 8, Scales::kNone, Minimums::kNone>;
using Q4_1 = Kind<4, 0, 32, 32, 0, Scales::kNone, Minimums::kBlock>;
using Q5_0 = Kind<4, 1, 32, 32, 16, Scales::kNone, Minimums::kNone>;
using Q5_1 = Kind<4, 1, 32, 32, 0, Scales::kNone, Minimums::kBlock>;
using Q8_0 = Kind<8, 0, 32, 32, 128, Scales::kNone, Minimums::kNone>;
using Q2_K = Kind<2, 0, 256, 16, 0, Scales::kNibbles, Minimums::kNibbles>;
using Q3_K = Kind<2, 1, 256, 16, 4, Scales::kBytes, Minimums::kNone>;
using Q4_K = Kind<4, 0, 256, 32, 0, Scales::kBytes, Minimums::kBytes>;
using Q5_K = Kind<4, 1, 256, 32, 0, Scales::kBytes, Minimums::kBytes>;
using Q6_K = Kind<4, 2, 256, 16, 32, Scales::kBytes, Minimums::kNone>;

template <class T>
struct Lookup {
    Packed weight;
    const int64_t* tokens;
    T* out;
    int64_t rows, k, kind, threads;
};

template <class K>
INLINE void unpack_span(const uint8_t* codes, const uint8_t* high, bytes (&fours)[kFours]) {
    unpack<K::kLow>(codes, fours);
    if constexpr (K::kHigh > 0) {
        bytes top[kFours];
        unpack<K::kHigh>(high, top);
        UNROLL
        for (int i = 0; i < kFours; i++) fours[i] |= (bytes)((words)top[i] << K::kLow);
    }
}

// Two groups' sums share four bytes where a kind has minimums: they are multiplied in pairs.
template <class K, int beside>
INLINE void put_sum(const Rounded<typename K::Sum>& into, int64_t row, int64_t g, int64_t groups, int32_t sum) {
    if constexpr (!K::has_minimum) {
        into.sums[x_place<beside>(row, g, groups)] = sum;
    } else {
        int32_t& pair = into.sums[x_place<beside>(row, g / 2, groups / 2)];
        pair = g % 2 ? int32_t(uint32_t(sum) << 16 | (uint32_t(pair) & 0xffff)) : sum;
    }
}

template <class K, int beside, class T>
void round_row(const T* x, int64_t row, int64_t k, const Rounded<typename K::Sum>& into) {
    float wide[K::kBlock];
    for (int64_t b = 0; b < k; b += K::kBlock) {
        vec most{};
        bool is_number = true;
        for (int64_t i = 0; i < K::kBlock; i += kLanes) {
            const vec v = F::load(x + b + i);
            F::store(wide + i, v);
            most = F::max(most, F::max(v, -v));
        }
        float largest = 0;
        for (int i = 0; i < kLanes; i++) largest = most[i] > largest ? most[i] : largest;
        for (int64_t i = 0; i < K::kBlock; i++) is_number &= wide[i] - wide[i] == 0;
        const bool is_zero = largest < kSmallest || !is_number;
        const float inverse = is_zero ? 0 : 127 / largest;
        // A number that is none makes every result of the row none, as it does in a product of floats.
        into.scales[x_place<beside>(row, b / K::kBlock, k / K::kBlock)] =
            is_number ? (is_zero ? 0 : largest / 127) : std::numeric_limits<float>::quiet_NaN();
        int32_t rounded[K::kBlock];
        for (int64_t i = 0; i < K::kBlock; i++)
            rounded[i] = is_zero ? 0 : int32_t(__builtin_nearbyintf(wide[i] * inverse));
        int8_t codes[K::kBlock];
        for (int64_t i = 0; i < K::kBlock; i++) codes[i] = int8_t(rounded[i]);
        for (int64_t i = 0; i < K::kBlock; i += 4)
            std::memcpy(into.codes + 4 * x_place<beside>(row, (b + i) / 4, k / 4), codes + i, 4);
        for (int64_t g = 0; g < K::kBlock / K::kGroup; g++) {
            int32_t sum = 0;
            for (int64_t i = 0; i < K::kGroup; i++) sum += rounded[g * K::kGroup + i];
            if constexpr (K::kZero != 0) sum *= -K::kZero;  // what the weight's zero takes from a sum of products
            put_sum<K, beside>(into, row, b / K::kGroup + g, k / K::kGroup, sum);
        }
    }
}

// The rows of `wide` registers of the weight against up to kTile rows of x: each four of x that is loaded is multiplied
// `wide` times.
template <class K, class T, int beside, int wide>
struct Tile {
    static constexpr int64_t kGroups = kSpan / K::kGroup;  // in a span
    static constexpr int64_t kBlockSpans = K::kBlock / kSpan;
    static constexpr int64_t kPairs = K::kBlock / K::kGroup / 2;
    static constexpr int kBits = K::kLow + K::kHigh;

    const Product<T>& p;
    const Rounded<typename K::Sum>& x;
    int64_t first;     // of the registers: each has kLanes rows of a strip
    int64_t m0, rows;  // of x
    vec out[kTile][wide];
    ints totals[kTile][wide];  // of a block

    // What rows of the weight have beside their codes: of a group, and of the block.
    struct Scaling {
        ints scale;
        vec d, m;
    };

    INLINE int64_t strip_of(int j) const { return (first + j) / kParts; }
    INLINE int64_t lane_of(int j) const { return (first + j) % kParts * kLanes; }
    INLINE int64_t place_of(int j, int64_t i, int64_t count) const {  // of number i of `count` beside the codes
        return (strip_of(j) * count + i) * kStrip + lane_of(j);
    }

    // Sums of the products of group g: `count` rows of x from m on, and the weight's fours from `own` on.
    template <int count>
    INLINE void multiply(int64_t m, int64_t g, const bytes (&fours)[wide][kFours], int own, ints (&dots)[count][wide]) {
        constexpr int ways = count * wide == 1 ? 4 : 1;  // sums at once: each waits for its last product
        const int8_t* codes = x.codes + 4 * x_place<beside>(m0 + m, g * (K::kGroup / 4), p.k / 4);
        ints sums[count][wide][ways] = {};
        if constexpr (K::kZero != 0) {
            const int32_t* zeros = x.sums + x_place<beside>(m0 + m, g, p.k / K::kGroup);
            UNROLL
            for (int r = 0; r < count; r++)
                UNROLL
                for (int j = 0; j < wide; j++) sums[r][j][0] = ints{} + zeros[r];
        }
        UNROLL
        for (int i = 0; i < K::kGroup / 4; i++)
            UNROLL
            for (int r = 0; r < count; r++)
                UNROLL
                for (int j = 0; j < wide; j++)
                    dot<kBits>(sums[r][j][i % ways], fours[j][own + i], codes + (i * beside + r) * 4);
        UNROLL
        for (int r = 0; r < count; r++)
            UNROLL
            for (int j = 0; j < wide; j++) {
                dots[r][j] = sums[r][j][0];
                if constexpr (ways == 4) dots[r][j] += sums[r][j][1] + (sums[r][j][2] + sums[r][j][3]);
            }
    }

    template <int count>
    INLINE void add_group(int64_t m, int64_t g, const bytes (&fours)[wide][kFours], int own, const Scaling (&by)[wide]) {
        ints dots[count][wide];
        multiply<count>(m, g, fours, own, dots);
        if constexpr (wide > 1) asm volatile("" : "+m"(dots));  // in L1: the next group's sums need the registers
        const float* x_scales = x.scales + x_place<beside>(m0 + m, g, p.k / K::kBlock);
        const auto* x_sums = x.sums + x_place<beside>(m0 + m, g, p.k / K::kGroup);
        UNROLL
        for (int r = 0; r < count; r++)
            UNROLL
            for (int j = 0; j < wide; j++) {
                if constexpr (K::has_scale) totals[m + r][j] += dots[r][j] * by[j].scale;
                else {
                    vec value = to_floats(dots[r][j]) * by[j].d;
                    if constexpr (K::kMinimums == Minimums::kBlock) value += by[j].m * x_sums[r];
                    out[m + r][j] += value * x_scales[r];
                }
            }
    }

    INLINE void add_span(int64_t span, Scaling (&by)[wide]) {
        bytes fours[wide][kFours];
        UNROLL
        for (int j = 0; j < wide; j++) {
            const int64_t at = strip_of(j) * (p.k / kSpan) + span;
            const uint8_t* codes = p.weight.codes + at * K::kLow * kVector;
            if (!m0 && !lane_of(j)) prefetch_codes<K::kLow * kVector>(codes);  // the strip's other lanes read the same lines
            unpack_span<K>(codes + lane_of(j) * 4,
                           K::kHigh ? p.weight.high + at * K::kHigh * kVector + lane_of(j) * 4 : nullptr, fours[j]);
        }
        if constexpr (wide > 1) asm volatile("" : "+m"(fours));  // in L1, too
        UNROLL
        for (int i = 0; i < kGroups; i++) {
            const int64_t g = span * kGroups + i;
            UNROLL
            for (int j = 0; j < wide; j++) {
                const int64_t at = place_of(j, g, p.k / K::kGroup);
                if constexpr (K::kScales == Scales::kBytes) by[j].scale = load_small(p.weight.scale + at);
                if constexpr (K::kScales == Scales::kNibbles)
                    by[j].scale = load_small(reinterpret_cast<const uint8_t*>(p.weight.scale) + at) & 15;
            }
            constexpr int each = K::kGroup / 4;
            if constexpr (beside == 1) add_group<1>(0, g, fours, i * each, by);
            else by_count(rows, [&](auto count, int64_t m) FORCED { add_group<count()>(m, g, fours, i * each, by); });
        }
    }

    // Minimums of two groups, in the halves of a lane: each is from 0 to 63.
    INLINE ints minimums_of(int j, int64_t g) const {
        const int64_t low = place_of(j, g, p.k / K::kGroup), high = low + kStrip;
        if constexpr (K::kMinimums == Minimums::kBytes)
            return load_small(p.weight.minimum + low) | load_small(p.weight.minimum + high) << 16;
        const uint8_t* both = reinterpret_cast<const uint8_t*>(p.weight.scale);
        return load_small(both + low) >> 4 | load_small(both + high) >> 4 << 16;
    }

    INLINE void add_totals(int64_t block, const Scaling (&by)[wide]) {
        ints minimums[wide][kPairs];
        if constexpr (K::has_minimum)
            for (int j = 0; j < wide; j++)
                for (int i = 0; i < kPairs; i++) minimums[j][i] = minimums_of(j, (block * kPairs + i) * 2);
        for (int64_t m = 0; m < rows; m++) {
            const float x_scale = x.scales[x_place<beside>(m0 + m, block, p.k / K::kBlock)];
            UNROLL
            for (int j = 0; j < wide; j++) {
                vec value = to_floats(totals[m][j]) * by[j].d;
                if constexpr (K::has_minimum) {
                    const int32_t* pairs = x.sums + x_place<beside>(m0 + m, block * kPairs, p.k / K::kGroup / 2);
                    ints sum{};
                    UNROLL
                    for (int i = 0; i < kPairs; i++) dot_pair(sum, minimums[j][i], pairs[i * beside]);
                    value -= by[j].m * to_floats(sum);
                }
                out[m][j] += value * x_scale;
            }
        }
    }

    INLINE void add_block(int64_t block) {
        Scaling by[wide];
        UNROLL
        for (int j = 0; j < wide; j++) {
            const int64_t at = place_of(j, block, p.k / K::kBlock);
            by[j].d = load_halves(p.weight.d + at);
            if constexpr (K::kMinimums != Minimums::kNone) by[j].m = load_halves(p.weight.m + at);
        }
        if constexpr (K::has_scale)
            for (int64_t m = 0; m < rows; m++)
                for (int j = 0; j < wide; j++) totals[m][j] = ints{};
        for (int64_t i = 0; i < kBlockSpans; i++) add_span(block * kBlockSpans + i, by);
        if constexpr (K::has_scale) add_totals(block, by);
    }

    void run() {
        for (int64_t m = 0; m < rows; m++)
            for (int j = 0; j < wide; j++) out[m][j] = vec{};
        for (int64_t block = 0; block < p.k / K::kBlock; block++) add_block(block);
        for (int j = 0; j < wide; j++) {
            const int64_t n0 = (first + j) * kLanes, left = std::min<int64_t>(kLanes, p.n - n0);
            if (left <= 0) return;
            vec bias{};
            if (p.bias) bias = left == kLanes ? F::load(p.bias + n0) : F::load_part(p.bias + n0, left);
            for (int64_t m = 0; m < rows; m++) {
                T* y = p.y + (m0 + m) * p.y_stride + n0;
                if (left == kLanes) F::store(y, out[m][j] + bias);
                else F::store_part(y, out[m][j] + bias, left);
            }
        }
    }
};

template <class K, int beside, class T>
void product_of(const Product<T>& p) {
    const int64_t groups = p.k / K::kGroup, blocks = p.k / K::kBlock;
    Rounded<typename K::Sum> x;
    const int64_t padded = (p.rows + beside - 1) / beside * beside;
    x.codes = reinterpret_cast<int8_t*>(codes_scratch.get(padded * p.k / 4));
    x.scales = scales_scratch.get(padded * (blocks + groups));
    x.sums = reinterpret_cast<typename K::Sum*>(x.scales + padded * blocks);
    const int64_t each = std::max<int64_t>(1, 8192 / p.k);
    share_items(p.rows, each, p.threads, p.rows * p.k > kWorthRounding, [&](int64_t row) {
        round_row<K, beside>(p.x + row * p.x_stride, row, p.k, x);
    });
    constexpr int wide = beside == 1 || kRegisters < 32 ? 1 : 2;
    const int64_t strips = (p.n + kStrip - 1) / kStrip, strip_bytes = kStrip * p.k * (K::kLow + K::kHigh) / 8;
    const int64_t at_once = strips_at_once(strips, strip_bytes, p.rows, p.threads);
    share((strips + at_once - 1) / at_once, p.threads, p.rows * p.n * p.k > kWorthSharing, [&](int64_t piece) {
        const int64_t last = std::min(strips, (piece + 1) * at_once) * kParts;
        for (int64_t m = 0; m < p.rows; m += kTile) {  // rows of x and the piece stay in L2
            const int64_t rows = std::min(kTile, p.rows - m);
            int64_t part = piece * at_once * kParts;
            for (; part + wide <= last; part += wide) Tile<K, T, beside, wide>{p, x, part, m, rows}.run();
            if constexpr (wide > 1)
                if (part < last) Tile<K, T, beside, 1>{p, x, part, m, rows}.run();
        }
    });
}

template <class K, class T>
void product(const Product<T>& p) {
    p.rows == 1 ? product_of<K, 1>(p) : product_of<K, kAtOnce>(p);
}

template <int bits>
INLINE int code_at(const uint8_t* plane, int64_t input, int64_t lane) {
    const int64_t span = input / kSpan, four = input % kSpan / 4;
    const uint8_t byte = plane[(span * bits + four % bits) * kVector + lane * 4 + input % 4];
    return byte >> (four / bits * bits) & ((1 << bits) - 1);
}

// Rows of the matrix as numbers: the embedding of tokens.
template <class K, class T>
void lookup(const Lookup<T>& c) {
    const int64_t k = c.k;
    for (int64_t row = 0; row < c.rows; row++) {
        const int64_t strip = c.tokens[row] / kStrip, lane = c.tokens[row] % kStrip;
        const uint8_t* codes = c.weight.codes + strip * (k / kSpan) * K::kLow * kVector;
        const uint8_t* high = K::kHigh ? c.weight.high + strip * (k / kSpan) * K::kHigh * kVector : nullptr;
        for (int64_t g = 0; g < k / K::kGroup; g++) {
            const int64_t block = g * K::kGroup / K::kBlock, place = (strip * (k / K::kGroup) + g) * kStrip + lane;
            const int64_t where = (strip * (k / K::kBlock) + block) * kStrip + lane;
            float scale = from_half(c.weight.d[where]), minimum = 0;
            if constexpr (K::kMinimums == Minimums::kBlock) minimum = -from_half(c.weight.m[where]);
            if constexpr (K::kScales == Scales::kBytes) scale *= c.weight.scale[place];
            if constexpr (K::kMinimums == Minimums::kBytes)
                minimum = from_half(c.weight.m[where]) * c.weight.minimum[place];
            if constexpr (K::kScales == Scales::kNibbles) {
                const uint8_t both = uint8_t(c.weight.scale[place]);
                scale *= both & 15, minimum = from_half(c.weight.m[where]) * (both >> 4);
            }
            for (int64_t i = g * K::kGroup; i < (g + 1) * K::kGroup; i++) {
                int code = code_at<K::kLow>(codes, i, lane);
                if constexpr (K::kHigh > 0) code |= code_at<K::kHigh>(high, i, lane) << K::kLow;
                const float value = scale * (code - K::kZero) - minimum;
                F::store_part(c.out + row * k + i, vec{value}, 1);
            }
        }
    }
}

// In the order of KINDS (kernels/weights/superblock.py).
template <class Run>
void with_kind(int64_t kind, Run run) {
    switch (kind) {
        case 0: return run(Q4_0{});
        case 1: return run(Q4_1{});
        case 2: return run(Q5_0{});
        case 3: return run(Q5_1{});
        case 4: return run(Q8_0{});
        case 5: return run(Q2_K{});
        case 6: return run(Q3_K{});
        case 7: return run(Q4_K{});
        case 8: return run(Q5_K{});
        case 9: return run(Q6_K{});
        default: std::abort();
    }
}

template <class T>
void packed_linear(const Product<T>& p) {
    if (p.kind >= kStripKinds) return strip_linear(p);
    with_kind(p.kind, [&](auto kind) { product<decltype(kind)>(p); });
}

template <class T>
void packed_embedding(const Lookup<T>& c) {
    with_kind(c.kind, [&](auto kind) { lookup<decltype(kind)>(c); });
}

}  // namespace

EXPORT void quire_packed_linear_f32(const Product<float>* call) { packed_linear(*call); }
EXPORT void quire_packed_linear_bf16(const Product<bf16>* call) { packed_linear(*call); }
EXPORT void quire_packed_embedding_f32(const Lookup<float>* call) { packed_embedding(*call); }
EXPORT void quire_packed_embedding_bf16(const Lookup<bf16>* call) { packed_embedding(*call); }
