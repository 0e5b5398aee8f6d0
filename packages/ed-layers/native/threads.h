// Loops over XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "ahead.h"
#include "xla/ffi/api/ffi.h"

namespace ed {

// Leave the core to its other thread for a moment.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Tasks that several threads take one after another, each when it has done the one before.
class Loop {
 public:
  template <typename F>
  Loop(int64_t count, const F& f)
      : count_(count), f_(&f), call_([](const void* f, int64_t task) {
          (*static_cast<const F*>(f))(task);
        }) {}

  // Do tasks until none is left. A thread that comes late sees none, and does not touch `f`.
  void work() {
    for (int64_t task; (task = next_.fetch_add(1)) < count_;) {
      call_(f_, task);
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  // Wait for the tasks that others have begun.
  void wait() const {
    while (done_.load(std::memory_order_acquire) < count_) std::this_thread::yield();
  }

 private:
  const int64_t count_;
  const void* const f_;
  void (*const call_)(const void*, int64_t);
  std::atomic<int64_t> next_{0}, done_{0};
};

// Threads of the pool that stay for a moment after a loop. In a step of decoding the next loop
// follows within microseconds, and waking a thread takes longer than many a loop.
class Crew {
 public:
  static Crew& get() {
    static Crew& crew = *new Crew;  // never destroyed: threads may look at it until the very end
    return crew;
  }

  // Have `helpers` threads of the pool join a loop.
  void join(xla::ffi::ThreadPool& pool, const std::shared_ptr<Loop>& loop, int64_t helpers) {
    uint64_t number;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      loop_ = loop;
      number = posted_.fetch_add(1) + 1;
    }
    for (int64_t i = waiting_.load(); i < helpers; ++i)
      pool.Schedule([this, loop, number] { help(loop, number); });
  }

 private:
  static constexpr std::chrono::microseconds kStay{50};

  void help(std::shared_ptr<Loop> loop, uint64_t number) {
    for (;;) {
      loop->work();
      waiting_.fetch_add(1);
      bool more = another(number);
      waiting_.fetch_sub(1);
      if (!more) return;
      std::lock_guard<std::mutex> lock(mutex_);
      loop = loop_, number = posted_.load();
    }
  }

  // Wait for a loop after the one of this number, but not for long.
  bool another(uint64_t number) const {
    auto until = std::chrono::steady_clock::now() + kStay;
    while (posted_.load(std::memory_order_acquire) == number) {
      if (!Ahead::get().fetch())
        for (int i = 0; i < 8; ++i) pause();
      if (std::chrono::steady_clock::now() > until) return false;
    }
    return true;
  }

  std::atomic<uint64_t> posted_{0};  // loops so far
  std::atomic<int64_t> waiting_{0};  // threads that look for the next one
  std::mutex mutex_;
  std::shared_ptr<Loop> loop_;
};

// Call `f(task)` for every task below `count`, on the pool's threads and this one.
//
// The caller works, too, and waits only for tasks that another thread has begun: so a pool whose
// threads are all busy cannot stop it.
template <typename F>
void parallel(xla::ffi::ThreadPool& pool, int64_t count, const F& f) {
  auto loop = std::make_shared<Loop>(count, f);
  int64_t helpers = std::min(count, pool.num_threads()) - 1;
  if (helpers > 0) Crew::get().join(pool, loop, helpers);
  loop->work();
  loop->wait();
}

}  // namespace ed
