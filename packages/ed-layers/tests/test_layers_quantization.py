"""Formats of quantized weights against numpy, products, rules, and training that simulates them."""

import re

import depth_case as case
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.rules import Rules
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_layers.projections.dot import Product, dot
from ed_layers.projections.linear import Linear
from ed_layers.quantization import (
    FORMATS,
    QuantParam,
    dequantize,
    describe,
    encode,
    is_quantized,
    pack,
    qarray,
    quantize,
)
from ed_layers.quantization.model import quantized_matrices
from ed_layers.quantization.stored import unpack
from flax import nnx

IN, OUT, GROUP = 96, 40, 32
F32 = np.float32
# bitsandbytes' documentation of `create_normal_map`, and the thresholds of its kernel dQuantizeNF4.
NF4 = """-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
 -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
 0.7229568362236023, 1.0"""
THRESHOLDS = """-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544,
 -0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767,
 0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683, 0.5016634166240692,
 0.6427869200706482, 0.8614784181118011"""
FP4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(F32)


def numbers(text):
    return np.array([float(x) for x in text.split(",")], F32)


def matrix(*lead, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*lead, IN, OUT)).astype(F32) * np.exp(rng.normal(size=(IN, OUT))).astype(
        F32
    )
    x[..., :GROUP, 3] = 0  # a group of zeros
    x[..., GROUP : 2 * GROUP, 4] = np.abs(x[..., GROUP : 2 * GROUP, 4])  # and one of one sign
    return x


# One function for each format, written from its paper or specification, on groups [n, k, o].


def np_scaled(x, largest):
    scale = np.abs(x).max(axis=1, keepdims=True) * F32(1 / largest)
    return scale, x / np.where(scale == 0, F32(1), scale)


def np_int8(x):
    scale, y = np_scaled(x, 127)
    return np.rint(y).astype(np.int8), scale, None, lambda c: c.astype(F32)


def np_fp8(x):
    scale, y = np_scaled(x, 448)
    return y.astype(ml_dtypes.float8_e4m3fn), scale, None, lambda c: c.astype(F32)


def np_nf4(x):
    largest = np.abs(x).max(axis=1, keepdims=True)
    y = x / np.where(largest == 0, F32(1), largest)
    codes = (y[..., None] > numbers(THRESHOLDS)).sum(-1).astype(np.uint8)
    return codes, largest, None, lambda c: numbers(NF4)[c]


def np_int4(x):
    low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
    scale = ((high - low) * F32(1 / 15)).astype(np.float16).astype(F32)
    safe = np.where(scale == 0, F32(1), scale)
    zero = np.clip(np.rint(-low / safe), 0, 15)
    codes = np.clip(np.rint(x / safe) + zero, 0, 15).astype(np.uint8)
    return codes, scale, zero, lambda c: c.astype(F32)


def np_exponent(x, largest):
    top = np.abs(x).max(axis=1, keepdims=True)
    power = np.where(top == 0, -127, np.floor(np.log2(np.where(top == 0, 1, top))) - largest)
    return np.ldexp(F32(1), power.astype(int))


def np_mxfp8(x):
    scale = np_exponent(x, 8)
    codes = np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes, scale, None, lambda c: c.astype(F32)


