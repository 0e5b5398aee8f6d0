// Random codes in packed panels for the test programs.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm_args.h"

namespace ed {

// Fill `groups` groups of panels with random codes and finite scales and zeros. `draw(low, high)`
// returns an integer.
template <typename Draw>
void fill_code_panels(const Gemm& p, int64_t groups, uint8_t* w, const Draw& draw) {
  for (int64_t group = 0; group < groups; ++group, w += get_panel_group_bytes(p)) {
    for (int64_t i = 0; i < get_panel_group_bytes(p); ++i)
      w[i] = static_cast<uint8_t>(draw(0, 255));
    auto write_params = [&](ParamType kind, int64_t at) {
      for (int64_t c = 0; c < kTile; ++c) {
        const float value = static_cast<float>(draw(-1000, 1000)) / 500;
        const auto float16_bits = static_cast<uint16_t>(draw(0, 0x3c00));  // from 0 to 1
        if (kind == ParamType::kFloat32) std::memcpy(w + at + 4 * c, &value, 4);
        if (kind == ParamType::kFloat16) std::memcpy(w + at + 2 * c, &float16_bits, 2);
      }
    };
    write_params(p.scale.kind, 0);
    if (p.zero.data) write_params(p.zero.kind, kTile * get_byte_width(p.scale.kind));
  }
}

}  // namespace ed
