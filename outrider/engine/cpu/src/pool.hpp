// A thread pool whose threads compute one pass together, with barriers between its operations.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif

namespace outrider {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int this_core() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// A counter that threads wait for: they first spin, then sleep.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void open() {
    value_.fetch_add(1);
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
  }

  // Waits until the value differs from `seen`. `crowded`: whether spinning would take the core that another thread needs.
  template <class Crowded>
  void wait(uint32_t seen, Crowded crowded) {
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::microseconds(SPIN_US);
    while (!crowded() && Clock::now() < until)
      for (int i = 0; i < 64; i++) {
        if (value() != seen) return;
        relax();
      }
    sleepers_.fetch_add(1);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return value_.load() != seen; });
    }
    sleepers_.fetch_sub(1);
  }

 private:
  static constexpr int SPIN_US = 200;  // the time of several barriers; longer would only take a core from other threads
  std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

class Pool {
 public:
  explicit Pool(int threads) : count_(threads), places_(new Place[threads]) {
    for (int thread = 1; thread < threads; thread++) workers_.emplace_back([this, thread] { serve(thread); });
  }

  ~Pool() {
    work_ = nullptr;
    jobs_.open();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return count_; }

  // Calls `work(thread)` on all threads, on the calling one as 0, and returns when all calls have returned.
  void run(const std::function<void(int)>& work) {
    places_[0].core.store(this_core(), std::memory_order_relaxed);
    if (count_ > 1) {
      work_ = &work;
      jobs_.open();
    }
    work(0);
    meet(0);
  }

  // Barrier: waits until all threads have called it.
  void meet(int thread) {
    if (count_ == 1) return;
    const uint32_t round = rounds_.value();
    const int core = this_core();
    places_[thread].core.store(core, std::memory_order_relaxed);
    places_[thread].round.store(round + 1, std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      rounds_.open();
      return;
    }
    rounds_.wait(round, [&] {
      for (int other = 0; other < count_; other++)
        if (other != thread && core >= 0 && places_[other].round.load(std::memory_order_relaxed) != round + 1 &&
            places_[other].core.load(std::memory_order_relaxed) == core)
          return true;
      return false;
    });
  }

 private:
  struct alignas(64) Place {
    std::atomic<int> core{-1};  // on which the thread ran last
    std::atomic<uint32_t> round{0};
  };

  void serve(int thread) {
    uint32_t seen = 0;
    while (true) {
      jobs_.wait(seen, [] { return false; });
      seen++;
      places_[thread].core.store(this_core(), std::memory_order_relaxed);
      if (!work_) return;
      (*work_)(thread);
      meet(thread);
    }
  }

  const int count_;
  std::unique_ptr<Place[]> places_;
  const std::function<void(int)>* work_ = nullptr;
  Gate jobs_, rounds_;
  std::atomic<int> arrived_{0};
  std::vector<std::thread> workers_;
};

}  // namespace outrider
