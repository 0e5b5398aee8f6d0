// Memory for the numbers that a task needs only while it runs.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

// One thread's memory, which its tasks use one after another: malloc would need a fifth of the time
// of a small task. What does not fit is allocated; a sanitizer sees separate arrays.
class ThreadMemory {
 public:
  ~ThreadMemory() { std::free(memory_); }

  // The memory taken last is given back first.
  void* take(int64_t bytes) {
    if (used_ + bytes > kBytes) return std::aligned_alloc(64, bytes);
    if (!memory_) memory_ = static_cast<char*>(std::aligned_alloc(64, kBytes));
    void* taken = memory_ + used_;
    used_ += bytes;
    return taken;
  }

  void give_back(void* taken, int64_t bytes) {
    if (taken >= memory_ && taken < memory_ + used_)
      used_ -= bytes;
    else
      std::free(taken);
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t kBytes = 0;
#else
  static constexpr int64_t kBytes = 1 << 20;
#endif
  char* memory_ = nullptr;
  int64_t used_ = 0;
};

thread_local ThreadMemory thread_memory;

// Numbers of one task, which begin on a line of the cache.
struct Scratch {
  explicit Scratch(int64_t numbers)
      : bytes((numbers * 4 + 127) / 64 * 64),
        data(static_cast<float*>(thread_memory.take(bytes))) {}
  Scratch(const Scratch&) = delete;
  ~Scratch() { thread_memory.give_back(data, bytes); }

  const int64_t bytes;
  float* const data;
};

}  // namespace
