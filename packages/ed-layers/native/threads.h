// Loops over XLA's own threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ed {

// Call `f(task)` for every task below `count`, on the pool's threads and this one.
//
// The caller works, too, and waits only for tasks that another thread has begun: so a pool whose
// threads are all busy cannot stop it. A thread that comes late sees no task left.
template <typename F>
void parallel(xla::ffi::ThreadPool& pool, int64_t count, const F& f) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  auto work = [state, count, &f] {
    for (int64_t task; (task = state->next.fetch_add(1)) < count;) {
      f(task);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  int64_t helpers = std::min(count, pool.num_threads()) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  while (state->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

}  // namespace ed
