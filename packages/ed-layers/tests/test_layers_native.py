"""The native library against float64: any shape, dtype, format and level of instructions; sums that
depend on nothing else; and plain XLA where the library is not there."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.logging import forget_said
from ed_layers.cache.sharded import scatter
from ed_layers.native import library, products, rows, split
from ed_layers.native.build import LEVELS, CannotBuild, build
from ed_layers.projections.dot import Transposed, combine_products, dot
from ed_layers.quantization import encode
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import DTYPES, anywhere, built, drawn, exact  # noqa: F401
from native_programs import (
    SANITIZERS,
    compile_amx_emulation,
    compile_handlers,
    compile_kernels,
)

SIZES = st.integers(1, 150)
GATED = products.Epilogue(act="silu", gated=True)


def near(y: jax.Array, x: np.ndarray, w: np.ndarray) -> None:
    """Assert equality up to rounding of float32 sums, and of a bfloat16 result."""
    expected, sizes = x @ w, np.abs(x) @ np.abs(w)
    rounded = 2**-8 * np.abs(expected) if y.dtype == jnp.bfloat16 else 0
    assert (np.abs(exact(y) - expected) <= rounded + 2e-6 * sizes).all()


@built
@settings(max_examples=15, deadline=None)
@given(n=SIZES, i=SIZES, o=SIZES, x_dtype=DTYPES, w_dtype=DTYPES, seed=st.integers(0, 99))
def test_native_products_are_exact(n, i, o, x_dtype, w_dtype, seed) -> None:
    x, w = drawn(seed, n, i, dtype=x_dtype), drawn(seed + 1, i, o, dtype=w_dtype)
    for transposed, turned in ((False, False), (True, False), (True, True)):
        y = products.product(
            x, jnp.array(w.T) if transposed else w, transposed=transposed, turned=turned
        )
        assert (y.shape, y.dtype) == ((n, o), x.dtype)
        near(y, exact(x), exact(w))


@built
@settings(max_examples=15, deadline=None)
@given(
    n=st.sampled_from([1, 5, 64, 131, 2049]),
    i=SIZES,
    widths=st.lists(SIZES, min_size=1, max_size=3),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_native_gradients_of_matrices_are_exact(n, i, widths, dtype, seed) -> None:
    x, d_ys = drawn(seed, n, i, dtype=dtype), [drawn(seed, n, o, dtype=dtype) for o in widths]
    for d_y, d_w in zip(d_ys, products.gradients(x, d_ys), strict=True):
        assert (d_w.shape, d_w.dtype) == ((i, d_y.shape[1]), jnp.float32)
        near(d_w, exact(x).T, exact(d_y))


@built
def test_high_precision_multiplies_parts_of_float32(monkeypatch) -> None:
    x, w, d_y = drawn(0, 256, 300), drawn(1, 300, 200), drawn(2, 256, 200)
    level = library.level()
    monkeypatch.setattr(split, "SPLIT_LEVELS", (level,))

    @jax.jit
    def of_all(x, w, d_y):
        y, pull = jax.vjp(lambda x, w: dot(x, w, precision="high"), x, w)
        d_x, d_w = pull(d_y)
        return y, d_x, d_w, dot(x, Transposed(w.T), precision="high")

    def largest(found: jax.Array, a: np.ndarray, b: np.ndarray) -> float:
        return float((np.abs(exact(found) - a @ b) / (np.abs(a) @ np.abs(b))).max())

    y, d_x, d_w, y_of_rows = of_all(x, w, d_y)
    x, w, d_y = exact(x), exact(w), exact(d_y)
    pairs = [(y, x, w), (d_x, d_y, w.T), (d_w, x.T, d_y), (y_of_rows, x, w)]
    assert all(1e-6 < largest(*pair) < 4e-6 for pair in pairs), "three products of parts"


@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_gated_layer_equal_those_of_xla(dtype, monkeypatch) -> None:
    x, gate, up = drawn(0, 128, 192, dtype=dtype), drawn(1, 192, 160) / 14, drawn(2, 192, 160) / 14
    biases = (drawn(3, 160, dtype=dtype), drawn(4, 160, dtype=dtype))

    def loss(x, gate, up, biases):
        found = combine_products(
            x, (gate, up), biases, act="silu", gated=True, names=("gate", "up")
        )
        if found is None:
            found = [jax.nn.silu(dot(x, gate) + biases[0]) * (dot(x, up) + biases[1])]
        return jnp.sum(jnp.sin(found[0].astype(jnp.float32)))

    of_all = jax.grad(loss, argnums=(0, 1, 2, 3))
    text = jax.jit(of_all).lower(x, gate, up, biases).as_text()
    assert library.TARGETS["ed_gradients"] in text
    ours = of_all(x, gate, up, biases)
    monkeypatch.setenv(library.VARIABLE, "0")
    for a, b in zip(
        jax.tree.leaves(ours), jax.tree.leaves(of_all(x, gate, up, biases)), strict=True
    ):
        assert a.dtype == b.dtype
        difference = np.linalg.norm(exact(a) - exact(b)) / np.linalg.norm(exact(b))
        assert difference <= (2e-2 if dtype == "bfloat16" else 2e-6)


@built
@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 70),
    group=st.sampled_from([2, 6, 16, 32]),
    groups=st.integers(1, 5),
    o=SIZES,
    bits=st.sampled_from([4, 8]),
    offset=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_products_of_codes_are_exact(n, group, groups, o, bits, offset, dtype, seed) -> None:
    rng = np.random.default_rng(seed)
    i = group * groups
    x = drawn(seed, n, i, dtype=dtype)
    scale = rng.uniform(0.5, 2, (groups, o)).astype(np.float32)
    zero = rng.integers(-8, 8, (groups, o)).astype(np.float32) if offset else None
    table = rng.normal(size=16).astype(np.float32) if bits == 4 else None
    if table is None:
        codes = rng.integers(-128, 128, (i, o)).astype(np.int8)
        values = codes.astype(np.float64)
    else:
        whole = rng.integers(0, 16, (i, o)).astype(np.uint8)
        codes, values = whole[::2] | whole[1::2] << 4, table[whole].astype(np.float64)
    w = values - np.repeat(0 if zero is None else zero, group, 0) if offset else values
    w = w * np.repeat(scale, group, 0)
    optional = [None if a is None else jnp.asarray(a) for a in (zero, table)]
    near(
        products.product_of_codes(x, jnp.asarray(codes), jnp.asarray(scale), *optional), exact(x), w
    )


@built
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_company(transposed, dtype) -> None:
    x, w = drawn(0, 200, 130, dtype=dtype), drawn(1, 130, 333, dtype=dtype)
    w = jnp.array(w.T) if transposed else w
    whole = np.asarray(products.product(x, w, transposed=transposed))
    for first, last in ((0, 1), (3, 5), (7, 16), (100, 170)):
        part = products.product(x[first:last], w, transposed=transposed)
        np.testing.assert_array_equal(np.asarray(part), whole[first:last])


@pytest.mark.daily("int4-32-18-True")
@built
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("form", "group", "groups"),
    [
        *[("int8", 600, 1), ("int8", 30, 20), ("int8", 32, 7)],
        *[("int4", 200, 3), ("int4", 32, 18), ("int4", 64, 9)],
    ],
)
def test_a_row_of_codes_does_not_depend_on_its_company(form, group, groups, whole) -> None:
    x = drawn(0, 40, group * groups)
    w = encode(drawn(1, group * groups, 145), form, group, activations=whole)
    assert isinstance(w.scale, jax.Array)
    table = jnp.arange(16.0) if form == "int4" else None
    for tied in (False, True):
        small = [a if a is None or not tied else jnp.array(a.T) for a in (w.scale, w.zero)]
        codes = jnp.array(w.codes.T) if tied else w.codes
        settings = {"transposed": tied, "quantize_rows": whole}
        all_rows = np.asarray(products.product_of_codes(x, codes, *small, table, **settings))
        for first, last in ((0, 1), (3, 5), (7, 15), (20, 36)):
            part = products.product_of_codes(x[first:last], codes, *small, table, **settings)
            np.testing.assert_array_equal(np.asarray(part), all_rows[first:last])


@built
def test_model_products_use_native_kernel_and_have_gradients() -> None:
    x, w = drawn(0, 2, 3, 256), drawn(1, 256, 384)
    for weight in (w, Transposed(jnp.array(w.T)), w.astype(jnp.bfloat16)):
        assert "ed_layers_product" in str(jax.make_jaxpr(dot)(x, weight))
        expected, pull = jax.vjp(lambda x, w: x @ w, x, w)
        y, pull_ours = jax.vjp(dot, x, weight)
        d_x, d_w = pull_ours(y)
        slack = 0.1 if weight is not w and not isinstance(weight, Transposed) else 1e-3
        np.testing.assert_allclose(y, expected, atol=slack * 10)
        assert d_x.shape == x.shape
        assert jax.tree.map(jnp.shape, d_w) == jax.tree.map(jnp.shape, weight)
        if weight is w:
            for ours, other in zip((d_x, d_w), pull(y), strict=True):
                np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-3)


@pytest.mark.daily("int4-float32", "int8-bfloat16")
@built
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["int8", "int4", "nf4", "mxfp4", "fp8", "mxfp8"])
def test_quantized_matrices_use_native_product(form, dtype, monkeypatch) -> None:
    x, w = drawn(0, 3, 256, dtype=dtype), encode(drawn(1, 256, 128), form)
    assert "ed_layers_product_of_codes" in str(jax.make_jaxpr(dot)(x, w))
    near(dot(x, w), exact(x), exact(w.dense()))
    d_x = jax.grad(lambda x: jnp.sum(dot(x, w).astype(jnp.float32)))(x)
    expected = exact(w.dense()).sum(1)
    np.testing.assert_allclose(exact(d_x)[0], expected, rtol=2e-2, atol=2e-2 * abs(expected).max())


@pytest.mark.nightly
@built
@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(1, 20),
    form=st.sampled_from(["int8", "int4"]),
    group=st.sampled_from([None, 6, 32, 64]),
    groups=st.integers(1, 12),
    o=st.integers(1, 90),
    tied=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_activations_in_8_bits_are_exact(n, form, group, groups, o, tied, dtype, seed):
    i = (group or 50) * groups
    x, matrix = drawn(seed, n, i, dtype=dtype), drawn(seed + 1, i, o)
    w = encode(matrix, form, group or i, activations=True)
    # Divided by numpy: XLA's division is a unit in the last place off, which counts at ties.
    grouped = np.asarray(x, np.float32).reshape(n, w.groups, -1)
    scale = np.abs(grouped).max(-1, keepdims=True) * np.float32(1 / 127)
    assert isinstance(w.scale, jax.Array)
    numbers = np.rint(grouped / np.where(scale == 0, 1, scale)) * scale.astype(np.float64)
    near(
        products.product_of_codes(
            x,
            w.codes.T if tied else w.codes,
            w.scale.T if tied else w.scale,
            None if w.zero is None else w.zero.T if tied else w.zero,
            jnp.arange(16.0) if form == "int4" else None,
            transposed=tied,
            quantize_rows=True,
        ),
        numbers.reshape(x.shape),
        exact(w.dense()),
    )


@pytest.mark.daily("int4-True")
@built
@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("form", ["int8", "int4", "nf4", "fp8", "mxfp4"])
def test_quantized_tables_use_native_product(form, activations, monkeypatch) -> None:
    """The head that is tied to a quantized embedding."""
    if activations and form not in ("int8", "int4"):
        pytest.skip("activations are quantized beside whole numbers")
    x = drawn(0, 3, 128)
    table = encode(drawn(1, 128, 200), form, activations=activations).transpose()
    assert "ed_layers_product_of_codes" in str(jax.make_jaxpr(dot)(x, table.T))
    ours = dot(x, table.T)
    monkeypatch.setenv(library.VARIABLE, "0")
    # 128 terms that cancel, added in another order.
    np.testing.assert_allclose(ours, dot(x, table.T), rtol=1e-5, atol=1e-4)


@built
@pytest.mark.parametrize("layered", [False, True])
def test_caches_of_small_floats_are_written_in_place(layered) -> None:
    """Not converted there and back, which would read and write all of the cache in each step."""
    lead = (2,) if layered else ()
    cache, new = jnp.zeros((*lead, 2, 3, 50, 8), "bfloat16"), drawn(0, 2, 4, 3, 8)
    slots = jnp.asarray([[3, 50, 0, 7], [-1, 1, 2, 49]])
    at = (jnp.int32(1),) if layered else ()
    write = jax.jit(lambda a: scatter(a, new, slots, *at), donate_argnums=0)
    text = write.lower(cache).compile().as_text()
    assert text is not None
    assert not re.search(r"(convert|copy|scatter)\(.*50,8", text)
    expected = np.zeros(cache.shape, np.float32)
    for b, row in enumerate(np.asarray(slots)):
        for s, slot in enumerate(row):
            if 0 <= slot < 50:
                expected[(*(1,) * layered, b, slice(None), slot)] = new[b, s].astype("bfloat16")
    np.testing.assert_array_equal(np.asarray(write(cache), np.float32), expected)


@pytest.mark.nightly
@built
@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 5), v=st.integers(1, 700), levels=st.integers(1, 50), seed=st.integers(0))
def test_first_largest_of_rows_is_exact(n, v, levels, seed) -> None:
    """With few levels, several numbers of a row are the largest."""
    x = np.random.default_rng(seed).integers(-levels, levels, (n, v)).astype(np.float32)
    x[x == levels - 1] = np.inf
    x[0, : v // 2] = -np.inf
    np.testing.assert_array_equal(rows.find_argmax(jnp.asarray(x)), x.argmax(axis=1))
    x[-1] = np.nan
    *found, with_nan = rows.find_argmax(jnp.asarray(x)).tolist()
    assert found == x[:-1].argmax(axis=1).tolist() and 0 <= with_nan < v


@built
def test_vmapped_dot_matches_batched_matmul() -> None:
    x, w = drawn(0, 3, 2, 128), drawn(1, 3, 128, 128)
    np.testing.assert_allclose(jax.vmap(dot)(x, w), x @ w, atol=1e-4)


@built
def test_calls_of_several_threads_at_once() -> None:
    """Each has its own loop, whichever of XLA's threads help."""
    x, matrices = drawn(0, 3, 300), [drawn(1 + i, 300, 500) for i in range(4)]
    step = jax.jit(lambda w: products.products(x, (w, w), epilogue=GATED)[0])
    expected = [np.asarray(step(w)) for w in matrices]

    def often(i: int) -> bool:
        return all(np.array_equal(step(matrices[i]), expected[i]) for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(often, range(4)))


