// Recurrences over tokens, for one level. The order of a token's sums does not depend on the other
// tokens of a call.
#pragma once

#include "attention_blocks.h"
#include "recurrence_args.h"

namespace ed {
namespace {

// Vectors of kLanes numbers, or the last `count` numbers of a row; other lanes are zeros.
struct FullVector {
  Vec load(const float* from) const { return ::load(from); }
  void store(float* to, Vec v) const { ::store(to, v); }
};

struct PartialVector {
  Vec load(const float* from) const {
    Vec v{};
    std::memcpy(&v, from, count * 4);
    return v;
  }
  void store(float* to, Vec v) const { std::memcpy(to, &v, count * 4); }

  int64_t count;
};

// Call `f(first number, lanes)` for the vectors of a row.
template <typename F>
ED_INLINE void for_vectors(int64_t count, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, FullVector());
  if (i < count) f(i, PartialVector{count - i});
}

// Multiply two vectors and round the result. In `a * b + c * d`, the compiler may skip the rounding
// of either product.
inline Vec multiply_rounded(Vec a, Vec b) {
  Vec product = a * b;
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__x86_64__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#endif
  return product;
}

// The inputs and outputs of one token and head.
struct TokenInputs {
  const float *query, *key, *value, *decay, *rates, *beta;
  float* out;
};

// One token of a head whose state is [values, keys].
template <bool kRates>
void keys_last(const RecurrenceArgs& p, float* state, const TokenInputs& t) {
  for_row_blocks<8>(p.values, [&](auto rows, int64_t first) {
    constexpr int R = decltype(rows)::value;
    Vec sum[R] = {};
    for_vectors(p.keys, [&](int64_t at, auto lanes) {
      Vec key = lanes.load(t.key + at), query = lanes.load(t.query + at);
      ED_UNROLL
      for (int r = 0; r < R; ++r) {
        int64_t place = (first + r) * p.keys + at;
        Vec decay = broadcast(t.decay[kRates ? first + r : 0]);
        if constexpr (kRates) decay = vec_exp(multiply_rounded(decay, lanes.load(t.rates + place)));
        Vec update = multiply_rounded(key, broadcast(t.value[first + r]));
        Vec next_state = decay * lanes.load(state + place) + update;
        lanes.store(state + place, next_state);
        sum[r] += next_state * query;
      }
    });
    reduce_sums<R>(sum, t.out + first);
  });
}

// `C` vectors of values of one token of a head whose state is [keys, values].
template <int C, typename Lanes>
ED_INLINE void values_last(const RecurrenceArgs& p, float* state, const TokenInputs& t,
                           int64_t first, Lanes lanes) {
  int64_t next = p.decays == 1 ? 0 : 1;
  Vec update[C], sum[C] = {};
  state += first;
  ED_UNROLL
  for (int c = 0; c < C; ++c) update[c] = lanes.load(t.value + first + c * kLanes);
  if (t.beta) {
    Vec prediction[C] = {};
    for (int64_t i = 0; i < p.keys; ++i) {
      Vec decay = broadcast(t.decay[i * next]), key = broadcast(t.key[i]);
      ED_UNROLL
      for (int c = 0; c < C; ++c) {
        float* place = state + i * p.values + c * kLanes;
        Vec next_state = multiply_rounded(decay, lanes.load(place));
        lanes.store(place, next_state);
        prediction[c] += next_state * key;
      }
    }
    ED_UNROLL
    for (int c = 0; c < C; ++c)
      update[c] = multiply_rounded(update[c] - prediction[c], broadcast(*t.beta));
  }
  for (int64_t i = 0; i < p.keys; ++i) {
    Vec decay = broadcast(t.beta ? 1.0f : t.decay[i * next]);
    Vec key = broadcast(t.key[i]), query = broadcast(t.query[i]);
    ED_UNROLL
    for (int c = 0; c < C; ++c) {
      float* place = state + i * p.values + c * kLanes;
      Vec next_state = decay * lanes.load(place) + multiply_rounded(update[c], key);
      lanes.store(place, next_state);
      sum[c] += next_state * query;
    }
  }
  ED_UNROLL
  for (int c = 0; c < C; ++c) lanes.store(t.out + first + c * kLanes, sum[c]);
}

void values_last(const RecurrenceArgs& p, float* state, const TokenInputs& t) {
  int64_t full_vectors = p.values / kLanes;
  for_row_blocks<4>(full_vectors, [&](auto vectors, int64_t first) {
    values_last<decltype(vectors)::value>(p, state, t, first * kLanes, FullVector());
  });
  if (int64_t rest = p.values % kLanes)
    values_last<1>(p, state, t, full_vectors * kLanes, PartialVector{rest});
}

// All tokens of the heads [first, last).
void run_recurrence(const RecurrenceArgs& p, int64_t first, int64_t last) {
  int64_t size = p.keys * p.values, shared = p.heads / p.groups;
  for (int64_t row = 0; row < p.rows; ++row) {
    float* states = p.states + p.owner[row] * p.heads * size;
    for (int64_t token = row * p.columns; token < (row + 1) * p.columns; ++token) {
      float* out = p.out + token * p.heads * p.values;
      if (p.marks[token] == kNoToken) {
        std::memset(out + first * p.values, 0, (last - first) * p.values * 4);
        continue;
      }
      if (p.marks[token] == kFirstToken)
        std::memset(states + first * size, 0, (last - first) * size * 4);
      for (int64_t head = first; head < last; ++head) {
        int64_t at = token * p.heads + head, group_token = token * p.groups + head / shared;
        TokenInputs t{p.query + group_token * p.keys,
                      p.key + group_token * p.keys,
                      p.value + at * p.values,
                      p.decay + at * p.decays,
                      p.rates ? p.rates + head * size : nullptr,
                      p.beta ? p.beta + at : nullptr,
                      out + head * p.values};
        float* state = states + head * size;
        if (!p.keys_last)
          values_last(p, state, t);
        else if (p.rates)
          keys_last<true>(p, state, t);
        else
          keys_last<false>(p, state, t);
      }
    }
  }
}

}  // namespace
}  // namespace ed
