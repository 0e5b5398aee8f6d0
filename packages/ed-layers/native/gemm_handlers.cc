// XLA handlers of products and of other operations on rows.
#include <memory>
#include <vector>

#include "handlers.h"

namespace {

using FloatVector = ffi::Buffer<ffi::F32, 1>;
using FloatMatrix = ffi::Buffer<ffi::F32, 2>;
using IntVector = ffi::Buffer<ffi::S32, 1>;

// Products of one x in one call. In a gated call, the result is act(first) * second.
struct GemmCall {
  std::vector<ed::Gemm> products;
  ed::Activation act = ed::Activation::kNone;  // activation of a gated call
  bool gated = false;
  bool int8 = false;  // whether x is quantized to int8
};

// Int8 rows of x. Products share the rows if their codes have equal group sizes and formats.
class QuantizedRows {
 public:
  void quantize(ffi::ThreadPool& pool, ed::Gemm& p) {
    const ed::Level& level = ed::level();
    const ed::Int8RowSizes row_sizes = level.get_int8_row_sizes(p);
    const int64_t groups = p.rows * (p.inputs / p.group);
    p.row_scale = allocate<float>(scales_, groups);
    p.row_sums = allocate<int32_t>(sums_, p.rows * row_sizes.sums);
    p.x_int8 = allocate<int8_t>(codes_, p.rows * row_sizes.bytes);
    const int64_t task_size = std::max<int64_t>(1, kMinTaskElements / p.inputs);
    ed::parallel_for(pool, (p.rows + task_size - 1) / task_size, [&](int64_t task) {
      const int64_t last = std::min(p.rows, (task + 1) * task_size);
      for (int64_t row = task * task_size; row < last; ++row) level.quantize_row(p, row);
    });
  }

 private:
  static constexpr int64_t kMinTaskElements = 1 << 13;  // numbers of a task

  template <typename T>
  static T* allocate(std::unique_ptr<T[]>& memory, int64_t count) {
    memory.reset(new T[count]);  // not zeroed
    return memory.get();
  }

  std::unique_ptr<int8_t[]> codes_;
  std::unique_ptr<int32_t[]> sums_;
  std::unique_ptr<float[]> scales_;
};

// The partition of a call into tasks: equal parts of the concatenated outputs of all products. With
// few rows, a thread has one task as long as its sums fit the cache, because long sequential reads
// are the fastest. With many rows, a task has a part of the rows and few tiles.
struct TaskGrid {
  TaskGrid(const GemmCall& call, int64_t threads) : rows(call.products[0].rows) {
    bool large = rows >= ed::get_large_gemm_rows(call.products[0]) && !call.int8;
    const bool packed = call.products[0].packed;
    unit = large ? ed::kTile : packed ? ed::kTile / 2 : call.int8 ? ed::kTile : ed::kUnit;
    for (const ed::Gemm& p : call.products) {
      int64_t last = ends.empty() ? 0 : ends.back();
      ends.push_back(last + (p.outputs + unit - 1) / unit);
      if (call.gated) break;  // the second product has the outputs of the first one
    }
    int64_t total_units = ends.back();
    int64_t max_units = 96, min_tasks = threads;  // units of a task, and tasks
    if (call.int8 || large) min_tasks = 2 * threads;
    if (call.int8) max_units = (rows <= 8 ? 16 : rows <= 64 ? 4 : 2) * ed::kTile / unit;
    if (large) {
      max_units = 4;
      int64_t runs = (total_units + max_units - 1) / max_units;
      row_parts =
          std::max((rows + 1023) / 1024, std::min(rows / 64, (min_tasks + runs - 1) / runs));
      min_tasks = (min_tasks + row_parts - 1) / row_parts;
    }
    output_parts = std::max(min_tasks, (total_units + max_units - 1) / max_units);
    if (!large) output_parts = divide_evenly(total_units, output_parts, threads);
    output_parts = std::min(total_units, output_parts);
  }

  // Return at least `min_parts` parts, equally many for each thread. The parts have equal sizes if
  // this needs at most three times as many.
  static int64_t divide_evenly(int64_t total_units, int64_t min_parts, int64_t threads) {
    const int64_t first = (min_parts + threads - 1) / threads * threads;
    for (int64_t parts = first; parts <= 3 * first; parts += threads)
      if (total_units % parts == 0) return parts;
    return first;
  }

