// Products as XLA calls them: checks the arrays, shares out the work.
#include <vector>

#include "library.h"

namespace {

using ed::wrong;
using Vector = ffi::Buffer<ffi::F32, 1>;
using Index = ffi::Buffer<ffi::S32, 1>;

// Products of one x that a call computes together; the first becomes act(first) * second if gated.
struct Call {
  std::vector<ed::Product> products;
  ed::Gate act = ed::Gate::kNone;
  bool whole = false;  // x in 8 bits
};

// x in 8 bits, which products share whose codes have groups of one size and kind.
struct Rounded {
  std::vector<int8_t> numbers;
  std::vector<int32_t> sums;
  std::vector<float> scales;

  void make(ffi::ThreadPool& pool, ed::Product& p) {
    const ed::Level& level = ed::level();
    ed::WholeSizes of_row = level.whole_sizes(p);
    numbers.resize(p.rows * of_row.numbers), sums.resize(p.rows * of_row.sums);
    scales.resize(p.rows * (p.inputs / p.group));
    p.numbers = numbers.data(), p.row_sums = sums.data(), p.row_scale = scales.data();
    auto round = [&](int64_t row) { level.round_row(p, row); };
    if (p.rows < 8)
      for (int64_t row = 0; row < p.rows; ++row) round(row);
    else
      ed::parallel(pool, p.rows, round);
  }
};

// Tasks are even parts of the outputs of all products, one product behind the other: long runs for
// few rows, and as many as even out busy threads.
struct Parts {
  Parts(const Call& call, int64_t threads) : unit(call.whole ? ed::kTile : ed::kUnit) {
    for (const ed::Product& p : call.products) {
      int64_t last = ends.empty() ? 0 : ends.back();
      ends.push_back(last + (p.outputs + unit - 1) / unit);
      if (call.act != ed::Gate::kNone) break;  // the second has the outputs of the first
    }
    int64_t rows = call.products[0].rows, all = ends.back();
    int64_t most = (rows <= 8 ? 16 : rows <= 64 ? 4 : 2) * ed::kTile / unit;
    tasks = std::min(all, std::max(2 * threads, (all + most - 1) / most));
  }

  // Call `f(product, first output, last output)` for what belongs to a task.
  template <typename F>
  void of_task(const Call& call, int64_t task, const F& f) const {
    int64_t all = ends.back(), from = all * task / tasks, to = all * (task + 1) / tasks;
    for (size_t i = 0; i < ends.size(); ++i) {
      int64_t begin = i ? ends[i - 1] : 0;
      int64_t first = std::max(from, begin) - begin, last = std::min(to, ends[i]) - begin;
      if (first < last) f(i, first * unit, std::min(call.products[i].outputs, last * unit));
    }
  }

