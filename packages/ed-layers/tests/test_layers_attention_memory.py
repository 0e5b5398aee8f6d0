"""Attention over blocks needs memory linear in the length, by XLA's own account; nothing runs."""

from __future__ import annotations

import attention_cases as cases
import jax
import jax.numpy as jnp
import pytest
from ed_infra.masks import MaskInfo

HEADS, GROUPS, HEAD_DIM = 4, 2, 64
LENGTHS = [2**n * 1024 for n in range(1, 6)]


def temporary(name: str, length: int, *, gradient: bool, window: int | None = None) -> int:
    """Return the bytes that a compiled call needs in addition to its arguments and results."""

    def shape(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), jnp.float32)

    mechanism = cases.mechanism_of(name, blocksize_q=128, blocksize_k=128)
    through = "call" if gradient else "forward"
    given = (("window", window),)
    f = cases.program(mechanism, id(mechanism.config), through, False, given)
    inputs = {"q": shape(HEADS), "k": shape(GROUPS), "v": shape(GROUPS)}
    rest = {"mask": jax.eval_shape(lambda: MaskInfo.full(1, length)), "traced": {}}
    compiled = f.lower(inputs, rest, shape(HEADS)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "gradient", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["forward", "gradient"]
)
def test_blockwise_attention_allocates_no_score_matrix(gradient) -> None:
    """A program of 2048 tokens needs less than the scores of one head."""
    assert temporary("blockwise", 2048, gradient=gradient) < 2048**2 * 4
    assert temporary("vanilla", 2048, gradient=gradient) > HEADS * 2048**2 * 4


@pytest.mark.nightly
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_memory_is_linear_in_the_length(gradient, record_property) -> None:
    rows = [f"temporary MB, {'gradient' if gradient else 'forward'}, {HEADS} heads of {HEAD_DIM}:"]
    per_token = {}
    for length in LENGTHS:
        lean, windowed, full = (
            temporary(name, length, gradient=gradient, window=window)
            for name, window in (("blockwise", None), ("blockwise", 1024), ("vanilla", None))
        )
        per_token[length] = lean / length, full / length
        figures = (("blockwise", lean), ("window of 1024", windowed), ("vanilla", full))
        cells = (f"{title} {size / 1e6:9.1f}" for title, size in figures)
        rows.append(f"  {length:6}: {', '.join(cells)} ({full / lean:.0f} x)")
    record_property("summary", "\n".join(rows))
    lean, full = zip(*(per_token[length] for length in (4096, 32768)), strict=True)
    assert lean[1] <= 1.3 * lean[0]
    assert full[1] >= 6 * full[0], "vanilla is no longer quadratic: the comparison means nothing"