  int64_t tasks() const { return output_parts * row_parts; }

  // Call `f(product, first row, last row, first output, last output)` for each product of a task.
  template <typename F>
  void for_task_parts(const GemmCall& call, int64_t task, const F& f) const {
    int64_t part = task % row_parts, row = rows * part / row_parts,
            to_row = rows * (part + 1) / row_parts;
    task /= row_parts;
    int64_t total_units = ends.back(), from = total_units * task / output_parts,
            to = total_units * (task + 1) / output_parts;
    for (size_t i = 0; i < ends.size(); ++i) {
      int64_t begin = i ? ends[i - 1] : 0;
      int64_t first = std::max(from, begin) - begin, last = std::min(to, ends[i]) - begin;
      if (first < last)
        f(i, row, to_row, first * unit, std::min(call.products[i].outputs, last * unit));
    }
  }

  int64_t rows, unit, output_parts, row_parts = 1;
  std::vector<int64_t> ends;
};

// Return the product of rows [first, last).
ed::Gemm slice_rows(ed::Gemm p, int64_t first, int64_t last) {
  int64_t bytes = p.x_transposed ? 4 : p.inputs * (p.x_is_bfloat16 ? 2 : 4);
  p.x = static_cast<const char*>(p.x) + first * bytes;
  p.y = static_cast<char*>(p.y) + first * p.outputs * (p.y_is_bfloat16 ? 2 : 4);
  p.rows = last - first;
  return p;
}

// Up to this number of rows, memory bandwidth limits a product.
constexpr int64_t kMemoryBoundRows = 32;

// The bytes of the product's matrix.
int64_t matrix_bytes(const ed::Gemm& p) {
  const int64_t numbers = p.inputs * p.outputs;
  if (p.packed && p.scale.data) return numbers / p.group / ed::kTile * ed::get_panel_group_bytes(p);
  switch (p.format) {
    case ed::Format::kFloat32:
      return 4 * numbers;
    case ed::Format::kBfloat16:
      return 2 * numbers;
    case ed::Format::kFourBits:
      return numbers / 2;
    default:
      return numbers;
  }
}

// Compute all products of a call.
void run_call(ffi::ThreadPool& pool, GemmCall& call) {
  std::vector<QuantizedRows> quantized(call.int8 ? call.products.size() : 0);
  for (size_t i = 0; i < quantized.size(); ++i) {
    ed::Gemm &p = call.products[i], &previous = call.products[i ? i - 1 : 0];
    if (i && p.group == previous.group && p.format == previous.format)
      p.x_int8 = previous.x_int8, p.row_sums = previous.row_sums, p.row_scale = previous.row_scale;
    else
      quantized[i].quantize(pool, p);
  }
  const ed::Level& level = ed::level();
  auto compute = [&](const ed::Gemm& p, int64_t first, int64_t last) {
    (call.int8      ? level.int8_gemm
     : p.transposed ? level.gemm_transposed
                    : level.gemm)(p, first, last);
  };
  std::unique_ptr<char[]> up;
  if (call.gated) {
    ed::Gemm& p = call.products[1];
    up.reset(new char[p.rows * p.outputs * (p.y_is_bfloat16 ? 2 : 4)]);  // not zeroed
    p.y = up.get();
  }
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  if (call.products[0].rows <= kMemoryBoundRows)
    for (const ed::Gemm& p : call.products) {
      // With packed weights, the calling thread computes the first part, and the other threads
      // prefetch their parts.
      const int64_t bytes = matrix_bytes(p), first = p.packed ? bytes / threads : 0;
      ed::MatrixPrefetcher::get().record_matrix(static_cast<const char*>(p.w) + first,
                                                bytes - first);
    }
  TaskGrid parts(call, threads);
  ed::parallel_for(pool, parts.tasks(), [&](int64_t task) {
    parts.for_task_parts(call, task,
                         [&](size_t i, int64_t row, int64_t to_row, int64_t first, int64_t last) {
                           ed::Gemm gate = slice_rows(call.products[i], row, to_row);
                           compute(gate, first, last);
                           if (!call.gated) return;
                           ed::Gemm up_part = slice_rows(call.products[1], row, to_row);
                           compute(up_part, first, last);
                           level.apply_glu(call.act, gate, up_part, first, last);
                         });
  });
}

// Read x [rows, inputs].
bool read_x(ed::Checks& checks, ed::Gemm& p, ffi::AnyBuffer x) {
  checks.require_dtype("x", x.element_type(), {ffi::F32, ffi::BF16});
  if (!checks.require_shape("x", x, {ed::kAny, ed::kAny})) return false;
  p.x = x.untyped_data();
  p.x_is_bfloat16 = p.y_is_bfloat16 = x.element_type() == ffi::BF16;
  p.rows = x.dimensions()[0], p.inputs = x.dimensions()[1];
  return checks.ok();
}

// Read x [rows, inputs] and the outputs of w [inputs, outputs], or of w [outputs, inputs] if
// transposed; or of panels [outputs / kTile, ..], which have more axes.
bool read_operands(ed::Checks& checks, ed::Gemm& p, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   bool transposed) {
  if (!read_x(checks, p, x)) return false;
  p.packed = w.dimensions().size() > 2;
  checks.require(!p.packed || !transposed, "panels cannot be transposed");
  if (!p.packed) checks.require_shape("the matrix", w, {ed::kAny, ed::kAny});
  if (!checks.ok()) return false;
  p.w = w.untyped_data();
  p.transposed = transposed;
  p.outputs = p.packed ? w.dimensions()[0] * ed::kTile : w.dimensions()[transposed ? 0 : 1];
  return true;
}

// Operations after the products of a call. With `biased`, the last arrays of the call are the
// biases.
struct Epilogue {
  bool biased;
  int64_t act;
  bool gated;
};

// Read the biases, from array `first` on, and the activation.
bool read_epilogue(ed::Checks& checks, GemmCall& call, Epilogue epilogue, ffi::DataType dtype,
                   ffi::RemainingArgs arrays, size_t first) {
  if (!checks.require(
          epilogue.act >= 0 && epilogue.act <= static_cast<int64_t>(ed::Activation::kRelu),
          "the number of the activation is unknown"))
    return false;
  call.gated = epilogue.gated;
  auto act = static_cast<ed::Activation>(epilogue.act);
  checks.require(!call.gated || (call.products.size() == 2 &&
                                 call.products[0].outputs == call.products[1].outputs),
                 "a gated call requires two products with the same number of outputs");
  if (call.gated) call.act = act;
  for (size_t i = 0; i < call.products.size(); ++i) {
    ed::Gemm& p = call.products[i];
    if (!call.gated) p.act = act;
    if (!epilogue.biased) continue;
    auto bias = arrays.get<ffi::AnyBuffer>(first + i);
    if (!checks.require(bias.has_value(), "each product requires one bias, or none has a bias"))
      return false;
    checks.require_dtype("the bias", bias->element_type(), {dtype});
    checks.require_shape("the bias", *bias, {p.outputs});
    p.bias = bias->untyped_data();
  }
  return checks.ok();
}

// Return the number of matrices among `arrays`. Each matrix has `parts` arrays and an optional
// bias; 0 = the number of arrays is invalid.
size_t count_matrices(ffi::RemainingArgs arrays, size_t parts, bool biased) {
  size_t each = parts + (biased ? 1 : 0);
  return arrays.size() % each ? 0 : arrays.size() / each;
}

// Whether all `count` numbers of a row are zero.
template <typename Bits>
bool is_zero_row(const Bits* row, int64_t count) {
  constexpr int64_t kChunk = 64;
  for (int64_t i = 0; i < count; i += kChunk) {
    Bits any = 0;
    for (int64_t j = i; j < std::min(count, i + kChunk); ++j) any |= row[j];
    if (static_cast<Bits>(any << 1)) return false;  // without the sign
  }
  return true;
}

// Computes a call without the rows of zeros at the end of x, which are the padding of a batch.
class TrimmedRows {
 public:
  explicit TrimmedRows(GemmCall& call)
      : call_(call), all_rows_(call.products[0].rows), used_rows_(all_rows_) {
    const ed::Gemm& p = call.products[0];
    auto zero = [&](int64_t row) {
      return p.x_is_bfloat16
                 ? is_zero_row(static_cast<const uint16_t*>(p.x) + row * p.inputs, p.inputs)
                 : is_zero_row(static_cast<const uint32_t*>(p.x) + row * p.inputs, p.inputs);
    };
    while (used_rows_ > 0 && zero(used_rows_ - 1)) --used_rows_;
    // With a bias, the result of one row of zeros is copied. The activation of zero is zero.
    has_bias_row_ = p.bias != nullptr && used_rows_ < all_rows_;
    for (ed::Gemm& gate : call.products) gate.rows = used_rows_ + has_bias_row_;
  }

