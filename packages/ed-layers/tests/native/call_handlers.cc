// A program that calls every handler like XLA, with valid and damaged buffers, for sanitizers.
// `native_programs.py` compiles it. ED_LAYERS_NATIVE_LEVEL selects the level.
#include <cmath>
#include <cstdio>
#include <random>

#include "random_panels.h"
#include "handlers.h"
#include "fake_runtime.h"

extern "C" {
XLA_FFI_Error* ed_product(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_product_of_codes(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_product_of_code_panels(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_take(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_first_largest(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_gradients(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_attention(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_attention_back(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_attention_cached(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_attention_paged(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_put(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_rotary(XLA_FFI_CallFrame*);
XLA_FFI_Error* ed_recurrence(XLA_FFI_CallFrame*);
}

namespace {

using ed::Array, ed::HandlerCall;
using Sizes = std::vector<int64_t>;

std::mt19937 bits(0);

int64_t draw(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(bits() % static_cast<uint32_t>(high - low + 1));
}

// Fill with random numbers; integers are less than `below`.
void fill(Array& array, int64_t below) {
  int64_t count = array.bytes / std::max<int64_t>(1, ffi::ByteWidth(array.dtype));
  for (int64_t i = 0; i < count; ++i) switch (array.dtype) {
      case ffi::F32:
        array.as<float>()[i] = static_cast<float>(draw(-1000, 1000)) / 500;
        break;
      case ffi::BF16:
        array.as<uint16_t>()[i] = static_cast<uint16_t>(draw(0x3e00, 0x4000));
        break;
      case ffi::F16:
        array.as<uint16_t>()[i] = static_cast<uint16_t>(draw(0x3000, 0x4000));
        break;
      case ffi::S32:
        array.as<int32_t>()[i] = static_cast<int32_t>(draw(0, below - 1));
        break;
      default:
        array.as<uint8_t>()[i] = static_cast<uint8_t>(draw(0, 100));
        break;
    }
}

Array draw_array(ffi::DataType dtype, Sizes sizes, int64_t below = 2) {
  Array array(dtype, std::move(sizes));
  fill(array, below);
  return array;
}

Array make_int32(std::vector<int32_t> numbers) {
  Array array(ffi::S32, {static_cast<int64_t>(numbers.size())});
  std::copy(numbers.begin(), numbers.end(), array.as<int32_t>());
  return array;
}

ffi::DataType draw_dtype() { return draw(0, 1) ? ffi::F32 : ffi::BF16; }

// A bias [o] for each matrix or for none, an activation, and whether the call is gated.
void add_epilogue(HandlerCall& call, int64_t matrices, ffi::DataType dtype, int64_t o, bool gated) {
  bool biased = draw(0, 1);
  for (int64_t m = 0; biased && m < matrices; ++m) call.arguments.push_back(draw_array(dtype, {o}));
  call.attributes.emplace_back("act", int64_t{draw(0, 5)});
  call.attributes.emplace_back("biased", biased);
  call.attributes.emplace_back("gated", gated);
}

HandlerCall make_product() {
  int64_t n = draw(0, 3) ? draw(1, 20) : draw(60, 140), i = draw(1, 90), o = draw(1, 150);
  bool transposed = draw(0, 1), gated = draw(0, 1);
  const int64_t panels = std::max<int64_t>(0, draw(-3, 3));
  if (panels) i = 2 * draw(1, 45), o = panels * ed::kTile, transposed = false;
  ffi::DataType x_dtype = draw_dtype(), dtype = draw(0, 1) ? x_dtype : ffi::F32;
  HandlerCall call{ed_product, {draw_array(x_dtype, {n, i})}, {Array(dtype, {n, o})}, {}};
  for (int64_t m = 0; m < (gated ? 2 : 1); ++m) {
    const ffi::DataType w_dtype = draw_dtype();
    const Sizes sizes =
        w_dtype == ffi::F32 ? Sizes{panels, i, ed::kTile} : Sizes{panels, i / 2, ed::kTile, 2};
    call.arguments.push_back(draw_array(w_dtype, panels       ? sizes
                                                 : transposed ? Sizes{o, i}
                                                              : Sizes{i, o}));
  }
  add_epilogue(call, gated ? 2 : 1, dtype, o, gated);
  call.attributes.emplace_back("transposed", transposed);
  call.attributes.emplace_back("fixed", bool(draw(0, 1)));
  return call;
}

HandlerCall make_gradients() {
  int64_t n = draw(1, 90), i = draw(1, 150), count = draw(1, 3);
  ffi::DataType dtype = draw_dtype();
  HandlerCall call{ed_gradients, {draw_array(dtype, {n, i})}, {}, {}};
  for (int64_t m = 0; m < count; ++m) {
    int64_t o = draw(1, 150);
    call.arguments.push_back(draw_array(dtype, {n, o}));
    call.results.emplace_back(ffi::F32, Sizes{i, o});
  }
  if (dtype == ffi::BF16) call.results.emplace_back(ffi::F32, Sizes{n, i});
  return call;
}

HandlerCall make_code_product() {
  int64_t n = draw(1, 20), groups = draw(1, 4), group = 2 * draw(1, 20), o = draw(1, 150);
  bool transposed = draw(0, 1), four_bits = draw(0, 1), offset = draw(0, 1), int8_rows = draw(0, 1);
  int64_t i = groups * group;
  auto order_sizes = [&](int64_t a, int64_t b) { return transposed ? Sizes{b, a} : Sizes{a, b}; };
  HandlerCall call{
      ed_product_of_codes, {draw_array(ffi::F32, {n, i})}, {Array(ffi::F32, {n, o})}, {}};
  call.arguments.push_back(
      draw_array(four_bits ? ffi::U8 : ffi::S8, order_sizes(four_bits ? i / 2 : i, o)));
  call.arguments.push_back(draw_array(draw(0, 1) ? ffi::F32 : ffi::F16, order_sizes(groups, o)));
  call.arguments.push_back(draw_array(ffi::F32, offset ? order_sizes(groups, o) : Sizes{0, 0}));
  call.arguments.push_back(draw_array(ffi::F32, {four_bits ? 16 : 0}));
  add_epilogue(call, 1, ffi::F32, o, false);
  call.attributes.emplace_back("transposed", transposed);
  call.attributes.emplace_back("whole", int8_rows);
  return call;
}

// Draw a format of packed codes, and add the attributes of a call.
ed::Gemm draw_panel_format(HandlerCall& call) {
  ed::Gemm p{};
  const bool four_bits = draw(0, 1), wide = draw(0, 1);
  p.format = four_bits ? ed::Format::kFourBits : ed::Format::kInt8;
  p.group = (four_bits ? 8 : 4) * draw(1, 20);
  p.scale.kind = wide ? ed::ParamType::kFloat32 : ed::ParamType::kFloat16;
  if (draw(0, 1)) p.zero = {&p, draw(0, 1) ? ed::ParamType::kUint8 : ed::ParamType::kFloat32};
  call.attributes.emplace_back("bits", int64_t{four_bits ? 4 : 8});
  call.attributes.emplace_back("scale_bytes", ed::get_byte_width(p.scale.kind));
  call.attributes.emplace_back("zero_bytes",
                               p.zero.data ? ed::get_byte_width(p.zero.kind) : int64_t{0});
  return p;
}

Array draw_code_panels(const ed::Gemm& p, int64_t panels, int64_t groups) {
  Array w(ffi::U8, {panels, groups, ed::get_panel_group_bytes(p)});
  ed::fill_code_panels(p, panels * groups, w.as<uint8_t>(), draw);
  return w;
}

HandlerCall make_packed_code_product() {
  const int64_t n = draw(1, 20), panels = draw(1, 3), groups = draw(1, 4), matrices = draw(1, 2);
  HandlerCall call{ed_product_of_code_panels, {}, {}, {}};
  const ed::Gemm p = draw_panel_format(call);
  call.arguments.push_back(draw_array(ffi::F32, {n, groups * p.group}));
  for (int64_t m = 0; m < matrices; ++m) {
    call.arguments.push_back(draw_code_panels(p, panels, groups));
    call.results.emplace_back(ffi::F32, Sizes{n, panels * ed::kTile});
  }
  add_epilogue(call, matrices, ffi::F32, panels * ed::kTile, false);
  return call;
}

HandlerCall make_take() {
  const int64_t n = draw(1, 80), panels = draw(1, 3), groups = draw(1, 4);
  HandlerCall call{ed_take, {}, {}, {}};
  const ed::Gemm p = draw_panel_format(call);
  call.arguments.push_back(draw_code_panels(p, panels, groups));
  call.arguments.push_back(draw_array(ffi::S32, {n}, panels * ed::kTile));
  call.results.emplace_back(ffi::F32, Sizes{n, groups * p.group});
  return call;
}

HandlerCall make_argmax() {
  const int64_t rows = draw(1, 5), count = draw(1, 300);
  return {ed_first_largest, {draw_array(ffi::F32, {rows, count})}, {Array(ffi::S32, {rows})}, {}};
}

void add_mask(HandlerCall& call, int64_t b, int64_t s, int64_t t) {
  call.arguments.push_back(draw_array(ffi::S32, {b, s}));
  call.arguments.push_back(draw_array(ffi::S32, {b, s}, t));
  call.arguments.push_back(draw_array(ffi::S32, {b, t}));
  call.arguments.push_back(draw_array(ffi::S32, {b, t}, t));
  call.arguments.push_back(
      make_int32({int32_t(draw(0, 1) * draw(1, 80)), int32_t(draw(0, 1) * 9)}));
}

void add_scoring(HandlerCall& call, bool causal, bool forward = true) {
  if (forward) call.attributes.emplace_back("fixed", bool(draw(0, 1)));
  if (causal) call.attributes.emplace_back("causal", bool(draw(0, 1)));
  call.attributes.emplace_back("scale", 0.3f);
  call.attributes.emplace_back("soft_cap", draw(0, 1) ? 4.0f : 0.0f);
}

// Biases by distance: a table and slopes, or empty arrays. Returns the sizes of the table.
Sizes add_biases(HandlerCall& call, int64_t h) {
  Sizes table_sizes = draw(0, 1) ? Sizes{h, 2 * draw(0, 90) + 1} : Sizes{0, 0};
  call.arguments.push_back(draw_array(ffi::F32, table_sizes));
  call.arguments.push_back(draw_array(ffi::F32, {draw(0, 1) * h}));
  call.attributes.emplace_back("alibi_factor", 0.1f);
  call.attributes.emplace_back("alibi_rounded", bool(draw(0, 1)));
  return table_sizes;
}

HandlerCall make_attention() {
  int64_t b = draw(1, 2), s = draw(1, 90), t = draw(1, 90), g = draw(1, 2), h = g * draw(1, 3);
  int64_t k = draw(1, 20), d = draw(1, 20);
  bool backward = draw(0, 1);
  ffi::DataType dtype = draw_dtype();
  HandlerCall call{backward ? ed_attention_back : ed_attention, {}, {}, {}};
  Sizes q_sizes{b, s, h, k}, k_sizes{b, t, g, k}, v_sizes{b, t, g, d}, out_sizes{b, s, h, d},
      lse_sizes{b, s, h};
  for (const Sizes& sizes : {q_sizes, k_sizes, v_sizes})
    call.arguments.push_back(draw_array(dtype, sizes));
  add_mask(call, b, s, t);
  Sizes table_sizes = add_biases(call, h);
  call.arguments.push_back(draw_array(ffi::S32, {2 * draw(0, 1)}, 1000));
  call.attributes.emplace_back("dropout", 0.25f);
  call.attributes.emplace_back("drop_below", int64_t{1} << 30);
  if (backward) {
    for (int i = 0; i < 2; ++i) call.arguments.push_back(draw_array(ffi::F32, lse_sizes));
    call.arguments.push_back(draw_array(dtype, out_sizes));
    // The scores of these numbers are less than this log-sum-exp.
    for (int64_t i = 0; i < b * s * h; ++i) call.arguments[11].as<float>()[i] = 60;
    for (const Sizes& sizes : {q_sizes, k_sizes, v_sizes})
      call.results.emplace_back(ffi::F32, sizes);
    call.results.emplace_back(ffi::F32, table_sizes);
  } else {
    call.results = {Array(dtype, out_sizes), Array(ffi::F32, lse_sizes)};
  }
  add_scoring(call, true, !backward);
  return call;
}

HandlerCall make_cached_attention() {
  int64_t b = draw(1, 2), s = draw(1, 9), t = draw(1, 200), g = draw(1, 2), h = g * draw(1, 3);
  int64_t n = draw(1, 2), k = n * draw(1, 20), d = n * draw(1, 20), layers = draw(0, 3);
  bool codes = draw(0, 1);
  ffi::DataType stored = codes ? (draw(0, 1) ? ffi::S8 : ffi::F8E4M3FN) : draw_dtype();
  auto add_layers = [&](Sizes sizes) {
    if (layers) sizes.insert(sizes.begin(), layers);
    return sizes;
  };
  HandlerCall call{ed_attention_cached, {draw_array(draw_dtype(), {b, s, h, k})}, {}, {}};
  call.results.emplace_back(call.arguments[0].dtype, Sizes{b, s, h, d});
  for (int64_t dim : {k, d})
    call.arguments.push_back(draw_array(stored, add_layers({b, g, t, dim})));
  for (int i = 0; i < 2; ++i)
    call.arguments.push_back(draw_array(ffi::F32, codes ? add_layers({b, g, n, t}) : Sizes{0}));
  call.arguments.push_back(make_int32({int32_t(layers ? layers - 1 : 0)}));
  add_mask(call, b, s, t);
  call.arguments.push_back(draw_array(ffi::F32, {draw(0, 1) * h}));
  add_biases(call, h);
  add_scoring(call, true);
  return call;
}

HandlerCall make_paged_attention() {
  int64_t page_size = draw(1, 16), row_pages = draw(1, 8), rows = draw(1, 3), g = draw(1, 2);
  int64_t h = g * draw(1, 3), n = draw(1, 2), width = n * draw(1, 20), layers = draw(0, 3);
  int64_t pool = rows * row_pages, entries = draw(1, 2);
  bool codes = draw(0, 1);
  ffi::DataType stored = codes ? (draw(0, 1) ? ffi::S8 : ffi::F8E4M3FN) : draw_dtype();
  std::vector<int32_t> first{0}, lengths;
  for (int64_t row = 0; row < rows; ++row) {
    lengths.push_back(static_cast<int32_t>(draw(1, page_size * row_pages)));
    first.push_back(first.back() + static_cast<int32_t>(draw(0, lengths.back())));
  }
  auto add_layers = [&](Sizes sizes) {
    if (layers) sizes.insert(sizes.begin(), layers);
    return sizes;
  };
  int64_t tokens = first.back() + draw(0, 3);
  HandlerCall call{ed_attention_paged, {draw_array(draw_dtype(), {tokens, h, width})}, {}, {}};
  call.results.emplace_back(call.arguments[0].dtype, Sizes{tokens, h, width});
  call.arguments.push_back(draw_array(stored, add_layers({pool, page_size, g, entries, width})));
  Sizes scale_sizes = add_layers({pool, g, entries, n, page_size});
  call.arguments.push_back(draw_array(ffi::F32, codes ? scale_sizes : Sizes{0}));
  call.arguments.push_back(make_int32({int32_t(layers ? layers - 1 : 0)}));
  call.arguments.push_back(make_int32(first));
  call.arguments.push_back(make_int32(lengths));
  call.arguments.push_back(make_int32({int32_t(draw(0, rows))}));
  call.arguments.push_back(draw_array(ffi::S32, {rows, row_pages}, pool));
  call.arguments.push_back(
      make_int32({int32_t(draw(0, 1) * draw(1, 80)), int32_t(draw(0, 1) * 9)}));
  call.arguments.push_back(draw_array(ffi::F32, {draw(0, 1) * h}));
  add_biases(call, h);
  add_scoring(call, false);
  return call;
}

HandlerCall make_put() {
  int64_t a = draw(1, 4), b = draw(1, 9), width = draw(1, 9), n = draw(0, 9);
  ffi::DataType dtype = draw_dtype();
  HandlerCall call{ed_put, {draw_array(dtype, {a, b, width})}, {Array(dtype, {a, b, width})}, {}};
  if (draw(0, 1)) call.results[0].data = call.arguments[0].data;  // in place
  call.arguments.push_back(draw_array(ffi::S32, {n}, a * b + 3));
  call.arguments.push_back(draw_array(dtype, {n, width}));
  call.attributes = {{"axes", int64_t{2}}};
  return call;
}

HandlerCall make_rotary() {
  int64_t b = draw(1, 2), s = draw(1, 40), h = draw(1, 4), pairs = draw(1, 40);
  int64_t dim = 2 * pairs + draw(0, 1) * draw(0, 20);
  ffi::DataType dtype = draw_dtype();
  HandlerCall call{
      ed_rotary, {draw_array(dtype, {b, s, h, dim})}, {Array(dtype, {b, s, h, dim})}, {}};
  for (int i = 0; i < 2; ++i) call.arguments.push_back(draw_array(ffi::F32, {b, s, pairs}));
  call.attributes = {{"back", bool(draw(0, 1))}, {"neighbours", bool(draw(0, 1))}};
  return call;
}

HandlerCall make_recurrence() {
  int64_t m = draw(1, 3), r = draw(1, 4), c = draw(1, 6), g = draw(1, 2), h = g * draw(1, 3);
  int64_t k = draw(1, 20), v = draw(1, 40);
  bool keys_last = draw(0, 1), rates = keys_last && draw(0, 1), beta = !keys_last && draw(0, 1);
  int64_t decays = rates ? v : keys_last || draw(0, 1) ? 1 : k;
  Sizes state_sizes = keys_last ? Sizes{m, h, v, k} : Sizes{m, h, k, v};
  HandlerCall call{ed_recurrence, {draw_array(ffi::F32, state_sizes)}, {}, {}};
  call.arguments.push_back(draw_array(ffi::S32, {r}, m));
  call.arguments.push_back(draw_array(ffi::S32, {r, c}, 3));
  for (int64_t i = 0; i < 2; ++i) call.arguments.push_back(draw_array(ffi::F32, {r, c, g, k}));
  call.arguments.push_back(draw_array(ffi::F32, {r, c, h, v}));
  call.arguments.push_back(draw_array(ffi::F32, {r, c, h, decays}));
  call.arguments.push_back(draw_array(ffi::F32, rates ? Sizes{h, v, k} : Sizes{0, 0, 0}));
  call.arguments.push_back(draw_array(ffi::F32, beta ? Sizes{r, c, h} : Sizes{0, 0, 0}));
  // Small factors keep the states finite.
  for (int64_t at : {4, 6, 7})
    for (int64_t i = 0; i < call.arguments[at].bytes / 4; ++i)
      call.arguments[at].as<float>()[i] /= 16;
  call.results = {Array(ffi::F32, state_sizes), Array(ffi::F32, {r, c, h, v})};
  if (draw(0, 1)) call.results[0].data = call.arguments[0].data;  // in place
  call.attributes = {{"keys_last", keys_last}};
  return call;
}

bool is_finite(const HandlerCall& call) {
  for (const Array& y : call.results)
    for (int64_t i = 0; y.dtype == ffi::F32 && i < y.bytes / 4; ++i)
      if (!std::isfinite(y.as<float>()[i]) && y.as<float>()[i] != -INFINITY) return false;
  return true;
}

// Change the dtype, a size or the number of axes of one buffer.
void damage_call(HandlerCall& call) {
  int64_t count = static_cast<int64_t>(call.arguments.size());
  int64_t at = draw(0, count + static_cast<int64_t>(call.results.size()) - 1);
  Array& array = at < count ? call.arguments[at] : call.results[at - count];
  int64_t rank = static_cast<int64_t>(array.dims.size());
  if (rank == 0) array.dims = {draw(0, 3)}, rank = 1;
  int64_t axis = draw(0, rank - 1);
  int64_t size = array.dims[axis], sizes[] = {0, 1, size / 2, size + 1, 3 * size};
  ffi::DataType dtypes[] = {ffi::F32, ffi::BF16,     ffi::S8, ffi::U8,
                            ffi::S32, ffi::F8E4M3FN, ffi::S4, ffi::F16};
  switch (draw(0, 4)) {
    case 0:
      array.dtype = dtypes[draw(0, 7)];
      break;
    case 1:
      array.dims.insert(array.dims.begin() + axis, draw(0, 3));
      break;
    case 2:
      array.dims.erase(array.dims.begin() + axis);
      break;
    default:
      array.dims[axis] = sizes[draw(0, 4)];
  }
  array.allocate();
  fill(array, 4);
}

// Return whether the matrix that followed last time is prefetched once and to its end.
bool prefetches_next_matrix() {
  static ed::MatrixPrefetcher prefetcher;
  std::vector<char> first(4096), second(2048);
  int chunks = 0;
  for (int round = 0; round < 2; ++round) {
    prefetcher.record_matrix(first.data(), 4096);
    for (chunks = 0; prefetcher.prefetch_next();) ++chunks;
    prefetcher.record_matrix(second.data(), 2048);
  }
  return chunks == 2;
}

}  // namespace

int main(int count, char** words) {
  if (!prefetches_next_matrix()) {
    std::printf("the matrix that follows is not fetched\n");
    return 1;
  }
  int rounds = count > 1 ? std::atoi(words[1]) : 200, rejected = 0;
  HandlerCall (*makers[])() = {
      make_product,   make_code_product, make_packed_code_product, make_take,
      make_gradients, make_attention,    make_cached_attention,    make_paged_attention,
      make_put,       make_rotary,       make_recurrence,          make_argmax};
  for (int round = 0; round < rounds; ++round)
    for (auto maker : makers) {
      // Two threads call concurrently, like two computations of XLA.
      HandlerCall call = maker(), second = maker();
      std::string error, second_error;
      std::thread second_thread([&] { second_error = second.run(); });
      error = call.run();
      second_thread.join();
      error += second_error;
      if (!error.empty() || !is_finite(call) || !is_finite(second)) {
        std::printf("turn %d: a valid call fails: %s\n", round, error.c_str());
        return 1;
      }
      HandlerCall damaged = maker();
      for (int64_t i = draw(1, 3); i > 0; --i) damage_call(damaged);
      rejected += !damaged.run().empty();
    }
  std::printf("%s: %d damaged calls refused\n", ed::level().name, rejected);
  return 0;
}
