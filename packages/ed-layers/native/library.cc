// Products, and other operations on rows, as XLA calls them: checks the buffers, shares out the work.
#include <memory>
#include <vector>

#include "library.h"

namespace {

using Vector = ffi::Buffer<ffi::F32, 1>;
using Rows = ffi::Buffer<ffi::F32, 2>;
using Index = ffi::Buffer<ffi::S32, 1>;

// Products of one x that a call computes together; the first becomes act(first) * second if gated.
struct Call {
  std::vector<ed::Product> products;
  ed::Act act = ed::Act::kNone;  // of a gated call
  bool gated = false;
  bool whole = false;  // x in 8 bits
};

// x in 8 bits, which products share whose codes have groups of one size and kind.
class Rounded {
 public:
  void make(ffi::ThreadPool& pool, ed::Product& p) {
    const ed::Level& level = ed::level();
    const ed::WholeSizes of_row = level.whole_sizes(p);
    const int64_t groups = p.rows * (p.inputs / p.group);
    p.row_scale = take<float>(scales_, groups);
    p.row_sums = take<int32_t>(sums_, p.rows * of_row.sums);
    p.numbers = take<int8_t>(numbers_, p.rows * of_row.numbers);
    const int64_t share = std::max<int64_t>(1, kLeast / p.inputs);
    ed::parallel(pool, (p.rows + share - 1) / share, [&](int64_t task) {
      const int64_t last = std::min(p.rows, (task + 1) * share);
      for (int64_t row = task * share; row < last; ++row) level.round_row(p, row);
    });
  }

 private:
  static constexpr int64_t kLeast = 1 << 13;  // numbers of a task

  template <typename T>
  static T* take(std::unique_ptr<T[]>& memory, int64_t count) {
    memory.reset(new T[count]);  // not zeroed
    return memory.get();
  }

  std::unique_ptr<int8_t[]> numbers_;
  std::unique_ptr<int32_t[]> sums_;
  std::unique_ptr<float[]> scales_;
};

// Tasks are even parts of the outputs of all products, one product behind the other. For few rows, a
// thread has one task as long as sums fit its cache, because memory is read fastest in long runs. Of
// many rows a task has a part, and few tiles.
struct Parts {
  Parts(const Call& call, int64_t threads) : rows(call.products[0].rows) {
    bool many = rows >= ed::many_rows(call.products[0]) && !call.whole;
    const bool in_panels = call.products[0].in_panels;
    unit = many ? ed::kTile : in_panels ? ed::kTile / 2 : call.whole ? ed::kTile : ed::kUnit;
    for (const ed::Product& p : call.products) {
      int64_t last = ends.empty() ? 0 : ends.back();
      ends.push_back(last + (p.outputs + unit - 1) / unit);
      if (call.gated) break;  // the second has the outputs of the first
    }
    int64_t all = ends.back();
    int64_t most = 96, least = threads;  // units of a task, and tasks
    if (call.whole || many) least = 2 * threads;
    if (call.whole) most = (rows <= 8 ? 16 : rows <= 64 ? 4 : 2) * ed::kTile / unit;
    if (many) {
      most = 4;
      int64_t runs = (all + most - 1) / most;
      of_rows = std::max((rows + 1023) / 1024, std::min(rows / 64, (least + runs - 1) / runs));
      least = (least + of_rows - 1) / of_rows;
    }
    of_outputs = std::max(least, (all + most - 1) / most);
    if (!many) of_outputs = even_parts(all, of_outputs, threads);
    of_outputs = std::min(all, of_outputs);
  }

  // At least `least` parts, as many for each thread; of equal size, if not many more are needed.
  static int64_t even_parts(int64_t all, int64_t least, int64_t threads) {
    const int64_t first = (least + threads - 1) / threads * threads;
    for (int64_t parts = first; parts <= 3 * first; parts += threads)
      if (all % parts == 0) return parts;
    return first;
  }

  int64_t tasks() const { return of_outputs * of_rows; }

