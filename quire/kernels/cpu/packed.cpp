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
    static constexpr int kLow = low, kHigh = high, kBits = low + high, kBlock = block, kGroup = group, kZero = zero;
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

// Where what belongs to `inputs` numbers of a row of x is, the i-th of such: fours, groups or blocks.
template <int inputs, int beside>
INLINE int64_t x_at(int64_t row, int64_t rows, int64_t i, int64_t k) {
    if constexpr (beside == 1) return i;
    return chunk_place<beside>(row, rows, i, k / inputs, kChunk / inputs);
}

// Two groups' sums share four bytes where a kind has minimums: they are multiplied in pairs.
template <class K, int beside>
INLINE void put_sum(const Rounded<typename K::Sum>& into, int64_t row, int64_t rows, int64_t g, int64_t k, int32_t sum) {
    if constexpr (!K::has_minimum) {
        into.sums[x_at<K::kGroup, beside>(row, rows, g, k)] = sum;
    } else {
        int32_t& pair = into.sums[x_at<K::kGroup * 2, beside>(row, rows, g / 2, k)];
        pair = g % 2 ? int32_t(uint32_t(sum) << 16 | (uint32_t(pair) & 0xffff)) : sum;
    }
}

// What a sum of products begins with, besides what the weight's zero takes from it. If it is scaled in floats: kMagic,
// which makes an integer the number kMagic + sum when its bits are read as a float.
template <class K>
constexpr int32_t kStart = QUIRE_FUSED && !K::has_scale ? kMagicBits : 0;

template <class K, int beside, class T>
void round_row(const T* x, int64_t row, int64_t rows, int64_t k, const Rounded<typename K::Sum>& into) {
    for (int64_t b = 0; b < k; b += K::kBlock) {
        float largest;
        const bool is_number = measure(x + b, K::kBlock, largest), is_zero = largest < kSmallest || !is_number;
        const float inverse = is_zero ? 0 : 127 / largest;
        // A number that is none makes every result of the row none, as it does in a product of floats.
        into.scales[x_at<K::kBlock, beside>(row, rows, b / K::kBlock, k)] =
            is_number ? (is_zero ? 0 : largest / 127) : std::numeric_limits<float>::quiet_NaN();
        for (int64_t g = 0; g < K::kBlock / K::kGroup; g++) {
            ints total{};
            for (int64_t i = b + g * K::kGroup; i < b + (g + 1) * K::kGroup; i += kStrip) {
                int8_t codes[kStrip];
                total += round_numbers(x + i, inverse, codes);
                int8_t* fours = into.codes + 4 * x_at<4, beside>(row, rows, i / 4, k);
                for (int64_t j = 0; j < kStrip; j += 4) std::memcpy(fours + j * beside, codes + j, 4);
            }
            int32_t sum = sum_of(total);
            if constexpr (K::kZero != 0) sum = kStart<K> - K::kZero * sum;  // what a sum of products begins with
            put_sum<K, beside>(into, row, rows, b / K::kGroup + g, k, sum);
        }
    }
}

// What rows of the weight have beside their codes: of a block. `zero`: what `kMagic` becomes when it is scaled.
struct Scaling {
    vec d, m, zero;
};

template <class K>
INLINE Scaling scaling_of(const Packed& weight, int64_t at) {
    Scaling by;
    by.d = load_halves(weight.d + at);
    by.zero = by.d * kMagic;  // exact: d has 11 bits, kMagic 2
    if constexpr (K::kMinimums != Minimums::kNone) by.m = load_halves(weight.m + at);
    return by;
}

// out += a block's sums of products, which began at kStart, scaled.
template <class K>
INLINE void add_scaled(vec& out, ints sums, const Scaling& by, float x_sum, float x_scale) {
#if QUIRE_FUSED
    vec value = multiply_subtract((vec)sums, by.d, by.zero);
#else
    vec value = to_floats(sums) * by.d;
#endif
    if constexpr (K::kMinimums == Minimums::kBlock) value = multiply_add(by.m, splat(x_sum), value);
    out = multiply_add(value, splat(x_scale), out);
}

