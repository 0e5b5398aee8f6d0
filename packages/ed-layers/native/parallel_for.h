// Parallel loops over XLA's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "prefetch.h"
#include "xla/ffi/api/ffi.h"

namespace ed {

// Yield the core to its other hardware thread for a moment.
inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Tasks of a loop. Each thread runs the next task when its previous one is finished.
class TaskLoop {
 public:
  template <typename F>
  TaskLoop(int64_t count, const F& f)
      : count_(count),
        f_(&f),
        call_([](const void* f, int64_t task) { (*static_cast<const F*>(f))(task); }) {}

  // Run tasks until none remains. A late thread finds no task and does not access `f`.
  void run_tasks() {
    for (int64_t task; (task = next_.fetch_add(1)) < count_;) {
      call_(f_, task);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  // Wait for the tasks that other threads run.
  void wait() const {
    while (done_.load(std::memory_order_acquire) < count_) std::this_thread::yield();
  }

 private:
  const int64_t count_;
  const void* const f_;
  void (*const call_)(const void*, int64_t);
  std::atomic<int64_t> next_{0}, done_{0};
};

// Threads of the pool that spin for a moment after a loop. In a decoding step, the next loop
// follows within microseconds, and waking a thread takes longer than many loops.
class ThreadTeam {
 public:
  static ThreadTeam& get() {
    static ThreadTeam& crew =
        *new ThreadTeam;  // never destroyed: threads may access it until the process exits
    return crew;
  }

  // Let `helpers` threads of the pool join a loop.
  void join(xla::ffi::ThreadPool& pool, const std::shared_ptr<TaskLoop>& loop, int64_t helpers) {
    uint64_t number;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      loop_ = loop;
      number = posted_.fetch_add(1) + 1;
    }
    for (int64_t i = waiting_.load(); i < helpers; ++i)
      pool.Schedule([this, loop, number] { run_helper(loop, number); });
  }

 private:
  static constexpr std::chrono::microseconds kStay{50};

  void run_helper(std::shared_ptr<TaskLoop> loop, uint64_t number) {
    for (;;) {
      loop->run_tasks();
      waiting_.fetch_add(1);
      bool has_loop = wait_for_loop(number);
      waiting_.fetch_sub(1);
      if (!has_loop) return;
      std::lock_guard<std::mutex> lock(mutex_);
      loop = loop_, number = posted_.load();
    }
  }

  // Wait a short time for a loop after the given one.
  bool wait_for_loop(uint64_t number) const {
    auto until = std::chrono::steady_clock::now() + kStay;
    while (posted_.load(std::memory_order_acquire) == number) {
      if (!MatrixPrefetcher::get().prefetch_next())
        for (int i = 0; i < 8; ++i) pause_cpu();
      if (std::chrono::steady_clock::now() > until) return false;
    }
    return true;
  }

  std::atomic<uint64_t> posted_{0};  // number of loops so far
  std::atomic<int64_t> waiting_{0};  // threads that wait for the next loop
  std::mutex mutex_;
  std::shared_ptr<TaskLoop> loop_;
};

// Call `f(task)` for every task below `count` on the pool's threads and the calling thread.
//
// The caller also runs tasks, and waits only for tasks that another thread has started. So a busy
// pool cannot block the caller.
template <typename F>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const F& f) {
  auto loop = std::make_shared<TaskLoop>(count, f);
  int64_t helpers = std::min(count, pool.num_threads()) - 1;
  if (helpers > 0) ThreadTeam::get().join(pool, loop, helpers);
  loop->run_tasks();
  loop->wait();
}

}  // namespace ed
