// The two products of attention with a block of keys and values, for one level of instructions.
//
// Both structs have the same functions: `read_query` reads a row of q, `start` names the next block of
// keys and values, `score` computes the scores [rows, kKeys] of some rows, without the factor
// `score_factor`, and `add_values` adds weights [rows, kKeys] times the values to out [rows,
// out_width]. The keys and the values of a block are prepared once for all rows that see the block.
#pragma once

#include "blocks.h"

namespace ed {
namespace {

// Products of float32 numbers.
struct PlainProducts {
  static constexpr bool halves = false;  // whether weights are rounded to bfloat16

  PlainProducts(const Attend& p, int64_t rows, int64_t)
      : out_width(whole_vectors(p.value_dim)), score_factor(1), p_(p), k_(p.key_dim),
        v_(p.value_dim), turned_(p.key_dim), q_(rows * k_.width) {
    std::memset(q_.data, 0, rows * k_.width * sizeof(float));
  }

  // Row r of the queries begins at number `from` of q.
  void read_query(int64_t r, int64_t from) {
    for (int64_t c = 0; c < p_.key_dim; ++c) {
      float number = p_.q_is_bfloat16 ? widen(static_cast<const uint16_t*>(p_.q)[from + c])
                                      : static_cast<const float*>(p_.q)[from + c];
      q_.data[r * k_.width + c] = number * p_.scale;
    }
  }

  void start(const Place& place) { place_ = place, has_keys_ = has_turned_ = has_values_ = false; }

  void score(int64_t first, int64_t rows, float* scores) {
    if (!has_keys_) k_.read(p_, p_.keys, place_), has_keys_ = true;
    const float* q = q_.data + first * k_.width;
    if (rows <= kFewQueries && !p_.fixed) return score_few(q, rows, scores);
    if (!has_turned_) turned_.of(k_, place_.count), has_turned_ = true;
    accumulate<FloatWords>(q, k_.width, 1, rows, turned_.pointers(), p_.key_dim, kKeys, scores, kKeys,
                           false);
  }

  void add_values(int64_t rows, const float* weights, float* out) {
    if (!has_values_) v_.read(p_, p_.values, place_), has_values_ = true;
    accumulate<FloatWords>(weights, kKeys, 1, rows, v_.rows, place_.count, out_width, out,
                           out_width);
  }

  const int64_t out_width;
  const float score_factor;

 private:
  // Each score is a sum over one row of keys, which are read where they lie.
  void score_few(const float* q, int64_t rows, float* scores) {
    int64_t n = place_.count;
    for (int64_t j = n; j < (n + 7) / 8 * 8; ++j) k_.rows[j] = k_.rows[n - 1];  // of no account
    for (int64_t j = 0; j < n; j += 8)
      for (int64_t r = 0; r < rows; ++r) {
        Vec dots[8] = {};
        for (int64_t c = 0; c < k_.width; c += kLanes) {
          Vec number = load(q + r * k_.width + c);
          ED_UNROLL
          for (int i = 0; i < 8; ++i) dots[i] += number * load(k_.rows[j + i] + c);
        }
        totals<8>(dots, scores + r * kKeys + j);
      }
  }

  const Attend& p_;
  Place place_{};
  bool has_keys_ = false, has_turned_ = false, has_values_ = false;
  Block k_, v_;
  Turned turned_;
  Scratch q_;
};

#if defined(__AVX512BF16__)
// Products of pairs of bfloat16 numbers, summed in float32.
struct PairProducts {
  static constexpr bool halves = true;

  // Whether a call has bfloat16 numbers. A call whose sums have one order computes plain products,
  // because the order of few rows is another one here.
  static bool take(const Attend& p) {
    return in_pairs(p) && !p.fixed;
  }

  PairProducts(const Attend& p, int64_t rows, int64_t rows_of_block)
      : out_width(whole_vectors(p.value_dim)), score_factor(p.scale), p_(p),
        turned_(p.key_dim / 2), q_(rows * p.key_dim / 2), values_(p.value_dim),
        weights_(rows_of_block * kKeys / 2) {}

  void read_query(int64_t r, int64_t from) {
    std::memcpy(halves_of(q_) + r * p_.key_dim, static_cast<const uint16_t*>(p_.q) + from,
                p_.key_dim * sizeof(uint16_t));
  }

  void start(const Place& place) { place_ = place, has_keys_ = has_values_ = false; }

  void score(int64_t first, int64_t rows, float* scores) {
    if (rows <= kFewQueries) return score_few(first, rows, scores);
    if (!has_keys_) {
      find(p_, p_.keys, place_, found_);
      turned_.of(found_, p_.key_dim / 2, place_.count);
      has_keys_ = true;
    }
    const int64_t words = p_.key_dim / 2;
    accumulate<PairWords>(q_.data + first * words, words, 1, rows, turned_.pointers(), words, kKeys,
                         scores, kKeys, false);
  }

  void add_values(int64_t rows, const float* weights, float* out) {
    if (!has_values_) {
      find(p_, p_.values, place_, found_);
      values_.of(found_, place_.count);
      has_values_ = true;
    }
    round_all(weights, rows * kKeys, weights_.data);
    accumulate<PairWords>(weights_.data, kKeys / 2, 1, rows, values_.pairs, (place_.count + 1) / 2,
                          out_width, out, out_width);
  }

  const int64_t out_width;
  const float score_factor;

 private:
  static uint16_t* halves_of(const Scratch& of) { return reinterpret_cast<uint16_t*>(of.data); }

  // Each score is a sum over one row of keys, which are read where they lie.
  void score_few(int64_t first, int64_t rows, float* scores) {
    find(p_, p_.keys, place_, found_);
    const int64_t n = place_.count;
    for (int64_t j = n; j < (n + 7) / 8 * 8; ++j) found_[j] = found_[n - 1];  // of no account
    for (int64_t j = 0; j < n; j += 8)
      for (int64_t r = 0; r < rows; ++r) {
        const uint16_t* q = halves_of(q_) + (first + r) * p_.key_dim;
        Vec sums[8] = {};
        for (int64_t c = 0; c < p_.key_dim; c += 32) {
          const __mmask32 mask = p_.key_dim - c >= 32 ? ~0u : (1u << (p_.key_dim - c)) - 1;
          const Vec number = (Vec)_mm512_maskz_loadu_epi16(mask, q + c);
          ED_UNROLL
          for (int i = 0; i < 8; ++i)
            sums[i] = PairWords::add(sums[i], number,
                                     (Vec)_mm512_maskz_loadu_epi16(mask, found_[j + i] + c));
        }
        totals<8>(sums, scores + r * kKeys + j);
      }
  }

  const Attend& p_;
  Place place_{};
  bool has_keys_ = false, has_values_ = false;
  Turned turned_;
  Scratch q_;
  PairedRows values_;
  Scratch weights_;
  const uint16_t* found_[kKeys];
};
#endif

}  // namespace
}  // namespace ed
