// The two products of attention with a block of keys and values, for one level of instructions.
//
// Both structs have the same functions: `read_query` reads a row of q, `score` computes the scores
// [rows, kKeys] of a block of keys, and `add_values` adds weights [rows, kKeys] times a block of
// values to out [rows, out_width].
#pragma once

#include "blocks.h"

namespace ed {
namespace {

// Products of float32 numbers.
struct PlainProducts {
  PlainProducts(const Attend& p, int64_t rows)
      : out_width(whole_vectors(p.value_dim)), p_(p), rows_(rows), k_(p.key_dim), v_(p.value_dim),
        turned_(p.key_dim), q_(rows * k_.width) {
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

  void score(const Place& at, float* scores) {
    k_.read(p_, p_.keys, at);
    std::memset(scores, 0, rows_ * kKeys * sizeof(float));
    if (rows_ <= kFewQueries && !p_.fixed) return score_few(at.count, scores);
    turned_.of(k_, at.count);
    accumulate(q_.data, k_.width, 1, rows_, turned_.pointers(), p_.key_dim, kKeys, scores, kKeys);
  }

  void add_values(const Place& at, const float* weights, float* out) {
    v_.read(p_, p_.values, at);
    accumulate(weights, kKeys, 1, rows_, v_.rows, at.count, out_width, out, out_width);
  }

  const int64_t out_width;

 private:
  // Each score is a sum over one row of keys, which are read where they lie.
  void score_few(int64_t n, float* scores) {
    for (int64_t j = n; j < (n + 7) / 8 * 8; ++j) k_.rows[j] = k_.rows[n - 1];  // of no account
    for (int64_t j = 0; j < n; j += 8)
      for (int64_t r = 0; r < rows_; ++r) {
        Vec dots[8] = {};
        for (int64_t c = 0; c < k_.width; c += kLanes) {
          Vec number = load(q_.data + r * k_.width + c);
          ED_UNROLL
          for (int i = 0; i < 8; ++i) dots[i] += number * load(k_.rows[j + i] + c);
        }
        totals<8>(dots, scores + r * kKeys + j);
      }
  }

  const Attend& p_;
  int64_t rows_;
  Block k_, v_;
  Turned turned_;
  Scratch q_;
};

#if defined(__AVX512BF16__)
// Products of pairs of bfloat16 numbers, summed in float32. Weights are rounded to bfloat16.
struct PairProducts {
  // Whether a call has bfloat16 numbers, and enough rows. A call whose sums have one order may have
  // few or many rows, so it computes plain products.
  static bool take(const Attend& p, int64_t rows) {
    return p.q_is_bfloat16 && p.keys.kind == Stored::kBfloat16 &&
           p.values.kind == Stored::kBfloat16 && p.key_dim % 8 == 0 && rows > kFewQueries && !p.fixed;
  }

  PairProducts(const Attend& p, int64_t rows)
      : out_width(whole_vectors(p.value_dim)), p_(p), rows_(rows),
        value_width_((p.value_dim + 31) / 32 * 32), turned_(p.key_dim / 2),
        q_(rows * p.key_dim / 2), values_(kKeys * value_width_ / 2), weights_(rows * kKeys / 2) {}

  void read_query(int64_t r, int64_t from) {
    std::memcpy(halves(q_) + r * p_.key_dim, static_cast<const uint16_t*>(p_.q) + from,
                p_.key_dim * sizeof(uint16_t));
  }

  void score(const Place& at, float* scores) {
    find(p_.keys, at);
    turned_.of(found_, p_.key_dim / 2, at.count);
    std::memset(scores, 0, rows_ * kKeys * sizeof(float));
    multiply(q_, p_.key_dim, p_.key_dim, turned_.panel, kKeys, kKeys, scores);
    for (int64_t i = 0; i < rows_ * kKeys; i += kLanes)
      store(scores + i, load(scores + i) * p_.scale);
  }

  void add_values(const Place& at, const float* weights, float* out) {
    find(p_.values, at);
    for (int64_t j = 0; j < at.count; j += 2)
      pair_rows(found_[j], j + 1 < at.count ? found_[j + 1] : nullptr, p_.value_dim,
                halves(values_) + j * value_width_);
    for (int64_t i = 0; i < rows_ * kKeys; i += 2 * kLanes)
      _mm512_storeu_si512(halves(weights_) + i,
                          (__m512i)_mm512_cvtne2ps_pbh((__m512)load(weights + i + kLanes),
                                                       (__m512)load(weights + i)));
    multiply(weights_, kKeys, at.count, values_, value_width_, out_width, out);
  }

  const int64_t out_width;

 private:
  static uint16_t* halves(const Scratch& of) { return reinterpret_cast<uint16_t*>(of.data); }

  // Where the rows of a block lie.
  void find(const Slots& from, const Place& place) {
    auto* numbers = static_cast<const uint16_t*>(from.data);
    for (int64_t i = most(0, place.skipped); i < place.count; ++i)
      found_[i] = numbers + place.at(p_, from, i).number;
    for (int64_t i = 0; i < place.skipped; ++i) found_[i] = found_[place.skipped];
  }

  // to [rows, width] += x [rows, k] times w [k / 2, w_width, 2].
  void multiply(const Scratch& x, int64_t x_width, int64_t k, const Scratch& w, int64_t w_width,
                int64_t width, float* to) {
    row_blocks<kRows>(rows_, [&](auto r, int64_t at) {
      over_blocks(width, [&](auto v, int64_t c) {
        multiply_pairs<decltype(r)::value, decltype(v)::value>(
            halves(x) + at * x_width, x_width, halves(w) + 2 * c, 2 * w_width, k,
            to + at * width + c, width);
      });
    });
  }

  const Attend& p_;
  int64_t rows_, value_width_;
  Turned turned_;
  Scratch q_, values_, weights_;
  const uint16_t* found_[kKeys];
};
#endif

}  // namespace
}  // namespace ed
