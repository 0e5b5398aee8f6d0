// Transposes in words of four bytes, for one level.
#pragma once

#include "simd.h"

namespace ed {
namespace {

// Transpose kLanes rows of kLanes words. Each stage interleaves the words of two rows.
ED_INLINE void transpose(Vec (&rows)[kLanes]) {
  ED_UNROLL
  for (int stage = 1; stage < kLanes; stage *= 2) {
    Vec next[kLanes];
    ED_UNROLL
    for (int r = 0; r < kLanes / 2; ++r) {
      next[2 * r] = interleave_lanes(rows[r], rows[r + kLanes / 2], Constant<0>());
      next[2 * r + 1] = interleave_lanes(rows[r], rows[r + kLanes / 2], Constant<1>());
    }
    ED_UNROLL
    for (int r = 0; r < kLanes; ++r) rows[r] = next[r];
  }
}

// Transpose one block: rows from `r` on and words from `i` on, up to `rows` and `words`. `get(r,
// i)` returns words of a row, and `put(i, r, words)` receives words of rows from r on.
template <typename Get, typename Put>
ED_INLINE void transpose_block(int64_t r, int64_t rows, int64_t i, int64_t words, const Get& get,
                               const Put& put) {
  Vec block[kLanes];
  ED_UNROLL
  for (int64_t l = 0; l < kLanes; ++l) block[l] = r + l < rows ? get(r + l, i) : Vec{};
  transpose(block);
  ED_UNROLL
  for (int64_t l = 0; l < kLanes; ++l)
    if (i + l < words) put(i + l, r, block[l]);
}

// Load the first `bytes` of a vector; other bytes are zeros.
ED_INLINE Vec load_partial_bits(const void* from, int64_t bytes) {
  Vec v{};
  if (bytes >= static_cast<int64_t>(sizeof v))
    std::memcpy(&v, from, sizeof v);
  else
    std::memcpy(&v, from, bytes);
  return v;
}

}  // namespace
}  // namespace ed
