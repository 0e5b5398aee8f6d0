// A recurrence over tokens on a CPU: the arguments of a call. Nothing depends on XLA.
#pragma once

#include <cstdint>

namespace ed {

// What a position of a row holds. The first token of a sequence starts with a state of zeros.
enum Mark : int32_t { kNoToken, kToken, kFirstToken };

// One call. Each head has a state, a matrix of `keys` times `values` numbers; a token t does
//
//   state = decay[t] state + key[t] value[t]^T,   out[t] = state^T query[t]
//
// With `beta`, a token writes beta[t] (value[t] - state^T key[t]) instead of its value.
struct Recurrence {
  int64_t rows, columns, heads, groups, keys, values;
  float* states;         // [states, heads, keys, values], or [.., values, keys] with `keys_last`
  bool keys_last;
  const int32_t* owner;  // [rows], the state that a row reads and writes
  const int32_t* marks;  // [rows, columns]
  const float *query, *key;  // [rows, columns, groups, keys]; the heads of a group share them
  const float* value;        // [rows, columns, heads, values]
  // Factors [rows, columns, heads, decays]: one for a head, or one for each of its keys. With
  // `rates` [heads, values, keys] instead [rows, columns, heads, values] steps: the factor of a
  // number is exp(step * rate).
  const float *decay, *rates;
  int64_t decays;
  const float* beta;  // [rows, columns, heads], or null
  float* out;         // [rows, columns, heads, values]
};

}  // namespace ed
