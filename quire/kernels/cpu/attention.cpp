// Causal attention of packed queries over a paged cache: prefills and decodes of a step in one call.
//
// Work:  4 * D operations per (query head, visible key), plus one exponential.
// Bytes: a key and a value (2 * D numbers) per (KV head, key) and query tile: once for a decode, for any group
//        size. A decode of one token does 2 * G / 4 operations per byte, so it is bound by memory (two Zen 4 cores); a
//        prompt is bound by arithmetic.
//
// A tile is up to kTile query vectors of one row that share a KV head: (token, head of the group) pairs, token-major.
// They are the SIMD lanes: scores are stored as s[key][lane], so that maxima, sums and masks are plain vector
// operations and no sum crosses lanes. Keys come in chunks of kChunk; each chunk is a softmax of its own, (peak, total,
// values), and chunks are merged in order. Chunks of one tile may therefore run on several threads with the same
// result. With enough rows for all threads, a decode processes all its KV heads together: a cache block is then read
// sequentially, which is faster than a head's 4 KB of it at a time (25 instead of 20 GB/s).
//
// Bits: chunks begin at multiples of kChunk in the row's own positions and lanes never mix, so a token's output
// depends only on its row's queries and cache: not on the batch, the threads, or the chunking of its prompt.
#include <algorithm>
#include <cmath>
#include <vector>

#include "outer.h"
#include "pool.h"

namespace {

constexpr int kVectors = kRegisters == 32 ? 4 : 2;
constexpr int64_t kTile = kVectors * kLanes;
constexpr int64_t kChunk = 256;  // keys: a tile's scores (64 KB) stay in L2
constexpr int64_t kWorthSharing = 128 * 1024;  // multiply-adds: fewer take less time than waking the thread pool
constexpr int64_t kRowsToShare = 4;  // decodes per thread: with this many, no thread waits long for the last one
constexpr float kNever = -__builtin_inff();

thread_local Scratch tile_scratch, partial_scratch;

// Arguments as Python packs them (8 bytes per field).
template <class T>
struct Call {
    const T* q;   // [tokens, heads, dim], q_stride between tokens
    const T* kv;  // [blocks, 2, kv_heads, block_size, dim], block_stride between blocks
    T* out;       // [tokens, heads * dim]
    const int32_t* query_starts;
    const int32_t* context_lens;
    const int32_t* tables;  // [rows, table_width], table_stride between rows
    const T* sinks;         // [heads] or null: logits that join the softmax's denominator
    const float* slopes;    // [heads] or null: a key's bias is the slope times its distance from the query
    const int32_t* ahead;   // [tokens] or null: how many keys after its own position a query sees; not with slopes
    int64_t rows, heads, kv_heads, dim, block_size, q_stride, block_stride, table_width, table_stride;
    int64_t window;  // 0: none
    double scale;
    double soft_cap;  // 0: none
    int64_t threads;

