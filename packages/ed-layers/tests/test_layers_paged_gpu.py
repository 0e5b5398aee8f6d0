"""The Triton kernel for prompts over pages equals the reference in float64.

Without a GPU, the kernel is interpreted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import attention_cases as cases
import attention_pages as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_layers.attention import kernels
from ed_layers.attention.kernel import Call, Paged, Settings
from ed_layers.attention.kernels import paged_gpu
from ed_layers.attention.kernels.paged import paged_attention
from ed_layers.attention.scoring import Scoring
from ed_layers.cache.protocol import Pages

KERNEL = replace(
    paged_gpu.KERNELS[0],
    platform=None,
    run=partial(paged_gpu.prompt_attention, interpret=jax.default_backend() != "gpu"),
)
CELLS = [
    name
    for name in cases.declared(KERNEL.mechanism)
    if not cases.CELLS[name].features & KERNEL.lacks
]


@pytest.fixture
def only_kernel(monkeypatch) -> None:
    def kernels_here(call: Call) -> list[Any]:
        assert call.name == KERNEL.mechanism
        return [KERNEL]

    monkeypatch.setattr(kernels, "kernels_here", kernels_here)
    pages.program.cache_clear()
    yield
    pages.program.cache_clear()


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error relative to the largest value."""
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


@pytest.mark.daily("soft_cap", "value_dim", "window+sinks")
@pytest.mark.parametrize("cell", CELLS)
def test_prompt_kernel_equals_the_reference(cell: str, only_kernel) -> None:
    case = pages.case_of(cases.CELLS[cell])
    mechanism = cases.mechanism_of(KERNEL.mechanism, cases.CELLS[cell].features)
    assert error(pages.run(case, mechanism), case.run()["out"]) <= 1e-5


def test_prompt_kernel_reads_no_number_of_other_pages(only_kernel) -> None:
    case = pages.case_of(cases.CELLS["window"])
    mechanism = cases.mechanism_of(KERNEL.mechanism, cases.CELLS["window"].features)
    clean = pages.run(case, mechanism)
    np.testing.assert_array_equal(pages.run(case, mechanism, fill=float("nan")), clean)


def call_of(dim: int = 16, dtype: Any = jnp.float32, **fields: Any) -> Paged:
    """A step whose pages contain random numbers, in the second of two layers."""
    draw = np.random.default_rng(0)
    ragged, _ = pages.batch(pages.Q_LENS, pages.KV_LENS)
    tokens = len(ragged.seq_of_token)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape), dtype)

    pool = normal(2, pages.page_table()[1], pages.PAGE_SIZE, 2, 2, dim)
    given = {"ragged": ragged, "scoring": Scoring(dim**-0.5, sinks=normal(4)), **fields}
    return Paged(
        name=KERNEL.mechanism, q=normal(tokens, 4, dim), pages=Pages(pool, (1,), "full"), **given
    )


def same(call: Paged, tolerance: float = 1e-5) -> None:
    """Fail unless the kernel and plain XLA compute equal attention."""
    assert KERNEL.refusals(call) == []
    with jax.default_matmul_precision("highest"):
        found, expected = KERNEL.run(call), paged_attention(replace(call, config=None))
    assert found.dtype == expected.dtype == call.q.dtype
    assert error(*(np.asarray(x, np.float32) for x in (found, expected))) <= tolerance


@pytest.mark.daily("72-<class 'jax.numpy.float32'>")
@pytest.mark.parametrize(("dim", "dtype"), [(72, jnp.float32), (32, jnp.bfloat16)], ids=str)
def test_prompt_kernel_computes_other_head_dims_and_bfloat16(dim: int, dtype: Any) -> None:
    same(call_of(dim, dtype), 1e-5 if dtype == jnp.float32 else 1e-2)


@pytest.mark.nightly
def test_prompt_kernel_sees_later_tokens_of_the_same_image() -> None:
    call = call_of()
    ahead = np.zeros(len(call.ragged.seq_of_token), np.int32)
    ahead[1 + 20 : 1 + 60] = np.arange(40)[::-1]  # of the second sequence, over several blocks
    same(replace(call, ragged=replace(call.ragged, ahead=jnp.asarray(ahead))))


@pytest.mark.nightly
def test_prompt_kernel_divides_heads_among_devices() -> None:
    same(call_of(config=EasyDeLBaseConfig(sharding_axis_dims=(1, 1, 1, 2, 1))))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dim": 288}, "a head dim of 288"),
        ({"settings": Settings(block_q=48, is_explicit=True)}, "blocks of (48, 64) tokens"),
    ],
    ids=str,
)
def test_prompt_kernel_refuses_shapes_that_triton_lacks(fields: dict, words: str) -> None:
    (reason,) = KERNEL.refusals(call_of(**fields))
    assert words in reason