  // Call `f(product, first row, last row, first output, last output)` for what belongs to a task.
  template <typename F>
  void of_task(const Call& call, int64_t task, const F& f) const {
    int64_t part = task % of_rows, row = rows * part / of_rows, to_row = rows * (part + 1) / of_rows;
    task /= of_rows;
    int64_t all = ends.back(), from = all * task / of_outputs, to = all * (task + 1) / of_outputs;
    for (size_t i = 0; i < ends.size(); ++i) {
      int64_t begin = i ? ends[i - 1] : 0;
      int64_t first = std::max(from, begin) - begin, last = std::min(to, ends[i]) - begin;
      if (first < last)
        f(i, row, to_row, first * unit, std::min(call.products[i].outputs, last * unit));
    }
  }

  int64_t rows, unit, of_outputs, of_rows = 1;
  std::vector<int64_t> ends;
};

// The product of rows [first, last).
ed::Product part_of(ed::Product p, int64_t first, int64_t last) {
  int64_t bytes = p.x_across ? 4 : p.inputs * (p.x_is_bfloat16 ? 2 : 4);
  p.x = static_cast<const char*>(p.x) + first * bytes;
  p.y = static_cast<char*>(p.y) + first * p.outputs * (p.y_is_bfloat16 ? 2 : 4);
  p.rows = last - first;
  return p;
}

// Memory limits a product of so many rows.
constexpr int64_t kRowsLimitedByMemory = 32;

// The bytes of the product's matrix.
int64_t matrix_bytes(const ed::Product& p) {
  const int64_t numbers = p.inputs * p.outputs;
  if (p.in_panels && p.scale.data) return numbers / p.group / ed::kTile * ed::panel_group_bytes(p);
  switch (p.format) {
    case ed::Format::kFloat32: return 4 * numbers;
    case ed::Format::kBfloat16: return 2 * numbers;
    case ed::Format::kFourBits: return numbers / 2;
    default: return numbers;
  }
}

// Compute all products of a call.
void run(ffi::ThreadPool& pool, Call& call) {
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
  std::unique_ptr<char[]> up;
  if (call.gated) {
    ed::Product& p = call.products[1];
    up.reset(new char[p.rows * p.outputs * (p.y_is_bfloat16 ? 2 : 4)]);  // not zeroed
    p.y = up.get();
  }
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  if (call.products[0].rows <= kRowsLimitedByMemory)
    for (const ed::Product& p : call.products) {
      // Of panels, the thread that calls takes the first part, and others wait for theirs.
      const int64_t bytes = matrix_bytes(p), first = p.in_panels ? bytes / threads : 0;
      ed::Ahead::get().reads(static_cast<const char*>(p.w) + first, bytes - first);
    }
  Parts parts(call, threads);
  ed::parallel(pool, parts.tasks(), [&](int64_t task) {
    parts.of_task(call, task, [&](size_t i, int64_t row, int64_t to_row, int64_t first, int64_t last) {
      ed::Product one = part_of(call.products[i], row, to_row);
      compute(one, first, last);
      if (!call.gated) return;
      ed::Product other = part_of(call.products[1], row, to_row);
      compute(other, first, last);
      level.gate(call.act, one, other, first, last);
    });
  });
}

// Read x [rows, inputs].
bool read_rows(ed::Checks& checks, ed::Product& p, ffi::AnyBuffer x) {
  checks.dtype("x", x.element_type(), {ffi::F32, ffi::BF16});
  if (!checks.shape("x", x, {ed::kAny, ed::kAny})) return false;
  p.x = x.untyped_data();
  p.x_is_bfloat16 = p.y_is_bfloat16 = x.element_type() == ffi::BF16;
  p.rows = x.dimensions()[0], p.inputs = x.dimensions()[1];
  return checks.ok();
}

// Read x [rows, inputs] and the outputs of w [inputs, outputs], or of w [outputs, inputs] if
// transposed; or of panels [outputs / kTile, ..], which have more axes.
bool read(ed::Checks& checks, ed::Product& p, ffi::AnyBuffer x, ffi::AnyBuffer w, bool transposed) {
  if (!read_rows(checks, p, x)) return false;
  p.in_panels = w.dimensions().size() > 2;
  checks.that(!p.in_panels || !transposed, "panels cannot be transposed");
  if (!p.in_panels) checks.shape("the matrix", w, {ed::kAny, ed::kAny});
  if (!checks.ok()) return false;
  p.w = w.untyped_data();
  p.transposed = transposed;
  p.outputs = p.in_panels ? w.dimensions()[0] * ed::kTile : w.dimensions()[transposed ? 0 : 1];
  return true;
}

// What is done to the products of a call: their biases are the last arrays of the call if `biased`.
struct Epilogue {
  bool biased;
  int64_t act;
  bool gated;
};

// Read the biases, from array `first` on, and the activation.
bool read_epilogue(ed::Checks& checks, Call& call, Epilogue epilogue, ffi::DataType dtype,
                 ffi::RemainingArgs arrays, size_t first) {
  if (!checks.that(epilogue.act >= 0 && epilogue.act <= static_cast<int64_t>(ed::Act::kRelu),
                   "the number of the activation is unknown"))
    return false;
  call.gated = epilogue.gated;
  auto act = static_cast<ed::Act>(epilogue.act);
  checks.that(!call.gated || (call.products.size() == 2 &&
                              call.products[0].outputs == call.products[1].outputs),
              "a gated call requires two products with the same number of outputs");
  if (call.gated) call.act = act;
  for (size_t i = 0; i < call.products.size(); ++i) {
    ed::Product& p = call.products[i];
    if (!call.gated) p.act = act;
    if (!epilogue.biased) continue;
    auto bias = arrays.get<ffi::AnyBuffer>(first + i);
    if (!checks.that(bias.has_value(), "each product requires one bias, or none has a bias"))
      return false;
    checks.dtype("the bias", bias->element_type(), {dtype});
    checks.shape("the bias", *bias, {p.outputs});
    p.bias = bias->untyped_data();
  }
  return checks.ok();
}

// The number of matrices among `arrays`, each of which has `parts` arrays and maybe a bias; 0 = the
// number of arrays does not fit.
size_t matrices_of(ffi::RemainingArgs arrays, size_t parts, bool biased) {
  size_t each = parts + (biased ? 1 : 0);
  return arrays.size() % each ? 0 : arrays.size() / each;
}

// Whether all `count` numbers of a row are zero.
template <typename Bits>
bool all_zero(const Bits* row, int64_t count) {
  constexpr int64_t kAtOnce = 64;
  for (int64_t i = 0; i < count; i += kAtOnce) {
    Bits any = 0;
    for (int64_t j = i; j < std::min(count, i + kAtOnce); ++j) any |= row[j];
    if (static_cast<Bits>(any << 1)) return false;  // without the sign
  }
  return true;
}

// Computes a call without the zeros at the end of x: a batch may have rows of zeros as padding.
class WithoutPadding {
 public:
  explicit WithoutPadding(Call& call) : call_(call), all_(call.products[0].rows), used_(all_) {
    const ed::Product& p = call.products[0];
    auto zero = [&](int64_t row) {
      return p.x_is_bfloat16
                 ? all_zero(static_cast<const uint16_t*>(p.x) + row * p.inputs, p.inputs)
                 : all_zero(static_cast<const uint32_t*>(p.x) + row * p.inputs, p.inputs);
    };
    while (used_ > 0 && zero(used_ - 1)) --used_;
    // With a bias, the result of one row of zeros is copied. Activations of zero are zero.
    biased_ = p.bias != nullptr && used_ < all_;
    for (ed::Product& one : call.products) one.rows = used_ + biased_;
  }

