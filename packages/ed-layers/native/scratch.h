// Temporary memory of a task.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

// The memory of one thread, which its tasks reuse: malloc would take a fifth of the time of a small
// task. Larger requests use malloc. With a sanitizer, all requests use malloc, so the arrays are
// separate.
class ThreadArena {
 public:
  ~ThreadArena() { std::free(memory_); }

  // Memory is released in the reverse order.
  void* allocate(int64_t bytes) {
    if (used_bytes_ + bytes > kBytes) return std::aligned_alloc(64, bytes);
    if (!memory_) memory_ = static_cast<char*>(std::aligned_alloc(64, kBytes));
    void* memory = memory_ + used_bytes_;
    used_bytes_ += bytes;
    return memory;
  }

  void release(void* memory, int64_t bytes) {
    if (memory >= memory_ && memory < memory_ + used_bytes_)
      used_bytes_ -= bytes;
    else
      std::free(memory);
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr int64_t kBytes = 0;
#else
  static constexpr int64_t kBytes = 1 << 20;
#endif
  char* memory_ = nullptr;
  int64_t used_bytes_ = 0;
};

thread_local ThreadArena thread_arena;

// Temporary numbers of one task, aligned to a cache line.
struct Scratch {
  explicit Scratch(int64_t numbers)
      : bytes((numbers * 4 + 127) / 64 * 64),
        data(static_cast<float*>(thread_arena.allocate(bytes))) {}
  Scratch(const Scratch&) = delete;
  ~Scratch() { thread_arena.release(data, bytes); }

  const int64_t bytes;
  float* const data;
};

}  // namespace