    // Tokens a block table can hold: no more are read, even if a row's length is larger.
    int64_t capacity() const { return table_width * block_size; }
    int64_t group() const { return heads / kv_heads; }
    // Keys that a token of a row sees after its own position.
    int64_t seen_ahead(int64_t row, int64_t token) const { return ahead ? ahead[query_starts[row] + token] : 0; }
    int64_t padded_dim() const { return (dim + kLanes - 1) / kLanes * kLanes; }
    // The cache can be read in place when it is float32 and its rows are whole vectors.
    bool direct() const { return sizeof(T) == sizeof(float) && dim % kLanes == 0; }
};

// A tile, or with `partial` some chunks of it.
struct Item {
    int64_t row, kv_head, kv_heads;      // KV heads kv_head .. kv_head + kv_heads
    int64_t first, count;                // queries first .. first + count of the row, as token * group + head
    int64_t position;                    // of the row's first query token
    int64_t last;                        // the last key that one of the queries sees
    int64_t chunk, chunk_end;            // chunks of keys to read
    int64_t partial;                     // offset of the first chunk's result in the partials, or -1: finish here
    int64_t cost;                        // keys * lanes
};

int64_t lanes_for(int64_t count) {
    for (int64_t lanes : {4, 8})
        if (count <= lanes) return lanes;
    return (count + kLanes - 1) / kLanes * kLanes;
}

// One chunk's softmax or several merged: values[lane][d] are sums of e^(score - peak) * v, total the sums of e^(...).
struct State {
    float *peak, *total, *values;
    static int64_t size(int64_t width, int64_t dim) { return width * (dim + 2); }
    State(float* memory, int64_t width) : peak(memory), total(memory + width), values(memory + 2 * width) {}
};

void clear(State s, int64_t width, int64_t dim) {
    for (int64_t i = 0; i < width; i++) s.peak[i] = kNever;
    std::memset(s.total, 0, width * (dim + 1) * sizeof(float));
}

// into = into and from, both rescaled to the higher peak. A side that saw no key has weight 0, the other then 1.
template <int L>
void merge(State into, State from, int64_t width, int64_t dim) {
    using Vec = Lanes<L>;
    float keep[kTile], add[kTile];
    for (int64_t i = 0; i < width; i += L) {
        auto old_peak = Vec::load(into.peak + i), new_peak = Vec::load(from.peak + i);
        auto peak = Vec::max(old_peak, new_peak);
        auto base = peak == (typename Vec::f{} + kNever) ? typename Vec::f{} : peak;  // no inf - inf
        auto a = exp<L>(old_peak - base), b = exp<L>(new_peak - base);
        Vec::store(keep + i, a);
        Vec::store(add + i, b);
        Vec::store(into.peak + i, peak);
        Vec::store(into.total + i, Vec::load(into.total + i) * a + Vec::load(from.total + i) * b);
    }
    for (int64_t i = 0; i < width; i++)
        for (int64_t d = 0; d < dim; d += kLanes) {
            float* value = into.values + i * dim + d;
            F::store(value, F::load(value) * keep[i] + F::load(from.values + i * dim + d) * add[i]);
        }
}

// Rows of the cache as float32 with padded_dim numbers each, copied unless they are that already. `ahead`: distance of
// the next rows, which are prefetched during the copy; it is set to 0 then, and kept for the caller if nothing is
// copied.
template <class T>
const float* widen(const Call<T>& c, const T* rows, int64_t count, float* copy, int64_t& ahead) {
    if (c.direct()) return reinterpret_cast<const float*>(rows);
    const int64_t width = c.padded_dim(), next = ahead;
    ahead = 0;
    for (int64_t i = 0; i < count; i++, rows += c.dim, copy += width) {
        if (next)
            for (int64_t d = 0; d < c.dim; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(rows + d + next, 0, 2);
        int64_t d = 0;
        for (; d + kLanes <= c.dim; d += kLanes) F::store(copy + d, F::load(rows + d));
        if (d < c.dim) F::store(copy + d, F::load_part(rows + d, c.dim - d));
    }
    return copy - count * width;
}

template <int L, int V, class T>
struct Tile {
    static constexpr int64_t width = L * V;
    static constexpr int kKeys = kRegisters == 32 ? (V <= 3 ? 8 : 4) : 4;  // keys in a register tile
    static constexpr int kQueries = 4;                                     // queries in one, against values
    using Vec = Lanes<L>;
    using vf = typename Vec::f;
    using vi = typename Vec::i;

    const Call<T>& c;
    const Item& item;
    const int64_t dim = c.padded_dim();
    const int32_t* table = c.tables + item.row * c.table_stride;
    // Of each head: queries [dim][width], scores [kChunk][width]. copy: of a plane of a block. memory: for states.
    float *queries, *scores, *copy, *memory;
    const int64_t queries_size = dim * width, scores_size = (kChunk + 8) * width;
    vi first_key[V], last_key[V];  // what each lane sees

    Tile(const Call<T>& call, const Item& it) : c(call), item(it) {
        const int64_t heads = item.kv_heads, each = queries_size + scores_size + 2 * state_size();
        queries = tile_scratch.get(heads * each + c.block_size * dim);
        scores = queries + heads * queries_size;
        memory = scores + heads * scores_size;
        copy = memory + heads * 2 * state_size();
        for (int64_t h = 0; h < heads; h++) load_queries(item.kv_head + h, queries + h * queries_size);
    }

    int64_t state_size() const { return State::size(width, dim); }

    void load_queries(int64_t kv_head, float* into) {
        const int64_t group = c.group();
        for (int v = 0; v < V; v++) {
            const T* source[L];
            for (int i = 0; i < L; i++) {
                // Lanes past the end repeat the last query, and are never written out.
                const int64_t at = item.first + std::min<int64_t>(v * L + i, item.count - 1);
                const int64_t token = at / group, head = kv_head * group + at % group;
                source[i] = c.q + (c.query_starts[item.row] + token) * c.q_stride + head * c.dim;
                last_key[v][i] = int32_t(item.position + token + c.seen_ahead(item.row, token));
                first_key[v][i] = c.window ? std::max<int32_t>(0, int32_t(item.position + token - c.window) + 1) : 0;
            }
            for (int64_t d = 0; d < c.dim; d += L) {
                vf block[L];
                for (int i = 0; i < L; i++)
                    block[i] = d + L <= c.dim ? Vec::load(source[i] + d) : Vec::load_part(source[i] + d, c.dim - d);
                transpose<L>(block);
                for (int64_t i = 0; i < L && d + i < c.dim; i++)
                    Vec::store(into + (d + i) * width + v * L, block[i] * float(c.scale));
            }
        }
    }

    int64_t plane() const { return c.block_size * c.dim; }
    // Where the first head's keys of a key's block begin; the values follow all heads' keys.
    const T* block_of(int64_t key) const {
        return c.kv + table[key / c.block_size] * c.block_stride + item.kv_head * plane();
    }

    // Keys are visited a cache block at a time, and in it head by head: calls visit(head, first of the block's rows,
    // index in the chunk, count). `offset` is that of the keys or the values in a block.
    template <class Visit>
    INLINE void each_block(int64_t begin, int64_t end, int64_t offset, Visit visit) {
        for (int64_t key = begin; key < end;) {
            const int64_t inside = key % c.block_size, count = std::min(c.block_size - inside, end - key);
            const T* rows = block_of(key) + offset + inside * c.dim;
            for (int64_t h = 0; h < item.kv_heads; h++) visit(h, rows + h * plane(), key - begin, count);
            key += count;
        }
    }

    // Software prefetch of a decode: the distance from `rows` to the next block's, fetched line by line. (All at once
    // would fill the miss queue, and the loads needed now would wait in it.)
    int64_t distance(const T* rows, int64_t next, int64_t end, int64_t offset) const {
        return V == 1 && next < end ? block_of(next) + offset - rows : 0;
    }

    void score(int64_t begin, int64_t end) {
        each_block(begin, end, 0, [&](int64_t h, const T* keys, int64_t at, int64_t count) {
            int64_t ahead = distance(keys, begin + at + count, end, h * plane());
            const float* rows = widen(c, keys, count, copy, ahead);
            for (int64_t i = 0; i < count; i += kKeys)
                outer<L, V, kKeys, Order::kRows>(rows + i * dim, dim, count - i, queries + h * queries_size, width,
                                                 scores + h * scores_size + (at + i) * width, width, c.dim, false,
                                                 ahead);
        });
    }

    // Scores s become cap * tanh(s / cap) = cap - 2 * cap / (1 + e^(2 * s / cap)).
    void soft_cap(float* scores, int64_t count) {
        const float cap = float(c.soft_cap), factor = 2 / cap;
        for (int64_t i = 0; i < count; i += L)
            Vec::store(scores + i, cap - 2 * cap / (1 + exp<L>(Vec::load(scores + i) * factor)));
    }

    // Adds slope * (key - position of the query), which is last_key, to scores.
    void add_bias(int64_t kv_head, float* scores, int64_t begin, int64_t end) {
        const int64_t group = c.group();
        for (int v = 0; v < V; v++) {
            vf slope{}, distance{};
            for (int i = 0; i < L; i++) {
                const int64_t at = item.first + std::min<int64_t>(v * L + i, item.count - 1);
                slope[i] = c.slopes[kv_head * group + at % group];
                distance[i] = float(begin - last_key[v][i]);
            }
            for (int64_t j = 0; j < end - begin; j++, distance += 1) {
                float* column = scores + j * width + v * L;
                Vec::store(column, Vec::load(column) + slope * distance);
            }
        }
    }

    // scores become weights e^(score - peak); keys that a lane must not see get weight 0.
    void softmax(int64_t kv_head, State s, float* scores, int64_t begin, int64_t end) {
        if (c.soft_cap > 0) soft_cap(scores, (end - begin) * width);
        if (c.slopes) add_bias(kv_head, scores, begin, end);
        const int64_t first_token = item.first / c.group(), last_token = (item.first + item.count - 1) / c.group();
        const bool masked = end - 1 > item.position + first_token ||
                            (c.window && begin < item.position + last_token - c.window + 1);
        for (int v = 0; v < V; v++) {
            float* column = scores + v * L;
            vf peak = vf{} + kNever;
            if (masked) {
                vi key = vi{} + int32_t(begin);
                for (int64_t j = 0; j < end - begin; j++, key += 1) {
                    vf score = Vec::load(column + j * width);
                    score = ((key <= last_key[v]) & (key >= first_key[v])) ? score : vf{} + kNever;
                    Vec::store(column + j * width, score);
                    peak = Vec::max(score, peak);
                }
            } else {
                for (int64_t j = 0; j < end - begin; j++) peak = Vec::max(Vec::load(column + j * width), peak);
            }
            const vf base = peak == (vf{} + kNever) ? vf{} : peak;
            vf total{};
            for (int64_t j = 0; j < end - begin; j++) {
                vf weight = exp<L>(Vec::load(column + j * width) - base);
                Vec::store(column + j * width, weight);
                total += weight;
            }
            Vec::store(s.peak + v * L, peak);
            Vec::store(s.total + v * L, total);
        }
    }

    template <int W>
    INLINE void add_values(const float* weights, const float* rows, int64_t count, float* sums, bool accumulate,
                           int64_t ahead) {
        for (int64_t i = 0; i < item.count; i += kQueries)
            outer<kLanes, W, kQueries, Order::kColumns>(weights + i, width, kQueries, rows, dim, sums + i * dim, dim,
                                                        count, accumulate, 0, ahead);
    }

    void weigh(float* states, int64_t begin, int64_t end) {
        each_block(begin, end, c.kv_heads * plane(), [&](int64_t h, const T* values, int64_t at, int64_t count) {
            int64_t ahead = distance(values, begin + at + count, end, (c.kv_heads + h) * plane());
            const float* rows = widen(c, values, count, copy, ahead);
            const float* weights = scores + h * scores_size + at * width;
            float* sums = State(states + h * state_size(), width).values;
            int64_t d = 0;
            for (; d + kTile <= dim; d += kTile) add_values<kVectors>(weights, rows + d, count, sums + d, at > 0, ahead);
            for (; d < dim; d += kLanes) add_values<1>(weights, rows + d, count, sums + d, at > 0, ahead);
        });
    }

    // One chunk of keys, of every head; the heads' states are consecutive.
    void chunk(float* states, int64_t index) {
        const int64_t first_token = item.first / c.group();
        const int64_t lowest = c.window ? item.position + first_token - c.window + 1 : 0;
        const int64_t begin = std::max(index * kChunk, lowest);
        const int64_t end = std::min({(index + 1) * kChunk, item.last + 1, c.capacity()});
        if (begin < end) score(begin, end);
        for (int64_t h = 0; h < item.kv_heads; h++) {
            State s(states + h * state_size(), width);
            if (begin < end) softmax(item.kv_head + h, s, scores + h * scores_size, begin, end);
            else clear(s, width, dim);
        }
        if (begin < end) weigh(states, begin, end);
    }

    void run(float* partials) {
        const int64_t size = item.kv_heads * state_size();
        if (item.partial >= 0) {
            for (int64_t i = item.chunk; i < item.chunk_end; i++)
                chunk(partials + item.partial + (i - item.chunk) * size, i);
            return;
        }
        merge_chunks([&](int64_t i) {
            chunk(memory + size, i);
            return memory + size;
        });
    }

    void merge_partials(float* partials) {
        const int64_t size = item.kv_heads * state_size();
        merge_chunks([&](int64_t i) { return partials + item.partial + (i - item.chunk) * size; });
    }

    // states_of(chunk) are the states of its heads.
    template <class StatesOf>
    void merge_chunks(StatesOf states_of) {
        for (int64_t h = 0; h < item.kv_heads; h++) clear(State(memory + h * state_size(), width), width, dim);
        for (int64_t i = item.chunk; i < item.chunk_end; i++) {
            float* states = states_of(i);
            for (int64_t h = 0; h < item.kv_heads; h++)
                merge<L>(State(memory + h * state_size(), width), State(states + h * state_size(), width), width, dim);
        }
        for (int64_t h = 0; h < item.kv_heads; h++) finish(item.kv_head + h, State(memory + h * state_size(), width));
    }

    void finish(int64_t kv_head, State s) {
        const int64_t group = c.group();
        for (int64_t i = 0; i < item.count; i++) {
            const int64_t at = item.first + i, token = c.query_starts[item.row] + at / group;
            T* out = c.out + (token * c.heads + kv_head * group + at % group) * c.dim;
            float total = s.total[i];
            if (c.sinks) total += std::exp(to_float(c.sinks[kv_head * group + at % group]) - s.peak[i]);
            const float inverse = total == 0 ? 0 : 1 / total;
            for (int64_t d = 0; d < c.dim; d += kLanes) {
                const vec value = F::load(s.values + i * dim + d) * inverse;
                if (d + kLanes <= c.dim) F::store(out + d, value);
                else F::store_part(out + d, value, c.dim - d);
            }
        }
    }
};

// Calls work(Tile) with the tile type that fits the item.
template <class T, class Work>
void with_tile(const Call<T>& c, const Item& item, Work work) {
    const int64_t lanes = lanes_for(item.count);
    if (lanes == 4) work(Tile<4, 1, T>(c, item));
    else if (lanes == 8) work(Tile<std::min(8, kLanes), 8 / std::min(8, kLanes), T>(c, item));
    else if (lanes == kLanes) work(Tile<kLanes, 1, T>(c, item));
    else if (lanes == 2 * kLanes || kVectors == 2) work(Tile<kLanes, 2, T>(c, item));
    else if (lanes == 3 * kLanes) work(Tile<kLanes, 3, T>(c, item));
    else work(Tile<kLanes, kVectors, T>(c, item));
}

struct Plan {
    std::vector<Item> items;  // to run, costliest first
    std::vector<Item> split;  // tiles whose chunks are separate items: to merge afterwards
    int64_t partials = 0;     // floats
    int64_t cost = 0;
};

template <class T>
Plan plan(const Call<T>& c) {
    const int64_t group = c.group();
    std::vector<Item> tiles;
    Plan result;
    for (int64_t row = 0; row < c.rows; row++) {
        const int64_t tokens = c.query_starts[row + 1] - c.query_starts[row];
        const int64_t context = std::min<int64_t>(c.context_lens[row], c.capacity());
        const int64_t position = std::max<int64_t>(0, context - tokens);
        const int64_t heads = tokens == 1 && c.rows >= c.threads * kRowsToShare ? c.kv_heads : 1;
        for (int64_t first = 0; first < tokens * group; first += kTile) {
            const int64_t count = std::min(kTile, tokens * group - first);
            int64_t last = position + (first + count - 1) / group;
            for (int64_t token = first / group; c.ahead && token <= (first + count - 1) / group; token++)
                last = std::max(last, position + token + c.seen_ahead(row, token));
            last = std::min(last, c.capacity() - 1);
            const int64_t lowest = c.window ? std::max<int64_t>(0, position + first / group - c.window + 1) : 0;
            for (int64_t head = 0; head < c.kv_heads; head += heads) {
                const int64_t cost = (last + 1 - lowest) * lanes_for(count) * heads;
                tiles.push_back(
                    {row, head, heads, first, count, position, last, lowest / kChunk, last / kChunk + 1, -1, cost});
                result.cost += cost;
            }
        }
    }
    // A tile larger than a quarter of a thread's share is divided into its chunks.
    const int64_t share = result.cost / (c.threads * 4);
    for (Item tile : tiles) {
        if (c.threads == 1 || tile.chunk_end - tile.chunk == 1 || tile.cost <= share) {
            result.items.push_back(tile);
            continue;
        }
        const int64_t size = tile.kv_heads * State::size(lanes_for(tile.count), c.padded_dim());
        tile.partial = result.partials;
        result.split.push_back(tile);
        for (int64_t i = tile.chunk; i < tile.chunk_end; i++, result.partials += size) {
            Item part = tile;
            part.chunk = i, part.chunk_end = i + 1, part.partial = result.partials;
            part.cost = kChunk * lanes_for(tile.count) * tile.kv_heads;
            result.items.push_back(part);
        }
    }
    std::stable_sort(result.items.begin(), result.items.end(),
                     [](const Item& a, const Item& b) { return a.cost > b.cost; });
    return result;
}

template <class T>
void attend(const Call<T>& c) {
    const Plan work = plan(c);
    float* partials = partial_scratch.get(work.partials);
    const bool is_worth = work.cost * c.dim > kWorthSharing;
    share(work.items.size(), c.threads, is_worth, [&](int64_t i) {
        with_tile(c, work.items[i], [&](auto tile) { tile.run(partials); });
    });
    share(work.split.size(), c.threads, is_worth, [&](int64_t i) {
        with_tile(c, work.split[i], [&](auto tile) { tile.merge_partials(partials); });
    });
}

}  // namespace

EXPORT void quire_attend_f32(const Call<float>* call) { attend(*call); }
EXPORT void quire_attend_bf16(const Call<bf16>* call) { attend(*call); }
