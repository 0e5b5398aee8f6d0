// The index of the largest number of a row, for one level.
#pragma once

#include "simd.h"

namespace ed {
namespace {

// Return the first index of the largest of `count` >= 1 numbers. A row with NaN returns any index.
int64_t find_argmax(const float* x, int64_t count) {
  constexpr int64_t kStep = 4 * kLanes;
  const int64_t full_steps = count / kStep * kStep;
  float max_value = x[0];
  if (full_steps > 0) {
    Vec lane_max[4];
    ED_UNROLL
    for (int v = 0; v < 4; ++v) lane_max[v] = load(x + v * kLanes);
    for (int64_t i = kStep; i < full_steps; i += kStep)
      ED_UNROLL
      for (int v = 0; v < 4; ++v) {
        const Vec next = load(x + i + v * kLanes);
        lane_max[v] = next > lane_max[v] ? next : lane_max[v];
      }
    for (const Vec& lanes : lane_max) {
      const float other = reduce_max(lanes);
      max_value = other > max_value ? other : max_value;
    }
  }
  for (int64_t i = full_steps; i < count; ++i) max_value = x[i] > max_value ? x[i] : max_value;
  int64_t i = 0;
  for (; i < full_steps; i += kStep) {
    Ints matches = {};
    ED_UNROLL
    for (int v = 0; v < 4; ++v) matches |= load(x + i + v * kLanes) == broadcast(max_value);
    if (reduce_sum(matches) != 0) break;
  }
  while (i < count && x[i] != max_value) ++i;
  return min_int(i, count - 1);
}

}  // namespace
}  // namespace ed
