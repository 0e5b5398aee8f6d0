// Matrices that are turned (transposed), in words of four bytes, for one level of instructions.
#pragma once

#include "simd.h"

namespace ed {
namespace {

// Word j of row r becomes word r of row j. Each stage puts the words of two rows in turns.
ED_INLINE void turn(Vec (&rows)[kLanes]) {
  ED_UNROLL
  for (int stage = 1; stage < kLanes; stage *= 2) {
    Vec next[kLanes];
    ED_UNROLL
    for (int r = 0; r < kLanes / 2; ++r) {
      next[2 * r] = in_turns(rows[r], rows[r + kLanes / 2], Count<0>());
      next[2 * r + 1] = in_turns(rows[r], rows[r + kLanes / 2], Count<1>());
    }
    ED_UNROLL
    for (int r = 0; r < kLanes; ++r) rows[r] = next[r];
  }
}

// Turn the rows from `r` on, and their words from `i` on, as far as both exist and one vector holds
// them: `get(r, i)` returns words of a row, and `put(i, r, words)` receives words of rows from r on.
template <typename Get, typename Put>
ED_INLINE void turn_block(int64_t r, int64_t rows, int64_t i, int64_t words, const Get& get,
                          const Put& put) {
  Vec block[kLanes];
  ED_UNROLL
  for (int64_t l = 0; l < kLanes; ++l) block[l] = r + l < rows ? get(r + l, i) : Vec{};
  turn(block);
  ED_UNROLL
  for (int64_t l = 0; l < kLanes; ++l)
    if (i + l < words) put(i + l, r, block[l]);
}

// The first `bytes` of a vector in memory, at most all; zeros beyond.
ED_INLINE Vec load_bits(const void* from, int64_t bytes) {
  Vec v{};
  if (bytes >= static_cast<int64_t>(sizeof v))
    std::memcpy(&v, from, sizeof v);
  else
    std::memcpy(&v, from, bytes);
  return v;
}

}  // namespace
}  // namespace ed