// The same for a block of several groups, whose sums were scaled in integers; `minimums`: of pairs of groups.
template <class K, int pairs, int beside>
INLINE void add_totals(vec& out, ints totals, const Scaling& by, const ints (&minimums)[pairs], const int32_t* x_sums,
                       float x_scale) {
    vec value = to_floats(totals) * by.d;
    if constexpr (K::has_minimum) {
        ints sum{};
        UNROLL
        for (int i = 0; i < pairs; i++) dot_pair(sum, minimums[i], x_sums[i * beside]);
        value = multiply_add(by.m, -to_floats(sum), value);
    }
    out = multiply_add(value, splat(x_scale), out);
}

// Registers of the weight's rows, counted over the strips.
template <class K>
struct Place {
    static constexpr int64_t kPairs = K::kBlock / K::kGroup / 2;

    const Packed& weight;
    int64_t k, strip, lane;

    Place(const Packed& weight, int64_t k, int64_t part)
        : weight(weight), k(k), strip(part / kParts), lane(part % kParts * kLanes) {}

    INLINE int64_t beside(int64_t i, int64_t count) const { return (strip * count + i) * kStrip + lane; }
    INLINE const uint8_t* codes(int64_t span) const {
        return weight.codes + (strip * (k / kSpan) + span) * K::kLow * kVector + lane * 4;
    }
    INLINE const uint8_t* high(int64_t span) const {
        return K::kHigh ? weight.high + (strip * (k / kSpan) + span) * K::kHigh * kVector + lane * 4 : nullptr;
    }
    INLINE Scaling scaling(int64_t block) const { return scaling_of<K>(weight, beside(block, k / K::kBlock)); }
    INLINE ints scale(int64_t g) const {
        const int64_t at = beside(g, k / K::kGroup);
        if constexpr (K::kScales == Scales::kBytes) return load_small(weight.scale + at);
        return load_small(reinterpret_cast<const uint8_t*>(weight.scale) + at) & 15;
    }
    // Minimums of two groups, in the halves of a lane: each is from 0 to 63.
    INLINE ints minimums(int64_t g) const {
        const int64_t low = beside(g, k / K::kGroup), high = low + kStrip;
        if constexpr (K::kMinimums == Minimums::kBytes)
            return load_small(weight.minimum + low) | load_small(weight.minimum + high) << 16;
        const uint8_t* both = reinterpret_cast<const uint8_t*>(weight.scale);
        return load_small(both + low) >> 4 | load_small(both + high) >> 4 << 16;
    }
    INLINE void minimums_of(int64_t block, ints (&into)[kPairs]) const {
        if constexpr (K::has_minimum)
            for (int64_t i = 0; i < kPairs; i++) into[i] = minimums((block * kPairs + i) * 2);
    }
};

// Puts results of a register's rows of the weight into y.
template <class T>
INLINE void put_results(const Product<T>& p, int64_t part, int64_t m, vec out) {
    const int64_t n0 = part * kLanes, left = std::min<int64_t>(kLanes, p.n - n0);
    if (left <= 0) return;
    vec bias{};
    if (p.bias) bias = left == kLanes ? F::load(p.bias + n0) : F::load_part(p.bias + n0, left);
    T* y = p.y + m * p.y_stride + n0;
    if (left == kLanes) F::store(y, out + bias);
    else F::store_part(y, out + bias, left);
}

// One register's rows of the weight against one row of x. It waits for memory.
template <class K, class T>
struct Line {
    const Product<T>& p;
    const Rounded<typename K::Sum>& x;
    const Place<K> at;
    vec out{};
    ints totals{};

    INLINE void add_group(int64_t g, const bytes* fours, const Scaling& by) {
        constexpr int ways = 4;  // sums at once: each waits for its last product
        const int8_t* codes = x.codes + g * K::kGroup;
        ints sums[ways] = {};
        sums[0] += K::kZero ? int32_t(x.sums[g]) : kStart<K>;
        UNROLL
        for (int i = 0; i < K::kGroup / 4; i++) dot<K::kBits>(sums[i % ways], fours[i], codes + i * 4);
        const ints dots = sums[0] + sums[1] + (sums[2] + sums[3]);
        if constexpr (K::has_scale) totals += dots * at.scale(g);
        else add_scaled<K>(out, dots, by, x.sums[g], x.scales[g]);
    }

