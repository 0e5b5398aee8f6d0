"""Several decode steps in one program, for models whose steps are shorter than the start of a
program, and for drafts.

Each step samples a token for every sequence, and the next step computes this token. The program
reads the page tables once: the scheduler has reserved the pages of all steps.

Legend: n rows, k steps, w numbers of a sampled token, d hidden.
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
#: `(inputs, cache, hidden) -> (tokens [n], hidden [n, d], cache)`: a decode step of a draft, which
#: reads the hidden states of the step before; None = those of the served model.
DraftStep = Callable[[StepInput, Cache, jax.Array | None], tuple[jax.Array, jax.Array, Cache]]


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


def draft_steps(
    step: DraftStep,
    inputs: StepInput,
    cache: Cache,
    chains: Int[Array, "3 n"],
    *,
    most: int,
    page_size: int,
    nowhere: Mapping[str, int],
) -> tuple[Int[Array, "n k"], Cache]:
    """Compute known tokens of some sequences, and draft `inputs.num_steps` tokens for each.

    Args:
        step: one step.
        inputs: arrays of the known tokens, each in a row of its own.
        cache: pages of the sequences.
        chains: for each sequence the row of its last token, and the number of positions of its
            pages; then the number of sequences, n times.
        most: maximum number of steps, k.
        page_size, nowhere: see `several_steps`.

    Returns:
        the drafts, and the cache. A draft whose position has no page is invalid.
    """
    index, limits, counts = chains
    tokens, hidden, cache = step(inputs, cache, None)
    inputs, tokens, hidden = (
        select_chain_rows(inputs, index, counts[0]),
        tokens[index],
        hidden[index],
    )
    drafts = jnp.zeros((len(index), most), jnp.int32).at[:, 0].set(tokens)

    def draft(number: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs, cache, tokens, hidden, drafts = carry
        inputs = following(inputs, page_size, nowhere, limits)
        token_inputs = replace(inputs, token_ids=jnp.maximum(tokens, 0)[None])
        tokens, hidden, cache = step(token_inputs, cache, hidden)
        return inputs, cache, tokens, hidden, drafts.at[:, number].set(tokens)

    start = (inputs, cache, tokens, hidden, drafts)
    _, cache, _, _, drafts = jax.lax.fori_loop(1, inputs.num_steps, draft, start)
    return drafts, cache


def select_chain_rows(inputs: StepInput, index: Int[Array, " n"], count: jax.Array) -> StepInput:
    """Return the inputs of some rows of a decode step.

    Args:
        index: the rows; those after the first `count` are unused.
        count: number of rows.
    """
    ragged, rows = inputs.ragged, jnp.arange(len(index))
    is_used = rows < count

    def take(values: jax.Array | None) -> jax.Array | None:
        return None if values is None else values[index]

    selected = replace(
        ragged,
        cu_q_lens=jnp.minimum(jnp.arange(len(index) + 1, dtype=jnp.int32), count),
        kv_lens=jnp.where(is_used, ragged.kv_lens[index], 0),
        seq_of_token=jnp.minimum(rows, jnp.maximum(count - 1, 0)),
        slots={group: slots[index] for group, slots in ragged.slots.items()},
        page_table={group: table[index] for group, table in ragged.page_table.items()},
        state_slots=ragged.state_slots[index],
        num_seqs=count,
        prompt_lens=take(ragged.prompt_lens),
        adapter_ids=take(ragged.adapter_ids),
    )
    return replace(
        inputs,
        token_ids=inputs.token_ids[:, index],
        ragged=selected,
        logits_at=jnp.where(is_used, rows, len(index) - 1),
        rows=inputs.rows[:, index],
        features=None,
        positions=None if inputs.positions is None else inputs.positions[..., index],
    )


def following(
    inputs: StepInput,
    page_size: int,
    nowhere: Mapping[str, int],
    limits: Int[Array, " n"] | None = None,
) -> StepInput:
    """Return the inputs of the step that computes the tokens sampled by a decode step.

    Args:
        inputs: inputs of the step that samples the tokens.
        page_size, nowhere: see `several_steps`.
        limits: number of positions of each sequence; later positions are not stored. None = the
            scheduler has reserved all pages.
    """
    ragged = inputs.ragged
    count = len(ragged.kv_lens)
    used = jnp.arange(count) < ragged.num_seqs
    lengths = ragged.kv_lens + used
    if limits is not None:
        used &= ragged.kv_lens < limits
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
