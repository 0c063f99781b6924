// Replays a recorded forward pass (tape.py): its calls in order.
#include "simd.h"

namespace {

struct Entry {
    void (*run)(const void* call);
    const void* call;
};

}  // namespace

EXPORT void quire_replay(const Entry* entries, int64_t count) {
    for (int64_t i = 0; i < count; i++) entries[i].run(entries[i].call);
}
