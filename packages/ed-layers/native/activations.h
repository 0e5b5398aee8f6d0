// Exponentials and activations of vectors, for one level.
#pragma once

#include "gemm_args.h"
#include "simd.h"

namespace ed {
namespace {

// e^x to 2 units in the last place; 0 below -87.
inline Vec vec_exp(Vec x) {
  Vec min_x = broadcast(-87.0f);
#if defined(__AVX512F__)
  Vec y = x;  // the mask below replaces results for x < min_x
#else
  Vec y = x < min_x ? min_x : x;
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
  __mmask16 mask = _mm512_cmp_ps_mask((__m512)x, (__m512)min_x, _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(mask, (__m512)p, (__m512)n);
#else
  // Scale by 2^n through the exponent bits. A NaN input stays NaN through the product.
  Ints power = __builtin_convertvector(n == n ? n : Vec{}, Ints) + 127;
  Vec result = p * (Vec)(power << 23);
  return x < min_x ? Vec{} : result;
#endif
}

// 2^x for x <= 0, with a relative error of 2^-18; 0 below -125.
inline Vec vec_exp2(Vec x) {
#if defined(__AVX512F__)
  Vec n = (x + 0x1.8p23f) - 0x1.8p23f, r = x - n;
  Vec p = broadcast(1.3333558e-3f);
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  __mmask16 mask = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(mask, (__m512)p, (__m512)n);
#else
  return vec_exp(x * 0.693147181f);
#endif
}

// tanh(x) from the exponential of |x|. Small arguments use the series, because the formula would
// cancel.
inline Vec vec_tanh(Vec x) {
  Vec size = x < 0 ? -x : x, capped = size > 10.0f ? broadcast(10.0f) : size;
  Vec t = 1.0f - 2.0f / (vec_exp(2.0f * capped) + 1.0f);
  Vec s = size * size;
  Vec near = size * (1.0f + s * (-1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315))));
  t = size < 0.15f ? near : t;
  return x != x ? x : (x < 0 ? -t : t);
}

// 1 / x for finite x >= 1, to a unit in the last place.
inline Vec vec_reciprocal(Vec x) {
#if defined(__AVX512F__)
  Vec y = (Vec)_mm512_rcp14_ps((__m512)x);
  return y + y * (1.0f - x * y);
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + e^-x)
inline Vec vec_sigmoid(Vec x) {
  Vec small = vec_exp(x < 0 ? x : -x);
  return (x < 0 ? small : 1.0f + Vec{}) * vec_reciprocal(1.0f + small);
}

// GELU with the error function: x times the normal distribution function at x. The complementary
// error function is `erfcc` of Numerical Recipes, with a relative error of 1.2e-7.
inline Vec vec_gelu(Vec x) {
  Vec z = (x < 0 ? -x : x) * 0.707106781f, t = vec_reciprocal(1.0f + 0.5f * z);
  Vec p = broadcast(0.17087277f);
  constexpr float kCoefficients[] = {-0.82215223f, 1.48851587f,  -1.13520398f,
                                     0.27886807f,  -0.18628806f, 0.09678418f,
                                     0.37409196f,  1.00002368f,  -1.26551223f};
  ED_UNROLL
  for (int i = 0; i < 9; ++i) p = p * t + kCoefficients[i];
  Vec above = 0.5f * t * vec_exp(p - z * z);  // the probability above |x|
  return x * (x < 0 ? above : 1.0f - above);
}

inline Vec apply_activation(Activation act, Vec x) {
  switch (act) {
    case Activation::kSilu:
      return x * vec_sigmoid(x);
    case Activation::kGeluTanh:
      return x * vec_sigmoid(1.595769122f * x * (1.0f + 0.044715f * x * x));
    case Activation::kGelu:
      return vec_gelu(x);
    case Activation::kQuickGelu:
      return x * vec_sigmoid(1.702f * x);
    case Activation::kRelu:
      return x < 0 ? Vec{} : x;
    case Activation::kNone:
      break;
  }
  return x;
}

}  // namespace
}  // namespace ed
