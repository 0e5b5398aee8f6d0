// Products of int8 rows with packed codes, for one level.
//
// A panel has kTile outputs and all inputs in the order of the multiplication. Each group of inputs
// has kTile scales, kTile zeros if the format has zeros, and the codes in quads of four bytes. A
// byte has one code of 8 bits, or two codes of four bits with the even input in the lower half. So
// the kernel reads the matrix sequentially and prefetches the next block at an even rate. Every sum
// has the order of `int8_gemm_tiles` of int8_gemm.h.
#pragma once

#include "int8_gemm.h"
#include "int8_gemm_amx.h"

namespace ed {
namespace {

// Prefetch of the next block of a panel, in equal parts for the passes over the current block.
struct BlockPrefetch {
  // Call `f(Constant<cache lines to prefetch for each quad>, first line)` for the part `pass`.
  template <typename F>
  ED_INLINE void select_part(int64_t pass, const F& f) const {
    const int64_t share = passes == 1 ? lines : passes < lines ? 2 : 1, line = pass * share;
    if (line >= lines) return f(Constant<0>(), from);
    if (share == 4) return f(Constant<4>(), from);
    if (share == 2) return f(Constant<2>(), from + line * 64);
    f(Constant<1>(), from + line * 64);
  }

  const char* from;
  int64_t lines, passes;  // cache lines of a quad: two or four
};

#if !ED_INT16_PAIRS
// Multiply a block of four-bit codes. The sums equal those of `multiply_int8_block`.
template <int R, int V, int lines>
void multiply_int4_block(const LhsBlock<R>& lhs, int64_t bytes, const uint8_t* w,
                         const float* scale, const float* zero, float* sums, int64_t sums_stride,
                         const char* next) {
  Ints acc[R][V] = {};
  for (int64_t n = 0; n < bytes / 4; ++n) {
    Ints even[V], odd[V];
    ED_UNROLL
    for (int c = 0; c < V; ++c) {
      Ints nibbles = load_ints(w + (n * kTile + c * kLanes) * 4);
      even[c] = nibbles & 0x0f0f0f0f, odd[c] = (nibbles >> 4) & 0x0f0f0f0f;
    }
    ED_UNROLL
    for (int l = 0; l < lines; ++l) prefetch(next + n * 4 * kTile + l * 64);
    ED_UNROLL
    for (int r = 0; r < R; ++r) {
      const int8_t* x = lhs.x_int8 + r * lhs.stride + 4 * n;
      int32_t x_even, x_odd;
      std::memcpy(&x_even, x, 4), std::memcpy(&x_odd, x + lhs.odd_offset, 4);
      ED_UNROLL
      for (int c = 0; c < V; ++c) {
        acc[r][c] = dot_bytes(acc[r][c], even[c], x_even);
        acc[r][c] = dot_bytes(acc[r][c], odd[c], x_odd);
      }
    }
  }
  add_block<R, V>(lhs, acc, scale, zero, sums, sums_stride);
}
#endif

// Split bytes with two codes into quads of even codes, and quads of odd codes from kBlockQuads / 2
// on.
inline void split_nibbles(const uint8_t* w, int64_t bytes, uint8_t* quads) {
  for (int64_t i = 0; i < bytes * kTile; i += kLanes * 4) {
    Ints nibbles = load_ints(w + i);
    Ints even = nibbles & 0x0f0f0f0f, odd = (nibbles >> 4) & 0x0f0f0f0f;
    std::memcpy(quads + i, &even, sizeof even);
    std::memcpy(quads + kBlockQuads / 2 * 4 * kTile + i, &odd, sizeof odd);
  }
}

// The scales and zeros of a panel's group as float32.
class PanelGroupParams {
 public:
  PanelGroupParams(const Gemm& p, const uint8_t* group)
      : scale(widen_params(p.scale.kind, group, scales_)),
        zero(p.zero.data
                 ? widen_params(p.zero.kind, group + kTile * get_byte_width(p.scale.kind), zeros_)
                 : nullptr) {}

  const float *const scale, *const zero;  // zero: null if the format has no zeros