  bool empty() const { return used_ + biased_ == 0; }

  // Write the other rows of the results.
  void finish() {
    for (const ed::Product& p : call_.products) {
      const int64_t bytes = p.outputs * (p.y_is_bfloat16 ? 2 : 4);
      char* y = static_cast<char*>(p.y);
      if (!biased_)
        std::memset(y + used_ * bytes, 0, (all_ - used_) * bytes);
      else
        for (int64_t row = used_ + 1; row < all_; ++row)
          std::memcpy(y + row * bytes, y + used_ * bytes, bytes);
      if (call_.gated) return;
    }
  }

 private:
  Call& call_;
  int64_t all_, used_;
  bool biased_;
};

// Read the results, one for each product, or one for both products of a gated layer; compute them.
ffi::Error compute(ed::Checks& checks, ffi::ThreadPool& pool, Call& call, ffi::DataType dtype,
                   ffi::RemainingRets results) {
  for (const ed::Product& p : call.products)
    checks.that(p.in_panels == call.products[0].in_panels,
                "either all matrices of a call are in panels, or none");
  if (!checks.that(results.size() == (call.gated ? 1 : call.products.size()),
                   "each product requires one result, and a gated pair one result"))
    return checks.error();
  size_t bytes = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    auto y = results.get<ffi::AnyBuffer>(i);
    if (!y.has_value()) return y.error();
    ed::Product& p = call.products[i];
    checks.dtype("the result", (*y)->element_type(), {dtype});
    if (!checks.shape("the result", **y, {p.rows, p.outputs})) return checks.error();
    p.y = (*y)->untyped_data(), bytes += (*y)->size_bytes();
  }
  if (call.products[0].inputs == 0) {  // empty sums, which need no codes
    call.whole = false;
    for (ed::Product& p : call.products)
      p.format = ed::Format::kFloat32, p.transposed = p.in_panels = false;
  }
  if (bytes == 0) return ffi::Error::Success();
  WithoutPadding rows(call);
  if (!rows.empty()) run(pool, call);
  rows.finish();
  return ffi::Error::Success();
}