    void run(int64_t part) {
        constexpr int64_t spans = K::kBlock / kSpan, groups = kSpan / K::kGroup;
        for (int64_t block = 0; block < p.k / K::kBlock; block++) {
            const Scaling by = at.scaling(block);
            totals = ints{};
            for (int64_t span = block * spans; span < (block + 1) * spans; span++) {
                const uint8_t* codes = at.codes(span);
                if (!at.lane) prefetch_codes<K::kLow * kVector>(codes);  // other lanes read the same lines
                bytes fours[kFours];
                unpack_span<K>(codes, at.high(span), fours);
                UNROLL
                for (int i = 0; i < groups; i++) add_group(span * groups + i, fours + i * (K::kGroup / 4), by);
            }
            if constexpr (K::has_scale) {
                constexpr int pairs = Place<K>::kPairs;
                ints minimums[pairs];
                at.minimums_of(block, minimums);
                add_totals<K, pairs, 1>(out, totals, by, minimums, x.sums + block * pairs, x.scales[block]);
            }
        }
        put_results(p, part, 0, out);
    }
};

// `wide` registers of the weight's rows against up to kPanel rows of x, kAtOnce at a time: each four of x that is loaded
// meets `wide` registers of codes, and each of codes kAtOnce rows. Codes of kChunk inputs are unpacked once for all rows,
// into L1; those of 4 bits, with many registers, for each kAtOnce rows, which costs less than storing them.
template <class K, class T, int wide>
struct Panel {
    static constexpr int64_t kGroups = K::kBlock / K::kGroup, kPairs = Place<K>::kPairs;
    static constexpr bool direct = K::kBits == 4;  // unpacked for each kAtOnce rows
    static constexpr bool unpacks = K::kBits < 8 && !direct;           // codes of 8 bits are used where they are

    // What the next chunk needs of the weight, of these registers or the next ones. It is prefetched by parts, one for
    // each kAtOnce rows at each group: all at once would fill the queue of misses, and loads that are needed now would
    // wait in it.
    struct Ahead {
        static constexpr int kStrips = wide / kParts > 1 ? wide / kParts : 1;
        static constexpr int64_t kLines = std::max<int64_t>(1, K::kLow * K::kGroup / kSpan);  // of a group's codes

        const uint8_t *codes[kStrips], *high[kStrips];
        int64_t group[kStrips];
        int64_t lines;  // of each strip's, at each group
        bool rest;      // whether scales too

        INLINE void fetch(const Packed& weight) {
            UNROLL
            for (int j = 0; j < kStrips; j++) {
                for (int64_t l = 0; l < lines; l++) __builtin_prefetch(codes[j] + l * 64, 0, 3);
                codes[j] += K::kLow * kVector * K::kGroup / kSpan;
                if (!rest) continue;
                if constexpr (K::kHigh > 0) __builtin_prefetch(high[j], 0, 3);
                high[j] += K::kHigh * kVector * K::kGroup / kSpan;
                if constexpr (K::has_scale) __builtin_prefetch(weight.scale + group[j], 0, 3);
                if constexpr (K::kMinimums == Minimums::kBytes) __builtin_prefetch(weight.minimum + group[j], 0, 3);
                if constexpr (!K::has_scale) __builtin_prefetch(weight.d + group[j], 0, 3);
                if constexpr (K::kMinimums == Minimums::kBlock) __builtin_prefetch(weight.m + group[j], 0, 3);
                group[j] += kStrip;
            }
        }
    };

    const Product<T>& p;
    const Rounded<typename K::Sum>& x;
    int64_t first;     // of the registers
    int64_t m0, rows;  // of x
    const int64_t groups = (rows + kAtOnce - 1) / kAtOnce;
    const int64_t lines = m0 ? 0 : (Ahead::kLines + groups - 1) / groups;  // of codes, prefetched at a time
    vec out[kPanel][wide];
    bytes unpacked[unpacks ? wide : 1][unpacks ? kChunk / 4 : 1];
    Scaling scaling[kChunk / K::kBlock][wide];

    INLINE Place<K> place(int j) const { return {p.weight, p.k, first + j}; }

