// The threads of pool.h.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <deque>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>

namespace {

// Sleeping and waking takes 5 to 50 us. A worker bridges the kernels between two shared ones, which one thread computes
// alone; the caller waits for the last pieces, which take about as long.
constexpr auto kWorkerSpin = std::chrono::microseconds(40);
constexpr auto kCallerSpin = std::chrono::microseconds(40);
constexpr int64_t kMostThreads = 1 << 10;
constexpr int64_t kMostPieces = 1 << 22;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `ready` within the time.
template <class Ready>
bool spin(std::chrono::microseconds time, Ready ready) {
    if (ready()) return true;
    const auto end = std::chrono::steady_clock::now() + time;
    do
        for (int i = 0; i < 32; i++) {
            if (ready()) return true;
            relax();
        }
    while (std::chrono::steady_clock::now() < end);
    return false;
}

// Where one thread sleeps until it is woken. It says that it sleeps before it looks a last time whether it should, and
// the thread that wakes it changes that before it looks for a sleeper: one of the two sees the other.
class Parking {
public:
    template <class Ready>
    void sleep(Ready ready) {
        std::unique_lock<std::mutex> lock(mutex_);
        is_asleep_.store(true);
        wake_.wait(lock, ready);
        is_asleep_.store(false);
    }
    void wake() {
        if (!is_asleep_.load()) return;
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_one();
    }

private:
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<bool> is_asleep_{false};
};

class Pool {
public:
    bool try_own() { return !owned_.exchange(true, std::memory_order_acquire); }
    void disown() { owned_.store(false, std::memory_order_release); }

    void run(int64_t pieces, int64_t threads, void (*run)(const void*, int64_t), const void* work) {
        start_workers(threads - 1);
        run_ = run, work_ = work, pieces_ = pieces;
        done_.store(0, std::memory_order_relaxed);
        // The workers' view of this region: everything above is visible to those that take a piece of it.
        ticket_.store(Ticket{++region_, uint64_t(threads), uint64_t(pieces)}.bits());
        for (int64_t i = 0; i < std::min<int64_t>(threads - 1, workers_.size()); i++) workers_[i].wake();
        while (take(0)) {}
        const auto is_done = [&] { return done_.load() == pieces; };
        if (!spin(kCallerSpin, is_done)) caller_.sleep(is_done);
    }

private:
    // What threads compete for: which region this is, how many threads may take part, and how many pieces are left.
    // They are one word, so that a thread that slept through the end of a region cannot take a piece of the next one
    // for a piece of the last.
    struct Ticket {
        uint64_t region, threads, left;
        static Ticket of(uint64_t bits) { return {bits >> 34, bits >> 23 & 2047, bits & ((1 << 23) - 1)}; }
        uint64_t bits() const { return region << 34 | threads << 23 | left; }
    };
    static_assert(kMostThreads < 2048 && kMostPieces < 1 << 23);

    // Whether thread `self` (0: the caller) may take a piece now.
    bool has_work(int64_t self) const {
        const Ticket ticket = Ticket::of(ticket_.load());
        return ticket.left && uint64_t(self) < ticket.threads;
    }

    // Takes and does one piece; false if there is none.
    bool take(int64_t self) {
        uint64_t bits = ticket_.load();
        for (;;) {
            const Ticket ticket = Ticket::of(bits);
            if (!ticket.left || uint64_t(self) >= ticket.threads) return false;
            if (!ticket_.compare_exchange_weak(bits, bits - 1)) continue;
            // The region cannot end before this piece does: what the caller wrote for it stays.
            const int64_t pieces = pieces_;
            run_(work_, pieces - int64_t(ticket.left));
            if (done_.fetch_add(1) + 1 == pieces && self) caller_.wake();
            return true;
        }
    }

    // Fewer than wanted where the machine refuses more threads: those that run share the work.
    void start_workers(int64_t wanted) {
        if (int64_t(workers_.size()) >= wanted) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads that the program knows
        try {
            while (int64_t(workers_.size()) < wanted) {
                Parking& parking = workers_.emplace_back();
                std::thread(&Pool::serve, this, int64_t(workers_.size()), std::ref(parking)).detach();
            }
        } catch (const std::system_error&) {
            workers_.pop_back();
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void serve(int64_t self, Parking& parking) {
        const auto ready = [&] { return has_work(self); };
        for (;;) {
            while (take(self)) {}
            if (!spin(kWorkerSpin, ready)) parking.sleep(ready);
        }
    }

    std::atomic<bool> owned_{false};
    std::deque<Parking> workers_;  // the owner's, as what follows
    uint64_t region_ = 0;
    void (*run_)(const void*, int64_t) = nullptr;
    const void* work_ = nullptr;
    int64_t pieces_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    Parking caller_;
};

// Never destroyed: its threads run until the process ends. A forked child, which has none of them, leaves its parent's
// pool as it was and makes its own.
std::atomic<Pool*> pool{nullptr};

Pool* current_pool() {
    Pool* found = pool.load(std::memory_order_acquire);
    if (found) return found;
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); }); });
    Pool* made = new Pool;
    if (pool.compare_exchange_strong(found, made)) return made;
    delete made;
    return found;
}

}  // namespace

void run_pieces(int64_t pieces, int64_t threads, void (*run)(const void*, int64_t), const void* work) {
    Pool* mine = current_pool();
    if (pieces > kMostPieces || !mine->try_own()) {
        for (int64_t i = 0; i < pieces; i++) run(work, i);
        return;
    }
    mine->run(pieces, std::min({threads, pieces, kMostThreads}), run, work);
    mine->disown();
}