// x [rows, inputs] times each w [inputs, outputs], or [outputs, inputs] if transposed; or times panels:
// see number_panels.h. Results have the dtype of x, or are float32.
ffi::Error products(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs arrays,
                    ffi::RemainingRets results, bool transposed, bool fixed, bool biased,
                    int64_t act, bool gated) {
  ed::Checks checks("product");
  Call call;
  size_t count = matrices_of(arrays, 1, biased);
  if (!checks.that(count > 0, "a call requires at least one matrix, and a bias for each or for none"))
    return checks.error();
  auto y = results.get<ffi::AnyBuffer>(0);
  if (!y.has_value()) return y.error();
  const bool wide = (*y)->element_type() == ffi::F32;
  const ffi::DataType dtype = wide ? ffi::F32 : x.element_type();
  for (size_t i = 0; i < count; ++i) {
    auto w = arrays.get<ffi::AnyBuffer>(i);
    if (!w.has_value()) return w.error();
    ed::Product p{};
    if (!read(checks, p, x, *w, transposed)) return checks.error();
    if (wide) p.y_is_bfloat16 = false;
    checks.dtype("the matrix", w->element_type(), {ffi::F32, ffi::BF16});
    const bool pairs = w->element_type() == ffi::BF16;
    p.format = pairs ? ed::Format::kBfloat16 : ed::Format::kFloat32;
    checks.that(!p.in_panels || !pairs || p.inputs % 2 == 0,
                "panels of pairs require an even number of inputs");
    if (!(p.in_panels && pairs ? checks.shape("the matrix in panels", *w, {ed::kAny, p.inputs / 2, ed::kTile, 2})
          : p.in_panels        ? checks.shape("the matrix in panels", *w, {ed::kAny, p.inputs, ed::kTile})
          : transposed         ? checks.shape("the matrix", *w, {p.outputs, p.inputs})
                               : checks.shape("the matrix", *w, {p.inputs, p.outputs})))
      return checks.error();
    p.fixed = fixed;
    call.products.push_back(p);
  }
  if (!read_epilogue(checks, call, {biased, act, gated}, dtype, arrays, count))
    return checks.error();
  return compute(checks, pool, call, dtype, results);
}

