// Product of few rows with an unpacked float32 or bfloat16 matrix [inputs, outputs], for one level.
//
// Memory bandwidth is the limit, and long sequential reads are the fastest. So the kernel reads
// several inputs together, each as a separate stream, and keeps the sums in the first-level cache.
// Every sum has the order of `gemm_blocked` of gemm_blocked.h.
#pragma once

#include "gemm_packed.h"

namespace ed {
namespace {

// sums [R, width] += x [R, inputs] * w, `count` columns from `first` on, a multiple of kLanes.
template <int R, typename T>
void gemv(const Gemm& p, const float* x, int64_t first, int64_t count, float* sums, int64_t width) {
  auto multiply_inputs = [&](auto inputs, int64_t i) __attribute__((always_inline)) {
    constexpr int kInputs = decltype(inputs)::value;
    const T* w = static_cast<const T*>(p.w) + i * p.outputs + first;
    const int64_t ahead = get_prefetch_rows(kInputs, sizeof(T) * count) * p.outputs;
    for (int64_t c = 0; c < count; c += kLanes) {
      Vec acc[R];
      ED_UNROLL
      for (int r = 0; r < R; ++r) acc[r] = load(sums + r * width + c);
      ED_UNROLL
      for (int j = 0; j < kInputs; ++j) {
        const T* from = w + j * p.outputs + c;
        Vec row = load_elements(from);
        prefetch(from + ahead);
        ED_UNROLL
        for (int r = 0; r < R; ++r) acc[r] += broadcast(x[r * p.inputs + i + j]) * row;
      }
      ED_UNROLL
      for (int r = 0; r < R; ++r) store(sums + r * width + c, acc[r]);
    }
  };
  int64_t i = 0;
  for (; i + 16 <= p.inputs; i += 16) multiply_inputs(Constant<16>(), i);
  for (; i < p.inputs; ++i) multiply_inputs(Constant<1>(), i);
}

#if defined(__AVX512BF16__)
// The same for any count of bfloat16 numbers; the kernel interleaves pairs of inputs.
template <int R>
void gemv_bf16(const Gemm& p, int64_t row, int64_t first, int64_t count, float* sums,
               int64_t width) {
  const __m512i low = get_pair_order();
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  auto* x = static_cast<const uint16_t*>(p.x) + row * p.inputs;
  auto multiply_inputs = [&](auto pairs, int64_t i, bool odd) __attribute__((always_inline)) {
    auto* w = static_cast<const uint16_t*>(p.w) + i * p.outputs + first;
    const int64_t ahead = get_prefetch_rows(2 * decltype(pairs)::value, 2 * count) * p.outputs;
    for (int64_t c = 0; c < count; c += 32) {
      __mmask32 mask = count - c >= 32 ? ~0u : (1u << (count - c)) - 1;
      __m512 acc[R][2];
      ED_UNROLL
      for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half)
          acc[r][half] = _mm512_loadu_ps(sums + r * width + c + half * kLanes);
      ED_UNROLL
      for (int j = 0; j < decltype(pairs)::value; ++j) {
        const uint16_t* from = w + 2 * j * p.outputs + c;
        __m512i even = _mm512_maskz_loadu_epi16(mask, from);
        __m512i next = _mm512_maskz_loadu_epi16(odd ? 0 : mask, from + (odd ? 0 : p.outputs));
        prefetch(from + ahead), prefetch(from + ahead + p.outputs);
        __m512bh low_pairs = (__m512bh)_mm512_permutex2var_epi16(even, low, next);
        __m512bh high_pairs = (__m512bh)_mm512_permutex2var_epi16(even, high, next);
        ED_UNROLL
        for (int r = 0; r < R; ++r) {
          int32_t pair = 0;
          std::memcpy(&pair, x + r * p.inputs + i + 2 * j, odd ? 2 : 4);
          __m512bh x_pair = (__m512bh)_mm512_set1_epi32(pair);
          acc[r][0] = _mm512_dpbf16_ps(acc[r][0], x_pair, low_pairs);
          acc[r][1] = _mm512_dpbf16_ps(acc[r][1], x_pair, high_pairs);
        }
      }
      ED_UNROLL
      for (int r = 0; r < R; ++r)
        for (int half = 0; half < 2; ++half)
          _mm512_storeu_ps(sums + r * width + c + half * kLanes, acc[r][half]);
    }
  };
  int64_t i = 0;
  constexpr int kPairs = R == 1 ? 4 : 8;
  for (; i + 2 * kPairs <= p.inputs; i += 2 * kPairs) multiply_inputs(Constant<kPairs>(), i, false);
  for (; i + 2 <= p.inputs; i += 2) multiply_inputs(Constant<1>(), i, false);
  if (i < p.inputs) multiply_inputs(Constant<1>(), i, true);
}
#endif

// Compute outputs from `first` on as far as this kernel supports them; return the next output.
int64_t run_gemv(const Gemm& p, int64_t first, int64_t last) {
  bool wide = p.format == Format::kFloat32;
#if defined(__AVX512BF16__)
  bool pairs = !wide && p.x_is_bfloat16;
#else
  bool pairs = false;
#endif
  if (p.rows > kGemvRows || !(wide || p.format == Format::kBfloat16)) return first;
  int64_t width = (last - first + kTile - 1) / kTile * kTile;
  int64_t count = pairs ? last - first : (last - first) / kLanes * kLanes;
  if (count == 0) return first;
  Scratch sums(p.rows * width);
  std::memset(sums.data, 0, p.rows * width * sizeof(float));
#if defined(__AVX512BF16__)
  if (pairs)
    for_row_blocks<kGemvRows>(p.rows, [&](auto r, int64_t row) {
      gemv_bf16<decltype(r)::value>(p, row, first, count, sums.data + row * width, width);
    });
#endif
  if (!pairs)
    for_row_blocks<kGemvRows>(p.rows, [&](auto r, int64_t) {
      constexpr int R = decltype(r)::value;
      Float32Rows rows(p);
      if (wide)
        gemv<R, float>(p, rows.x, first, count, sums.data, width);
      else
        gemv<R, uint16_t>(p, rows.x, first, count, sums.data, width);
    });
  for (int64_t r = 0; r < p.rows; ++r) write_outputs(p, r, first, sums.data + r * width, count);
  return first + count;
}

void gemm(const Gemm& p, int64_t first, int64_t last) {
  if (p.packed) return gemm_packed(p, first, last);
  if (try_gemm_panels(p, first, last)) return;
  first = run_gemv(p, first, last);
  if (first < last) gemm_blocked(p, first, last);
}

}  // namespace
}  // namespace ed
