// Fetching of the next product's matrix while threads wait for that product.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

namespace ed {

// Learns which matrix follows which. Every step of decoding reads the same matrices in the same
// order, and memory is its limit, but would rest from the end of a product to the next one.
//
// A wrong guess, or an address that is no longer valid, costs a little time and nothing else: to
// fetch an address never faults. So the numbers below need no lock, and may be of two matrices.
class Ahead {
 public:
  static Ahead& get() {
    static Ahead& ahead = *new Ahead;  // never destroyed, like the threads that use it
    return ahead;
  }

  // A product is about to read this matrix.
  void reads(const void* matrix, int64_t bytes) {
    Matrix& after = after_[place(last_.exchange(matrix))];
    after.begin = static_cast<const char*>(matrix);
    after.bytes = std::min(bytes, kMost);
    fetched_.store(0);
  }

  // Fetch some of the matrix that followed last time; false = there is no more.
  bool fetch() {
    const Matrix& next = after_[place(last_.load(std::memory_order_relaxed))];
    int64_t at = fetched_.load(std::memory_order_relaxed);
    int64_t end = std::min(next.bytes.load(std::memory_order_relaxed), at + kAtOnce);
    if (at >= end || !fetched_.compare_exchange_strong(at, end)) return false;
    const char* begin = next.begin.load(std::memory_order_relaxed);
    for (; at < end; at += kLine) __builtin_prefetch(begin + at, 0, 2);
    return true;
  }

 private:
  static constexpr int64_t kLine = 64, kAtOnce = 16 * kLine, kMost = 1 << 20;
  static constexpr size_t kPlaces = 1 << 13;

  struct Matrix {
    std::atomic<const char*> begin{nullptr};
    std::atomic<int64_t> bytes{0};
  };

  static size_t place(const void* matrix) {
    return reinterpret_cast<uintptr_t>(matrix) * 0x9E3779B97F4A7C15u >> 51;
  }

  std::array<Matrix, kPlaces> after_;  // of a matrix at its place; two may share one
  std::atomic<const void*> last_{nullptr};
  std::atomic<int64_t> fetched_{0};
};

}  // namespace ed