// The gradients [inputs, outputs] of matrices: x [rows, inputs], turned, times each gradient of a
// product, [rows, outputs]. The last result is a buffer for x of bfloat16 numbers: four bytes each.
ffi::Error gradients(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs arrays,
                     ffi::RemainingRets results) {
  ed::Checks checks("gradients of matrices");
  const size_t buffers = x.element_type() == ffi::BF16 ? 1 : 0;
  if (!checks.that(arrays.size() > 0 && results.size() == arrays.size() + buffers,
                   "a call requires at least one array and one result for each, and a buffer for x "
                   "of bfloat16 numbers"))
    return checks.error();
  checks.dtype("x", x.element_type(), {ffi::F32, ffi::BF16});
  if (!checks.shape("x", x, {ed::kAny, ed::kAny})) return checks.error();
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  void* numbers = x.untyped_data();
  if (buffers) {
    auto buffer = results.get<ffi::AnyBuffer>(arrays.size());
    if (!buffer.has_value()) return buffer.error();
    checks.dtype("the buffer", (*buffer)->element_type(), {ffi::F32});
    if (!checks.shape("the buffer", **buffer, {rows, inputs})) return checks.error();
    numbers = (*buffer)->untyped_data();
  }
  Call call;
  size_t bytes = 0;
  for (size_t i = 0; i < arrays.size(); ++i) {
    auto d_y = arrays.get<ffi::AnyBuffer>(i);
    auto d_w = results.get<ffi::AnyBuffer>(i);
    if (!d_y.has_value()) return d_y.error();
    if (!d_w.has_value()) return d_w.error();
    checks.dtype("the gradient of a product", d_y->element_type(), {x.element_type()});
    checks.dtype("the result", (*d_w)->element_type(), {ffi::F32});
    if (!checks.shape("the gradient of a product", *d_y, {rows, ed::kAny})) return checks.error();
    ed::Product p{};
    p.rows = inputs, p.inputs = rows, p.outputs = d_y->dimensions()[1];
    if (!checks.shape("the result", **d_w, {p.rows, p.outputs})) return checks.error();
    p.x = numbers, p.x_rows = inputs, p.x_across = !buffers || !ed::level().across_in_rows;
    p.w = d_y->untyped_data(), p.y = (*d_w)->untyped_data();
    p.x_is_bfloat16 = x.element_type() == ffi::BF16;
    p.format = p.x_is_bfloat16 ? ed::Format::kBfloat16 : ed::Format::kFloat32;
    bytes += (*d_w)->size_bytes();
    call.products.push_back(p);
  }
  if (!checks.ok()) return checks.error();
  if (bytes == 0) return ffi::Error::Success();
  if (buffers)
    ed::parallel(pool, (rows + ed::kTile - 1) / ed::kTile, [&](int64_t task) {
      const int64_t first = task * ed::kTile, last = std::min(rows, first + ed::kTile);
      ed::level().across(call.products[0], x.untyped_data(), numbers, first, last);
    });
  run(pool, call);
  return ffi::Error::Success();
}

// Read scales or zeros: [groups, outputs], or [outputs, groups] if the codes are transposed.
bool read_groups(ed::Checks& checks, ed::OfGroups& numbers, const char* name, ffi::AnyBuffer from,
                 const ed::Product& p, int64_t groups) {
  numbers.data = from.untyped_data();
  switch (from.element_type()) {
    case ffi::U8: numbers.kind = ed::Small::kUint8; break;
    case ffi::F16: numbers.kind = ed::Small::kFloat16; break;
    case ffi::F8E8M0FNU: numbers.kind = ed::Small::kPowerOfTwo; break;
    default: numbers.kind = ed::Small::kFloat32;
  }
  checks.dtype(name, from.element_type(), {ffi::F32, ffi::F16, ffi::U8, ffi::F8E8M0FNU});
  return p.transposed ? checks.shape(name, from, {p.outputs, groups})
                      : checks.shape(name, from, {groups, p.outputs});
}

