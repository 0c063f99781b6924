// Low-rank products of adapters, added to a result: out[t] += b[s]^T (a[s] x[t]), s the slot of token t; nothing for
// tokens with a negative slot. a is [slots, parts * rank, depth], b [slots, rank, width]; outputs bounds[p] to
// bounds[p + 1] read ranks p * rank to (p + 1) * rank of a. T is float or bf16; the arithmetic is float32.
//
// Operations: 2 tokens rank (parts depth + width). Bytes: a and b of each token, from memory once for all tokens of a
// slot if they fit a cache, which they do: 16 ranks of 4096 numbers are 256 KiB. A token is computed in one order,
// whatever the other tokens are: its bits do not depend on the batch.
#include <algorithm>

#include "pool.h"
#include "simd.h"

namespace {

constexpr int64_t kWorthSharing = 64 * 1024;  // multiplications, about what waking the threads costs
constexpr int64_t kPiece = 16 * 1024;
constexpr int64_t kRanks = 4;  // rows of a that share a pass over x
constexpr int64_t kOutputs = 512;

thread_local Scratch inner_scratch;

// Arguments as Python packs them (8 bytes per field).
template <class T>
struct LowRank {
    const T *x, *a, *b;
    const int32_t* slots;
    const int64_t* bounds;
    T* out;
    int64_t rows, parts, rank, depth, width, x_stride, out_stride, threads;
};

template <class T, int R>
INLINE void dots(const T* x, const T* a, int64_t depth, float* out) {
    vec sums[R] = {};
    int64_t i = 0;
    for (; i + kLanes <= depth; i += kLanes) {
        const vec v = F::load(x + i);
        for (int r = 0; r < R; r++) sums[r] += v * F::load(a + r * depth + i);
    }
    if (const int64_t left = depth - i; left > 0) {
        const vec v = F::load_part(x + i, left);
        for (int r = 0; r < R; r++) sums[r] += v * F::load_part(a + r * depth + i, left);
    }
    for (int r = 0; r < R; r++) out[r] = sum<kLanes>(sums[r]);
}

template <class T>
INLINE void grow(const T* b, int64_t width, int64_t rank, const float* inner, T* out, int64_t first, int64_t last) {
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes) {
        vec total = F::load(out + i);
        for (int64_t r = 0; r < rank; r++) total += inner[r] * F::load(b + r * width + i);
        F::store(out + i, total);
    }
    if (const int64_t left = last - i; left > 0) {
        vec total = F::load_part(out + i, left);
        for (int64_t r = 0; r < rank; r++) total += inner[r] * F::load_part(b + r * width + i, left);
        F::store_part(out + i, total, left);
    }
}

template <class T>
void low_rank(const LowRank<T>& p) {
    const int64_t ranks = p.parts * p.rank, groups = (ranks + kRanks - 1) / kRanks;
    float* inner = inner_scratch.get(p.rows * ranks);
    const auto shrink = [&](int64_t i) {
        const int64_t token = i / groups, first = i % groups * kRanks, slot = p.slots[token];
        if (slot < 0) return;
        const T *x = p.x + token * p.x_stride, *a = p.a + (slot * ranks + first) * p.depth;
        float* out = inner + token * ranks + first;
        if (first + kRanks <= ranks) return dots<T, kRanks>(x, a, p.depth, out);
        for (int64_t r = 0; r < ranks - first; r++) dots<T, 1>(x, a + r * p.depth, p.depth, out + r);
    };
    const int64_t each = std::max<int64_t>(1, kPiece / (kRanks * p.depth));
    share_items(p.rows * groups, each, p.threads, p.rows * ranks * p.depth > kWorthSharing, shrink);

    const int64_t chunks = (p.width + kOutputs - 1) / kOutputs;
    const auto expand = [&](int64_t i) {
        const int64_t token = i / chunks, slot = p.slots[token];
        if (slot < 0) return;
        const int64_t begin = i % chunks * kOutputs, end = std::min(begin + kOutputs, p.width);
        const T* b = p.b + slot * p.rank * p.width;
        for (int64_t part = 0; part < p.parts; part++) {
            const int64_t first = std::max(begin, p.bounds[part]), last = std::min(end, p.bounds[part + 1]);
            const float* own = inner + token * ranks + part * p.rank;
            if (first < last) grow(b, p.width, p.rank, own, p.out + token * p.out_stride, first, last);
        }
    };
    const int64_t pieces = std::max<int64_t>(1, kPiece / (p.rank * kOutputs));
    share_items(p.rows * chunks, pieces, p.threads, p.rows * p.rank * p.width > kWorthSharing, expand);
}

}  // namespace

EXPORT void quire_low_rank_f32(const LowRank<float>* p) { low_rank(*p); }
EXPORT void quire_low_rank_bf16(const LowRank<bf16>* p) { low_rank(*p); }
