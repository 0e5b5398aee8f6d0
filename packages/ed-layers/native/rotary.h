// Rotary positions, for one level of instructions.
#pragma once

#include "simd.h"

namespace ed {
namespace {

inline float load_float(const float* from, int64_t i) { return from[i]; }
inline float load_float(const uint16_t* from, int64_t i) { return widen(from[i]); }
inline void store_float(float* to, int64_t i, float x) { to[i] = x; }
inline void store_float(uint16_t* to, int64_t i, float x) { to[i] = narrow(x); }

// Rotate the pairs of one head: numbers i * kStep and i * kStep + `distance`.
template <int kStep, typename Element>
ED_INLINE void rotate_pairs(const Element* __restrict x, Element* __restrict y, int64_t pairs,
                            int64_t distance, const float* __restrict cos,
                            const float* __restrict sin, float sign) {
  for (int64_t i = 0; i < pairs; ++i) {
    float a = load_float(x, i * kStep), b = load_float(x, i * kStep + distance), s = sign * sin[i];
    store_float(y, i * kStep, a * cos[i] - b * s);
    store_float(y, i * kStep + distance, b * cos[i] + a * s);
  }
}

template <typename Element>
void rotate_tokens(const RotaryArgs& p, int64_t first, int64_t last) {
  for (int64_t token = first; token < last; ++token) {
    const float *cos = p.cos + token * p.pairs, *sin = p.sin + token * p.pairs;
    float sign = p.inverse ? -1.0f : 1.0f;
    for (int64_t head = token * p.heads; head < (token + 1) * p.heads; ++head) {
      const Element* x = static_cast<const Element*>(p.x) + head * p.dim;
      Element* y = static_cast<Element*>(p.y) + head * p.dim;
      if (p.interleaved)
        rotate_pairs<2>(x, y, p.pairs, 1, cos, sin, sign);
      else
        rotate_pairs<1>(x, y, p.pairs, p.pairs, cos, sin, sign);
      int64_t rotated = 2 * p.pairs;
      std::memcpy(y + rotated, x + rotated, (p.dim - rotated) * sizeof(Element));
    }
  }
}

void apply_rotary(const RotaryArgs& p, int64_t first, int64_t last) {
  (p.is_bfloat16 ? rotate_tokens<uint16_t> : rotate_tokens<float>)(p, first, last);
}

}  // namespace
}  // namespace ed