 private:
  static const float* widen_params(ParamType kind, const uint8_t* from, float* copies) {
    if (kind == ParamType::kFloat32) return reinterpret_cast<const float*>(from);
    for (int64_t c = 0; c < kTile; c += kLanes)
      store(copies + c, kind == ParamType::kFloat16
                            ? load_float16(reinterpret_cast<const uint16_t*>(from) + c)
                            : convert_to_float(load_bytes(from + c)));
    return copies;
  }

  alignas(64) float scales_[kTile], zeros_[kTile];
};

// Products of some int8 rows of x with a panel, or with half of a panel.
class PackedInt8Gemm {
 public:
  explicit PackedInt8Gemm(const Gemm& p)
      : p_(p),
        blocks_(p),
        group_bytes_(get_panel_group_bytes(p)),
        header_(group_bytes_ - kTile * (p.group / blocks_.codes_per_byte)),
        splits_nibbles_(blocks_.codes_per_byte == 2 && (ED_INT16_PAIRS || uses_amx())),
        scratch_(splits_nibbles_ ? kBlockInputs * kTile / 4 : 0) {}

  // sums [rows, kTile] = the products of the rows from `row` on, for the outputs [first, last) of
  // the panel that starts at output `column`.
  void multiply(int64_t row, int64_t rows, int64_t column, int64_t first, int64_t last,
                float* sums) {
    std::memset(sums, 0, rows * kTile * sizeof(float));
    auto* group =
        static_cast<const uint8_t*>(p_.w) + column / kTile * blocks_.groups * group_bytes_;
    for (int64_t g = 0; g < blocks_.groups; ++g, group += group_bytes_) {
      const PanelGroupParams params(p_, group);
      for (int64_t i = 0; i < header_; i += 64) prefetch(group + group_bytes_ + i);
      const uint8_t* w = group + header_;
      for (int64_t b = 0; b < blocks_.per_group; ++b) {
        const int64_t bytes =
            min_int(kBlockInputs, p_.group - b * kBlockInputs) / blocks_.codes_per_byte;
        const uint8_t* next = w + bytes * kTile + (b + 1 < blocks_.per_group ? 0 : header_);
        const Block block{g * blocks_.per_group + b, bytes, w, next};
        multiply_block(block, params, row, rows, first, last, sums);
        w += bytes * kTile;
      }
    }
  }

 private:
  // The codes of a block of inputs, `bytes` of each output, and the codes of the next block.
  struct Block {
    int64_t number, bytes;
    const uint8_t *w, *next;
  };

  bool uses_amx() const {
#if defined(__AMX_INT8__)
    return p_.rows >= kTileRows;
#else
    return false;
#endif
  }

  void multiply_block(const Block& block, const PanelGroupParams& params, int64_t row, int64_t rows,
                      int64_t first, int64_t last, float* sums) {
    auto* quads = reinterpret_cast<uint8_t*>(scratch_.data);
    if (splits_nibbles_) split_nibbles(block.w, block.bytes, quads);
#if defined(__AMX_INT8__)
    if (uses_amx())
      return tiles_.add(p_, row, rows, block.number, splits_nibbles_ ? quads : block.w, block.bytes,
                        first, last, params.scale, params.zero, sums);
#endif
    constexpr int64_t kNarrow = kBlock < kTile / 2 ? kBlock : kTile / 2;  // outputs of half a panel
    const int64_t width = last - first, step_outputs = width < kBlock ? kNarrow : kBlock;
    const BlockPrefetch next{reinterpret_cast<const char*>(block.next + 4 * first), width * 4 / 64,
                             (rows + kRows - 1) / kRows * (width / step_outputs)};
    int64_t pass = 0;
    for_row_blocks<kRows>(rows, [&](auto r, int64_t at) {
      constexpr int R = decltype(r)::value;
      LhsBlock<R> lhs(p_, blocks_, row + at, block.number);
      for (int64_t c = first; c < last; c += step_outputs)
        next.select_part(pass++, [&](auto lines, const char* from) __attribute__((always_inline)) {
          constexpr int L = decltype(lines)::value;
          auto multiply_vectors = [&](auto vectors) __attribute__((always_inline)) {
            constexpr int V = decltype(vectors)::value;
            const float *scale = params.scale + c, *zero = params.zero ? params.zero + c : nullptr;
            float* to = sums + at * kTile + c;
#if ED_INT16_PAIRS
            if (splits_nibbles_)
              return multiply_int8_block<R, V, false, L>(lhs, 2, block.bytes, quads + 4 * c, scale,
                                                         zero, to, kTile, from);
#else
            if (blocks_.codes_per_byte == 2)
              return multiply_int4_block<R, V, L>(lhs, block.bytes, block.w + 4 * c, scale, zero, to,
                                            kTile, from);
#endif
            multiply_int8_block<R, V, true, L>(lhs, 1, block.bytes, block.w + 4 * c, scale, zero,
                                               to, kTile, from);
          };
          step_outputs == kBlock ? multiply_vectors(Constant<kVectors>())
                                 : multiply_vectors(Constant<kNarrow / kLanes>());
        });
    });
  }