// Require that the groups divide the inputs.
bool read_group(ed::Checks& checks, ed::Product& p, int64_t groups) {
  if (!checks.that(groups > 0 && p.inputs % groups == 0,
                   "the number of groups must be at least 1 and divide the inputs"))
    return false;
  p.group = p.inputs / groups;
  return checks.that(p.format != ed::Format::kFourBits || p.group % 2 == 0,
                     "a group of four-bit codes must have an even size");
}

// Read a matrix of codes: int8 or float8_e4m3fn [inputs, outputs]; or four bits, [inputs / 2,
// outputs] bytes, by a table [16]; or the transpose. An empty `zero` stands for none.
bool read_codes(ed::Checks& checks, ed::Product& p, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                ffi::AnyBuffer scale, ffi::AnyBuffer zero, Vector table, bool transposed,
                bool whole) {
  if (!checks.shape("codes", codes, {ed::kAny, ed::kAny})) return false;
  if (!read(checks, p, x, codes, transposed)) return false;
  whole ? checks.dtype("codes", codes.element_type(), {ffi::S8, ffi::U8})
        : checks.dtype("codes", codes.element_type(), {ffi::S8, ffi::F8E4M3FN, ffi::U8});
  switch (codes.element_type()) {
    case ffi::S8: p.format = ed::Format::kInt8; break;
    case ffi::F8E4M3FN: p.format = ed::Format::kFp8; break;
    default: p.format = ed::Format::kFourBits;
  }
  bool half = p.format == ed::Format::kFourBits;
  checks.that(!half || p.inputs % 2 == 0, "four-bit codes require an even number of inputs");
  int64_t stored = half ? p.inputs / 2 : p.inputs;
  transposed ? checks.shape("codes", codes, {p.outputs, stored})
             : checks.shape("codes", codes, {stored, p.outputs});
  checks.shape("the table of four-bit codes", table, {half ? 16 : 0});
  if (!checks.shape("scale", scale, {ed::kAny, ed::kAny})) return false;
  int64_t groups = scale.dimensions()[transposed ? 1 : 0];
  if (!read_group(checks, p, groups)) return false;
  p.table = table.typed_data();
  read_groups(checks, p.scale, "scale", scale, p, groups);
  if (zero.element_count() > 0) read_groups(checks, p.zero, "zero", zero, p, groups);
  return checks.ok();
}

// x times each matrix of codes, which is four arrays. `whole`: x in 8 bits.
ffi::Error products_of_codes(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs arrays,
                             ffi::RemainingRets results, bool transposed, bool whole, bool biased,
                             int64_t act, bool gated) {
  ed::Checks checks("product of codes");
  Call call;
  call.whole = whole;
  size_t count = matrices_of(arrays, 4, biased);
  if (!checks.that(count > 0,
                   "a matrix requires four arrays: codes, scale, zero and table; and a bias, or no "
                   "matrix has a bias"))
    return checks.error();
  for (size_t i = 0; i < 4 * count; i += 4) {
    auto codes = arrays.get<ffi::AnyBuffer>(i), scale = arrays.get<ffi::AnyBuffer>(i + 1);
    auto zero = arrays.get<ffi::AnyBuffer>(i + 2);
    auto table = arrays.get<Vector>(i + 3);
    if (!codes.has_value() || !scale.has_value() || !zero.has_value()) return codes.error();
    if (!table.has_value()) return table.error();
    ed::Product p{};
    if (!read_codes(checks, p, x, *codes, *scale, *zero, *table, transposed, whole))
      return checks.error();
    call.products.push_back(p);
  }
  if (!read_epilogue(checks, call, {biased, act, gated}, x.element_type(), arrays, 4 * count))
    return checks.error();
  return compute(checks, pool, call, x.element_type(), results);
}