  int64_t unit, tasks;
  std::vector<int64_t> ends;
};

ffi::Error run(ffi::ThreadPool pool, Call call) {
  if (call.products[0].rows == 0) return ffi::Error::Success();
  std::vector<Rounded> rounded(call.whole ? call.products.size() : 0);
  for (size_t i = 0; i < rounded.size(); ++i) {
    ed::Product &p = call.products[i], &before = call.products[i ? i - 1 : 0];
    if (i && p.group == before.group && p.format == before.format)
      p.numbers = before.numbers, p.row_sums = before.row_sums, p.row_scale = before.row_scale;
    else
      rounded[i].make(pool, p);
  }
  const ed::Level& level = ed::level();
  auto compute = [&](const ed::Product& p, int64_t first, int64_t last) {
    (call.whole ? level.whole : p.transposed ? level.rows : level.columns)(p, first, last);
  };
  std::vector<char> up;
  if (call.act != ed::Gate::kNone) {
    ed::Product& p = call.products[1];
    up.resize(p.rows * p.outputs * (p.x_is_bfloat16 ? 2 : 4));
    p.y = up.data();
  }
  Parts parts(call, std::max<int64_t>(1, pool.num_threads()));
  ed::parallel(pool, parts.tasks, [&](int64_t task) {
    parts.of_task(call, task, [&](size_t i, int64_t first, int64_t last) {
      compute(call.products[i], first, last);
      if (call.act == ed::Gate::kNone) return;
      compute(call.products[1], first, last);
      level.gate(call.act, call.products[0], call.products[1], first, last);
    });
  });
  return ffi::Error::Success();
}

bool is_number(ffi::DataType t) { return t == ffi::F32 || t == ffi::BF16; }

// What both kinds of products share: x [rows, inputs], w [.., outputs].
ffi::Error fill(ed::Product& p, ffi::AnyBuffer x, ffi::AnyBuffer w, bool transposed) {
  if (x.dimensions().size() != 2 || w.dimensions().size() != 2)
    return wrong("product: arrays should have two axes");
  if (!is_number(x.element_type())) return wrong("product: x should be float32 or bfloat16");
  p.x = x.untyped_data();
  p.x_is_bfloat16 = x.element_type() == ffi::BF16;
  p.rows = x.dimensions()[0];
  p.inputs = x.dimensions()[1];
  p.w = w.untyped_data();
  p.transposed = transposed;
  p.outputs = w.dimensions()[transposed ? 0 : 1];
  return ffi::Error::Success();
}

// Give the products their results, one each; one for both that are gated.
ffi::Error finish(Call& call, ffi::DataType dtype, ffi::RemainingRets results, int64_t act) {
  if (act < 0 || act > static_cast<int64_t>(ed::Gate::kGeluTanh))
    return wrong("product: the activation is unknown");
  call.act = static_cast<ed::Gate>(act);
  bool gated = call.act != ed::Gate::kNone;
  if (gated && (call.products.size() != 2 || call.products[0].outputs != call.products[1].outputs))
    return wrong("product: an activation stands between two products of one size");
  if (results.size() != (gated ? 1 : call.products.size()))
    return wrong("product: there should be a result for each product");
  for (size_t i = 0; i < results.size(); ++i) {
    auto y = results.get<ffi::AnyBuffer>(i);
    if (!y.has_value()) return y.error();
    ed::Product& p = call.products[i];
    if ((*y)->element_type() != dtype || (*y)->dimensions().size() != 2 ||
        (*y)->dimensions()[0] != p.rows || (*y)->dimensions()[1] != p.outputs)
      return wrong("product: y should be [rows, outputs], in the type of x");
    p.y = (*y)->untyped_data();
  }
  return ffi::Error::Success();
}

// x [rows, inputs] times each w [inputs, outputs], or [outputs, inputs] if transposed.
ffi::Error products(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs matrices,
                    ffi::RemainingRets results, bool transposed, int64_t act) {
  Call call;
  for (size_t i = 0; i < matrices.size(); ++i) {
    auto w = matrices.get<ffi::AnyBuffer>(i);
    if (!w.has_value()) return w.error();
    ed::Product p{};
    if (ffi::Error error = fill(p, x, *w, transposed); error.failure()) return error;
    if (!is_number(w->element_type()) || w->dimensions()[transposed ? 1 : 0] != p.inputs)
      return wrong("product: w should be float32 or bfloat16, with the inputs of x");
    p.format = w->element_type() == ffi::F32 ? ed::Format::kFloat32 : ed::Format::kBfloat16;
    call.products.push_back(p);
  }
  if (call.products.empty()) return wrong("product: there is no matrix");
  if (ffi::Error error = finish(call, x.element_type(), results, act); error.failure())
    return error;
  return run(pool, call);
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

// A matrix of codes: int8 or float8_e4m3fn [inputs, outputs], or four bits, [inputs / 2, outputs]
// bytes, by a table [16]; or the transpose. A zero without numbers is none.
ffi::Error fill_codes(ed::Product& p, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                      ffi::AnyBuffer zero, Vector table, bool transposed, bool whole) {
  if (ffi::Error error = fill(p, x, codes, transposed); error.failure()) return error;
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
  return ffi::Error::Success();
}

// x times each matrix of codes, which is four arrays. `whole`: x in 8 bits.
ffi::Error products_of_codes(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs matrices,
                             ffi::RemainingRets results, bool transposed, bool whole, int64_t act) {
  Call call;
  call.whole = whole;
  if (matrices.size() == 0 || matrices.size() % 4)
    return wrong("product of codes: a matrix is codes, scale, zero and table");
  for (size_t i = 0; i < matrices.size(); i += 4) {
    auto codes = matrices.get<ffi::AnyBuffer>(i), scale = matrices.get<ffi::AnyBuffer>(i + 1);
    auto zero = matrices.get<ffi::AnyBuffer>(i + 2);
    auto table = matrices.get<Vector>(i + 3);
    if (!codes.has_value() || !scale.has_value() || !zero.has_value() || !table.has_value())
      return wrong("product of codes: a matrix is codes, scale, zero and table");
    ed::Product p{};
    if (ffi::Error error = fill_codes(p, x, *codes, *scale, *zero, *table, transposed, whole);
        error.failure())
      return error;
    call.products.push_back(p);
  }
  if (ffi::Error error = finish(call, x.element_type(), results, act); error.failure())
    return error;
  return run(pool, call);
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_product, products,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("transposed")
                                  .Attr<int64_t>("act"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_product_of_codes, products_of_codes,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("transposed")
                                  .Attr<bool>("whole")
                                  .Attr<int64_t>("act"));

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
