// Products as XLA calls them: checks the arrays, shares out the work.
#include <vector>

#include "library.h"

namespace {

using ed::wrong;
using Vector = ffi::Buffer<ffi::F32, 1>;
using Index = ffi::Buffer<ffi::S32, 1>;

// Outputs of a task: long runs for few rows, and as many tasks as even out busy threads.
int64_t outputs_of_task(const ed::Product& p, int64_t threads) {
  int64_t tiles = (p.outputs + ed::kTile - 1) / ed::kTile;
  int64_t most = p.rows <= 8 ? 16 : p.rows <= 64 ? 4 : 2;
  int64_t share = (tiles + 2 * threads - 1) / (2 * threads);
  return std::max<int64_t>(1, std::min(most, share)) * ed::kTile;
}

// Compute a product; x rounded to 8 bits if `whole`.
ffi::Error run(ffi::ThreadPool pool, ed::Product p, bool whole = false) {
  if (p.rows == 0 || p.outputs == 0) return ffi::Error::Success();
  int64_t share = outputs_of_task(p, std::max<int64_t>(1, pool.num_threads()));
  int64_t tasks = (p.outputs + share - 1) / share;
  const ed::Level& level = ed::level();
  ed::ProductOfOutputs compute = p.transposed ? level.rows : level.columns;
  std::vector<int8_t> numbers;
  std::vector<int32_t> sums;
  std::vector<float> scales;
  if (whole) {
    ed::WholeSizes of_row = level.whole_sizes(p);
    numbers.resize(p.rows * of_row.numbers), sums.resize(p.rows * of_row.sums);
    scales.resize(p.rows * (p.inputs / p.group));
    p.numbers = numbers.data(), p.row_sums = sums.data(), p.row_scale = scales.data();
    auto round = [&](int64_t row) { level.round_row(p, row); };
    if (p.rows < 8)
      for (int64_t row = 0; row < p.rows; ++row) round(row);
    else
      ed::parallel(pool, p.rows, round);
    compute = level.whole;
  }
  ed::parallel(pool, tasks, [&](int64_t task) {
    compute(p, task * share, std::min(p.outputs, (task + 1) * share));
  });
  return ffi::Error::Success();
}

bool is_number(ffi::DataType t) { return t == ffi::F32 || t == ffi::BF16; }

// What both products share: x [rows, inputs], w [.., outputs], y.
ffi::Error fill(ed::Product& p, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer y,
                bool transposed) {
  if (x.dimensions().size() != 2 || w.dimensions().size() != 2 || y.dimensions().size() != 2)
    return wrong("product: arrays should have two axes");
  if (!is_number(x.element_type()) || y.element_type() != x.element_type())
    return wrong("product: x and y should be both float32, or both bfloat16");
  p.x = x.untyped_data();
  p.y = y.untyped_data();
  p.x_is_bfloat16 = x.element_type() == ffi::BF16;
  p.rows = x.dimensions()[0];
  p.inputs = x.dimensions()[1];
  p.w = w.untyped_data();
  p.transposed = transposed;
  p.outputs = w.dimensions()[transposed ? 0 : 1];
  if (y.dimensions()[0] != p.rows || y.dimensions()[1] != p.outputs)
    return wrong("product: the shapes of x, w and y do not fit");
  return ffi::Error::Success();
}

// x [rows, inputs] times w [inputs, outputs], or [outputs, inputs] if transposed.
ffi::Error product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::Result<ffi::AnyBuffer> y, bool transposed) {
  ed::Product p{};
  if (ffi::Error error = fill(p, x, w, *y, transposed); error.failure()) return error;
  if (!is_number(w.element_type()) || w.dimensions()[transposed ? 1 : 0] != p.inputs)
    return wrong("product: w should be float32 or bfloat16, with the inputs of x");
  p.format = w.element_type() == ffi::F32 ? ed::Format::kFloat32 : ed::Format::kBfloat16;
  return run(pool, p);
}

// What `scale` and `zero` are: [groups, outputs], or [outputs, groups] if the codes are transposed.
ffi::Error small(ed::OfGroups& numbers, ffi::AnyBuffer from) {
  numbers.data = from.untyped_data();
  switch (from.element_type()) {
    case ffi::F32: numbers.kind = ed::Small::kFloat32; break;
    case ffi::U8: numbers.kind = ed::Small::kUint8; break;
    case ffi::F8E8M0FNU: numbers.kind = ed::Small::kPowerOfTwo; break;
    default: return wrong("scale and zero should be float32, uint8 or float8_e8m0fnu");
  }
  return ffi::Error::Success();
}