  bool is_empty() const { return used_rows_ + has_bias_row_ == 0; }

  // Write the results of the trimmed rows.
  void fill_padding() {
    for (const ed::Gemm& p : call_.products) {
      const int64_t bytes = p.outputs * (p.y_is_bfloat16 ? 2 : 4);
      char* y = static_cast<char*>(p.y);
      if (!has_bias_row_)
        std::memset(y + used_rows_ * bytes, 0, (all_rows_ - used_rows_) * bytes);
      else
        for (int64_t row = used_rows_ + 1; row < all_rows_; ++row)
          std::memcpy(y + row * bytes, y + used_rows_ * bytes, bytes);
      if (call_.gated) return;
    }
  }

 private:
  GemmCall& call_;
  int64_t all_rows_, used_rows_;
  bool has_bias_row_;
};

// Read the results, one for each product, or one for both products of a gated layer; compute them.
ffi::Error compute(ed::Checks& checks, ffi::ThreadPool& pool, GemmCall& call, ffi::DataType dtype,
                   ffi::RemainingRets results) {
  for (const ed::Gemm& p : call.products)
    checks.require(p.packed == call.products[0].packed,
                   "either all matrices of a call are in panels, or none");
  if (!checks.require(results.size() == (call.gated ? 1 : call.products.size()),
                      "each product requires one result, and a gated pair one result"))
    return checks.error();
  size_t bytes = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    auto y = results.get<ffi::AnyBuffer>(i);
    if (!y.has_value()) return y.error();
    ed::Gemm& p = call.products[i];
    checks.require_dtype("the result", (*y)->element_type(), {dtype});
    if (!checks.require_shape("the result", **y, {p.rows, p.outputs})) return checks.error();
    p.y = (*y)->untyped_data(), bytes += (*y)->size_bytes();
  }
  if (call.products[0].inputs == 0) {  // empty sums, which need no codes
    call.int8 = false;
    for (ed::Gemm& p : call.products)
      p.format = ed::Format::kFloat32, p.transposed = p.packed = false;
  }
  if (bytes == 0) return ffi::Error::Success();
  TrimmedRows rows(call);
  if (!rows.is_empty()) run_call(pool, call);
  rows.fill_padding();
  return ffi::Error::Success();
}