def np_mxfp4(x):
    scale = np_exponent(x, 2)
    codes = np.clip(x / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return codes, scale, None, lambda c: FP4[c]


NUMPY = {
    "nf4": np_nf4,
    "int8": np_int8,
    "int4": np_int4,
    "fp8": np_fp8,
    "mxfp8": np_mxfp8,
    "mxfp4": np_mxfp4,
}
GROUPS = {"int8": (None, GROUP), "fp8": (None, GROUP), "mxfp8": (None,), "mxfp4": (None,)}
CASES = [(name, group) for name in NUMPY for group in GROUPS.get(name, (16, GROUP))]


def same_bits(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


def test_every_quantization_format_has_numpy_reference():
    assert set(NUMPY) == set(FORMATS)


@pytest.mark.parametrize(("name", "group"), CASES)
@pytest.mark.daily("int8-None", "int4-32", "nf4-16", "mxfp4-None")
def test_codes_and_values_are_numpys_to_the_bit(name, group):
    x, w = matrix(), encode(matrix(), name, group)
    k = group or {"mxfp8": 32, "mxfp4": 32}.get(name, IN)
    grouped = x.reshape(-1, k, OUT)
    codes, scale, zero, level = NUMPY[name](grouped)
    own = unpack(w.codes) if FORMATS[name].packed else w.codes
    if name == "mxfp4":  # there are two zeros
        codes, own = np.where(codes == 8, 0, codes), np.where(np.asarray(own) == 8, 0, own)
    same_bits(own, codes.reshape(IN, OUT))
    same_bits(w.scales(), scale[:, 0])
    values = level(codes)
    values = (values if zero is None else values - zero) * scale
    np.testing.assert_array_equal(w.dense(), values.reshape(IN, OUT))
    np.testing.assert_array_equal(jax.jit(lambda w: w.dense())(w), values.reshape(IN, OUT))
    assert (w.shape, w.groups, w.group_size) == ((IN, OUT), IN // k, k)


def test_nf4_is_that_of_bitsandbytes():
    levels = numbers(NF4)
    ladder = np.repeat(levels[:, None], 2, axis=1) * F32([3.0, 0.25])
    w = encode(ladder, "nf4", 16)
    np.testing.assert_array_equal(unpack(w.codes), np.arange(16)[:, None].repeat(2, 1))
    np.testing.assert_array_equal(w.dense(), ladder)
    np.testing.assert_array_equal(w.codes[:, 0], [c | (c + 1) << 4 for c in range(0, 16, 2)])
    same_bits(pack(np.arange(16, dtype=np.uint8)[:, None]), w.codes[:, :1])


def test_double_quantization_compresses_scales():
    """Scales in 8 bits: blocks of 256 columns share a scale, after the mean is taken off."""
    x = np.concatenate([matrix(seed=s) for s in range(13)], axis=1)  # 520 columns: blocks of 260/2
    w, single = encode(x, "nf4", 16, double=True), encode(x, "nf4", 16)
    scale = np.asarray(single.scale)
    offset = scale.mean(dtype=np.float64)
    assert w.scale.scale.shape == (6, 4)
    np.testing.assert_allclose(w.scale.offset, [[offset]], rtol=1e-6)
    rest = scale - np.asarray(w.scale.offset)
    outer = np.abs(rest.reshape(6, 4, 130)).max(-1) * F32(1 / 127)
    np.testing.assert_allclose(w.scale.scale, outer, rtol=1e-6)
    codes = np.rint(rest / outer.repeat(130, 1))
    assert np.abs(np.asarray(w.scale.codes, int) - codes).max() <= 1
    np.testing.assert_allclose(w.scales(), scale, atol=outer.max() / 1.99)
    np.testing.assert_array_equal(w.codes, single.codes)
    assert w.nbytes < single.nbytes - 0.7 * scale.nbytes


@pytest.mark.parametrize("name", [*FORMATS, "double"])
@pytest.mark.daily("int8", "nf4", "mxfp4")
def test_products_are_those_of_the_values(name):
    double = name == "double"
    w = encode(matrix(), "nf4" if double else name, 16 if double else None, double=double)
    assert isinstance(w, Product)
    x = np.random.default_rng(1).normal(size=(2, 5, IN)).astype(F32)
    exact = x.astype(np.float64) @ np.asarray(w.dense(), np.float64)
    bound = 3e-6 * np.abs(exact).max()
    np.testing.assert_allclose(jax.jit(dot)(x, w), exact, atol=bound)
    upstream = np.random.default_rng(2).normal(size=(2, 5, OUT)).astype(F32)
    dx = jax.jit(jax.grad(lambda x: jnp.sum(dot(x, w) * upstream)))(x)
    exact = upstream.astype(np.float64) @ np.asarray(w.dense(), np.float64).T
    np.testing.assert_allclose(dx, exact, atol=3e-6 * np.abs(exact).max())


@pytest.mark.nightly
@pytest.mark.parametrize("columns", [7, 10])
@pytest.mark.parametrize(
    ("name", "activations"), [("nf4", False), ("int8", False), ("fp8", False), ("int4", True)]
)
def test_a_large_matrix_is_never_decoded_as_a_whole(monkeypatch, name, activations, columns):
    """On a CPU it is multiplied by blocks of columns; the last one may begin within another."""
    w = encode(matrix(), name, 16, activations=activations)
    x = np.random.default_rng(1).normal(size=(5, IN)).astype(F32)
    both = lambda x: jax.value_and_grad(lambda x: jnp.sum(jnp.sin(dot(x, w))))(x)  # noqa: E731
    value, dx = jax.jit(lambda x: both(x))(x)
    monkeypatch.setattr(qarray, "_BLOCK", IN * columns)
    blocked = jax.jit(lambda x: both(x))
    got, dgot = blocked(x)
    # The terms of the sum are up to 1, and cancel.
    np.testing.assert_allclose(got, value, atol=1e-6 * x.shape[0] * OUT)
    np.testing.assert_allclose(dgot, dx, atol=2e-5 * np.abs(dx).max())
    compiled = blocked.lower(x).compile().as_text()
    assert not [rows for rows in (IN, IN // 2) if f"f32[{rows},{OUT}]" in compiled]


def test_every_float8_has_its_value():
    bits = np.arange(256, dtype=np.uint8)
    got = FORMATS["fp8"].level(jnp.asarray(bits.view(ml_dtypes.float8_e4m3fn)))
    np.testing.assert_array_equal(got, bits.view(ml_dtypes.float8_e4m3fn).astype(F32))


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*FORMATS, "double"])
def test_tables_give_rows_and_multiply_as_heads(name):
    double, table = name == "double", matrix().T
    w = encode(
        matrix(), "nf4" if double else name, 16 if double else None, double=double
    ).transpose()
    assert w.shape == (OUT, IN)
    rows = np.array([[3, 0], [39, 3]])
    np.testing.assert_array_equal(w.take(rows), np.asarray(w.dense())[rows])
    assert np.abs(w.dense() - table).max() < np.abs(table).max() / 4
    x = np.ones((2, IN), F32)
    np.testing.assert_allclose(dot(x, w.T), x @ np.asarray(w.dense()).T, rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(
        dot(np.ones((2, OUT), F32), w), np.ones((2, OUT)) @ w.dense(), atol=1e-4
    )


@pytest.mark.daily("int4-16")
@pytest.mark.parametrize(("name", "group"), [("int8", None), ("int8", 16), ("int4", 16)])
def test_quantized_activations_multiply_whole_numbers(name, group):
    """Against the same sums in float64: only the last rounding differs."""
    w = encode(matrix(), name, group, activations=True)
    x = np.random.default_rng(1).normal(size=(3, IN)).astype(F32)
    grouped = x.reshape(3, w.groups, -1)
    scale = np.abs(grouped).max(-1, keepdims=True) * F32(1 / 127)
    seen = (np.rint(grouped / scale) * scale.astype(np.float64)).reshape(3, IN)
    exact = seen @ np.asarray(w.dense(), np.float64)
    np.testing.assert_allclose(dot(x, w), exact, atol=1e-6 * np.abs(exact).max())
    text = jax.jit(dot).lower(x, w).as_text()
    assert "xi8>" in text and "xi32>" in text, "8 bits by 8 bits, summed in 32"
    dx = jax.grad(lambda x: dot(x, w).sum())(x)
    # Activations are rounded in the product alone: its gradient is that of the matrix, in float32.
    terms = np.asarray(w.dense(), np.float64)
    assert (np.abs(dx - terms.sum(1)) <= 1e-6 * np.abs(terms).sum(1)).all()


@pytest.mark.nightly
@pytest.mark.parametrize("block", [10**9, 7 * IN])
@pytest.mark.parametrize(("name", "activations"), [("nf4", False), ("fp8", False), ("int4", True)])
def test_a_head_of_a_table_is_that_of_the_matrix(monkeypatch, name, activations, block):
    """Whole, and by blocks of the table's rows."""
    monkeypatch.setattr(qarray, "_BLOCK", block)
    w = encode(matrix(), name, 16, activations=activations)
    x = np.random.default_rng(1).normal(size=(3, IN)).astype(F32)
    both = lambda x, w: jax.value_and_grad(lambda x: jnp.sum(jnp.sin(dot(x, w))))(x)  # noqa: E731
    value, dx = jax.jit(lambda x: both(x, w))(x)
    got, dgot = jax.jit(lambda x: both(x, w.transpose().T))(x)
    # The terms of the sum are up to 1, and cancel.
    np.testing.assert_allclose(got, value, atol=1e-6 * x.shape[0] * OUT)
    np.testing.assert_allclose(dgot, dx, atol=2e-5 * np.abs(dx).max())


@pytest.mark.nightly
def test_leading_dimensions_are_quantized_independently():
    x = matrix(2, 3)
    for name in FORMATS:
        whole = encode(x, name)
        for at in np.ndindex(2, 3):
            one = encode(x[at], name)
            jax.tree.map(lambda a, b, at=at: same_bits(a[at], b), whole, one)


@pytest.mark.parametrize(
    ("name", "group", "size", "message"),
    [
        ("nf4", 64, 96, "group_size 64 of nf4 .* 96; sizes that do: 2, 4, 6, 8, 12, 16, 24"),
        ("int8", 7, 96, "group_size 7 of int8 does not divide"),
        ("nf4", None, 33, "two values in a byte.*33, an odd number"),
        ("mxfp4", None, 48, "mxfp4 has blocks of 32.*leave this layer out"),
        ("mxfp8", 16, 96, "groups of 32, no others"),
    ],
)
def test_groups_that_do_not_fit(name, group, size, message):
    with pytest.raises(ConfigError, match=message):
        encode(np.zeros((size, 4), F32), name, group)


def test_default_group_size_divides_the_dimension():
    assert encode(np.zeros((688, 4), F32), "nf4").group_size == 16
    assert encode(np.zeros((688, 4), F32), "int8").group_size == 688


# Models.


class Model(nnx.Module):
    def __init__(self, stack):
        self.layers = stack

    def __call__(self, x):
        return self.layers(x, case.context())[0]


def model(scan=True):
    return Model(case.stack(4, scan=scan))


def outputs(of):
    graphdef, state = nnx.split(of)
    return np.asarray(jax.jit(lambda s, x: nnx.merge(graphdef, s)(x))(state, jnp.asarray(case.X)))


INT8, NF4_8 = {"dtype": "int8"}, {"dtype": "nf4", "group_size": 8}
RULES = [(r"layers\.2\.", None), (r"layers\.0\.q$", INT8), (r"mlp|\.q$", NF4_8)]


@pytest.mark.nightly
def test_ordered_rules_on_scanned_and_unrolled_layers():
    scanned, unrolled = (quantize(model(scan), RULES) for scan in (True, False))
    formats = {n: w.format for names, w in quantized_matrices(scanned) for n in names}
    assert formats == {n: w.format for names, w in quantized_matrices(unrolled) for n in names}
    assert formats["layers.0.q.kernel"] == "int8"
    assert formats["layers.3.q.kernel"] == formats["layers.0.mlp.up_proj.kernel"] == "nf4"
    assert not [name for name in formats if name.startswith("layers.2.")]
    case.assert_near(outputs(scanned), outputs(unrolled))
    case.assert_near(outputs(scanned), outputs(dequantize(scanned)))
    assert np.abs(outputs(scanned) - outputs(model())).max() > 1e-4
    lines = describe(scanned).splitlines()
    assert re.fullmatch(r"int8, groups of 16: 1 matrices, 256 weights, 1\.25.*", lines[0])
    assert "nf4, groups of 8" in lines[1]


def test_a_rule_with_equal_values_cuts_no_run():
    twice = [(r"layers\.[01]\.", INT8), (r"layers\.[23]\.", INT8)]
    assert [run.name for run in quantize(model(), twice).layers.runs] == ["run_0_4_1"]


def test_quantized_matrices_are_frozen_and_everything_else_is_shared():
    plain = model()
    quantized = quantize(plain, [("", INT8)])
    assert is_quantized(quantized)
    assert not is_quantized(plain)
    learned = dict(nnx.to_flat_state(nnx.state(quantized, nnx.Param)))
    before = dict(nnx.to_flat_state(nnx.state(plain)))
    assert learned, "norms and biases"
    assert all(
        variable.get_value() is before[path].get_value() for path, variable in learned.items()
    )
    kernels = dict(nnx.to_flat_state(nnx.state(quantized, QuantParam)))
    assert {path[-1] for path in kernels} == {"kernel"}
    for path, variable in kernels.items():
        assert variable.get_metadata()["axes"] == before[path].get_metadata()["axes"]
        assert variable.get_value().dtype == before[path].get_value().dtype


def test_rules_may_be_one_configuration():
    spec = EasyDeLQuantizationConfig("int8", pattern=r"\.q$")
    got = {n for names, _ in quantized_matrices(quantize(model(), spec)) for n in names}
    assert got == {f"layers.{i}.q.kernel" for i in range(4)}
    rules = Rules([(r"\.q$", spec)], kind="quantization rule")
    assert {n for names, _ in quantized_matrices(quantize(model(), rules)) for n in names} == got
    mapping = {"quantization_method": "8bit", "pattern": r"\.q$"}
    assert {n for names, _ in quantized_matrices(quantize(model(), mapping)) for n in names} == got


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("quu", INT8), ("q$", INT8)], "quantization rule 'quu' matches no"),
        ([("", {"dtype": "nf5"})], "did you mean 'nf4'"),
        ([("", {"dtype": "nf4", "group_size": 5})], r"layers\.0\.\S+: group_size 5 of nf4"),
        ([("", {"dtype": "int8", "double_quantization": True})], "double_quantization is for nf4"),
        ([("", {"dtype": "mxfp4", "group_size": 16})], "mxfp4 has groups of 32, no others"),
    ],
)
def test_invalid_quantization_rules_raise_config_error(rules, message):
    with pytest.raises(ConfigError, match=message):
        quantize(model(), rules)