@pytest.mark.nightly
@built
@pytest.mark.parametrize("setting", [{"ED_LAYERS_NATIVE_LEVEL": "base"}, {}, {"threads": "1"}])
def test_every_level_and_number_of_threads(setting, tmp_path) -> None:
    """A level produces the same bits on one thread and on all threads."""
    environment = {**os.environ, **setting, "XLA_FLAGS": ""}
    if "threads" in setting:
        environment["NPROC"] = "1"
    code = (
        "import jax.numpy as jnp, json, numpy as np;"
        "from ed_layers.native import library, products;"
        "library.level(); r = np.random.default_rng(0);"
        "x, w = (jnp.asarray(r.normal(size=s), 'float32') for s in ((90, 300), (300, 700)));"
        "y = np.asarray(products.product(x, w)); z = np.asarray(x, float) @ np.asarray(w, float);"
        "gated = products.Epilogue(act='silu', gated=True);"
        "both = products.products(x, (w, w), epilogue=gated)[0];"
        "bits = y.tobytes().hex()[:4000] + np.asarray(both).tobytes().hex()[:4000];"
        "print(json.dumps([library.level(), float(abs(y - z).max()), bits]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    name, apart, bits = json.loads(done.stdout.splitlines()[-1])
    assert apart <= 1e-4
    if "threads" in setting:
        x, w = (jnp.asarray(r, jnp.float32) for r in _same_arrays())
        y, (both,) = products.product(x, w), products.products(x, (w, w), epilogue=GATED)
        here = [np.asarray(a).tobytes().hex()[:4000] for a in (y, both)]
        assert (name, bits) == (library.level(), "".join(here))
    else:
        assert name == setting.get("ED_LAYERS_NATIVE_LEVEL", library.level())


def _same_arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape) for shape in ((90, 300), (300, 700))]


