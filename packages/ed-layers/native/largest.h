// The first of the largest numbers of a row, for one level of instructions.
#pragma once

#include "simd.h"

namespace ed {
namespace {

// The first index of the largest of `count` numbers, of which there is at least one. Of a row with NaN,
// any index.
int64_t first_largest(const float* x, int64_t count) {
  constexpr int64_t kSome = 4 * kLanes;
  const int64_t whole = count / kSome * kSome;
  float top = x[0];
  if (whole > 0) {
    Vec high[4];
    ED_UNROLL
    for (int v = 0; v < 4; ++v) high[v] = load(x + v * kLanes);
    for (int64_t i = kSome; i < whole; i += kSome)
      ED_UNROLL
      for (int v = 0; v < 4; ++v) {
        const Vec next = load(x + i + v * kLanes);
        high[v] = next > high[v] ? next : high[v];
      }
    for (const Vec& lanes : high) {
      const float other = highest(lanes);
      top = other > top ? other : top;
    }
  }
  for (int64_t i = whole; i < count; ++i) top = x[i] > top ? x[i] : top;
  int64_t i = 0;
  for (; i < whole; i += kSome) {
    Ints found = {};
    ED_UNROLL
    for (int v = 0; v < 4; ++v) found |= load(x + i + v * kLanes) == broadcast(top);
    if (total(found) != 0) break;
  }
  while (i < count && x[i] != top) ++i;
  return least(i, count - 1);
}

}  // namespace
}  // namespace ed