def test_repeated_quantize_and_plain_dequantize_raise_config_error():
    with pytest.raises(ConfigError, match="quantized again: give all rules at once"):
        quantize(quantize(model(), [("q$", INT8)]), [("mlp", INT8)])
    with pytest.raises(ConfigError, match="no matrix of the model is quantized"):
        dequantize(model())


def test_quantized_model_holds_expected_bytes_per_weight():
    """Return the bytes of a quantized model on the device, by format."""
    normal = jax.nn.initializers.normal()
    linear = nnx.List(
        [Linear(256, 512, axes=("embed", "mlp"), kernel_init=normal, rngs=nnx.Rngs(0))]
    )
    expected = {
        "nf4": 0.5 + 4 / 64,
        "int8": 1 + 4 / 256,
        "int4": 0.5 + 3 / 64,
        "fp8": 1 + 4 / 256,
        "mxfp8": 1 + 1 / 32,
        "mxfp4": 0.5 + 1 / 32,
    }
    for name, bytes_a_weight in expected.items():
        # The list keeps the arrays alive: a dead array's identity may be given to a new one.
        before = jax.live_arrays()
        known = {id(a) for a in before}
        quantized = quantize(linear, [("", {"dtype": name})])
        held = sum(a.nbytes for a in jax.live_arrays() if id(a) not in known)
        assert held == pytest.approx(bytes_a_weight * 256 * 512, rel=1e-3), name
        buffers = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(nnx.state(quantized))]
        assert len(set(buffers)) == len(buffers)


