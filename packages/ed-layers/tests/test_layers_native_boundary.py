"""The native library refuses damaged calls with an error and never ends the process. A library that
XLA refuses is left out. Sums of no numbers and large sinks have their exact values."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.masks import MaskInfo
from ed_layers.attention.kernel import Cached
from ed_layers.attention.kernels import native
from ed_layers.attention.scoring import Scoring
from ed_layers.cache.protocol import StoredLayer
from ed_layers.native import products
from ed_layers.native.build import headers
from native_cases import anywhere, built  # noqa: F401
from native_programs import PROGRAMS

PROGRAM = Path(__file__).with_name("native_boundary_cases.py")


def outcome(seed: int, count: int) -> dict[str, list[str]]:
    """Run `count` calls of every target in a separate process."""
    command = [sys.executable, str(PROGRAM), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1:]
    assert done.returncode == 0, f"the process ended with {done.returncode} after {last}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
@built
def test_every_target_refuses_damaged_calls() -> None:
    found = outcome(0, 24)
    assert not found["surprises"], "\n".join(found["surprises"][:8])
    assert len(found["refusals"]) > 50


@built
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 4))
def test_every_target_refuses_many_damaged_calls(seed: int) -> None:
    found = outcome(seed, 400)
    assert not found["surprises"], "\n".join(found["surprises"][:8])


@built
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("codes", [False, True])
def test_products_of_no_inputs_are_zero(codes: bool, act: str | None) -> None:
    x, count = jnp.zeros((3, 0)), 1 if act is None else 2
    epilogue = products.Epilogue(act=act, gated=act is not None)
    if codes:
        matrix = products.QuantizedMatrix(jnp.zeros((0, 40), "int8"), jnp.ones((1, 40)))
        results = products.products_of_codes(x, (matrix,) * count, epilogue=epilogue)
    else:
        results = products.products(x, (jnp.zeros((0, 40)),) * count, epilogue=epilogue)
    assert [np.asarray(y).tolist() for y in results] == [np.zeros((3, 40)).tolist()]


@built
def test_products_of_no_groups_are_refused() -> None:
    codes, scale = jnp.zeros((8, 40), "int8"), jnp.zeros((0, 40))
    with pytest.raises(Exception, match="the number of groups must be at least 1"):
        products.product_of_codes(jnp.ones((3, 8)), codes, scale).block_until_ready()


@pytest.mark.nightly
@built
@pytest.mark.parametrize("sink", [-200.0, -50.0, 30.0, 88.0, 100.0, 300.0])
def test_large_sinks_leave_the_exact_share_to_the_keys(sink: float) -> None:
    ones = jnp.ones((1, 1, 3, 8))
    keys = StoredLayer(ones, 2 * ones, (), MaskInfo.full(1, 3), "leaves", ordered=True)
    scoring = Scoring(scale=0.5, sinks=jnp.full((1,), sink))
    q = jnp.ones((1, 3, 1, 8))
    call = Cached(name="autoregressive_decodeattn", q=q, scoring=scoring, stored=keys)
    keys_seen, score = np.arange(1, 4), 4.0
    share = 1 / (1 + np.exp(np.float64(sink) - score) / keys_seen)
    ours = native.cache_attention(call)[0, :, 0, 0]
    np.testing.assert_allclose(ours, 2 * share, rtol=1e-5, atol=1e-37)


@pytest.mark.nightly
@built
def test_library_of_a_newer_interface_falls_back_to_xla_with_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "newer.so"
    source = PROGRAMS / "newer_api.cc"
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    flags = ("-std=c++17", "-fPIC", "-shared", "-O0", "-isystem", str(headers()))
    subprocess.run([compiler, *flags, str(source), "-o", str(path)], check=True)
    code = (
        "import pathlib, sys, jax.numpy as jnp, logging;"
        "from ed_layers.projections.dot import dot; from ed_layers.native import library;"
        "logging.basicConfig(level=logging.WARNING);"
        "library.LIBRARY = pathlib.Path(sys.argv[1]);"
        "x, w = jnp.ones((4, 256)), jnp.ones((256, 256));"
        "print(library.describe(), float(dot(x, w).sum() + dot(x, w).sum()))"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "API version (0.1000) is incompatible" in done.stdout
    assert done.stdout.split()[-1] == str(2.0 * 4 * 256 * 256)
    assert done.stderr.count("cannot be loaded") == 1
