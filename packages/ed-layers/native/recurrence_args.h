// Arguments of a recurrence over tokens. No dependency on XLA.
#pragma once

#include <cstdint>

namespace ed {

// The content of a position of a row. The first token of a sequence starts with a state of zeros.
enum Mark : int32_t { kNoToken, kToken, kFirstToken };

// The arguments of one call. Each head has a state, a matrix [keys, values]. Token t computes
//
//   state = decay[t] state + key[t] value[t]^T,   out[t] = state^T query[t]
//
// With `beta`, a token writes beta[t] (value[t] - state^T key[t]) instead of its value.
struct RecurrenceArgs {
  int64_t rows, columns, heads, groups, keys, values;
  float* states;  // [states, heads, keys, values], or [.., values, keys] with `keys_last`
  bool keys_last;
  const int32_t* owner;      // [rows], the state of each row
  const int32_t* marks;      // [rows, columns]
  const float *query, *key;  // [rows, columns, groups, keys]; the heads of a group share them
  const float* value;        // [rows, columns, heads, values]
  // Factors [rows, columns, heads, decays]: one for each head, or one for each key. With `rates`
  // [heads, values, keys], `decay` has steps [rows, columns, heads, values], and the factor is
  // exp(step * rate).
  const float *decay, *rates;
  int64_t decays;
  const float* beta;  // [rows, columns, heads], or null
  float* out;         // [rows, columns, heads, values]
};

}  // namespace ed
