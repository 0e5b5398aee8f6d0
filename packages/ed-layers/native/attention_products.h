// The two products of attention with a block of keys and values, for one level.
//
// Both structs have the same functions. `read_query` reads a row of q, and `start` sets the next
// block of keys and values. `score` computes the scores [rows, kBlockKeys] of some rows without the
// factor `score_factor`. `add_values` adds weights [rows, kBlockKeys] times the values to out
// [rows, out_width]. All rows that see a block share the prepared keys and values.
#pragma once

#include "attention_blocks.h"

namespace ed {
namespace {

// Products of float32 numbers.
struct Float32Products {
  static constexpr bool rounds_weights = false;  // whether weights are rounded to bfloat16

  Float32Products(const AttentionArgs& p, int64_t rows, int64_t)
      : out_width(round_up_lanes(p.value_dim)),
        score_factor(1),
        p_(p),
        k_(p.key_dim),
        v_(p.value_dim),
        transposed_(p.key_dim),
        q_(rows * k_.width) {
    std::memset(q_.data, 0, rows * k_.width * sizeof(float));
  }

  // Read row r of the queries, which starts at number `from` of q.
  void read_query(int64_t r, int64_t from) {
    for (int64_t c = 0; c < p_.key_dim; ++c) {
      float number = p_.q_is_bfloat16 ? widen(static_cast<const uint16_t*>(p_.q)[from + c])
                                      : static_cast<const float*>(p_.q)[from + c];
      q_.data[r * k_.width + c] = number * p_.scale;
    }
  }

  void start(const SlotRange& range) {
    range_ = range, has_keys_ = has_transposed_ = has_values_ = false;
  }

  void score(int64_t first, int64_t rows, float* scores) {
    if (!has_keys_) k_.read(p_, p_.keys, range_), has_keys_ = true;
    const float* q = q_.data + first * k_.width;
    if (rows <= kFewQueries && !p_.fixed_order) return score_few(q, rows, scores);
    if (!has_transposed_) transposed_.assign(k_, range_.count), has_transposed_ = true;
    accumulate<Float32Words>(q, k_.width, 1, rows, transposed_.pointers(), p_.key_dim, kBlockKeys,
                             scores, kBlockKeys, false);
  }

  void add_values(int64_t rows, const float* weights, float* out) {
    if (!has_values_) v_.read(p_, p_.values, range_), has_values_ = true;
    accumulate<Float32Words>(weights, kBlockKeys, 1, rows, v_.rows, range_.count, out_width, out,
                             out_width);
  }

  const int64_t out_width;
  const float score_factor;

 private:
  // Each score is a sum over one row of keys, which is read in place.
  void score_few(const float* q, int64_t rows, float* scores) {
    int64_t n = range_.count;
    for (int64_t j = n; j < (n + 7) / 8 * 8; ++j)
      k_.rows[j] = k_.rows[n - 1];  // padding; these scores are masked
    for (int64_t j = 0; j < n; j += 8)
      for (int64_t r = 0; r < rows; ++r) {
        Vec dot_rows[8] = {};
        for (int64_t c = 0; c < k_.width; c += kLanes) {
          Vec number = load(q + r * k_.width + c);
          ED_UNROLL
          for (int i = 0; i < 8; ++i) dot_rows[i] += number * load(k_.rows[j + i] + c);
        }
        reduce_sums<8>(dot_rows, scores + r * kBlockKeys + j);
      }
  }

  const AttentionArgs& p_;
  SlotRange range_{};
  bool has_keys_ = false, has_transposed_ = false, has_values_ = false;
  Block k_, v_;
  TransposedRows transposed_;
  Scratch q_;
};

#if defined(__AVX512BF16__)
// Products of pairs of bfloat16 numbers, summed in float32.
struct Bf16Products {
  static constexpr bool rounds_weights = true;

  // Return whether a call has bfloat16 numbers. A call with a fixed order of sums uses float32
  // products, because few rows have another order of sums in this struct.
  static bool supports(const AttentionArgs& p) { return uses_bf16_pairs(p) && !p.fixed_order; }

  Bf16Products(const AttentionArgs& p, int64_t rows, int64_t rows_of_block)
      : out_width(round_up_lanes(p.value_dim)),
        score_factor(p.scale),
        p_(p),
        transposed_(p.key_dim / 2),
        q_(rows * p.key_dim / 2),
        values_(p.value_dim),
        weights_(rows_of_block * kBlockKeys / 2) {}

  void read_query(int64_t r, int64_t from) {
    std::memcpy(bf16_data(q_) + r * p_.key_dim, static_cast<const uint16_t*>(p_.q) + from,
                p_.key_dim * sizeof(uint16_t));
  }

  void start(const SlotRange& range) { range_ = range, has_keys_ = has_values_ = false; }

  void score(int64_t first, int64_t rows, float* scores) {
    if (rows <= kFewQueries) return score_few(first, rows, scores);
    if (!has_keys_) {
      locate_rows(p_, p_.keys, range_, row_pointers_);
      transposed_.assign(row_pointers_, p_.key_dim / 2, range_.count);
      has_keys_ = true;
    }
    const int64_t words = p_.key_dim / 2;
    accumulate<Bf16PairWords>(q_.data + first * words, words, 1, rows, transposed_.pointers(),
                              words, kBlockKeys, scores, kBlockKeys, false);
  }

  void add_values(int64_t rows, const float* weights, float* out) {
    if (!has_values_) {
      locate_rows(p_, p_.values, range_, row_pointers_);
      values_.assign(row_pointers_, range_.count);
      has_values_ = true;
    }
    round_to_bf16(weights, rows * kBlockKeys, weights_.data);
    accumulate<Bf16PairWords>(weights_.data, kBlockKeys / 2, 1, rows, values_.pairs,
                              (range_.count + 1) / 2, out_width, out, out_width);
  }

  const int64_t out_width;
  const float score_factor;

 private:
  static uint16_t* bf16_data(const Scratch& scratch) {
    return reinterpret_cast<uint16_t*>(scratch.data);
  }

  // Each score is a sum over one row of keys, which is read in place.
  void score_few(int64_t first, int64_t rows, float* scores) {
    locate_rows(p_, p_.keys, range_, row_pointers_);
    const int64_t n = range_.count;
    for (int64_t j = n; j < (n + 7) / 8 * 8; ++j)
      row_pointers_[j] = row_pointers_[n - 1];  // padding; these scores are masked
    for (int64_t j = 0; j < n; j += 8)
      for (int64_t r = 0; r < rows; ++r) {
        const uint16_t* q = bf16_data(q_) + (first + r) * p_.key_dim;
        Vec sums[8] = {};
        for (int64_t c = 0; c < p_.key_dim; c += 32) {
          const __mmask32 mask = p_.key_dim - c >= 32 ? ~0u : (1u << (p_.key_dim - c)) - 1;
          const Vec number = (Vec)_mm512_maskz_loadu_epi16(mask, q + c);
          ED_UNROLL
          for (int i = 0; i < 8; ++i)
            sums[i] = Bf16PairWords::add(
                sums[i], number, (Vec)_mm512_maskz_loadu_epi16(mask, row_pointers_[j + i] + c));
        }
        reduce_sums<8>(sums, scores + r * kBlockKeys + j);
      }
  }

  const AttentionArgs& p_;
  SlotRange range_{};
  bool has_keys_ = false, has_values_ = false;
  TransposedRows transposed_;
  Scratch q_;
  Bf16PairRows values_;
  Scratch weights_;
  const uint16_t* row_pointers_[kBlockKeys];
};
#endif

}  // namespace
}  // namespace ed