  const Gemm& p_;
  const QuantBlocks blocks_;
  const int64_t group_bytes_, header_;
  const bool splits_nibbles_;  // whether four-bit codes are split before the multiplication
  Scratch scratch_;
#if defined(__AMX_INT8__)
  AmxInt8Gemm tiles_;
#endif
};

// The outputs [first, last) of packed codes, a multiple of half a panel, for int8 rows. The group
// size is a multiple of four bytes.
void int8_gemm_packed(const Gemm& p, int64_t first, int64_t last) {
  Scratch sums(min_int(p.rows, kMaxTaskRows) * kTile);
  PackedInt8Gemm panels(p);
  for (int64_t row = 0; row < p.rows; row += kMaxTaskRows) {
    const int64_t rows = min_int(kMaxTaskRows, p.rows - row);
    for (int64_t column = first, end; column < last; column = end) {
      const int64_t panel_column = column % kTile, panel = column - panel_column;
      end = min_int(last, panel + kTile);
      panels.multiply(row, rows, panel, panel_column, end - panel, sums.data);
      for (int64_t r = 0; r < rows; ++r)
        write_outputs(p, row + r, column, sums.data + r * kTile + panel_column, end - column);
    }
  }
}

// Rows [first, last) of y, float32 [.., inputs]: the outputs `at` of packed codes. An embedding
// whose table is the transpose reads its rows like this. An index beyond the outputs returns NaN.
void gather_packed_rows(const Gemm& p, const int32_t* at, int64_t first, int64_t last) {
  const int64_t group_bytes = get_panel_group_bytes(p), groups = p.inputs / p.group;
  const bool four_bits = p.format == Format::kFourBits;
  const int64_t bytes = four_bits ? p.group / 2 : p.group, header = group_bytes - kTile * bytes;
  auto* to = static_cast<float*>(p.y) + first * p.inputs;
  for (int64_t row = first; row < last; ++row) {
    const int64_t output = at[row] < 0 ? at[row] + p.outputs : at[row];
    if (output < 0 || output >= p.outputs) {
      for (int64_t i = 0; i < p.inputs; ++i) *to++ = __builtin_nanf("");
      continue;
    }
    const int64_t column = output % kTile;
    auto* group = static_cast<const uint8_t*>(p.w) + output / kTile * groups * group_bytes;
    for (int64_t g = 0; g < groups; ++g, group += group_bytes) {
      const PanelGroupParams params(p, group);
      const float scale = params.scale[column], zero = params.zero ? params.zero[column] : 0;
      const uint8_t* codes = group + header + 4 * column;
      for (int64_t i = 0; i < bytes; ++i) {
        const uint8_t byte = codes[i / 4 * 4 * kTile + i % 4];
        *to++ = ((four_bits ? byte & 15 : static_cast<int8_t>(byte)) - zero) * scale;
        if (four_bits) *to++ = ((byte >> 4) - zero) * scale;
      }
    }
  }
}

}  // namespace
}  // namespace ed
