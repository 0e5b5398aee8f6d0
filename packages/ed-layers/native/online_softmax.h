// The online softmax of attention over blocks of keys, for one level.
#pragma once

#include "attention_blocks.h"

namespace ed {
namespace {

// The largest score and the sum of weights of each row so far.
struct OnlineSoftmax {
  explicit OnlineSoftmax(int64_t rows)
      : rows(rows),
        storage(4 * round_up_lanes(rows)),
        max_score(storage.data),
        sum(max_score + round_up_lanes(rows)),
        next_max_(sum + round_up_lanes(rows)),
        rescale_(next_max_ + round_up_lanes(rows)) {
    for (int64_t r = 0; r < round_up_lanes(rows); ++r)
      max_score[r] = kMinusInfinity, sum[r] = 0, next_max_[r] = 0;
  }

  // Replace the scores [rows, kBlockKeys] of a block by weights, after a multiplication with
  // `factor`, for the rows from `first` on. Rescale `out` [rows, width], whose weights were
  // relative to a smaller maximum. `rounds_weights`: the weights are rounded to bfloat16 later.
  template <bool rounds_weights>
  void update(int64_t first, int64_t rows, float factor, float* scores, float* out, int64_t width) {
    float *max_score = this->max_score + first, *sum = this->sum + first;
    float *next_max = next_max_ + first, *rescale = rescale_ + first;
    for (int64_t r = 0; r < rows; ++r) {
      const float* row_scores = scores + r * kBlockKeys;
      Vec high = load(row_scores);
      for (int64_t j = kLanes; j < kBlockKeys; j += kLanes) {
        Vec next = load(row_scores + j);
        high = next > high ? next : high;
      }
      float block_max = reduce_max(high) * factor;
      next_max[r] = block_max > max_score[r] ? block_max : max_score[r];
      // No visible key so far: all weights become zero; weights of NaN stay NaN.
      if (next_max[r] == kMinusInfinity) next_max[r] = -kMinusInfinity;
    }
    for (int64_t r = 0; r < rows; r += kLanes) {
      Vec block_max = load(next_max + r), previous = load(max_score + r),
          no_score = broadcast(-kMinusInfinity);
      store(rescale + r, block_max == no_score ? broadcast(1.0f) : vec_exp(previous - block_max));
      store(max_score + r, block_max == no_score ? previous : block_max);
    }
    const float exponent_scale = factor * 1.44269504f;
    for_row_blocks<8>(rows, [&](auto count, int64_t at) {
      constexpr int R = decltype(count)::value;
      Vec weight_sums[R] = {};
      float row_sums[R];
      for (int r = 0; r < R; ++r) {
        float *row_scores = scores + (at + r) * kBlockKeys, highest_score = next_max[at + r];
        for (int64_t j = 0; j < kBlockKeys; j += kLanes) {
          Vec weight =
              rounds_weights
                  ? vec_exp2(load(row_scores + j) * exponent_scale - highest_score * 1.44269504f)
                  : vec_exp(load(row_scores + j) - highest_score);
          store(row_scores + j, weight);
          weight_sums[r] += weight;
        }
      }
      reduce_sums<R>(weight_sums, row_sums);
      for (int r = 0; r < R; ++r) sum[at + r] = sum[at + r] * rescale[at + r] + row_sums[r];
    });
    for (int64_t r = 0; r < rows; ++r) {
      if (rescale[r] == 1) continue;
      for (int64_t c = 0; c < width; c += kLanes)
        store(out + r * width + c, load(out + r * width + c) * rescale[r]);
    }
  }

  int64_t rows;
  Scratch storage;
  float *max_score, *sum;

 private:
  float *next_max_, *rescale_;  // of the current block
};

}  // namespace
}  // namespace ed
