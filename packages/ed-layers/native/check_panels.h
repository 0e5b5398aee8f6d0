// Random codes in panels for the programs that check kernels.
#pragma once

#include <cstdint>
#include <cstring>

#include "product.h"

namespace ed {

// Fill `groups` groups of panels with random codes, and finite scales and zeros. `draw(low, high)` returns
// a whole number.
template <typename Draw>
void fill_code_panels(const Product& p, int64_t groups, uint8_t* w, const Draw& draw) {
  for (int64_t group = 0; group < groups; ++group, w += panel_group_bytes(p)) {
    for (int64_t i = 0; i < panel_group_bytes(p); ++i) w[i] = static_cast<uint8_t>(draw(0, 255));
    auto put = [&](Small kind, int64_t at) {
      for (int64_t c = 0; c < kTile; ++c) {
        const float number = static_cast<float>(draw(-1000, 1000)) / 500;
        const auto half = static_cast<uint16_t>(draw(0, 0x3c00));  // from 0 to 1
        if (kind == Small::kFloat32) std::memcpy(w + at + 4 * c, &number, 4);
        if (kind == Small::kFloat16) std::memcpy(w + at + 2 * c, &half, 2);
      }
    };
    put(p.scale.kind, 0);
    if (p.zero.data) put(p.zero.kind, kTile * bytes_of(p.scale.kind));
  }
}

}  // namespace ed