# Training that simulates.


@pytest.mark.nightly
@pytest.mark.parametrize("spec", [NF4_8, INT8, {"dtype": "w8a8"}])
def test_simulated_quantization_trains_and_matches_quantized_model(spec):
    rules = [(r"mlp|\.q$", {**spec, "simulate": True})]
    simulated = quantize(model(), rules)
    assert not is_quantized(simulated)
    assert "simulated" in describe(simulated)
    names = {p for p, _ in nnx.to_flat_state(nnx.state(model(), nnx.Param))}
    assert {p for p, _ in nnx.to_flat_state(nnx.state(simulated, nnx.Param))} == names
    graphdef, params, rest = nnx.split(simulated, nnx.Param, ...)

    @jax.jit
    def step(params):
        def loss(params):
            return jnp.mean((nnx.merge(graphdef, params, rest)(jnp.asarray(case.X)) - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), grads

    first, after, grads = step(params)
    last = first
    for _ in range(5):
        last, after, _ = step(after)
    assert last < 0.9 * first
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads)), "straight through"
    learned = nnx.merge(graphdef, after, rest)
    quantized = quantize(learned, [(r"mlp|\.q$", spec)])
    case.assert_near(outputs(quantized), outputs(learned))
    learned, plain = (
        dict(nnx.to_flat_state(nnx.state(of))) for of in (learned, dequantize(learned))
    )
    for path, variable in nnx.to_flat_state(nnx.state(quantized, QuantParam)):
        seen = variable.get_value().dense()
        same_bits(seen, learned[path].get_value().dense())
        assert np.abs(seen - plain[path].get_value()).max() > 1e-4