// How the groups of codes in panels are stored: see panels.h.
struct PanelFormat {
  int64_t bits;         // of a code: 4 or 8
  int64_t scale_bytes;  // 4: float32; 2: float16
  int64_t zero_bytes;   // 4: float32; 1: uint8; 0: there are no zeros
};

// Read codes in panels, bytes [outputs / kTile, groups, ..], of a number of inputs.
bool read_code_panels(ed::Checks& checks, ed::Product& p, ffi::AnyBuffer w, int64_t inputs,
                      PanelFormat format) {
  checks.that(format.bits == 4 || format.bits == 8, "a code must have 4 or 8 bits");
  checks.that(format.scale_bytes == 4 || format.scale_bytes == 2, "a scale must have 2 or 4 bytes");
  checks.that(format.zero_bytes == 4 || format.zero_bytes == 1 || format.zero_bytes == 0,
              "a zero must have 0, 1 or 4 bytes");
  checks.dtype("the panels of codes", w.element_type(), {ffi::U8});
  if (!checks.shape("the panels of codes", w, {ed::kAny, ed::kAny, ed::kAny})) return false;
  p.w = w.untyped_data(), p.in_panels = true;
  p.inputs = inputs, p.outputs = w.dimensions()[0] * ed::kTile;
  const bool half = format.bits == 4;
  p.format = half ? ed::Format::kFourBits : ed::Format::kInt8;
  const int64_t groups = w.dimensions()[1];
  if (!read_group(checks, p, groups)) return false;
  checks.that(p.group % (half ? 8 : 4) == 0,
              "a group of codes in panels must have whole fours of bytes");
  p.scale = {p.w, format.scale_bytes == 4 ? ed::Small::kFloat32 : ed::Small::kFloat16};
  auto* zeros = static_cast<const char*>(p.w) + format.scale_bytes * ed::kTile;
  if (format.zero_bytes)
    p.zero = {zeros, format.zero_bytes == 4 ? ed::Small::kFloat32 : ed::Small::kUint8};
  return checks.shape("the panels of codes", w, {ed::kAny, groups, ed::panel_group_bytes(p)});
}

// x in 8 bits times each matrix of codes in panels.
ffi::Error products_of_code_panels(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs arrays,
                                   ffi::RemainingRets results, int64_t bits, int64_t scale_bytes,
                                   int64_t zero_bytes, bool biased, int64_t act, bool gated) {
  ed::Checks checks("product of codes in panels");
  Call call;
  call.whole = true;
  const size_t count = matrices_of(arrays, 1, biased);
  if (!checks.that(count > 0, "a call requires at least one matrix, and a bias for each or for none"))
    return checks.error();
  for (size_t i = 0; i < count; ++i) {
    auto w = arrays.get<ffi::AnyBuffer>(i);
    if (!w.has_value()) return w.error();
    ed::Product p{};
    if (!read_rows(checks, p, x)) return checks.error();
    if (!read_code_panels(checks, p, *w, p.inputs, {bits, scale_bytes, zero_bytes}))
      return checks.error();
    call.products.push_back(p);
  }
  if (!read_epilogue(checks, call, {biased, act, gated}, x.element_type(), arrays, count))
    return checks.error();
  return compute(checks, pool, call, x.element_type(), results);
}

// Rows [n, inputs], float32: the outputs `at` [n] of codes in panels.
ffi::Error take(ffi::ThreadPool pool, ffi::AnyBuffer w, Index at, ffi::Result<ffi::AnyBuffer> rows,
                int64_t bits, int64_t scale_bytes, int64_t zero_bytes) {
  constexpr int64_t kRowsOfTask = 32;
  ed::Checks checks("rows of codes in panels");
  checks.dtype("the result", rows->element_type(), {ffi::F32});
  const int64_t count = at.dimensions()[0];
  if (!checks.shape("the result", *rows, {count, ed::kAny})) return checks.error();
  ed::Product p{};
  if (!read_code_panels(checks, p, w, rows->dimensions()[1], {bits, scale_bytes, zero_bytes}))
    return checks.error();
  p.y = rows->untyped_data();
  if (p.inputs == 0) return ffi::Error::Success();
  ed::parallel(pool, (count + kRowsOfTask - 1) / kRowsOfTask, [&](int64_t task) {
    const int64_t first = task * kRowsOfTask;
    ed::level().take(p, at.typed_data(), first, std::min(count, first + kRowsOfTask));
  });
  return ffi::Error::Success();
}

