// y[m, n] = sum over k of x[m, k] * weight[n, k] (+ bias[n]); weight row-major as the checkpoint has it.
//
// Work:  2 * M * N * K operations.
// Bytes: N * K * sizeof(weight), read once from memory; x and y are small in comparison. On two Zen 4 cores (22 GB/s,
//        236 GFLOP/s in float32) memory bounds M <= 20 or so, arithmetic the rest.
//
// SIMD lanes run along M: x is packed transposed, xt[k][M rounded up to lanes], and each weight is broadcast against
// it. So the weight needs no repacking, there are no sums across lanes, and K and N need no alignment. One row of x
// leaves lanes idle, but two broadcasts per cycle still consume 8 bytes of weight per cycle, more than memory delivers.
//
// Bits: every output is one chain of fused multiply-adds over k = 0 .. K - 1 (see outer.h), so a row's result is the
// same for every M, every thread count and every position in the batch.
#include <algorithm>
#include <type_traits>

#include "outer.h"
#include "pool.h"

namespace {

constexpr int kVectors = kRegisters == 32 ? 4 : 2;  // of a panel, along M
constexpr int64_t kPanel = kVectors * kLanes;       // rows of x packed side by side
constexpr int64_t kSlab = 16 * kPanel;              // rows of x packed at once: bounds the memory that takes
constexpr int64_t kSliceBytes = 384 * 1024;         // of a packed panel along k: stays in L2
constexpr int64_t kChunkBytes = 256 * 1024;         // of weight: stays in L2 while the panels pass over it
constexpr int64_t kWorthSharing = 256 * 1024;       // multiply-adds: fewer take less time than waking the thread pool

constexpr int64_t kWorthPacking = 64 * 1024;        // numbers of x: the same
constexpr int64_t kPackPiece = 16 * 1024;           // numbers of x that a thread packs at a time

thread_local Scratch packed_scratch, sums_scratch, wide_scratch;

// Rows of weight in a register tile: with V vectors along M, as many accumulators as there are registers.
constexpr int tile_rows(int vectors) {
    return vectors == 1 ? 8 : kRegisters == 32 ? 24 / vectors : 6;
}

// bf16 without a dot instruction is widened to float32: x as it is packed, the weight a chunk at a time.
template <class T>
using Operand = std::conditional_t<kBf16Dot, T, float>;

// Arguments as Python packs them (8 bytes per field); bias may be null.
template <class T>
struct Problem {
    const T *x, *weight, *bias;
    T* y;
    int64_t m, n, k, x_stride, weight_stride, threads;

    static constexpr int64_t per_step = sizeof(float) / sizeof(Operand<T>);
    int64_t steps() const { return (k + per_step - 1) / per_step; }
};

// Up to L steps (4 bytes each) of a row of x; zero where the row has ended, which also fills an odd K's last pair.
template <int L, class T>
INLINE typename Lanes<L>::f load_steps(const T* source, int64_t numbers) {
    using Vec = Lanes<L>;
    if constexpr (!std::is_same_v<T, Operand<T>>) {
        return numbers >= L ? Vec::load(source) : Vec::load_part(source, numbers);
    } else {
        typename Vec::f words{};
        const int64_t bytes = numbers * sizeof(T);
        if (bytes >= L * 4) std::memcpy(&words, source, L * 4);
        else std::memcpy(&words, source, bytes);
        return words;
    }
}

// xt[step][width] for L steps from rows m0 .. of x: L x L transposes. Lanes past M are zero.
template <int L, class T>
void pack(const Problem<T>& p, int64_t m0, int64_t width, int64_t step, float* xt) {
    const int64_t offset = step * p.per_step, steps = std::min<int64_t>(L, p.steps() - step);
    if (p.m == 1) {  // nothing to transpose: each step has one number, in the first lane
        const auto row = load_steps<L>(p.x + offset, p.k - offset);
        for (int64_t i = 0; i < steps; i++) Lanes<L>::store(xt + (step + i) * width, typename Lanes<L>::f{row[i]});
        return;
    }
    for (int64_t lane = 0; lane < width; lane += L) {
        typename Lanes<L>::f block[L];
        for (int i = 0; i < L; i++) {
            const int64_t row = m0 + lane + i;
            block[i] = typename Lanes<L>::f{};
            if (row < p.m) block[i] = load_steps<L>(p.x + row * p.x_stride + offset, p.k - offset);
        }
        transpose<L>(block);
        for (int64_t i = 0; i < steps; i++) Lanes<L>::store(xt + (step + i) * width + lane, block[i]);
    }
}

// y[m0 .., n0 ..] = sums[n][lane] transposed (+ bias).
template <int L, class T>
void unpack(const Problem<T>& p, int64_t m0, int64_t width, int64_t n0, int64_t rows, const float* sums) {
    using Vec = Lanes<L>;
    for (int64_t r = 0; r < rows; r += L) {
        const int64_t left = rows - r;
        typename Vec::f bias{};
        if (p.bias) bias = left >= L ? Vec::load(p.bias + n0 + r) : Vec::load_part(p.bias + n0 + r, left);
        for (int64_t lane = 0; lane < width && m0 + lane < p.m; lane += L) {
            typename Vec::f block[L];
            for (int i = 0; i < L; i++) block[i] = Vec::load(sums + std::min(r + i, rows - 1) * width + lane);
            transpose<L>(block);
            for (int64_t i = 0; i < L && m0 + lane + i < p.m; i++) {
                T* y = p.y + (m0 + lane + i) * p.n + n0 + r;
                if (left >= L) Vec::store(y, block[i] + bias);
                else Vec::store_part(y, block[i] + bias, left);
            }
        }
    }
}

// sums[r][lane] over all of K: `rows` rows of weight against one packed panel.
template <int L, int V, class W>
void multiply(const W* weight, int64_t stride, int64_t rows, int64_t k, const float* xt, float* sums) {
    constexpr int R = tile_rows(V);
    constexpr int64_t width = L * V, per_step = sizeof(float) / sizeof(W), depth = kSliceBytes / (width * 4);
    const int64_t steps = k / per_step;
    for (int64_t k0 = 0; k0 < steps; k0 += depth)
        for (int64_t r = 0; r < rows; r += R)
            outer<L, V, R, Order::kRows>(weight + r * stride + k0 * per_step, stride, rows - r, xt + k0 * width, width,
                                         sums + r * width, width, std::min(depth, steps - k0), k0 > 0, R * stride);
    if (k % per_step)  // an odd K's last number, paired with zero
        for (int64_t r = 0; r < rows; r += R) {
            W last[R][2] = {};
            for (int64_t i = 0; i < R; i++) last[i][0] = weight[std::min(r + i, rows - 1) * stride + k - 1];
            outer<L, V, R, Order::kRows>(&last[0][0], 2, R, xt + steps * width, width, sums + r * width, width, 1,
                                         steps > 0);
        }
}

template <int L, int V, class T>
void panel(const Problem<T>& p, int64_t m0, int64_t n0, int64_t rows, const float* xt, float* sums) {
    const int64_t stride = p.weight_stride;
    const T* weight = p.weight + n0 * stride;
    if constexpr (std::is_same_v<T, Operand<T>>) {
        multiply<L, V>(weight, stride, rows, p.k, xt, sums);
    } else {
        float* wide = wide_scratch.get(rows * p.k);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < p.k; i++) wide[r * p.k + i] = to_float(weight[r * stride + i]);
        multiply<L, V>(wide, p.k, rows, p.k, xt, sums);
    }
    unpack<L>(p, m0, L * V, n0, rows, sums);
}

