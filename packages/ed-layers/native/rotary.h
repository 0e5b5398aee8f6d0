// Rotary positions, for one level of instructions.
#pragma once

#include "simd.h"

namespace ed {
namespace {

inline float number(const float* from, int64_t i) { return from[i]; }
inline float number(const uint16_t* from, int64_t i) { return widen(from[i]); }
inline void put(float* to, int64_t i, float x) { to[i] = x; }
inline void put(uint16_t* to, int64_t i, float x) { to[i] = narrow(x); }

// The pairs of one head: numbers i * kStep and i * kStep + `apart`.
template <int kStep, typename Number>
ED_INLINE void turn_pairs(const Number* __restrict x, Number* __restrict y, int64_t pairs,
                          int64_t apart, const float* __restrict cos, const float* __restrict sin,
                          float sign) {
  for (int64_t i = 0; i < pairs; ++i) {
    float a = number(x, i * kStep), b = number(x, i * kStep + apart), s = sign * sin[i];
    put(y, i * kStep, a * cos[i] - b * s);
    put(y, i * kStep + apart, b * cos[i] + a * s);
  }
}

template <typename Number>
void turn_tokens(const Rotary& p, int64_t first, int64_t last) {
  for (int64_t token = first; token < last; ++token) {
    const float *cos = p.cos + token * p.pairs, *sin = p.sin + token * p.pairs;
    float sign = p.back ? -1.0f : 1.0f;
    for (int64_t head = token * p.heads; head < (token + 1) * p.heads; ++head) {
      const Number* x = static_cast<const Number*>(p.x) + head * p.dim;
      Number* y = static_cast<Number*>(p.y) + head * p.dim;
      if (p.neighbours)
        turn_pairs<2>(x, y, p.pairs, 1, cos, sin, sign);
      else
        turn_pairs<1>(x, y, p.pairs, p.pairs, cos, sin, sign);
      int64_t turned = 2 * p.pairs;
      std::memcpy(y + turned, x + turned, (p.dim - turned) * sizeof(Number));
    }
  }
}

void rotate(const Rotary& p, int64_t first, int64_t last) {
  (p.is_bfloat16 ? turn_tokens<uint16_t> : turn_tokens<float>)(p, first, last);
}

}  // namespace
}  // namespace ed
