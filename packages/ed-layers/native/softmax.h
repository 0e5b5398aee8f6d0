// The softmax of attention over blocks of keys, for one level of instructions.
#pragma once

#include "blocks.h"

namespace ed {
namespace {

// The largest score and the sum of the weights of each row so far.
struct RunningSoftmax {
  explicit RunningSoftmax(int64_t rows)
      : rows(rows), of_rows(4 * whole_vectors(rows)), largest(of_rows.data),
        sum(largest + whole_vectors(rows)), top_(sum + whole_vectors(rows)),
        shrink_(top_ + whole_vectors(rows)) {
    for (int64_t r = 0; r < whole_vectors(rows); ++r)
      largest[r] = kNothing, sum[r] = 0, top_[r] = 0;
  }

  // Make weights of the scores [rows, kKeys] of a block, times a factor, for the rows from `first` on,
  // and shrink `out` [rows, width], which was summed with weights relative to a smaller score.
  // `halves`: the weights are rounded to bfloat16 later.
  template <bool halves>
  void weigh(int64_t first, int64_t rows, float factor, float* scores, float* out, int64_t width) {
    float *largest = this->largest + first, *sum = this->sum + first;
    float *top = top_ + first, *shrink = shrink_ + first;
    for (int64_t r = 0; r < rows; ++r) {
      const float* own = scores + r * kKeys;
      Vec high = load(own);
      for (int64_t j = kLanes; j < kKeys; j += kLanes) {
        Vec next = load(own + j);
        high = next > high ? next : high;
      }
      float now = highest(high) * factor;
      top[r] = now > largest[r] ? now : largest[r];
      // Nothing is seen so far: all weights become zero; those of NaN stay NaN.
      if (top[r] == kNothing) top[r] = -kNothing;
    }
    for (int64_t r = 0; r < rows; r += kLanes) {
      Vec now = load(top + r), before = load(largest + r), none = broadcast(-kNothing);
      store(shrink + r, now == none ? broadcast(1.0f) : exponential(before - now));
      store(largest + r, now == none ? before : now);
    }
    const float to_powers = factor * 1.44269504f;
    row_blocks<8>(rows, [&](auto count, int64_t at) {
      constexpr int R = decltype(count)::value;
      Vec added[R] = {};
      float totals_of[R];
      for (int r = 0; r < R; ++r) {
        float *own = scores + (at + r) * kKeys, highest_score = top[at + r];
        for (int64_t j = 0; j < kKeys; j += kLanes) {
          Vec weight = halves ? two_to(load(own + j) * to_powers - highest_score * 1.44269504f)
                              : exponential(load(own + j) - highest_score);
          store(own + j, weight);
          added[r] += weight;
        }
      }
      totals<R>(added, totals_of);
      for (int r = 0; r < R; ++r) sum[at + r] = sum[at + r] * shrink[at + r] + totals_of[r];
    });
    for (int64_t r = 0; r < rows; ++r) {
      if (shrink[r] == 1) continue;
      for (int64_t c = 0; c < width; c += kLanes)
        store(out + r * width + c, load(out + r * width + c) * shrink[r]);
    }
  }

  int64_t rows;
  Scratch of_rows;
  float *largest, *sum;

 private:
  float *top_, *shrink_;  // of the present block
};

}  // namespace
}  // namespace ed
