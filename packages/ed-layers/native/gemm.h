// Product of many rows with a float32 or bfloat16 matrix, for one level.
//
// A tile of the matrix is first packed into a panel with all inputs, or as many as the second-level
// cache holds. Packing takes a hundredth of the time of a product of a hundred rows. Each block of
// rows then reads the panel with its sums in registers. Every sum has the order of `gemm_blocked`
// of gemm_blocked.h.
#pragma once

#include "gemm_small.h"
#include "amx_tiles.h"

namespace ed {
namespace {

constexpr int64_t kPanelWords =
    1 << 16;  // words of four bytes of a panel, which stays in the second-level cache

#if defined(__AMX_BF16__)
// The same for AMX: blocks of two tiles of rows. The panel is padded with zeros to full tiles of
// inputs.
struct AmxWords {
  using Element = uint16_t;
  static constexpr int64_t kBlockRows = 2 * kTileRows;
  struct Rows {
    int64_t value;
  };

  ~AmxWords() { release_tiles(); }

  static void fill(const Gemm& p, int64_t i, int64_t k, int64_t column, int64_t count,
                   float* panel) {
    Bf16PairWords::fill(p, i, k, column, count, panel);
    pad_with_zeros((k + 1) / 2, panel);
  }

  static const float* unpack_words(const Gemm&, const float* words, int64_t k, int64_t count,
                                   float* panel) {
    if (k % kTileInputs == 0) return words;
    for (int64_t word = 0; word < k / 2; ++word)
      std::memcpy(panel + word * kTile, words + word * kTile, count * sizeof(float));
    pad_with_zeros(k / 2, panel);
    return panel;
  }

  static void pad_with_zeros(int64_t words, float* panel) {
    const int64_t tile_words = kTileInputs / 2,
                  padded_words = (words + tile_words - 1) / tile_words * tile_words;
    std::memset(panel + words * kTile, 0, (padded_words - words) * kTile * sizeof(float));
  }

  template <typename F>
  void blocks(int64_t rows, const F& f) {
    for (int64_t row = 0; row < rows; row += kBlockRows) {
      const int64_t count = min_int(kBlockRows, rows - row);
      if (count != config_rows) TileConfig(count).use(), config_rows = count;
      f(Rows{count}, row);
    }
  }

  int64_t config_rows = 0;  // rows of the loaded tile configuration
};

template <bool pack_lhs>
void multiply(AmxWords::Rows rows, AmxWords&, const uint16_t* x, int64_t x_stride,
              const float* panel, int64_t inputs, int64_t outputs, float* sums, bool first) {
  multiply_tiles(x, x_stride, rows.value, panel, inputs, outputs, sums, first);
}
#endif

// sums [R, kTile] += R rows of x times a panel, or =.
template <bool pack_lhs, int R, typename Words>
void multiply(Constant<R>, Words&, const typename Words::Element* x, int64_t x_stride,
              const float* panel, int64_t inputs, int64_t outputs, float* sums, bool first) {
  auto multiply_columns = [&](auto vectors, int64_t c) __attribute__((always_inline)) {
    multiply_panel<Words, R, decltype(vectors)::value, pack_lhs>(x, x_stride, panel + c, kTile,
                                                                 inputs, sums + c, kTile, first);
  };
  // Half a panel may be beyond the end of the matrix.
  for (int64_t c = 0; c < outputs; c += kBlock)
    outputs - c > kBlock / 2 ? multiply_columns(Constant<kVectors>(), c)
                             : multiply_columns(Constant<kVectors / 2>(), c);
}

// The part of the matrix that becomes a panel: `inputs` inputs from `i` on, and `outputs` outputs
// from `column` on.
struct PanelRange {
  int64_t i, inputs, column, outputs;

