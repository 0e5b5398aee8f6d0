// Vectors of the width of a level. Every function is internal to its translation unit, because the
// source is compiled for several levels.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "gemm_args.h"
#include "scratch.h"

// Unrolls loops over accumulators. The compiler would keep the accumulators of a loop in memory.
#define ED_UNROLL _Pragma("GCC unroll 16")
#define ED_INLINE inline __attribute__((always_inline))
// For a kernel with many callers and much work in each call: copies in every caller would only make
// the build slower.
#define ED_NOINLINE __attribute__((noinline))

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Ints load_ints(const void* from) {
  Ints v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

inline Vec broadcast(float x) { return x - Vec{}; }

// The same without arithmetic, for words that are not float32 numbers.
inline Vec broadcast_bits(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return (Vec)(bits - Ints{});
}

inline Vec convert_to_float(Ints v) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps((__m512i)v);
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps((__m256i)v);
#else
  return __builtin_convertvector(v, Vec);
#endif
}

// Convert floats without fractions to integers.
inline Ints convert_to_int(Vec v) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)v);
#else
  return __builtin_convertvector(v, Ints);
#endif
}

// Store integers of 8 bits as bytes.
inline void store_bytes(Ints v, int8_t* to) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
  __m256i values = (__m256i)v;
  __m128i low = _mm256_castsi256_si128(values), high = _mm256_extracti128_si256(values, 1);
  __m128i words = _mm_packs_epi32(low, high);
  _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(words, words));
#else
  for (int l = 0; l < kLanes; ++l) to[l] = static_cast<int8_t>(v[l]);
#endif
}

// The same, with separate arrays for even and odd lanes.
inline void store_even_odd_bytes(Ints v, int8_t* even, int8_t* odd) {
#if defined(__AVX512F__)
  const __m512i high = _mm512_srli_epi64((__m512i)v, 32);
  _mm_storel_epi64((__m128i*)even, _mm512_cvtepi64_epi8((__m512i)v));
  _mm_storel_epi64((__m128i*)odd, _mm512_cvtepi64_epi8(high));
#else
  for (int l = 0; l < kLanes; l += 2) {
    even[l / 2] = static_cast<int8_t>(v[l]);
    odd[l / 2] = static_cast<int8_t>(v[l + 1]);
  }
#endif
}

inline float cast_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float widen(uint16_t bfloat16) { return cast_bits(uint32_t{bfloat16} << 16); }

// Round to the nearest bfloat16, ties to even; NaN stays NaN.
inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? static_cast<uint16_t>(rounded) : static_cast<uint16_t>((bits >> 16) | 0x40);
}

// Convert a float16.
inline float convert_float16(uint16_t half) {
  const uint32_t size = half & 0x7fff;
  float x = cast_bits((size << 13) + (112u << 23));
  if (size < 0x400) x = size * 0x1p-24f;
  if (size >= 0x7c00) x = cast_bits(0x7f800000 | size << 13);
  return half & 0x8000 ? -x : x;
}

// Convert a float8_e4m3fn.
inline float convert_fp8(uint8_t code) {
  int size = code & 127;
  float x = size < 8 ? size * 0x1p-9f : cast_bits((size << 20) + (120u << 23));
  x = size == 127 ? cast_bits(0x7fc00000) : x;
  return code & 128 ? -x : x;
}

// Load kLanes consecutive numbers of each type as float32.
inline Vec load_elements(const float* from) { return load(from); }

inline Vec load_elements(const uint16_t* bfloat16) {
#if defined(__AVX512F__)
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bfloat16));
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif defined(__AVX2__)
  __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bfloat16));
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
  Vec v;
  for (int l = 0; l < kLanes; ++l) v[l] = widen(bfloat16[l]);
  return v;
#endif
}

