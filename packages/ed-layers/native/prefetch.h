// Prefetch of the next product's matrix by threads that wait for work.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace ed {

// Records which matrix follows each matrix. Every decoding step reads the same matrices in the same
// order. Memory bandwidth limits a step, but memory is idle between two products.
//
// A wrong prediction or an invalid address only costs time, because a prefetch never faults. So the
// members below need no lock, and a reader may combine values of two matrices.
class MatrixPrefetcher {
 public:
  static MatrixPrefetcher& get() {
    static MatrixPrefetcher& ahead =
        *new MatrixPrefetcher;  // never destroyed, like the threads that use it
    return ahead;
  }

  // Record that a product reads this matrix next.
  void record_matrix(const void* matrix, int64_t bytes) {
    Matrix& successor = successors_[get_slot(last_matrix_.exchange(matrix))];
    successor.begin = static_cast<const char*>(matrix);
    successor.bytes = std::min(bytes, kMaxBytes);
    prefetched_.store(0);
  }

  // Prefetch a part of the predicted next matrix; return false if no part remains.
  bool prefetch_next() {
    const Matrix& next = successors_[get_slot(last_matrix_.load(std::memory_order_relaxed))];
    int64_t at = prefetched_.load(std::memory_order_relaxed);
    int64_t end = std::min(next.bytes.load(std::memory_order_relaxed), at + kChunkBytes);
    if (at >= end || !prefetched_.compare_exchange_strong(at, end)) return false;
    const char* begin = next.begin.load(std::memory_order_relaxed);
    for (; at < end; at += kLine) __builtin_prefetch(begin + at, 0, 2);
    return true;
  }

 private:
  static constexpr int64_t kLine = 64, kChunkBytes = 16 * kLine, kMaxBytes = 1 << 20;
  static constexpr size_t kSlots = 1 << 13;

  struct Matrix {
    std::atomic<const char*> begin{nullptr};
    std::atomic<int64_t> bytes{0};
  };

  static size_t get_slot(const void* matrix) {
    return reinterpret_cast<uintptr_t>(matrix) * 0x9E3779B97F4A7C15u >> 51;
  }

  std::array<Matrix, kSlots> successors_;  // by the hash of a matrix; two matrices may share a slot
  std::atomic<const void*> last_matrix_{nullptr};
  std::atomic<int64_t> prefetched_{0};
};

}  // namespace ed
