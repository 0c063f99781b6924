// Finds where each row's last tokens occurred before: the longest match of `shortest` to `longest` tokens, of those the
// latest. Reads 4 bytes a token of the row, from its end on, until there is a match of `longest`.
#include <algorithm>
#include <cstdint>

namespace {

// Arguments as Python packs them (8 bytes per field).
struct Ngram {
    const int64_t *rows, *num_tokens, *last_token;
    const int32_t *tokens, *tables;  // by row if `block_size` is 0, else in pages
    int32_t *drafts, *num_drafts;
    int64_t count, table_stride, token_stride, draft_stride, block_size, shortest, longest, wanted;
};

// The tokens of a row, which were computed: all but its last one.
struct Row {
    const int32_t *tokens, *table;
    int64_t block_size;
    int32_t operator[](int64_t position) const {
        if (!block_size) return tokens[position];
        return tokens[table[position / block_size] * block_size + position % block_size];
    }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void quire_ngram_i32(const Ngram* a) {
    for (int64_t r = 0; r < a->count; r++) {
        const int64_t row = a->rows[r], end = a->num_tokens[row];
        const Row token{a->block_size ? a->tokens : a->tokens + row * a->token_stride, a->tables + row * a->table_stride,
                        a->block_size};
        const int32_t last = int32_t(a->last_token[row]);
        int64_t best = 0, length = 0;
        for (int64_t place = end - 1; place > 0 && length < a->longest; place--) {
            if (token[place - 1] != last) continue;
            const int64_t most = std::min(a->longest, place);
            int64_t found = 1;
            while (found < most && token[place - 1 - found] == token[end - 1 - found]) found++;
            if (found > length) best = place, length = found;
        }
        const bool is_found = length >= a->shortest;
        int32_t* drafts = a->drafts + row * a->draft_stride;
        for (int64_t i = 0; is_found && i < a->wanted; i++) {
            const int64_t position = best + i % (end - best);  // the row's end is followed by the drafts themselves
            drafts[i] = position == end - 1 ? last : token[position];
        }
        a->num_drafts[row] = is_found ? int32_t(a->wanted) : 0;
    }
}