// x [rows, inputs] times each w [inputs, outputs], or [outputs, inputs] if transposed; or times
// packed weights: see gemm_packed.h. Results have the dtype of x, or are float32.
ffi::Error run_products(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs arrays,
                        ffi::RemainingRets results, bool transposed, bool fixed_order, bool biased,
                        int64_t act, bool gated) {
  ed::Checks checks("product");
  GemmCall call;
  size_t count = count_matrices(arrays, 1, biased);
  if (!checks.require(count > 0,
                      "a call requires at least one matrix, and a bias for each or for none"))
    return checks.error();
  auto y = results.get<ffi::AnyBuffer>(0);
  if (!y.has_value()) return y.error();
  const bool float32_result = (*y)->element_type() == ffi::F32;
  const ffi::DataType dtype = float32_result ? ffi::F32 : x.element_type();
  for (size_t i = 0; i < count; ++i) {
    auto w = arrays.get<ffi::AnyBuffer>(i);
    if (!w.has_value()) return w.error();
    ed::Gemm p{};
    if (!read_operands(checks, p, x, *w, transposed)) return checks.error();
    if (float32_result) p.y_is_bfloat16 = false;
    checks.require_dtype("the matrix", w->element_type(), {ffi::F32, ffi::BF16});
    const bool pairs = w->element_type() == ffi::BF16;
    p.format = pairs ? ed::Format::kBfloat16 : ed::Format::kFloat32;
    checks.require(!p.packed || !pairs || p.inputs % 2 == 0,
                   "panels of pairs require an even number of inputs");
    if (!(p.packed && pairs ? checks.require_shape("the matrix in panels", *w,
                                                   {ed::kAny, p.inputs / 2, ed::kTile, 2})
          : p.packed
              ? checks.require_shape("the matrix in panels", *w, {ed::kAny, p.inputs, ed::kTile})
          : transposed ? checks.require_shape("the matrix", *w, {p.outputs, p.inputs})
                       : checks.require_shape("the matrix", *w, {p.inputs, p.outputs})))
      return checks.error();
    p.fixed_order = fixed_order;
    call.products.push_back(p);
  }
  if (!read_epilogue(checks, call, {biased, act, gated}, dtype, arrays, count))
    return checks.error();
  return compute(checks, pool, call, dtype, results);
}