// The first index of the largest number of each row of x [rows, count].
ffi::Error first_largest(ffi::ThreadPool pool, Rows x, ffi::Result<Index> at) {
  constexpr int64_t kNumbersOfTask = 1 << 16;
  ed::Checks checks("largest numbers of rows");
  const int64_t rows = x.dimensions()[0], count = x.dimensions()[1];
  checks.that(count > 0, "a row must have at least one number");
  if (!checks.shape("the result", *at, {rows})) return checks.error();
  const int64_t share = std::max<int64_t>(1, kNumbersOfTask / count);
  ed::parallel(pool, (rows + share - 1) / share, [&](int64_t task) {
    for (int64_t row = task * share; row < std::min(rows, (task + 1) * share); ++row)
      at->typed_data()[row] = ed::level().first_largest(x.typed_data() + row * count, count);
  });
  return ffi::Error::Success();
}

// Write rows [n, ..] at `index` [n] of an array whose first `axes` axes count its rows.
// XLA may pass one buffer as the array and as the result. An index beyond the array drops its row.
ffi::Error put(ffi::AnyBuffer array, Index index, ffi::AnyBuffer rows,
               ffi::Result<ffi::AnyBuffer> result, int64_t axes) {
  ed::Checks checks("put");
  auto shape = array.dimensions(), of_rows = rows.dimensions(), of_result = result->dimensions();
  checks.dtype("the rows", rows.element_type(), {array.element_type()});
  checks.dtype("the result", result->element_type(), {array.element_type()});
  size_t bytes = ffi::ByteWidth(array.element_type());
  checks.that(bytes > 0, "numbers must have whole bytes");
  if (!std::equal(shape.begin(), shape.end(), of_result.begin(), of_result.end()))
    checks.refuse("the result has shape " + ed::text_of(of_result) + ", the array has shape " +
                  ed::text_of(shape));
  if (!checks.that(axes >= 1 && axes <= static_cast<int64_t>(shape.size()),
                   "axes must be at least 1 and at most the number of axes of the array"))
    return checks.error();
  int64_t count = 1, width = bytes, news = index.dimensions()[0];
  for (int64_t axis = 0; axis < axes; ++axis) count *= shape[axis];
  for (size_t axis = axes; axis < shape.size(); ++axis) width *= shape[axis];
  bool same = of_rows.size() > 0 && of_rows[0] == news &&
              std::equal(shape.begin() + axes, shape.end(), of_rows.begin() + 1, of_rows.end());
  if (!same)
    checks.refuse("the rows have shape " + ed::text_of(of_rows) + " for " + std::to_string(news) +
                  " places in an array of shape " + ed::text_of(shape) + " with " +
                  std::to_string(axes) + " axes of rows");
  if (!checks.ok()) return checks.error();
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
                                  .Attr<bool>("fixed")
                                  .Attr<bool>("biased")
                                  .Attr<int64_t>("act")
                                  .Attr<bool>("gated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ed_gradients, gradients,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_product_of_codes, products_of_codes,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("transposed")
                                  .Attr<bool>("whole")
                                  .Attr<bool>("biased")
                                  .Attr<int64_t>("act")
                                  .Attr<bool>("gated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_product_of_code_panels, products_of_code_panels,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("scale_bytes")
                                  .Attr<int64_t>("zero_bytes")
                                  .Attr<bool>("biased")
                                  .Attr<int64_t>("act")
                                  .Attr<bool>("gated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_take, take,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Index>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("scale_bytes")
                                  .Attr<int64_t>("zero_bytes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_first_largest, first_largest,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Rows>().Ret<Index>());

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
