// What stands between the products of a gated layer, for one level of instructions.
#pragma once

#include "blocks.h"

namespace ed {
namespace {

// act(gate) * up, where act(x) is x times a sigmoid: of x, or of the argument of GELU's tanh.
inline Vec gated(Gate act, Vec gate, Vec up) {
  Vec x = gate;
  if (act == Gate::kGeluTanh) x = 1.595769122f * x * (1.0f + 0.044715f * x * x);
  Vec small = exponential(x < 0 ? x : -x);
  return gate * ((x < 0 ? small : 1.0f + Vec{}) / (1.0f + small)) * up;
}

void gate(Gate act, const Product& gate, const Product& up, int64_t first, int64_t last) {
  for (int64_t row = 0; row < gate.rows; ++row)
    for (int64_t column = first; column < last; column += kLanes) {
      int64_t at = row * gate.outputs + column, count = least(kLanes, last - column);
      float left[kLanes] = {}, right[kLanes] = {};
      if (gate.x_is_bfloat16) {
        for (int64_t c = 0; c < count; ++c) {
          left[c] = widen(static_cast<const uint16_t*>(gate.y)[at + c]);
          right[c] = widen(static_cast<const uint16_t*>(up.y)[at + c]);
        }
      } else {
        std::memcpy(left, static_cast<const float*>(gate.y) + at, count * sizeof(float));
        std::memcpy(right, static_cast<const float*>(up.y) + at, count * sizeof(float));
      }
      store(left, gated(act, load(left), load(right)));
      write(gate, row, column, left, count);
    }
}

}  // namespace
}  // namespace ed