    INLINE void unpack_chunk(int64_t i0, int64_t inputs) {
        UNROLL
        for (int j = 0; j < wide; j++) {
            const Place<K> at = place(j);
            for (int64_t block = 0; block < inputs / K::kBlock; block++)
                scaling[block][j] = at.scaling(i0 / K::kBlock + block);
            for (int64_t span = 0; unpacks && span < inputs / kSpan; span++) {
                bytes fours[kFours];
                unpack_span<K>(at.codes(i0 / kSpan + span), at.high(i0 / kSpan + span), fours);
                UNROLL
                for (int i = 0; i < kFours; i++) unpacked[j][span * kFours + i] = fours[i];
            }
        }
    }

    // What rows have of a chunk: x_at's, for the rows of which the first is visited.
    struct Chunk {
        const int8_t* codes;
        const typename K::Sum* sums;
        const float* scales;
    };

    INLINE Chunk chunk_of(int64_t m, int64_t i0, int64_t inputs) const {
        constexpr int64_t each = K::has_minimum ? K::kGroup * 2 : K::kGroup;
        const int64_t at = m0 * p.k + i0 * groups * kAtOnce + m / kAtOnce * inputs * kAtOnce, row = m % kAtOnce;
        return {x.codes + at + row * 4, x.sums + at / each + row, x.scales + at / K::kBlock + row};
    }

    INLINE Ahead ahead_of(int64_t m, int64_t i0) const {
        Ahead ahead;
        const bool is_inside = i0 + kChunk < p.k;
        const int64_t i = is_inside ? i0 + kChunk : 0, from = first + (is_inside ? 0 : wide);
        const int64_t begin = m / kAtOnce * lines;
        ahead.lines = begin < Ahead::kLines ? lines : 0;
        ahead.rest = lines && !m;
        UNROLL
        for (int j = 0; j < Ahead::kStrips; j++) {
            const Place<K> at(p.weight, p.k, from + j * kParts);
            ahead.codes[j] = at.codes(i / kSpan) + begin * 64;
            ahead.high[j] = at.high(i / kSpan);
            ahead.group[j] = at.beside(i / K::kGroup, p.k / K::kGroup);
        }
        return ahead;
    }

    // Sums of the products of a group: `codes` of the weight in each register's strip, or unpacked, with x's.
    template <int count>
    INLINE static void multiply(const bytes* const (&codes)[wide], const int8_t* x_codes,
                                const typename K::Sum* starts, ints (&sums)[count][wide]) {
        UNROLL
        for (int r = 0; r < count; r++)
            UNROLL
            for (int j = 0; j < wide; j++) sums[r][j] = ints{} + (K::kZero ? int32_t(starts[r]) : kStart<K>);
        dot_fours<K::kBits, K::kGroup / 4, count, wide>(sums, [&](int j, int n) FORCED {
            if constexpr (!direct) return codes[j][unpacks ? n : n * kParts];
            const words packed = (words)codes[j][n % 4 * kParts];
            return (bytes)(n < 4 ? packed : packed >> 4) & 15;
        }, x_codes);
    }

