// What stands between the products of a gated layer, for one level of instructions.
#pragma once

#include "groups.h"

namespace ed {
namespace {

template <typename Number>
void gate_as(Act act, const Product& gate, const Product& up, int64_t first, int64_t last) {
  for (int64_t row = 0; row < gate.rows; ++row) {
    auto* left = static_cast<Number*>(gate.y) + row * gate.outputs;
    auto* right = static_cast<const Number*>(up.y) + row * gate.outputs;
    for (int64_t column = first; column < last; column += kLanes) {
      int64_t count = last - column;
      Vec x = load_some(left + column, count);
      store_numbers(left + column, activated(act, x) * load_some(right + column, count), count);
    }
  }
}

void gate(Act act, const Product& gate, const Product& up, int64_t first, int64_t last) {
  gate.y_is_bfloat16 ? gate_as<uint16_t>(act, gate, up, first, last)
                     : gate_as<float>(act, gate, up, first, last);
}

}  // namespace
}  // namespace ed
