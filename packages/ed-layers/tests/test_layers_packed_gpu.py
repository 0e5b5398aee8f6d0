"""The Triton kernels for packed rows equal the reference in float64, forward and backward.

Without a GPU, the kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import attention_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import Case, error
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.masks import MaskInfo
from ed_layers.attention.kernel import Projected, Settings
from ed_layers.attention.kernels import gpu, packed_gpu
from ed_layers.attention.kernels.vanilla import vanilla_attention
from ed_layers.attention.scoring import Scoring
from ed_layers.numerics import measure_errors
from ed_layers.numerics.attention import describe_attention

INTERPRET = jax.default_backend() != "gpu"
KERNEL = replace(
    packed_gpu.KERNELS[0],
    platform=None,
    run=partial(packed_gpu.attend_packed, interpret=INTERPRET),
)
CELLS = [name for name, cell in cases.CELLS.items() if not cell.features & KERNEL.lacks]


@pytest.fixture(autouse=True)
def only_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with cases.select_kernel(KERNEL, monkeypatch, cases.program):
        yield


def list_errors(case: Case, **fields: Any) -> dict[str, float]:
    """Return the error of the output and of each gradient."""
    d_out = cases.noise(case)
    mechanism = cases.mechanism_of(KERNEL.mechanism, **fields)
    found = cases.run(case, mechanism, d_out)
    return {name: error(found[name], wanted) for name, wanted in case.run(d_out).items()}


@pytest.mark.daily("window+sinks", "soft_cap")
@pytest.mark.parametrize("cell", CELLS)
def test_packed_kernels_equal_float64(cell: str) -> None:
    errors = list_errors(cases.case_of(cases.CELLS[cell]))
    assert errors.pop("out") <= 1e-5
    assert max(errors.values()) <= 1e-4, errors


@pytest.mark.nightly
@pytest.mark.parametrize("cell", ["window", "chunk"])
def test_packed_kernels_have_limits_of_a_scanned_layer(cell: str) -> None:
    case = cases.case_of(cases.CELLS[cell])
    mechanism = cases.mechanism_of(KERNEL.mechanism)
    out = cases.run(case, mechanism, traced=True)["out"]
    assert error(out, case.run()["out"]) <= 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("width", [24, 72, 256])
@pytest.mark.parametrize("groups", [1, 4])
def test_packed_kernels_have_widths_and_groups(
    width: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "HEAD_DIM", width)
    errors = list_errors(cases.case_of(cases.CELLS["window+value_dim"], groups))
    assert max(errors.values()) <= 1e-4, errors


@pytest.mark.nightly
def test_packed_kernels_in_bfloat16_equal_float64_of_the_rounded_inputs() -> None:
    case = cases.case_of(cases.CELLS["window+soft_cap"])
    rounded = {
        name: np.asarray(jnp.asarray(getattr(case, name), "bfloat16"), "f") for name in "qkv"
    }
    errors = list_errors(replace(case, **rounded), attn_dtype="bfloat16")
    assert errors.pop("out") <= 1e-2
    assert max(errors.values()) <= 2e-2, errors


def build_call(**fields: Any) -> Projected:
    """Return a call with two packed rows of 77 tokens, and gaps of padding."""
    case = cases.case_of(cases.CELLS["causal"])
    q, k, v = (jnp.asarray(x) for x in (case.q, case.k, case.v))
    call = Projected(
        name=KERNEL.mechanism,
        q=q,
        k=k,
        v=v,
        mask_info=cases.info_of(case.mask),
        scoring=Scoring(0.25),
        settings=Settings(16, 32),
    )
    return replace(call, **fields)


def pull(run: Any, call: Projected, d_out: jax.Array) -> list[np.ndarray]:
    """Return the output, and the gradients of q, k and v."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return run(replace(call, q=q, k=k, v=v))

    out, pull_back = jax.vjp(attend, call.q, call.k, call.v)
    return [np.asarray(x) for x in (out, *pull_back(d_out))]