// The gradients [inputs, outputs] of matrices: x^T times each output gradient [rows, outputs], for
// x [rows, inputs]. The last result is a buffer for packed bfloat16 numbers of x, with four bytes
// each.
ffi::Error run_gradients(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs arrays,
                         ffi::RemainingRets results) {
  ed::Checks checks("gradients of matrices");
  const size_t buffers = x.element_type() == ffi::BF16 ? 1 : 0;
  if (!checks.require(
          arrays.size() > 0 && results.size() == arrays.size() + buffers,
          "a call requires at least one array and one result for each, and a buffer for x "
          "of bfloat16 numbers"))
    return checks.error();
  checks.require_dtype("x", x.element_type(), {ffi::F32, ffi::BF16});
  if (!checks.require_shape("x", x, {ed::kAny, ed::kAny})) return checks.error();
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  void* numbers = x.untyped_data();
  if (buffers) {
    auto buffer = results.get<ffi::AnyBuffer>(arrays.size());
    if (!buffer.has_value()) return buffer.error();
    checks.require_dtype("the buffer", (*buffer)->element_type(), {ffi::F32});
    if (!checks.require_shape("the buffer", **buffer, {rows, inputs})) return checks.error();
    numbers = (*buffer)->untyped_data();
  }
  GemmCall call;
  size_t bytes = 0;
  for (size_t i = 0; i < arrays.size(); ++i) {
    auto d_y = arrays.get<ffi::AnyBuffer>(i);
    auto d_w = results.get<ffi::AnyBuffer>(i);
    if (!d_y.has_value()) return d_y.error();
    if (!d_w.has_value()) return d_w.error();
    checks.require_dtype("the gradient of a product", d_y->element_type(), {x.element_type()});
    checks.require_dtype("the result", (*d_w)->element_type(), {ffi::F32});
    if (!checks.require_shape("the gradient of a product", *d_y, {rows, ed::kAny}))
      return checks.error();
    ed::Gemm p{};
    p.rows = inputs, p.inputs = rows, p.outputs = d_y->dimensions()[1];
    if (!checks.require_shape("the result", **d_w, {p.rows, p.outputs})) return checks.error();
    p.x = numbers, p.x_rows = inputs, p.x_transposed = !buffers || !ed::level().lhs_in_rows;
    p.w = d_y->untyped_data(), p.y = (*d_w)->untyped_data();
    p.x_is_bfloat16 = x.element_type() == ffi::BF16;
    p.format = p.x_is_bfloat16 ? ed::Format::kBfloat16 : ed::Format::kFloat32;
    bytes += (*d_w)->size_bytes();
    call.products.push_back(p);
  }
  if (!checks.ok()) return checks.error();
  if (bytes == 0) return ffi::Error::Success();
  if (buffers)
    ed::parallel_for(pool, (rows + ed::kTile - 1) / ed::kTile, [&](int64_t task) {
      const int64_t first = task * ed::kTile, last = std::min(rows, first + ed::kTile);
      ed::level().pack_lhs(call.products[0], x.untyped_data(), numbers, first, last);
    });
  run_call(pool, call);
  return ffi::Error::Success();
}

// Read scales or zeros: [groups, outputs], or [outputs, groups] if the codes are transposed.
bool read_groups(ed::Checks& checks, ed::GroupParams& numbers, const char* name,
                 ffi::AnyBuffer from, const ed::Gemm& p, int64_t groups) {
  numbers.data = from.untyped_data();
  switch (from.element_type()) {
    case ffi::U8:
      numbers.kind = ed::ParamType::kUint8;
      break;
    case ffi::F16:
      numbers.kind = ed::ParamType::kFloat16;
      break;
    case ffi::F8E8M0FNU:
      numbers.kind = ed::ParamType::kE8m0;
      break;
    default:
      numbers.kind = ed::ParamType::kFloat32;
  }
  checks.require_dtype(name, from.element_type(), {ffi::F32, ffi::F16, ffi::U8, ffi::F8E8M0FNU});
  return p.transposed ? checks.require_shape(name, from, {p.outputs, groups})
                      : checks.require_shape(name, from, {groups, p.outputs});
}