    template <int count>
    INLINE void add_rows(int64_t m, int64_t i0, int64_t inputs) {
        constexpr int64_t bits = direct ? K::kBits : 8;
        constexpr int64_t group_bytes = K::kGroup * (unpacks ? kLanes : kStrip) * bits / 8 / sizeof(bytes);
        Chunk chunk = chunk_of(m, i0, inputs);
        const bytes* codes[wide];
        UNROLL
        for (int j = 0; j < wide; j++)
            codes[j] = unpacks ? unpacked[j] : reinterpret_cast<const bytes*>(place(j).codes(i0 / kSpan));
        const auto next_group = [&]() FORCED {
            UNROLL
            for (int j = 0; j < wide; j++) codes[j] += group_bytes;
            chunk.codes += K::kGroup * kAtOnce;
            if constexpr (!K::has_minimum) chunk.sums += kAtOnce;
        };
        Ahead ahead = ahead_of(m, i0);
        const Scaling (*by)[wide] = scaling;
        vec (*into)[wide] = out + m;
        for (int64_t i = 0; i < inputs; i += K::kBlock) {
            Scaling kept[wide];  // in registers
            UNROLL
            for (int j = 0; j < wide; j++) kept[j] = (*by)[j];
            const Scaling (&own)[wide] = kRegisters == 32 ? kept : *by;
            if constexpr (!K::has_scale) {
                ahead.fetch(p.weight);
                ints sums[count][wide];
                multiply<count>(codes, chunk.codes, chunk.sums, sums);
                UNROLL
                for (int r = 0; r < count; r++)
                    UNROLL
                    for (int j = 0; j < wide; j++)
                        add_scaled<K>(into[r][j], sums[r][j], own[j], chunk.sums[r], chunk.scales[r]);
                next_group();
                asm volatile("" ::: "memory");  // results stay in L1: sums need registers
            } else {
                const int64_t b = (i0 + i) / K::kBlock;
                ints totals[count][wide] = {};
                for (int64_t g = 0; g < kGroups; g++) {
                    ahead.fetch(p.weight);
                    ints sums[count][wide], scale[wide];
                    multiply<count>(codes, chunk.codes, chunk.sums, sums);
                    UNROLL
                    for (int j = 0; j < wide; j++) scale[j] = place(j).scale(b * kGroups + g);
                    UNROLL
                    for (int r = 0; r < count; r++)
                        UNROLL
                        for (int j = 0; j < wide; j++) totals[r][j] += sums[r][j] * scale[j];
                    next_group();
                    asm volatile("" : "+m"(totals));  // in L1: sums need the registers
                }
                if constexpr (!K::has_minimum) chunk.sums -= kGroups * kAtOnce;
                UNROLL
                for (int j = 0; j < wide; j++) {
                    ints minimums[kPairs];
                    place(j).minimums_of(b, minimums);
                    UNROLL
                    for (int r = 0; r < count; r++)
                        add_totals<K, kPairs, kAtOnce>(into[r][j], totals[r][j], own[j], minimums, chunk.sums + r,
                                                       chunk.scales[r]);
                }
                chunk.sums += (K::has_minimum ? kPairs : kGroups) * kAtOnce;
            }
            chunk.scales += kAtOnce, by++;
        }
    }

    void run() {
        for (int64_t m = 0; m < rows; m++) {
            for (int j = 0; j < wide; j++) out[m][j] = vec{};
            asm volatile("" ::: "memory");  // no call of memset for a few kilobytes
        }
        for (int64_t i0 = 0; i0 < p.k; i0 += kChunk) {
            const int64_t inputs = std::min(kChunk, p.k - i0);
            unpack_chunk(i0, inputs);
            by_count(rows, [&](auto count, int64_t m) FORCED { add_rows<count()>(m, i0, inputs); });
        }
        for (int64_t m = 0; m < rows; m++)
            for (int j = 0; j < wide; j++) put_results(p, first + j, m0 + m, out[m][j]);
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
        round_row<K, beside>(p.x + row * p.x_stride, row, p.rows, p.k, x);
    });
    const int64_t strips = (p.n + kStrip - 1) / kStrip, strip_bytes = kStrip * p.k * K::kBits / 8;
    constexpr int wide = K::kBits <= kWideBits ? 2 : 1;
    const int64_t together = beside > 1 && wide > kParts ? wide / kParts : 1;
    const int64_t at_once = strips_at_once(strips, strip_bytes, p.rows, p.threads, together);
    share((strips + at_once - 1) / at_once, p.threads, p.rows * p.n * p.k > kWorthSharing, [&](int64_t piece) {
        const int64_t begin = piece * at_once * kParts, end = std::min(strips, (piece + 1) * at_once) * kParts;
        if constexpr (beside == 1) {
            for (int64_t part = begin; part < end; part++) Line<K, T>{p, x, {p.weight, p.k, part}}.run(part);
        } else {
            for (int64_t m = 0; m < p.rows; m += kPanel) {  // rows of x and the piece stay in L2
                const int64_t rows = std::min(kPanel, p.rows - m);
                int64_t part = begin;
                for (; part + wide <= end; part += wide) Panel<K, T, wide>{p, x, part, m, rows}.run();
                if constexpr (wide > 1)
                    if (part < end) Panel<K, T, 1>{p, x, part, m, rows}.run();
            }
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