// The whole GEMM, in panels of up to `max_vectors` vectors of L lanes, the last one narrower if that covers M.
template <int L, int max_vectors, class T>
void linear(const Problem<T>& p) {
    const int64_t panels = (p.m + kPanel - 1) / kPanel, steps = p.steps();
    auto vectors = [&](int64_t i) { return int(std::min((p.m - i * kPanel + L - 1) / L, int64_t(max_vectors))); };
    float* packed = packed_scratch.get(panels * kPanel * steps);

    constexpr int64_t tile = 24;  // a multiple of every tile_rows
    const int64_t fitting = kChunkBytes / (p.k * int64_t(sizeof(Operand<T>))), fair = p.n / (p.threads * 4);
    const int64_t rows = std::max(tile, std::min(fitting, fair) / tile * tile);
    const int64_t chunks = (p.n + rows - 1) / rows, blocks = (steps + L - 1) / L;

    const auto pack_block = [&](int64_t i) {
        const int64_t at = i / blocks;
        pack<L>(p, at * kPanel, vectors(at) * L, i % blocks * L, packed + at * kPanel * steps);
    };
    share_items(panels * blocks, kPackPiece / (kPanel * L), p.threads, p.m * p.k > kWorthPacking, pack_block);
    share(chunks, p.threads, p.m * p.n * p.k > kWorthSharing, [&](int64_t chunk) {
        float* sums = sums_scratch.get((rows + tile) * kPanel);
        const int64_t n0 = chunk * rows, count = std::min(rows, p.n - n0);
        for (int64_t i = 0; i < panels; i++) {
            const float* xt = packed + i * kPanel * steps;
            switch (vectors(i)) {
                case 1: panel<L, 1>(p, i * kPanel, n0, count, xt, sums); break;
                case 2: panel<L, std::min(2, max_vectors)>(p, i * kPanel, n0, count, xt, sums); break;
                case 3: panel<L, std::min(3, max_vectors)>(p, i * kPanel, n0, count, xt, sums); break;
                default: panel<L, max_vectors>(p, i * kPanel, n0, count, xt, sums); break;
            }
        }
    });
}

template <class T>
void dispatch(const Problem<T>& p) {
    constexpr int narrow = std::min(8, kLanes);
    if (p.m <= narrow) return linear<narrow, 1>(p);
    for (int64_t m = 0; m < p.m; m += kSlab) {
        Problem<T> slab = p;
        slab.x += m * p.x_stride, slab.y += m * p.n, slab.m = std::min(kSlab, p.m - m);
        linear<kLanes, kVectors>(slab);
    }
}

}  // namespace

EXPORT void quire_linear_f32(const Problem<float>* p) { dispatch(*p); }
EXPORT void quire_linear_bf16(const Problem<bf16>* p) { dispatch(*p); }