// Require that the groups divide the inputs.
bool read_group(ed::Checks& checks, ed::Gemm& p, int64_t groups) {
  if (!checks.require(groups > 0 && p.inputs % groups == 0,
                      "the number of groups must be at least 1 and divide the inputs"))
    return false;
  p.group = p.inputs / groups;
  return checks.require(p.format != ed::Format::kFourBits || p.group % 2 == 0,
                        "a group of four-bit codes must have an even size");
}

// Read a matrix of codes: int8 or float8_e4m3fn [inputs, outputs]; or four bits, [inputs / 2,
// outputs] bytes with a table [16]; or the transpose. An empty `zero` means no zeros.
bool read_codes(ed::Checks& checks, ed::Gemm& p, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                ffi::AnyBuffer scale, ffi::AnyBuffer zero, FloatVector table, bool transposed,
                bool int8) {
  if (!checks.require_shape("codes", codes, {ed::kAny, ed::kAny})) return false;
  if (!read_operands(checks, p, x, codes, transposed)) return false;
  int8 ? checks.require_dtype("codes", codes.element_type(), {ffi::S8, ffi::U8})
       : checks.require_dtype("codes", codes.element_type(), {ffi::S8, ffi::F8E4M3FN, ffi::U8});
  switch (codes.element_type()) {
    case ffi::S8:
      p.format = ed::Format::kInt8;
      break;
    case ffi::F8E4M3FN:
      p.format = ed::Format::kFp8;
      break;
    default:
      p.format = ed::Format::kFourBits;
  }
  bool four_bits = p.format == ed::Format::kFourBits;
  checks.require(!four_bits || p.inputs % 2 == 0,
                 "four-bit codes require an even number of inputs");
  int64_t stored_inputs = four_bits ? p.inputs / 2 : p.inputs;
  transposed ? checks.require_shape("codes", codes, {p.outputs, stored_inputs})
             : checks.require_shape("codes", codes, {stored_inputs, p.outputs});
  checks.require_shape("the table of four-bit codes", table, {four_bits ? 16 : 0});
  if (!checks.require_shape("scale", scale, {ed::kAny, ed::kAny})) return false;
  int64_t groups = scale.dimensions()[transposed ? 1 : 0];
  if (!read_group(checks, p, groups)) return false;
  p.table = table.typed_data();
  read_groups(checks, p.scale, "scale", scale, p, groups);
  if (zero.element_count() > 0) read_groups(checks, p.zero, "zero", zero, p, groups);
  return checks.ok();
}

// x times each matrix of codes, which has four arrays. `whole`: x is quantized to int8.
ffi::Error run_code_products(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::RemainingArgs arrays,
                             ffi::RemainingRets results, bool transposed, bool int8, bool biased,
                             int64_t act, bool gated) {
  ed::Checks checks("product of codes");
  GemmCall call;
  call.int8 = int8;
  size_t count = count_matrices(arrays, 4, biased);
  if (!checks.require(
          count > 0,
          "a matrix requires four arrays: codes, scale, zero and table; and a bias, or no "
          "matrix has a bias"))
    return checks.error();
  for (size_t i = 0; i < 4 * count; i += 4) {
    auto codes = arrays.get<ffi::AnyBuffer>(i), scale = arrays.get<ffi::AnyBuffer>(i + 1);
    auto zero = arrays.get<ffi::AnyBuffer>(i + 2);
    auto table = arrays.get<FloatVector>(i + 3);
    if (!codes.has_value() || !scale.has_value() || !zero.has_value()) return codes.error();
    if (!table.has_value()) return table.error();
    ed::Gemm p{};
    if (!read_codes(checks, p, x, *codes, *scale, *zero, *table, transposed, int8))
      return checks.error();
    call.products.push_back(p);
  }
  if (!read_epilogue(checks, call, {biased, act, gated}, x.element_type(), arrays, 4 * count))
    return checks.error();
  return compute(checks, pool, call, x.element_type(), results);
}

