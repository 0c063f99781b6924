// Threads that share a kernel's work.
//
// A kernel cuts its work into pieces, and every thread takes the next piece from a shared counter until none is left:
// the caller too. A thread that has no core takes no pieces, so that on a busy machine a step waits at most for the
// piece that such a thread holds, not for a fixed share of the work. Which thread computes a piece never changes its
// result.
//
// Threads that find no work spin for some microseconds, which bridges the gap between two kernels, and then sleep.
// There is one pool in a process; a caller that finds it in use, or that is a piece itself, does all pieces alone.
// After a fork the child starts threads of its own when it needs them. Threads end with the process.
#pragma once

#include <algorithm>
#include <cstdint>

// Runs run(work, i) for i = 0 .. pieces - 1 on up to `threads` threads, and returns when all are done.
void run_pieces(int64_t pieces, int64_t threads, void (*run)(const void* work, int64_t piece), const void* work);

// Calls work(i) for i = 0 .. pieces - 1, on this thread alone unless it `is_worth` sharing.
template <class Work>
inline void share(int64_t pieces, int64_t threads, bool is_worth, const Work& work) {
    if (threads <= 1 || pieces <= 1 || !is_worth) {
        for (int64_t i = 0; i < pieces; i++) work(i);
        return;
    }
    run_pieces(pieces, threads, [](const void* all, int64_t i) { (*static_cast<const Work*>(all))(i); }, &work);
}

// The same over `count` small items, `each` of them in a piece.
template <class Work>
inline void share_items(int64_t count, int64_t each, int64_t threads, bool is_worth, const Work& work) {
    share((count + each - 1) / each, threads, is_worth, [&](int64_t piece) {
        for (int64_t i = piece * each; i < std::min(count, (piece + 1) * each); i++) work(i);
    });
}
