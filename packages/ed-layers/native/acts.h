// Exponentials and activations of vectors, for one level of instructions.
#pragma once

#include "product.h"
#include "simd.h"

namespace ed {
namespace {

// e^x to 2 units in the last place; 0 below -87.
inline Vec exponential(Vec x) {
  Vec least_x = broadcast(-87.0f);
#if defined(__AVX512F__)
  Vec y = x;  // a mask replaces results below the least x
#else
  Vec y = x < least_x ? least_x : x;
#endif
  Vec n = y * 1.44269504f;
  n = (n + 0x1.8p23f) - 0x1.8p23f;
  Vec r = y - n * 0.693145752f;
  r -= n * 1.42860677e-6f;
  Vec p = broadcast(1.9875691e-4f);
  p = p * r + 1.3981999e-3f;
  p = p * r + 8.3334519e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 5.0000001e-1f;
  p = p * r * r + r + 1.0f;
#if defined(__AVX512F__)
  __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, (__m512)least_x, _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)n);
#else
  // The power of two by its exponent's bits. NaN keeps NaN by the product.
  Ints power = __builtin_convertvector(n == n ? n : Vec{}, Ints) + 127;
  Vec result = p * (Vec)(power << 23);
  return x < least_x ? Vec{} : result;
#endif
}

// 2^x for x up to 0, to 2^-18 of the result; 0 below -125.
inline Vec two_to(Vec x) {
#if defined(__AVX512F__)
  Vec n = (x + 0x1.8p23f) - 0x1.8p23f, r = x - n;
  Vec p = broadcast(1.3333558e-3f);
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)n);
#else
  return exponential(x * 0.693147181f);
#endif
}

// tanh(x) by the exponential of its size; by its series where that would cancel.
inline Vec squash(Vec x) {
  Vec size = x < 0 ? -x : x, capped = size > 10.0f ? broadcast(10.0f) : size;
  Vec t = 1.0f - 2.0f / (exponential(2.0f * capped) + 1.0f);
  Vec s = size * size;
  Vec near = size * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315))));
  t = size < 0.15f ? near : t;
  return x != x ? x : (x < 0 ? -t : t);
}

// 1 / x for finite x from 1 on, to a unit in the last place.
inline Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
  Vec y = (Vec)_mm512_rcp14_ps((__m512)x);
  return y + y * (1.0f - x * y);
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + e^-x)
inline Vec sigmoid(Vec x) {
  Vec small = exponential(x < 0 ? x : -x);
  return (x < 0 ? small : 1.0f + Vec{}) * reciprocal(1.0f + small);
}

// GELU with the error function: x times the share of a normal distribution below x. The complement
// of the error function is that of Numerical Recipes (erfcc), with a relative error of 1.2e-7.
inline Vec gelu(Vec x) {
  Vec z = (x < 0 ? -x : x) * 0.707106781f, t = reciprocal(1.0f + 0.5f * z);
  Vec p = broadcast(0.17087277f);
  constexpr float kFactors[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                                0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  ED_UNROLL
  for (int i = 0; i < 9; ++i) p = p * t + kFactors[i];
  Vec above = 0.5f * t * exponential(p - z * z);  // the share above |x|
  return x * (x < 0 ? above : 1.0f - above);
}

inline Vec activated(Act act, Vec x) {
  switch (act) {
    case Act::kSilu: return x * sigmoid(x);
    case Act::kGeluTanh: return x * sigmoid(1.595769122f * x * (1.0f + 0.044715f * x * x));
    case Act::kGelu: return gelu(x);
    case Act::kQuickGelu: return x * sigmoid(1.702f * x);
    case Act::kRelu: return x < 0 ? Vec{} : x;
    case Act::kNone: break;
  }
  return x;
}

}  // namespace
}  // namespace ed