// The storage of groups of packed codes: see int8_gemm_packed.h.
struct PackedFormat {
  int64_t bits;         // of a code: 4 or 8
  int64_t scale_bytes;  // 4: float32; 2: float16
  int64_t zero_bytes;   // 4: float32; 1: uint8; 0: no zeros
};

// Read packed codes, bytes [outputs / kTile, groups, ..], for a number of inputs.
bool read_code_panels(ed::Checks& checks, ed::Gemm& p, ffi::AnyBuffer w, int64_t inputs,
                      PackedFormat format) {
  checks.require(format.bits == 4 || format.bits == 8, "a code must have 4 or 8 bits");
  checks.require(format.scale_bytes == 4 || format.scale_bytes == 2,
                 "a scale must have 2 or 4 bytes");
  checks.require(format.zero_bytes == 4 || format.zero_bytes == 1 || format.zero_bytes == 0,
                 "a zero must have 0, 1 or 4 bytes");
  checks.require_dtype("the panels of codes", w.element_type(), {ffi::U8});
  if (!checks.require_shape("the panels of codes", w, {ed::kAny, ed::kAny, ed::kAny})) return false;
  p.w = w.untyped_data(), p.packed = true;
  p.inputs = inputs, p.outputs = w.dimensions()[0] * ed::kTile;
  const bool four_bits = format.bits == 4;
  p.format = four_bits ? ed::Format::kFourBits : ed::Format::kInt8;
  const int64_t groups = w.dimensions()[1];
  if (!read_group(checks, p, groups)) return false;
  checks.require(p.group % (four_bits ? 8 : 4) == 0,
                 "a group of codes in panels must have whole fours of bytes");
  p.scale = {p.w, format.scale_bytes == 4 ? ed::ParamType::kFloat32 : ed::ParamType::kFloat16};
  auto* zeros = static_cast<const char*>(p.w) + format.scale_bytes * ed::kTile;
  if (format.zero_bytes)
    p.zero = {zeros, format.zero_bytes == 4 ? ed::ParamType::kFloat32 : ed::ParamType::kUint8};
  return checks.require_shape("the panels of codes", w,
                              {ed::kAny, groups, ed::get_panel_group_bytes(p)});
}

// Int8 rows of x times each matrix of packed codes.
ffi::Error run_packed_code_products(ffi::ThreadPool pool, ffi::AnyBuffer x,
                                    ffi::RemainingArgs arrays, ffi::RemainingRets results,
                                    int64_t bits, int64_t scale_bytes, int64_t zero_bytes,
                                    bool biased, int64_t act, bool gated) {
  ed::Checks checks("product of codes in panels");
  GemmCall call;
  call.int8 = true;
  const size_t count = count_matrices(arrays, 1, biased);
  if (!checks.require(count > 0,
                      "a call requires at least one matrix, and a bias for each or for none"))
    return checks.error();
  for (size_t i = 0; i < count; ++i) {
    auto w = arrays.get<ffi::AnyBuffer>(i);
    if (!w.has_value()) return w.error();
    ed::Gemm p{};
    if (!read_x(checks, p, x)) return checks.error();
    if (!read_code_panels(checks, p, *w, p.inputs, {bits, scale_bytes, zero_bytes}))
      return checks.error();
    call.products.push_back(p);
  }
  if (!read_epilogue(checks, call, {biased, act, gated}, x.element_type(), arrays, count))
    return checks.error();
  return compute(checks, pool, call, x.element_type(), results);
}

// Rows [n, inputs], float32: the outputs `at` [n] of packed codes.
ffi::Error gather_rows(ffi::ThreadPool pool, ffi::AnyBuffer w, IntVector at,
                       ffi::Result<ffi::AnyBuffer> rows, int64_t bits, int64_t scale_bytes,
                       int64_t zero_bytes) {
  constexpr int64_t kTaskRows = 32;
  ed::Checks checks("rows of codes in panels");
  checks.require_dtype("the result", rows->element_type(), {ffi::F32});
  const int64_t count = at.dimensions()[0];
  if (!checks.require_shape("the result", *rows, {count, ed::kAny})) return checks.error();
  ed::Gemm p{};
  if (!read_code_panels(checks, p, w, rows->dimensions()[1], {bits, scale_bytes, zero_bytes}))
    return checks.error();
  p.y = rows->untyped_data();
  if (p.inputs == 0) return ffi::Error::Success();
  ed::parallel_for(pool, (count + kTaskRows - 1) / kTaskRows, [&](int64_t task) {
    const int64_t first = task * kTaskRows;
    ed::level().gather_rows(p, at.typed_data(), first, std::min(count, first + kTaskRows));
  });
  return ffi::Error::Success();
}

