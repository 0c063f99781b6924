// Products as in packed.cpp, with weights of 2, 4 or 8 bits whose only scales are floats: INT4, INT8 and ternary.
//
// value = d * (code - zero), with d in float32 and zero (a constant, or a byte) per `group` inputs of an output. x is
// rounded to 8 bits by blocks of `block` inputs, at most a group: 32, or 128, or all of them. Layout, work and bits are
// packed.cpp's: 2 to 8 bits a weight are read, sums are exact in int32 within a block (255 * 127 * 65536 < 2^31), and
// blocks are scaled and added in float32, in order.
#include <cmath>

#include "packed.h"
#include "pool.h"

namespace {

thread_local Scratch strip_codes, strip_scales;

using X = Rounded<int32_t>;

template <int beside, class T>
void round_row(const T* x, int64_t row, int64_t k, int64_t block, const X& into) {
    for (int64_t b = 0; b < k; b += block) {
        float largest;
        const bool is_number = measure(x + b, block, largest), is_zero = largest < kSmallest || !is_number;
        const float inverse = is_zero ? 0 : 127 / largest;
        const int64_t at = x_place<beside>(row, b / block, k / block);
        // A number that is none makes every result of the row none, as it does in a product of floats.
        into.scales[at] = is_number ? (is_zero ? 0 : largest / 127) : std::numeric_limits<float>::quiet_NaN();
        ints total{};
        for (int64_t i = b; i < b + block; i += kSpan) {
            int8_t codes[kSpan];
            for (int j = 0; j < kSpan; j += kStrip) total += round_numbers(x + i + j, inverse, codes + j);
            for (int j = 0; j < kSpan; j += 4)
                std::memcpy(into.codes + 4 * x_place<beside>(row, (i + j) / 4, k / 4), codes + j, 4);
        }
        into.sums[at] = sum_of(total);
    }
}

// One register's rows of a strip against up to kTile rows of x.
template <int bits, int zero, int beside, class T>
struct Tile {
    const Product<T>& p;
    const X& x;
    int64_t strip, lane;  // which strip, and which of its rows is the first lane
    int64_t m0, rows;     // of x
    vec out[kTile];

    template <int count>
    INLINE void add_block(int64_t m, int64_t block, vec d, ints zeros) {
        constexpr int ways = count == 1 ? 4 : count == 2 ? 2 : 1;  // sums at once: each waits for its last product
        ints sums[count][ways] = {};
        const int64_t spans = p.block / kSpan;
        const uint8_t* codes = p.weight.codes + (strip * (p.k / kSpan) + block * spans) * bits * kVector + lane * 4;
        const int8_t* fours_of_x = x.codes + 4 * x_place<beside>(m0 + m, block * (p.block / 4), p.k / 4);
        for (int64_t span = 0; span < spans; span++) {
            bytes fours[kFours];
            if (!lane && !m0 && !m) prefetch_codes<bits * kVector>(codes + span * bits * kVector);
            unpack<bits>(codes + span * bits * kVector, fours);
            UNROLL
            for (int i = 0; i < kFours; i++)
                UNROLL
                for (int r = 0; r < count; r++)
                    dot<bits>(sums[r][i % ways], fours[i], fours_of_x + ((span * kFours + i) * beside + r) * 4);
        }
        const int64_t at = x_place<beside>(m0 + m, block, p.k / p.block);
        UNROLL
        for (int r = 0; r < count; r++) {
            ints total = sums[r][0];
            if constexpr (ways == 4) total += sums[r][1] + (sums[r][2] + sums[r][3]);
            if constexpr (ways == 2) total += sums[r][1];
            total -= zeros * x.sums[at + r];
            out[m + r] += to_floats(total) * d * x.scales[at + r];
        }
    }

    void run() {
        for (int64_t m = 0; m < rows; m++) out[m] = vec{};
        const float* scales = reinterpret_cast<const float*>(p.weight.d);
        for (int64_t block = 0; block < p.k / p.block; block++) {
            const int64_t at = (strip * (p.k / p.group) + block * p.block / p.group) * kStrip + lane;
            const vec d = F::load(scales + at);
            ints zeros = ints{} + zero;
            if constexpr (zero < 0) zeros = load_small(reinterpret_cast<const uint8_t*>(p.weight.minimum) + at);
            if constexpr (beside == 1) add_block<1>(0, block, d, zeros);
            else by_count(rows, [&](auto count, int64_t m) FORCED { add_block<count()>(m, block, d, zeros); });
        }
        const int64_t n0 = strip * kStrip + lane, left = std::min<int64_t>(kLanes, p.n - n0);
        if (left <= 0) return;
        vec bias{};
        if (p.bias) bias = left == kLanes ? F::load(p.bias + n0) : F::load_part(p.bias + n0, left);
        for (int64_t m = 0; m < rows; m++) {
            T* y = p.y + (m0 + m) * p.y_stride + n0;
            if (left == kLanes) F::store(y, out[m] + bias);
            else F::store_part(y, out[m] + bias, left);
        }
    }
};

// `zero` below 0: every group has its own.
template <int bits, int zero, int beside, class T>
void product_of(const Product<T>& p) {
    const int64_t blocks = p.k / p.block, padded = (p.rows + beside - 1) / beside * beside;
    X x;
    x.codes = reinterpret_cast<int8_t*>(strip_codes.get(padded * p.k / 4));
    x.scales = strip_scales.get(padded * 2 * blocks);
    x.sums = reinterpret_cast<int32_t*>(x.scales + padded * blocks);
    const int64_t each = std::max<int64_t>(1, 8192 / p.k);
    share_items(p.rows, each, p.threads, p.rows * p.k > kWorthRounding, [&](int64_t row) {
        round_row<beside>(p.x + row * p.x_stride, row, p.k, p.block, x);
    });
    const int64_t strips = (p.n + kStrip - 1) / kStrip, strip_bytes = kStrip * p.k * bits / 8;
    share_items(strips, strips_at_once(strips, strip_bytes, p.rows, p.threads), p.threads,
                p.rows * p.n * p.k > kWorthSharing, [&](int64_t strip) {
                    for (int64_t m = 0; m < p.rows; m += kTile)
                        for (int64_t part = 0; part < kParts; part++)
                            Tile<bits, zero, beside, T>{
                                p, x, strip, part * kLanes, m, std::min(kTile, p.rows - m)}
                                .run();
                });
}

template <int bits, int zero, class T>
void product(const Product<T>& p) {
    p.rows == 1 ? product_of<bits, zero, 1>(p) : product_of<bits, zero, kAtOnce>(p);
}

template <class T>
void by_kind(const Product<T>& p) {
    switch (p.kind - kStripKinds) {  // in the order of KINDS (kernels/weights/strips.py)
        case 0: return product<2, 1>(p);
        case 1: return product<4, 8>(p);
        case 2: return product<4, -1>(p);
        case 3: return product<8, 128>(p);
        case 4: return product<8, -1>(p);
        default: std::abort();
    }
}

}  // namespace

void strip_linear(const Product<float>& p) { by_kind(p); }
void strip_linear(const Product<bf16>& p) { by_kind(p); }