@pytest.mark.nightly
def test_packed_kernels_ignore_gradients_of_padding() -> None:
    call = build_call()
    padding = (call.mask_info.q_segment_ids == 0)[:, :, None, None]
    d_out = jnp.asarray(np.random.default_rng(1).normal(size=call.q.shape), jnp.float32)
    expected = pull(KERNEL.run, call, d_out)
    d_out = jnp.where(padding, jnp.nan, d_out)
    for found, wanted in zip(pull(KERNEL.run, call, d_out), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(expected[0][np.asarray(padding[..., 0, 0])], 0)


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", [None, 12])
def test_packed_kernels_see_later_tokens_of_the_same_image(chunk: int | None) -> None:
    call = build_call()
    ahead = np.zeros(call.q.shape[:2], np.int32)
    ahead[:, 5:17] = np.arange(12)[::-1]
    mask_info = replace(call.mask_info, ahead=jnp.asarray(ahead))
    call = replace(call, mask_info=mask_info, scoring=Scoring(0.25, window=9, chunk=chunk))
    d_out = jnp.asarray(np.random.default_rng(1).normal(size=call.q.shape), jnp.float32)
    pairs = zip(pull(KERNEL.run, call, d_out), pull(vanilla_attention, call, d_out), strict=True)
    assert max(error(found, wanted) for found, wanted in pairs) <= 2e-6


@pytest.mark.nightly
def test_packed_kernels_hide_forgotten_keys() -> None:
    call = build_call()
    mask_info = call.mask_info.forgetful(jax.random.key(0), 0.3, 0.6)
    call = replace(call, mask_info=mask_info)
    d_out = jnp.asarray(np.random.default_rng(1).normal(size=call.q.shape), jnp.float32)
    pairs = zip(pull(KERNEL.run, call, d_out), pull(vanilla_attention, call, d_out), strict=True)
    assert max(error(found, wanted) for found, wanted in pairs) <= 2e-6


@pytest.mark.nightly
def test_packed_kernels_divide_rows_and_heads_among_devices() -> None:
    sinks = jnp.linspace(-1.0, 1.0, cases.HEADS)
    config = EasyDeLBaseConfig(sharding_axis_dims=(2, 1, 1, 4, 1))
    call = build_call(config=config, scoring=Scoring(0.25, sinks=sinks))
    d_out = jnp.asarray(np.random.default_rng(1).normal(size=call.q.shape), jnp.float32)
    one_device = replace(call, config=None)
    pairs = zip(
        pull(KERNEL.run, call, d_out),
        pull(vanilla_attention, one_device, d_out),
        strict=True,
    )
    assert max(error(found, wanted) for found, wanted in pairs) <= 2e-6


@pytest.mark.nightly
def test_doctor_finds_a_planted_fault_of_packed_kernels() -> None:
    use = describe_attention(KERNEL, build_call(scoring=Scoring(0.25, window=20, soft_cap=3.0)))
    assert use is not None
    errors = measure_errors(use)
    assert errors.is_right and errors.backward is not None, errors

    def plant(*inputs: jax.Array) -> jax.Array:
        q, k, v, *extra = inputs
        return use.run(q, k + 0.05 * (v - jax.lax.stop_gradient(v)), v, *extra)

    wrong = measure_errors(replace(use, run=plant))
    assert wrong.forward == errors.forward
    assert not wrong.is_right, wrong


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"q": jnp.zeros((2, 77, 4, 320))}, "a head dim of 320"),
        ({"q": np.zeros((2, 77, 4, 16))}, "float64"),
        ({"settings": Settings(16, 48)}, "blocks of (16, 48) tokens"),
        (
            {"config": EasyDeLBaseConfig(flash_attention_backward_pass_impl="xla")},
            "gradients of XLA",
        ),
        ({"scoring": Scoring(1.0, bias=jnp.zeros((1, 1, 77, 77)))}, "a bias"),
    ],
    ids=["width", "dtype", "blocks", "gradients", "bias"],
)
def test_packed_kernels_refuse_what_they_lack(fields: dict[str, Any], words: str) -> None:
    (reason,) = KERNEL.refusals(build_call(**fields))
    assert words in reason


def test_cudnn_passes_packed_rows_to_the_packed_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    called, kernel = [], partial(gpu.by_jax, 0.25, "xla")

    def attend_segments(shape: Any, q: jax.Array, k: Any, v: Any, sinks: Any, limits: Any) -> Any:
        called.append(shape)
        return q

    monkeypatch.setattr(packed_gpu, "attention_of_rows", attend_segments)
    for platform, count in (("cpu", 0), ("gpu", 1)):
        monkeypatch.setattr(gpu, "get_platform", lambda config, name=platform: name)
        q = jnp.zeros((2, 78, 4, 16), jnp.bfloat16)
        segments = jnp.asarray(np.repeat([[1, 2], [1, 0]], 39, axis=1))
        call = build_call(q=q, k=q, v=q, mask_info=MaskInfo.from_segments(segments))
        jax.make_jaxpr(lambda q, call=call: gpu.on_rows(kernel, replace(call, q=q)))(q)
        assert len(called) == count