inline Vec load_elements(const int8_t* from) {
#if defined(__AVX512F__)
  return convert_to_float((Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return convert_to_float((Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  Vec v;
  for (int l = 0; l < kLanes; ++l) v[l] = from[l];
  return v;
#endif
}

inline Ints load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  Ints v;
  for (int l = 0; l < kLanes; ++l) v[l] = from[l];
  return v;
#endif
}

inline Vec load_float16(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  Vec v;
  for (int l = 0; l < kLanes; ++l) v[l] = convert_float16(from[l]);
  return v;
#endif
}

inline Vec load_fp8(const uint8_t* from) {
#if defined(__AVX512F__)
  __m512i code = (__m512i)load_bytes(from), size = _mm512_and_si512(code, _mm512_set1_epi32(127));
  // The bits of a float16 with an exponent that is too small by 8. This also covers subnormal
  // numbers.
  __m512i half = _mm512_slli_epi32(size, 7);
  __m512 number = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(half)), _mm512_set1_ps(256));
  __mmask16 none = _mm512_cmpeq_epi32_mask(size, _mm512_set1_epi32(127));
  number = _mm512_mask_mov_ps(number, none, _mm512_set1_ps(__builtin_nanf("")));
  __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(code, 7), 31);
  return (Vec)_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(number), sign));
#else
  Vec v;
  for (int l = 0; l < kLanes; ++l) v[l] = convert_fp8(from[l]);
  return v;
#endif
}

// Store kLanes bfloat16 numbers, rounded as by `narrow`.
inline void store_bfloat16(uint16_t* to, Vec v) {
  Ints bits = (Ints)v, rounded = bits + 0x7fff + ((bits >> 16) & 1);
  rounded = v == v ? rounded : bits | 0x400000;
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded, 16)));
#elif defined(__AVX2__)
  __m256i halves = _mm256_srli_epi32((__m256i)rounded, 16);
  halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 8);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(halves));
#else
  for (int l = 0; l < kLanes; ++l)
    to[l] = static_cast<uint16_t>(static_cast<uint32_t>(rounded[l]) >> 16);
#endif
}

// Load min(kLanes, count) numbers of x; other lanes are zeros.
template <typename Element>
inline Vec load_partial(const Element* x, int64_t count) {
  if (count >= kLanes) return load_elements(x);
  Element some[kLanes] = {};
  std::memcpy(some, x, count * sizeof(Element));
  return load_elements(some);
}

// Return table[code]; only the lowest four bits of a code count.
inline Vec look_up(const float* table, Ints codes) {
#if defined(__AVX512F__)
  return (Vec)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  __m256i at = (__m256i)codes;
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), at);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), at);
  return (Vec)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
#else
  Vec v;
  for (int l = 0; l < kLanes; ++l) v[l] = table[codes[l] & 15];
  return v;
#endif
}

inline float reduce_sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int l = 0; l < n; ++l) v[l] += v[l + n];
  return v[0];
#endif
}

inline int32_t reduce_sum(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += v[l];
  return sum;
#endif
}

inline int32_t reduce_max(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t top = v[0];
  for (int l = 1; l < kLanes; ++l) top = v[l] > top ? v[l] : top;
  return top;
#endif
}

inline float reduce_max(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float top = v[0];
  for (int l = 1; l < kLanes; ++l) top = v[l] > top ? v[l] : top;
  return top;
#endif
}

// Reduce Q vectors, each as `reduce_sum` does. One call for several vectors needs a third of the
// instructions.
template <int Q>
ED_INLINE void reduce_sums(const Vec* v, float* to) {
#if defined(__AVX512F__)
  if constexpr (Q == 4 || Q == 8) {
    __m512 half[Q / 2], quarter[Q / 4];
    ED_UNROLL
    for (int i = 0; i < Q / 2; ++i) {
      __m512 a = (__m512)v[2 * i], b = (__m512)v[2 * i + 1];
      half[i] = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
    }
    ED_UNROLL
    for (int i = 0; i < Q / 4; ++i) {
      __m512 a = half[2 * i], b = half[2 * i + 1];
      quarter[i] = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
    }
    const __m512 a = quarter[0], b = quarter[Q / 4 - 1];
    __m512 pairs = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
    // Each group of four lanes: sum i, and sum 4 + i of eight.
    __m512 x_bytes = _mm512_shuffle_ps(pairs, pairs, 0x88) + _mm512_shuffle_ps(pairs, pairs, 0xdd);
    __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    __m512 ordered_sums = _mm512_permutexvar_ps(order, x_bytes);
    if constexpr (Q == 8)
      _mm256_storeu_ps(to, _mm512_castps512_ps256(ordered_sums));
    else
      _mm_storeu_ps(to, _mm512_castps512_ps128(ordered_sums));
    return;
  }
#endif
  for (int q = 0; q < Q; ++q) to[q] = reduce_sum(v[q]);
}