// The first index of the largest number of each row of x [rows, count].
ffi::Error find_argmax(ffi::ThreadPool pool, FloatMatrix x, ffi::Result<IntVector> at) {
  constexpr int64_t kTaskElements = 1 << 16;
  ed::Checks checks("largest numbers of rows");
  const int64_t rows = x.dimensions()[0], count = x.dimensions()[1];
  checks.require(count > 0, "a row must have at least one number");
  if (!checks.require_shape("the result", *at, {rows})) return checks.error();
  const int64_t task_size = std::max<int64_t>(1, kTaskElements / count);
  ed::parallel_for(pool, (rows + task_size - 1) / task_size, [&](int64_t task) {
    for (int64_t row = task * task_size; row < std::min(rows, (task + 1) * task_size); ++row)
      at->typed_data()[row] = ed::level().find_argmax(x.typed_data() + row * count, count);
  });
  return ffi::Error::Success();
}

// Write rows [n, ..] at `index` [n] of an array whose first `axes` axes count its rows. XLA may
// pass one buffer as the array and the result. An index beyond the array drops its row.
ffi::Error scatter_rows(ffi::AnyBuffer array, IntVector index, ffi::AnyBuffer rows,
                        ffi::Result<ffi::AnyBuffer> result, int64_t axes) {
  ed::Checks checks("put");
  auto shape = array.dimensions(), row_parts = rows.dimensions(),
       result_shape = result->dimensions();
  checks.require_dtype("the rows", rows.element_type(), {array.element_type()});
  checks.require_dtype("the result", result->element_type(), {array.element_type()});
  size_t bytes = ffi::ByteWidth(array.element_type());
  checks.require(bytes > 0, "numbers must have whole bytes");
  if (!std::equal(shape.begin(), shape.end(), result_shape.begin(), result_shape.end()))
    checks.reject("the result has shape " + ed::format_shape(result_shape) +
                  ", the array has shape " + ed::format_shape(shape));
  if (!checks.require(axes >= 1 && axes <= static_cast<int64_t>(shape.size()),
                      "axes must be at least 1 and at most the number of axes of the array"))
    return checks.error();
  int64_t count = 1, width = bytes, new_rows = index.dimensions()[0];
  for (int64_t axis = 0; axis < axes; ++axis) count *= shape[axis];
  for (size_t axis = axes; axis < shape.size(); ++axis) width *= shape[axis];
  bool same = row_parts.size() > 0 && row_parts[0] == new_rows &&
              std::equal(shape.begin() + axes, shape.end(), row_parts.begin() + 1, row_parts.end());
  if (!same)
    checks.reject("the rows have shape " + ed::format_shape(row_parts) + " for " +
                  std::to_string(new_rows) + " places in an array of shape " +
                  ed::format_shape(shape) + " with " + std::to_string(axes) + " axes of rows");
  if (!checks.ok()) return checks.error();
  auto* to = static_cast<char*>(result->untyped_data());
  auto* from = static_cast<const char*>(rows.untyped_data());
  if (to != array.untyped_data()) std::memcpy(to, array.untyped_data(), array.size_bytes());
  for (int64_t i = 0; i < new_rows; ++i) {
    int64_t at = index.typed_data()[i];
    if (at >= 0 && at < count) std::memcpy(to + at * width, from + i * width, width);
  }
  return ffi::Error::Success();
}

}  // namespace

// Exported symbols.
#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_product, run_products,
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
    ed_gradients, run_gradients,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_product_of_codes, run_code_products,
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_product_of_code_panels, run_packed_code_products,
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_take, gather_rows,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<IntVector>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("scale_bytes")
                                  .Attr<int64_t>("zero_bytes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    ed_first_largest, find_argmax,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<FloatMatrix>().Ret<IntVector>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(ed_put, scatter_rows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<IntVector>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("axes"));

// The name of the selected level.
extern "C" const char* ed_level() { return ed::level().name; }

#pragma GCC visibility pop
