// What XLA calls: checks the arrays, chooses the level of instructions, shares out the work.
#include <cstdlib>
#include <cstring>

#include "product.h"
#include "threads.h"

namespace ffi = xla::ffi;

namespace {

using Vector = ffi::Buffer<ffi::F32, 1>;
using Matrix = ffi::Buffer<ffi::F32, 2>;

// The best level that this processor has; ED_LAYERS_NATIVE_LEVEL names a lower one, for tests.
const ed::Level& level() {
  static const ed::Level* chosen = [] {
    const char* asked = std::getenv("ED_LAYERS_NATIVE_LEVEL");
    auto fits = [&](const ed::Level& l) { return !asked || !std::strcmp(asked, l.name); };
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16") && fits(ed::kAvx512Bf16Level))
      return &ed::kAvx512Bf16Level;
    if (avx512 && fits(ed::kAvx512Level)) return &ed::kAvx512Level;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && fits(ed::kAvx2Level))
      return &ed::kAvx2Level;
#endif
    return &ed::kBaseLevel;
  }();
  return *chosen;
}

// Outputs of a task: long runs for few rows, and as many tasks as even out busy threads.
int64_t outputs_of_task(const ed::Product& p, int64_t threads) {
  int64_t tiles = (p.outputs + ed::kTile - 1) / ed::kTile;
  int64_t most = p.rows <= 8 ? 16 : p.rows <= 64 ? 4 : 2;
  int64_t share = (tiles + 2 * threads - 1) / (2 * threads);
  return std::max<int64_t>(1, std::min(most, share)) * ed::kTile;
}

ffi::Error run(ffi::ThreadPool pool, const ed::Product& p) {
  if (p.rows == 0 || p.outputs == 0) return ffi::Error::Success();
  int64_t share = outputs_of_task(p, std::max<int64_t>(1, pool.num_threads()));
  int64_t tasks = (p.outputs + share - 1) / share;
  ed::ProductOfOutputs compute = p.transposed ? level().rows : level().columns;
  ed::parallel(pool, tasks, [&](int64_t task) {
    compute(p, task * share, std::min(p.outputs, (task + 1) * share));
  });
  return ffi::Error::Success();
}

ffi::Error wrong(const char* what) { return ffi::Error(ffi::ErrorCode::kInvalidArgument, what); }

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

// x times codes: int8 [inputs, outputs], or four bits, [inputs / 2, outputs] bytes, by a table [16].
// scale and zero [inputs / group, outputs]; a zero without rows is none.
ffi::Error product_of_codes(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
                            Matrix scale, Matrix zero, Vector table,
                            ffi::Result<ffi::AnyBuffer> y) {
  ed::Product p{};
  if (ffi::Error error = fill(p, x, codes, *y, false); error.failure()) return error;
  bool bytes = codes.element_type() == ffi::S8;
  if (!bytes && codes.element_type() != ffi::U8) return wrong("codes should be int8 or uint8");
  p.format = bytes ? ed::Format::kInt8 : ed::Format::kFourBits;
  int64_t inputs = codes.dimensions()[0] * (bytes ? 1 : 2), groups = scale.dimensions()[0];
  if (inputs != p.inputs || groups == 0 || inputs % groups != 0 ||
      scale.dimensions()[1] != p.outputs)
    return wrong("product of codes: the shapes of x, codes and scale do not fit");
  if (table.dimensions()[0] != (bytes ? 0 : 16)) return wrong("four bits need a table of 16");
  if (zero.dimensions()[0] != 0 &&
      (zero.dimensions()[0] != groups || zero.dimensions()[1] != p.outputs))
    return wrong("product of codes: zero should have the shape of scale");
  p.scale = scale.typed_data();
  p.zero = zero.dimensions()[0] == 0 ? nullptr : zero.typed_data();
  p.table = table.typed_data();
  p.group = inputs / groups;
  return run(pool, p);
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
                                  .Arg<Matrix>()
                                  .Arg<Matrix>()
                                  .Arg<Vector>()
                                  .Ret<ffi::AnyBuffer>());

// The name of the level in use.
extern "C" const char* ed_level() { return level().name; }

#pragma GCC visibility pop