// Lanes: sum += the four signed bytes of w times the four signed bytes of x. kBias was added to w
// if the instruction needs unsigned bytes.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr int kBias = 128;
#else
constexpr int kBias = 0;
#endif

ED_INLINE Ints dot_bytes(Ints sum, Ints w, Ints x) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // Even and odd bytes as 16 bits; the instruction adds pairs of 16-bit products.
  __m256i v = (__m256i)w, x_bytes = (__m256i)x;
  __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8),
                                   _mm256_srai_epi16(_mm256_slli_epi16(x_bytes, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(v, 8), _mm256_srai_epi16(x_bytes, 8));
  return sum + (Ints)_mm256_add_epi32(even, odd);
#elif defined(__AVX512BW__)
  __m512i v = (__m512i)w, x_bytes = (__m512i)x;
  __m512i even = _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8),
                                   _mm512_srai_epi16(_mm512_slli_epi16(x_bytes, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srai_epi16(v, 8), _mm512_srai_epi16(x_bytes, 8));
  return sum + (Ints)_mm512_add_epi32(even, odd);
#elif defined(__SSE2__)
  // The same as with AVX2.
  __m128i v = (__m128i)w, x_bytes = (__m128i)x;
  __m128i even = _mm_madd_epi16(_mm_srai_epi16(_mm_slli_epi16(v, 8), 8),
                                _mm_srai_epi16(_mm_slli_epi16(x_bytes, 8), 8));
  __m128i odd = _mm_madd_epi16(_mm_srai_epi16(v, 8), _mm_srai_epi16(x_bytes, 8));
  return sum + (Ints)_mm_add_epi32(even, odd);
#else
  for (int byte = 0; byte < 32; byte += 8)
    sum += ((w << (24 - byte)) >> 24) * ((x << (24 - byte)) >> 24);
  return sum;
#endif
}

// The same x for all lanes.
ED_INLINE Ints dot_bytes(Ints sum, Ints w, int32_t x) { return dot_bytes(sum, w, x - Ints{}); }

// The linker would share templates of the standard library between levels, and a processor may lack
// the instructions of the shared copy. So the kernels use these functions instead.
constexpr int64_t min_int(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max_int(int64_t a, int64_t b) { return a > b ? a : b; }

// Prefetch into the second-level cache, because the first-level cache supports few outstanding
// misses.
inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

template <int R>
struct Constant {
  static constexpr int value = R;
};

// Interleave half `half` of the lanes of two vectors: a0 b0 a1 b1 ..
template <typename Half>
inline Vec interleave_lanes(Vec a, Vec b, Half) {
  constexpr int h = Half::value * kLanes / 2, o = kLanes;
#if defined(__AVX512F__)
  return __builtin_shufflevector(a, b, h, h + o, h + 1, h + 1 + o, h + 2, h + 2 + o, h + 3,
                                 h + 3 + o, h + 4, h + 4 + o, h + 5, h + 5 + o, h + 6, h + 6 + o,
                                 h + 7, h + 7 + o);
#elif defined(__AVX2__)
  return __builtin_shufflevector(a, b, h, h + o, h + 1, h + 1 + o, h + 2, h + 2 + o, h + 3,
                                 h + 3 + o);
#else
  return __builtin_shufflevector(a, b, h, h + o, h + 1, h + 1 + o);
#endif
}

// Call `f(Constant<R>, first row)` for blocks of at most `most` rows, as equal as possible.
template <int R, typename F>
void run_block(int64_t count, int64_t row, const F& f) {
  if constexpr (R > 0) {
    if (count == R) return f(Constant<R>(), row);
    run_block<R - 1>(count, row, f);
  }
}

template <int most, typename F>
void for_row_blocks(int64_t rows, const F& f) {
  int64_t blocks = (rows + most - 1) / most;
  for (int64_t b = 0; b < blocks; ++b) {
    int64_t row = rows * b / blocks;
    run_block<most>(rows * (b + 1) / blocks - row, row, f);
  }
}

}  // namespace