@built
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["base", *(name for _, name, _ in LEVELS["x86_64"][1:])])
def test_every_instruction_level_passes_value_tests(name, tmp_path) -> None:
    """The tests of values, by each level that this processor has."""
    environment = {**os.environ, "ED_LAYERS_NATIVE_LEVEL": name}
    tests = sorted(Path(__file__).parent.glob("test_layers_native*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "exact or lie or company"]
    done = subprocess.run([*command, *tests], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("state", ["off", "deleted", "damaged"])
def test_missing_native_library_falls_back_to_xla(state, monkeypatch, tmp_path, caplog) -> None:
    path = tmp_path / library.LIBRARY.name
    if state == "off":
        monkeypatch.setenv(library.VARIABLE, "0")
    else:
        monkeypatch.setattr(library, "LIBRARY", path)
    if state == "damaged":
        path.write_bytes(b"no library")
    library._load_library.cache_clear()
    forget_said()
    x, w = drawn(0, 4, 256), drawn(1, 256, 256)
    try:
        with caplog.at_level(logging.INFO, logger="easydel"):
            for _ in range(2):
                np.testing.assert_allclose(dot(x, w), x @ w, atol=1e-4)
        assert "ffi_call" not in str(jax.make_jaxpr(dot)(x, w))
        said = [r.getMessage() for r in caplog.records if "native kernels" in r.getMessage()]
        assert len(said) == (0 if state == "off" else 1), "said once"
        words = {"off": "turned off by ED_LAYERS_NATIVE=0", "damaged": "cannot be loaded"}.get(
            state, "not built"
        )
        assert words in library.describe()
    finally:
        library._load_library.cache_clear()


@built
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_sanitizers_report_no_errors(tmp_path) -> None:
    program = compile_kernels(tmp_path / "run_kernels")
    for _, name, _ in LEVELS.get(platform.machine(), ()):
        environment = {**os.environ, "ED_LAYERS_NATIVE_LEVEL": name}
        done = subprocess.run([program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr[-3000:]}"


@built
@pytest.mark.nightly
@pytest.mark.timeout(3600)  # beside other work, the compiler needs 15 minutes
@pytest.mark.parametrize("sanitizer", sorted(SANITIZERS))
def test_no_sanitizer_finds_anything_in_calls_of_handlers(sanitizer, tmp_path) -> None:
    """Every handler, called as XLA does on several threads, with valid and with damaged buffers."""
    program = compile_handlers(tmp_path / "call_handlers", sanitizer)
    for _, name, _ in LEVELS.get(platform.machine(), ()):
        environment = {**os.environ, "ED_LAYERS_NATIVE_LEVEL": name}
        done = subprocess.run([program, "300"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr[-3000:]}"


@built
@pytest.mark.nightly
@pytest.mark.skipif(library.level() != "avx512_bf16", reason="needs AVX-512 for bfloat16, no AMX")
def test_products_by_emulated_tiles_are_exact(tmp_path) -> None:
    done = subprocess.run(
        [compile_amx_emulation(tmp_path / "emulate_amx"), "300"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_missing_compiler_raises_cannot_build(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CannotBuild, match="no-such-compiler is not there; CXX names one"):
        build(tmp_path / "library.so")
    assert not list(Path(tmp_path).iterdir())
