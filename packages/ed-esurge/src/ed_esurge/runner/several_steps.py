"""Several decode steps in one program, for models whose steps are shorter than the start of a
program.

Each step samples a token for every sequence, and the next step computes this token. The program
reads the page tables once: the scheduler has reserved the pages of all steps.

Legend: n rows, k steps, w numbers of a sampled token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from ed_layers.cache import Cache
from jaxtyping import Array, Int

from ed_esurge.runner.batch import StepInput
from ed_esurge.runner.row_numbers import OF_STEP

#: `(inputs, cache, last) -> (packed [n, w], cache, last)`: a decode step that also samples.
DecodeStep = Callable[[StepInput, Cache, jax.Array], tuple[jax.Array, Cache, jax.Array]]


def several_steps(
    step: DecodeStep,
    inputs: StepInput,
    cache: Cache,
    last: Int[Array, " a"],
    *,
    most: int,
    page_size: int,
    nowhere: Mapping[str, int],
) -> tuple[Int[Array, "nk w"], Cache, Int[Array, " a"]]:
    """Run `inputs.num_steps` decode steps.

    Args:
        step: one step.
        inputs: arrays of the first step.
        cache: pages of the sequences.
        last: the token that each slot sampled last.
        most: maximum number of steps.
        page_size: number of tokens in a page.
        nowhere: group -> index of a token outside the pool.

    Returns:
        the packed tokens, the cache and the last tokens. The `most` rows of a sequence are
        consecutive; those after `inputs.num_steps` are zero.
    """
    width = jax.eval_shape(step, inputs, cache, last)[0].shape

    def one(number: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs, cache, last, packed_tokens = carry
        packed, cache, last = step(inputs, cache, last)
        packed_tokens = packed_tokens.at[:, number].set(packed)
        return following(inputs, page_size, nowhere), cache, last, packed_tokens

    packed_tokens = jnp.zeros((width[0], most, width[1]), jnp.int32)
    start = (inputs, cache, last, packed_tokens)
    _, cache, last, packed_tokens = jax.lax.fori_loop(0, inputs.num_steps, one, start)
    return packed_tokens.reshape(-1, width[1]), cache, last


def following(inputs: StepInput, page_size: int, nowhere: Mapping[str, int]) -> StepInput:
    """Return the inputs of the step that computes the tokens sampled by a decode step."""
    ragged = inputs.ragged
    count = len(ragged.kv_lens)
    used = jnp.arange(count) < ragged.num_seqs
    lengths = ragged.kv_lens + used
    page, inside = jnp.divmod(ragged.kv_lens, page_size)
    slots = {
        group: jnp.where(used, table[jnp.arange(count), page] * page_size + inside, nowhere[group])
        for group, table in ragged.page_table.items()
    }
    positions = inputs.positions
    return replace(
        inputs,
        token_ids=jnp.full_like(inputs.token_ids, -1),
        ragged=replace(ragged, kv_lens=lengths, slots=slots),
        rows=inputs.rows.at[OF_STEP.index("kv_lens")].set(lengths),
        positions=None if positions is None else positions + 1,
    )
