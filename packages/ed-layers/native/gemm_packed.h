// Products with packed float32 and bfloat16 weights, for one level. The matrix has the order of the
// multiplication, so memory is read sequentially and nothing is packed at run time.
//
// A panel has kTile outputs and all inputs in words of four bytes: a float32, or a pair of bfloat16
// inputs. Every sum has the order of `gemm_blocked` of gemm_blocked.h.
#pragma once

#include "gemm.h"

namespace ed {
namespace {

// sums [R, P, kTile] = R rows of x times P panels, V vectors of each. Several streams use more
// memory bandwidth than one. `widens_pairs`: x has single inputs, and the words have pairs.
template <typename Words, int R, int P, int V, bool widens_pairs>
void multiply_packed_panels(const Gemm& p, const typename Words::Element* x, int64_t column,
                            float* sums) {
  constexpr int64_t word_inputs = (widens_pairs ? 8 : 4) / sizeof(*x);
  constexpr int64_t kPrefetch = 2048 / sizeof(float);  // prefetch distance of a stream, in words
  const int64_t panel = p.inputs / word_inputs * kTile;
  const float* w = locate_words(p, 0, column);
  Vec acc[R][P][V] = {};
  for (int64_t i = 0; i < p.inputs; i += word_inputs, w += kTile) {
    Vec even[R], odd[R];
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      float numbers[2];
      std::memcpy(numbers, x + r * p.inputs + i, widens_pairs ? 8 : 4);
      even[r] = broadcast_bits(numbers[0]), odd[r] = broadcast_bits(numbers[widens_pairs]);
    }
    ED_UNROLL
    for (int q = 0; q < P; ++q)
      ED_UNROLL
      for (int c = 0; c < V; ++c) {
        const float* from = w + q * panel + c * kLanes;
        if (c * kLanes % 16 == 0) prefetch(from + kPrefetch);
        const Vec words = load(from);
        ED_UNROLL
        for (int r = 0; r < R; ++r) {
          acc[r][q][c] =
              Words::add(acc[r][q][c], even[r], widens_pairs ? get_even_half(words) : words);
          if (widens_pairs) acc[r][q][c] = Words::add(acc[r][q][c], odd[r], get_odd_half(words));
        }
      }
  }
  ED_UNROLL
  for (int r = 0; r < R; ++r)
    ED_UNROLL
    for (int q = 0; q < P; ++q)
      ED_UNROLL
      for (int c = 0; c < V; ++c) store(sums + (r * P + q) * kTile + c * kLanes, acc[r][q][c]);
}

// Rows of x of the streaming kernel: their sums fill the registers.
constexpr int kRunRows = kLanes == 16 ? 4 : 1;

// R rows of x with the outputs [first, last), a multiple of half a panel.
template <int R, typename Words, bool widens_pairs>
void gemv_packed(const Gemm& p, const typename Words::Element* x, int64_t first, int64_t last) {
  constexpr int kAll = kTile / kLanes, kPanels = kLanes == 16 ? 4 / R : 1;
  alignas(64) float sums[R * kPanels * kTile];
  auto multiply_columns = [&](auto panels, auto vectors) {
    constexpr int P = decltype(panels)::value, V = decltype(vectors)::value;
    constexpr int64_t count = (P - 1) * kTile + V * kLanes;
    multiply_packed_panels<Words, R, P, V, widens_pairs>(p, x, first, sums);
    for (int r = 0; r < R; ++r) write_outputs(p, r, first, sums + r * P * kTile, count);
    first += count;
  };
  while (first < last) {
    const int64_t panels = first % kTile ? 0 : (last - first) / kTile;
    if (panels >= kPanels)
      multiply_columns(Constant<kPanels>(), Constant<kAll>());
    else if (panels > 0)
      multiply_columns(Constant<1>(), Constant<kAll>());
    else
      multiply_columns(Constant<1>(), Constant<kAll / 2>());
  }
}

// All rows of x with the outputs [first, last), by parts of panels that stay in the first-level
// cache. The next part is prefetched while all rows are multiplied by the current one.
template <typename Words>
void gemm_packed_small(const Gemm& p, const typename Words::Element* x, int64_t first,
                       int64_t last) {
  constexpr int64_t word_inputs = 4 / sizeof(*x), max_inputs = kSmallPanelWords * word_inputs;
  const int64_t row_block_count = (p.rows + kRows - 1) / kRows;
  Scratch sums(p.rows * kTile), panel(kSmallPanelWords * kTile);
  for (int64_t end; first < last; first = end) {
    end = min_int(last, (first / kTile + 1) * kTile);
    const int64_t count = end - first;
    for (int64_t i = 0, k; i < p.inputs; i += k) {
      k = min_int(max_inputs, p.inputs - i);
      const float* w = get_panel<Words>(p, i, k, first, count, panel.data);
      const int64_t next_words = k / get_word_inputs(p);
      int64_t part = 0, fetched = 0;
      for_row_blocks<kRows>(p.rows, [&](auto r, int64_t row) {
        const int64_t to = next_words * ++part / row_block_count;
        const auto* next =
            reinterpret_cast<const char*>(locate_words(p, i + k, first) + fetched * kTile);
        const TilePrefetch<kTile * sizeof(float) / 64> fetch{next, kTile * sizeof(float),
                                                             to - fetched};
        for_column_blocks(count, [&](auto v, int64_t c) {
          multiply_panel<Words, decltype(r)::value, decltype(v)::value>(
              x + row * p.inputs + i, p.inputs, w + c, kTile, k, sums.data + row * kTile + c, kTile,
              i == 0, fetch);
        });
        fetched = to;
      });
    }
    for (int64_t row = 0; row < p.rows; ++row)
      write_outputs(p, row, first, sums.data + row * kTile, count);
  }
}

template <typename Words>
void gemm_packed_as(const Gemm& p, const typename Words::Element* x, int64_t first, int64_t last) {
  if (p.rows >= get_large_gemm_rows(p)) return gemm_large_panels<Words, false>(p, x, first, last);
  if (p.rows > kRunRows) return gemm_packed_small<Words>(p, x, first, last);
  for_row_blocks<kRunRows>(p.rows, [&](auto r, int64_t) {
    constexpr int R = decltype(r)::value;
    if (sizeof(*x) == 4 && p.format == Format::kBfloat16)
      gemv_packed<R, Words, sizeof(*x) == 4>(p, x, first, last);
    else
      gemv_packed<R, Words, false>(p, x, first, last);
  });
}

// The outputs [first, last) of packed weights.
void gemm_packed(const Gemm& p, int64_t first, int64_t last) {
#if defined(__AVX512BF16__)
  if (p.x_is_bfloat16 && p.format == Format::kBfloat16) {
    auto* x = static_cast<const uint16_t*>(p.x);
#if defined(__AMX_BF16__)
    if (p.rows >= kTileRows && !p.fixed_order)
      return gemm_large_panels<AmxWords>(p, x, first, last);
#endif
    return gemm_packed_as<Bf16PairWords>(p, x, first, last);
  }
#endif
  Float32Rows wide(p);
  gemm_packed_as<Float32Words>(p, wide.x, first, last);
}

}  // namespace
}  // namespace ed
