// A program that runs every kernel of one level with random shapes, for sanitizers.
// `native_programs.py` compiles it. ED_LAYERS_NATIVE_LEVEL selects the level.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "random_panels.h"
#include "handlers.h"

namespace {

std::mt19937 bits(0);

int64_t draw(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(bits() % static_cast<uint32_t>(high - low + 1));
}

std::vector<float> draw_floats(int64_t count) {
  std::vector<float> numbers(count);
  for (float& x : numbers) x = static_cast<float>(draw(-1000, 1000)) / 500;
  return numbers;
}

std::vector<uint8_t> draw_bytes(int64_t count) {
  std::vector<uint8_t> codes(count);
  for (uint8_t& x : codes) x = static_cast<uint8_t>(bits());
  return codes;
}

bool is_finite(const std::vector<float>& numbers) {
  for (float x : numbers)
    if (!std::isfinite(x)) return false;
  return true;
}

// Convert to bfloat16 by truncation.
std::vector<uint16_t> to_bfloat16(const std::vector<float>& numbers) {
  std::vector<uint16_t> upper(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    uint32_t float_bits;
    std::memcpy(&float_bits, &numbers[i], sizeof float_bits);
    upper[i] = static_cast<uint16_t>(float_bits >> 16);
  }
  return upper;
}

bool is_finite(const std::vector<uint16_t>& numbers) {
  for (uint16_t x : numbers)
    if ((x & 0x7f80) == 0x7f80) return false;
  return true;
}

// One product with a random shape and format.
bool check_gemm(const ed::Level& level) {
  ed::Gemm p{};
  int64_t groups = draw(1, 4), outputs = draw(0, 2) ? draw(1, 200) : ed::kTile * draw(1, 3);
  p.group = draw(0, 1) ? 2 * draw(1, 150) : 16 << draw(0, 3), p.inputs = groups * p.group;
  p.rows = draw(0, 3) ? draw(1, 20) : draw(60, 140);
  p.outputs = outputs, p.transposed = draw(0, 1);
  p.format = static_cast<ed::Format>(draw(0, 4));
  auto x = draw_floats(p.rows * p.inputs), table = draw_floats(16),
       scale = draw_floats(groups * outputs);
  auto zero = draw_floats(groups * outputs);
  std::vector<float> y(p.rows * outputs);
  int64_t width[] = {4, 2, 1, 1, 1};
  int64_t size = p.inputs * outputs * width[static_cast<int>(p.format)];
  auto w = draw_bytes(p.format == ed::Format::kFourBits ? size / 2 : size);
  if (p.format == ed::Format::kFloat32) {
    auto numbers = draw_floats(p.inputs * outputs);
    std::memcpy(w.data(), numbers.data(), w.size());
  }
  for (size_t i = 1; p.format == ed::Format::kBfloat16 && i < w.size(); i += 2) w[i] = 0x3f;
  for (uint8_t& code : w)
    if (p.format == ed::Format::kFp8 && (code & 127) == 127) code = 0;
  auto bf16_x = to_bfloat16(x);
  p.x_is_bfloat16 = draw(0, 1);
  p.x = p.x_is_bfloat16 ? static_cast<void*>(bf16_x.data()) : x.data();
  p.y = y.data(), p.w = w.data(), p.table = table.data();
  p.scale.data = scale.data();
  bool codes = p.format >= ed::Format::kInt8;
  if (codes && p.format != ed::Format::kFp8 && draw(0, 1)) p.zero.data = zero.data();
  bool int8 = (p.format == ed::Format::kInt8 || p.format == ed::Format::kFourBits) && draw(0, 1);
  int64_t quad_inputs = p.format == ed::Format::kFourBits ? 8 : 4;  // inputs of four bytes
  p.packed = !p.transposed && outputs % ed::kTile == 0 &&
             (codes ? int8 && p.group % quad_inputs == 0 : draw(0, 1) && p.inputs % 2 == 0);
  if (codes && p.packed) {
    p.scale.kind = draw(0, 1) ? ed::ParamType::kFloat16 : ed::ParamType::kFloat32;
    p.zero.kind = draw(0, 1) ? ed::ParamType::kUint8 : ed::ParamType::kFloat32;
    const int64_t group_count = outputs / ed::kTile * groups;
    w.resize(group_count * ed::get_panel_group_bytes(p)), p.w = w.data();
    ed::fill_code_panels(p, group_count, w.data(), draw);
  }
  std::vector<int8_t> numbers;
  std::vector<int32_t> sums;
  std::vector<float> scales(p.rows * groups);
  if (int8) {
    ed::Int8RowSizes sizes = level.get_int8_row_sizes(p);
    numbers.resize(p.rows * sizes.bytes), sums.resize(p.rows * sizes.sums);
    p.x_int8 = numbers.data(), p.row_sums = sums.data(), p.row_scale = scales.data();
    for (int64_t row = 0; row < p.rows; ++row) level.quantize_row(p, row);
  }
  auto compute = int8 ? level.int8_gemm : p.transposed ? level.gemm_transposed : level.gemm;
  int64_t share = p.packed ? ed::kTile / 2 * draw(1, 5)
                  : int8   ? 2 * ed::kTile
                           : ed::kUnit * draw(1, 9);
  auto up = draw_floats(p.rows * outputs);
  ed::Gemm up_gemm = p;
  up_gemm.y = up.data();
  for (int64_t first = 0; first < outputs; first += share) {
    int64_t last = std::min(outputs, first + share);
    compute(p, first, last);
    level.apply_glu(static_cast<ed::Activation>(draw(1, 5)), p, up_gemm, first, last);
  }
  return is_finite(y);
}

// The gradient of a matrix with a random shape.
bool check_gradient(const ed::Level& level, bool bf16_args) {
  ed::Gemm p{};
  p.inputs = draw(1, 200), p.rows = p.x_rows = draw(1, 150), p.outputs = draw(1, 200);
  auto x = draw_floats(p.inputs * p.rows), w = draw_floats(p.inputs * p.outputs), buffer = x;
  auto bf16_x = to_bfloat16(x), bf16_w = to_bfloat16(w);
  std::vector<float> y(p.rows * p.outputs);
  p.x = x.data(), p.w = w.data(), p.y = y.data(), p.x_transposed = true;
  if (bf16_args) {
    p.format = ed::Format::kBfloat16, p.x_is_bfloat16 = true, p.w = bf16_w.data();
    p.x = buffer.data(), p.x_transposed = !level.lhs_in_rows;
    for (int64_t first = 0; first < p.inputs; first += ed::kTile)
      level.pack_lhs(p, bf16_x.data(), buffer.data(), first, std::min(p.inputs, first + ed::kTile));
  }
  int64_t share = ed::kUnit * draw(1, 9);
  for (int64_t first = 0; first < p.outputs; first += share)
    level.gemm(p, first, std::min(p.outputs, first + share));
  return is_finite(y);
}

// The forward pass of attention, in tasks.
void run_forward(const ed::Level& level, const ed::AttentionArgs& p) {
  int64_t share = level.attention.get_block_queries(p) * draw(1, ed::kTaskBlocks);
  for (int64_t row = 0; row < p.batch; ++row)
    for (int64_t group = 0; group < p.groups; ++group)
      for (int64_t first = 0; first < p.queries; first += share)
        level.attention.forward(p, row, group, first, std::min(p.queries, first + share));
}

// Attention with a random shape, forward and backward.
bool check_attention(const ed::Level& level) {
  ed::AttentionArgs p{};
  p.batch = p.rows = draw(1, 2), p.queries = draw(1, 150), p.slots = p.queries;
  p.groups = draw(1, 2), p.heads = p.groups * draw(1, 3);
  p.key_dim = draw(1, 40), p.value_dim = draw(1, 40);
  int64_t tokens = p.batch * p.queries;
  auto q = draw_floats(tokens * p.heads * p.key_dim),
       k = draw_floats(tokens * p.groups * p.key_dim);
  auto v = draw_floats(tokens * p.groups * p.value_dim),
       d_out = draw_floats(tokens * p.heads * p.value_dim);
  auto shared = draw_floats(tokens * p.heads), sinks = draw_floats(p.heads);
  std::vector<float> out(d_out.size()), lse(shared.size()), d_q(q.size());
  std::vector<float> d_k(k.size()), d_v(v.size());
  p.max_distance = draw(1, 100);
  auto distances = draw_floats(p.heads * (2 * p.max_distance + 1)), slopes = draw_floats(p.heads);
  std::vector<float> d_distance_bias(p.heads / p.groups * (2 * p.max_distance + 1));
  if (draw(0, 1)) p.distance_bias = distances.data();
  if (draw(0, 1)) p.slopes = slopes.data(), p.alibi_factor = 0.1f, p.alibi_rounded = draw(0, 1);
  if (draw(0, 1)) p.drop_threshold = int64_t{1} << 31, p.keep_scale = 2;
  std::vector<int32_t> segments(tokens), index(tokens);
  for (int64_t i = 0; i < tokens; ++i)
    segments[i] = draw(0, 9) != 0, index[i] = static_cast<int32_t>(i % p.queries);
  p.q = q.data(), p.out = out.data(), p.lse = lse.data();
  for (ed::SlotArray* s : {&p.keys, &p.values}) {
    s->data = s == &p.keys ? k.data() : v.data();
    s->head = s == &p.keys ? p.key_dim : p.value_dim;
    s->slot = p.groups * s->head, s->row = p.slots * s->slot;
  }
  p.q_segments = p.k_segments = segments.data(), p.q_index = p.k_index = index.data();
  p.causal = draw(0, 1), p.scale = 0.3f, p.soft_cap = draw(0, 1) ? 4.0f : 0.0f;
  p.window = draw(0, 1) ? draw(1, 80) : 0, p.chunk = draw(0, 1) ? draw(1, 80) : 0;
  if (draw(0, 1)) p.sinks = sinks.data();
  run_forward(level, p);
  ed::AttentionArgs bf16_args = p;
  auto bf16_q = to_bfloat16(q), bf16_k = to_bfloat16(k), bf16_v = to_bfloat16(v),
       bf16_d_out = to_bfloat16(d_out);
  std::vector<uint16_t> bf16_out(out.size());
  bf16_args.q = bf16_q.data(), bf16_args.q_is_bfloat16 = true, bf16_args.out = bf16_out.data();
  bf16_args.keys.data = bf16_k.data(), bf16_args.keys.kind = ed::StorageType::kBfloat16;
  bf16_args.values.data = bf16_v.data(), bf16_args.values.kind = ed::StorageType::kBfloat16;
  run_forward(level, bf16_args);
  p.d_out = d_out.data(), p.shared = shared.data();
  p.d_k = d_k.data(), p.d_v = d_v.data();
  bf16_args.lse = lse.data(), bf16_args.shared = p.shared;
  bf16_args.d_out = bf16_d_out.data(), bf16_args.d_k = p.d_k, bf16_args.d_v = p.d_v;
  bool is_valid = is_finite(out) && is_finite(bf16_out);
  for (const ed::AttentionArgs& args : {p, bf16_args})
    for (int64_t group = 0; group < p.groups; ++group) {
      const int64_t middle = draw(0, p.slots);
      for (int64_t first : {int64_t{0}, middle})
        level.attention.backward(args, p.batch - 1, group, first, first ? p.slots : middle,
                                 d_q.data(), d_distance_bias.data());
      is_valid = is_valid && is_finite(d_k) && is_finite(d_v) && is_finite(d_q) &&
                 is_finite(d_distance_bias);
    }
  return is_valid;
}

// Rotary positions with a random shape.
bool check_rotary(const ed::Level& level) {
  ed::RotaryArgs p{};
  p.tokens = draw(1, 20), p.heads = draw(1, 4), p.pairs = draw(1, 40);
  p.dim = 2 * p.pairs + draw(0, 1) * draw(0, 20);
  auto x = draw_floats(p.tokens * p.heads * p.dim);
  auto cos = draw_floats(p.tokens * p.pairs), sin = draw_floats(p.tokens * p.pairs);
  std::vector<float> y(x.size());
  p.x = x.data(), p.y = y.data(), p.cos = cos.data(), p.sin = sin.data();
  p.interleaved = draw(0, 1), p.inverse = draw(0, 1);
  int64_t half = p.tokens / 2;
  level.apply_rotary(p, 0, half), level.apply_rotary(p, half, p.tokens);
  return is_finite(y);
}

// A recurrence with a random shape and random options.
bool check_recurrence(const ed::Level& level) {
  ed::RecurrenceArgs p{};
  p.rows = draw(1, 3), p.columns = draw(1, 5), p.groups = draw(1, 2),
  p.heads = p.groups * draw(1, 3);
  p.keys = draw(1, 40), p.values = draw(1, 70), p.keys_last = draw(0, 1);
  bool has_rates = p.keys_last && draw(0, 1), has_beta = !p.keys_last && draw(0, 1);
  int64_t tokens = p.rows * p.columns;
  p.decays = has_rates ? p.values : p.keys_last || draw(0, 1) ? 1 : p.keys;
  auto states = draw_floats(2 * p.heads * p.keys * p.values),
       value = draw_floats(tokens * p.heads * p.values);
  auto query = draw_floats(tokens * p.groups * p.keys),
       key = draw_floats(tokens * p.groups * p.keys);
  auto decay = draw_floats(tokens * p.heads * p.decays),
       rates = draw_floats(p.heads * p.values * p.keys);
  auto beta = draw_floats(tokens * p.heads);
  for (float& x : rates) x = -std::abs(x);
  for (float& x : decay) x = has_rates ? std::abs(x) : x / 2;
  for (float& x : key) x /= 8;
  std::vector<float> out(value.size());
  std::vector<int32_t> owner(p.rows), marks(tokens);
  for (int32_t& state : owner) state = static_cast<int32_t>(draw(0, 1));
  for (int32_t& mark : marks) mark = static_cast<int32_t>(draw(0, 2));
  p.states = states.data(), p.owner = owner.data(), p.marks = marks.data();
  p.query = query.data(), p.key = key.data(), p.value = value.data(), p.decay = decay.data();
  p.rates = has_rates ? rates.data() : nullptr, p.beta = has_beta ? beta.data() : nullptr;
  p.out = out.data();
  int64_t half = p.heads / 2;
  level.run_recurrence(p, 0, half), level.run_recurrence(p, half, p.heads);
  return is_finite(out) && is_finite(states);
}

}  // namespace

int main() {
  const ed::Level& level = ed::level();
  for (int round = 0; round < 150; ++round)
    if (!check_gemm(level) || !check_gradient(level, round % 2) || !check_attention(level) ||
        !check_rotary(level) || !check_recurrence(level)) {
      std::printf("%s: turn %d has a number that is not finite\n", level.name, round);
      return 1;
    }
  std::printf("%s\n", level.name);
  return 0;
}
