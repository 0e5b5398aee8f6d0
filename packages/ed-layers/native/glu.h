// The gated linear unit between the products of a feed-forward layer, for one level.
#pragma once

#include "operands.h"

namespace ed {
namespace {

template <typename Element>
void apply_glu_as(Activation act, const Gemm& gate, const Gemm& up, int64_t first, int64_t last) {
  for (int64_t row = 0; row < gate.rows; ++row) {
    auto* gate_row = static_cast<Element*>(gate.y) + row * gate.outputs;
    auto* up_row = static_cast<const Element*>(up.y) + row * gate.outputs;
    for (int64_t column = first; column < last; column += kLanes) {
      int64_t count = last - column;
      Vec x = load_partial(gate_row + column, count);
      store_partial(gate_row + column,
                    apply_activation(act, x) * load_partial(up_row + column, count), count);
    }
  }
}

void apply_glu(Activation act, const Gemm& gate, const Gemm& up, int64_t first, int64_t last) {
  gate.y_is_bfloat16 ? apply_glu_as<uint16_t>(act, gate, up, first, last)
                     : apply_glu_as<float>(act, gate, up, first, last);
}

}  // namespace
}  // namespace ed