// x times codes: int8 or float8_e4m3fn [inputs, outputs], or four bits, [inputs / 2, outputs] bytes,
// by a table [16]; or the transpose. A zero without numbers is none. `whole`: x in 8 bits.
ffi::Error product_of_codes(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                            ffi::AnyBuffer scale, ffi::AnyBuffer zero, Vector table,
                            ffi::Result<ffi::AnyBuffer> y, bool transposed, bool whole) {
  ed::Product p{};
  if (ffi::Error error = fill(p, x, codes, *y, transposed); error.failure()) return error;
  switch (codes.element_type()) {
    case ffi::S8: p.format = ed::Format::kInt8; break;
    case ffi::F8E4M3FN: p.format = ed::Format::kFp8; break;
    case ffi::U8: p.format = ed::Format::kFourBits; break;
    default: return wrong("codes should be int8, float8_e4m3fn or uint8");
  }
  bool half = p.format == ed::Format::kFourBits;
  int along = transposed ? 1 : 0;
  int64_t inputs = codes.dimensions()[along] * (half ? 2 : 1);
  if (scale.dimensions().size() != 2) return wrong("product of codes: scale should have two axes");
  int64_t groups = scale.dimensions()[along];
  if (inputs != p.inputs || groups == 0 || inputs % groups != 0 || (half && inputs / groups % 2) ||
      scale.dimensions()[1 - along] != p.outputs)
    return wrong("product of codes: the shapes of x, codes and scale do not fit");
  if (table.dimensions()[0] != (half ? 16 : 0)) return wrong("four bits need a table of 16");
  if (zero.element_count() != 0 &&
      (zero.dimensions().size() != 2 || zero.dimensions()[along] != groups ||
       zero.dimensions()[1 - along] != p.outputs))
    return wrong("product of codes: zero should have the shape of scale");
  if (whole && p.format == ed::Format::kFp8) return wrong("codes of 8-bit floats are not whole");
  if (ffi::Error error = small(p.scale, scale); error.failure()) return error;
  if (ffi::Error error = small(p.zero, zero); error.failure()) return error;
  if (zero.element_count() == 0) p.zero.data = nullptr;
  p.table = table.typed_data();
  p.group = inputs / groups;
  return run(pool, p, whole);
}

// Put rows [n, ..] at `index` [n] of an array whose first `axes` axes count its rows, and which is
// the result's memory, too.
ffi::Error put(ffi::AnyBuffer array, Index index, ffi::AnyBuffer rows,
               ffi::Result<ffi::AnyBuffer> result, int64_t axes) {
  auto shape = array.dimensions();
  if (axes < 1 || axes > static_cast<int64_t>(shape.size()) ||
      rows.element_type() != array.element_type() || result->size_bytes() != array.size_bytes())
    return wrong("put: the array, the rows and the result do not fit");
  int64_t count = 1, news = index.dimensions()[0];
  for (int64_t axis = 0; axis < axes; ++axis) count *= shape[axis];
  if (count == 0 || news == 0) return ffi::Error::Success();
  int64_t width = array.size_bytes() / count;
  if (static_cast<int64_t>(rows.size_bytes()) != width * news)
    return wrong("put: the rows are of another size than the array's");
  auto* to = static_cast<char*>(result->untyped_data());
  auto* from = static_cast<const char*>(rows.untyped_data());
  if (to != array.untyped_data()) std::memcpy(to, array.untyped_data(), array.size_bytes());
  for (int64_t i = 0; i < news; ++i) {
    int64_t at = index.typed_data()[i];
    if (at >= 0 && at < count) std::memcpy(to + at * width, from + i * width, width);
  }
  return ffi::Error::Success();
}

}  // namespace

// What the library exports.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_product, product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_product_of_codes, product_of_codes,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Vector>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("transposed")
                                  .Attr<bool>("whole"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_put, put,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Index>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("axes"));

// The name of the level in use.
extern "C" const char* ed_level() { return ed::level().name; }

#pragma GCC visibility pop