  // Prefetch part `part` of `parts` of these numbers, which are strided in memory.
  void fetch(const Gemm& p, int64_t part, int64_t parts) const {
    if (p.packed) {
      const int64_t words = inputs / get_word_inputs(p);
      const float* from = locate_words(p, i, column);
      for (int64_t word = words * part / parts; word < words * (part + 1) / parts; ++word)
        for (int64_t c = 0; c < outputs; c += 16) prefetch(from + word * kTile + c);
      return;
    }
    const int64_t size = p.format == Format::kFloat32 ? 4 : 2;
    const int64_t runs = p.transposed ? outputs : inputs,
                  run_elements = p.transposed ? inputs : outputs;
    const int64_t stride = p.transposed ? p.inputs : p.outputs;
    const int64_t first = p.transposed ? column * stride + i : i * stride + column;
    for (int64_t j = runs * part / parts; j < runs * (part + 1) / parts; ++j)
      for (int64_t byte = 0; byte < run_elements * size; byte += 64)
        prefetch(static_cast<const char*>(p.w) + (first + j * stride) * size + byte);
  }
};

// All rows of x with the outputs [first, last). The next panel is prefetched during the last row
// blocks. An earlier prefetch would be displaced by the rows of x.
template <typename Words, bool pack_lhs = false>
void gemm_large_panels(const Gemm& p, const typename Words::Element* x, int64_t first,
                       int64_t last) {
  constexpr int64_t word_inputs = 4 / sizeof(*x), max_inputs = kPanelWords / kTile * word_inputs;
  const int64_t blocks = (p.inputs + max_inputs - 1) / max_inputs;
  const int64_t block = (p.inputs + blocks * 32 - 1) / (blocks * 32) * 32;
  Scratch panel(block / word_inputs * kTile), sums(p.rows * kTile);
  std::memset(panel.data, 0, block / word_inputs * kTile * sizeof(float));
  auto get_range = [&](int64_t i, int64_t column) {
    const int64_t skipped = p.packed ? column % kTile : 0;
    return PanelRange{i, min_int(block, p.inputs - i), column,
                      min_int(kTile - skipped, last - column)};
  };
  const int64_t row_step = pack_lhs ? word_inputs : p.inputs;
  const int64_t word_step = pack_lhs ? p.x_rows * word_inputs : word_inputs;
  const int64_t row_block_count = (p.rows + Words::kBlockRows - 1) / Words::kBlockRows;
  const int64_t parts = min_int(24, row_block_count);
  Words words;
  PanelRange next = get_range(0, first);
  next.fetch(p, 0, 1);
  for (bool has_next = true; has_next;) {
    const auto [i, k, column, count] = next;
    const float* panel_words = get_panel<Words>(p, i, k, column, count, panel.data);
    const bool complete = i + k == p.inputs;
    has_next = !complete || column + count < last;
    if (has_next) next = complete ? get_range(0, column + count) : get_range(i + k, column);
    int64_t part = parts - row_block_count;
    words.blocks(p.rows, [&, i = i, k = k, column = column, count = count](auto r, int64_t row) {
      if (has_next && part >= 0) next.fetch(p, part, parts);
      ++part;
      multiply<pack_lhs>(r, words, x + row * row_step + i / word_inputs * word_step,
                         pack_lhs ? word_step : row_step, panel_words, k, count,
                         sums.data + row * kTile, i == 0);
      if (!complete) return;
      for (int64_t r_out = row; r_out < row + r.value; ++r_out)
        write_outputs(p, r_out, column, sums.data + r_out * kTile, count);
    });
  }
}

// Compute the outputs if this kernel is the fastest; return whether it did.
bool try_gemm_panels(const Gemm& p, int64_t first, int64_t last) {
  if (p.inputs == 0 || !(p.format == Format::kFloat32 || p.format == Format::kBfloat16))
    return false;
  const bool few = p.rows < get_large_gemm_rows(p) && !p.x_transposed;
  if (few && (p.rows <= kGemvRows || p.transposed || p.format == Format::kFloat32)) return false;
#if defined(__AVX512BF16__)
  if (p.x_is_bfloat16 && p.format == Format::kBfloat16) {
    auto* numbers = static_cast<const uint16_t*>(p.x);
#if defined(__AMX_BF16__)
    if (p.rows >= (p.transposed ? get_large_gemm_rows(p) : kTileRows) && !p.fixed_order &&
        !p.x_transposed) {
      gemm_large_panels<AmxWords>(p, numbers, first, last);
      return true;
    }
#endif
    (few              ? gemm_small_panels<Bf16PairWords>
     : p.x_transposed ? gemm_large_panels<Bf16PairWords, true>
                      : gemm_large_panels<Bf16PairWords, false>)(p, numbers, first, last);
    return true;
  }
#endif
  if (p.x_transposed) {
    gemm_large_panels<Float32Words, true>(p, static_cast<const float*>(p.x), first, last);
  } else {
    Float32Rows wide(p);
    (few ? gemm_small_panels<Float32Words> : gemm_large_panels<Float32Words, false>)(p, wide.x,
                                                                                     first, last);
  }
  return true;
}

}  // namespace
}  // namespace ed
