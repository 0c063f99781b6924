// Runs pool.cpp through what test_cpu_pool.py states; exits with 0, or prints what went wrong.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "pool.h"

static void check(bool is_so, const char* what) {
    if (is_so) return;
    std::printf("%s\n", what);
    std::exit(1);
}

// Every piece once, for every number of pieces and threads; plain memory, so that a race shows in the sanitizer.
static void each_once(int64_t regions, int64_t seed) {
    for (int64_t i = 0; i < regions; i++) {
        const int64_t pieces = (i * 7 + seed) % 300, threads = 1 + (i * 5 + seed) % 6;
        std::vector<int> ran(pieces);
        share(pieces, threads, true, [&](int64_t piece) { ran[piece]++; });
        for (int count : ran) check(count == 1, "a piece did not run exactly once");
    }
}

// A thread that holds a piece and does not go on keeps no other piece from being done.
static void held_piece() {
    constexpr int64_t kPieces = 100;
    const auto caller = std::this_thread::get_id();
    std::atomic<int64_t> done{0};
    std::atomic<bool> is_held{false}, was_held{false};
    share(kPieces, 2, true, [&](int64_t) {
        if (std::this_thread::get_id() == caller) {
            while (!is_held) std::this_thread::yield();
        } else if (!is_held.exchange(true)) {
            while (done < kPieces - 1) std::this_thread::yield();
            was_held = true;
        }
        done++;
    });
    check(was_held && done == kPieces, "the pieces were not done around the held one");
}

// A piece that shares work of its own, and callers at once.
static void nested_and_concurrent() {
    std::atomic<int64_t> total{0};
    share(20, 3, true, [&](int64_t) { share(10, 3, true, [&](int64_t) { total++; }); });
    check(total == 200, "pieces inside pieces");
    std::vector<std::thread> callers;
    for (int64_t i = 0; i < 3; i++) callers.emplace_back(each_once, 300, i);
    for (auto& caller : callers) caller.join();
}

// A child of a fork has no threads but its own, whether the parent's sleep or run.
static void after_fork() {
    for (int i = 0; i < 3; i++) {
        each_once(20, i);
        if (const pid_t child = fork()) {
            int status = 1;
            waitpid(child, &status, 0);
            check(status == 0, "a forked child");
        } else {
            each_once(50, i);
            held_piece();
            std::_Exit(0);
        }
    }
}

int main(int count, char**) {
    each_once(2000, 1);
    held_piece();
    nested_and_concurrent();
    if (count == 1) after_fork();  // the sanitizer does not follow threads into a child
    std::printf("ok\n");
    return 0;
}
