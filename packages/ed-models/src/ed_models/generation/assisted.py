"""Assisted generation: several tokens are drafted, and one forward of the model checks them all.

At each place the model chooses as if it were alone: greedily, or by the draw that the place has
without drafts (row key and position fix it). Drafts are kept as far as they equal these choices, so
the output is that of plain decoding with the same seed, token for token. For a fixed draft this
accepts as often as rejection sampling does (Leviathan et al., 2023); a drawn one shares the model's
noise (Daliri et al., 2024).

A ring of slots or a state cannot drop rejected drafts. The model computes it again from before the
drafts, with the accepted tokens.

Legend: b rows, t tokens of a row, k drafts, j = k + 1 places, v vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from ed_layers.cache.protocol import ContiguousCache
from jaxtyping import Array, Bool, Float, Int

from ed_models.generation.decoding import Draws, Finished, Split
from ed_models.generation.generated_rows import GeneratedRows
from ed_models.generation.settings import Drafts
from ed_models.generation.token_choice import TokenChoice, process
from ed_models.protocol import LanguageModel


def look_up_drafts(ids: Int[Array, "b t"], count: int, ngram: int) -> Int[Array, "b k"]:
    """Draft what followed the latest tokens of a row when they stood there first; -1 where they did
    not. The most of them that are found count, up to `ngram` (Saxena, 2023)."""
    b, t = ids.shape
    drafts = jnp.full((b, count), -1, jnp.int32)
    for size in range(1, min(ngram, t - 1) + 1):
        starts = t - size
        same = jnp.ones((b, starts), bool)
        for i in range(size):
            latest = ids[:, starts + i, None]
            same &= (ids[:, i : i + starts] == latest) & (latest >= 0)
        places = jnp.argmax(same, axis=1)[:, None] + size + jnp.arange(count)
        following = jnp.take_along_axis(ids, jnp.minimum(places, t - 1), axis=1)
        following = jnp.where(places < t, following, -1)
        drafts = jnp.where(jnp.any(same, axis=1, keepdims=True), following, drafts)
    return drafts


def _forward(
    model: LanguageModel,
    tokens: Int[Array, "b j"],
    cache: ContiguousCache,
    token_mask: Bool[Array, "b j"],
) -> tuple[Float[Array, "b j v"], ContiguousCache]:
    """Logits behind each token; where not `token_mask`, a token is padding.

    Rotary factors that depend on length are computed for each token, as in plain decoding.
    """
    segments = jnp.where(token_mask, 1 + jnp.arange(tokens.shape[1], dtype=jnp.int32), 0)
    out = model.decode(jnp.maximum(tokens, 0), segment_ids=segments, past_key_values=cache)
    assert out.logits is not None
    return out.logits, out.past_key_values


def commit_tokens(
    model: LanguageModel,
    old_cache: ContiguousCache,
    new_cache: ContiguousCache,
    tokens: Int[Array, "b j"],
    count: Int[Array, " b"],
) -> ContiguousCache:
    """Return the cache with the first `count` of the tokens between `old_cache` and `new_cache`."""
    if old_cache.can_rewind:
        assert old_cache.tokens is not None
        return new_cache.rewind(old_cache.tokens + count)
    return _forward(model, tokens, old_cache, jnp.arange(tokens.shape[1]) < count[:, None])[1]


def next_tokens(
    logits: Float[Array, "b j v"],
    drafts: Int[Array, "b k"],
    rows: GeneratedRows,
    draws: Draws,
    choice: TokenChoice,
) -> tuple[Int[Array, "b j"], Bool[Array, "b j"]]:
    """The choice at each place, if the drafts before it are right; and whether it ends the row."""
    b, j, _ = logits.shape
    t = rows.ids.shape[1]
    sequences = jnp.concatenate([rows.ids, drafts], axis=1)
    ids = jnp.stack([sequences[:, i : i + t] for i in range(j)], axis=1)
    new = rows.new[:, None] + jnp.arange(j)
    place_rows = rows.take(jnp.repeat(jnp.arange(b), j))
    place_rows = replace(place_rows, ids=ids.reshape(b * j, t), new=new.reshape(-1))
    of = jnp.repeat(jnp.arange(b), j)
    place_draws = jax.tree.map(lambda x: x[of], draws)
    candidates = process(logits.reshape(b * j, -1), choice, place_rows)
    tokens = place_draws.choose(candidates, choice, place_rows)
    return tokens.reshape(b, j), place_rows.push(tokens).find_ended_rows().reshape(b, j)


def append_tokens(
    rows: GeneratedRows, tokens: Int[Array, "b j"], count: Int[Array, " b"]
) -> GeneratedRows:
    """The rows with the first `count` of these tokens more."""
    sequences = jnp.concatenate([rows.ids, tokens], axis=1)
    places = jnp.arange(rows.ids.shape[1]) + count[:, None]
    return replace(rows, ids=jnp.take_along_axis(sequences, places, axis=1), new=rows.new + count)


@functools.lru_cache(maxsize=8)
def assisted_program(
    split: Split, assistant: Split | None
) -> Callable[..., tuple[Finished, ContiguousCache, ContiguousCache | None]]:
    """`(leaves, helper, cache, helper_cache, logits, rows, draws, choice, drafts=) -> (Finished,
    cache, helper_cache)`; `helper` are the leaves of the assistant.

    The caches come back only so that their donated memory is used.
    """

    @functools.partial(jax.jit, static_argnames="drafts", donate_argnames=("cache", "helper_cache"))
    def decode(leaves, helper, cache, helper_cache, logits, rows, draws, choice, *, drafts: Drafts):
        model = split.merge(leaves)
        helping = None if assistant is None else assistant.merge(helper)
        places = jnp.arange(drafts.num_tokens + 1)

        def draft_tokens(rows: GeneratedRows, token_mask: Bool[Array, "b j"], cache):
            """Drafts [b, k], and the assistant's cache with the latest token and all of them."""
            if helping is None:
                return look_up_drafts(rows.ids, drafts.num_tokens, drafts.ngram or 1), cache
            drafter: LanguageModel = helping

            def draft(state, token_mask):
                rows, cache = state
                logits, cache = _forward(drafter, rows.ids[:, -1:], cache, token_mask[:, None])
                token = draws.choose(process(logits[:, 0], choice, rows), choice, rows)
                return (rows.push(token), cache), token

            (_, cache), tokens = jax.lax.scan(draft, (rows, cache), token_mask.T)
            return tokens[:-1].T, cache

        def has_unfinished_rows(state):
            _, rows, done, _, _ = state
            return jnp.any(~done & (rows.new < rows.limit))

        def step(state):
            steps, rows, done, cache, helper_cache = state
            # Nothing is computed for rows that ended, nor behind the last token that a row can get.
            inside = ~done[:, None] & (rows.new[:, None] + places < rows.limit)
            guesses, drafted_cache = draft_tokens(rows, inside, helper_cache)
            tokens = jnp.concatenate([rows.ids[:, -1:], guesses], axis=1)
            logits, seen = _forward(model, tokens, cache, inside)
            new_tokens, ends = next_tokens(logits, guesses, rows, draws, choice)
            right = jnp.cumprod(new_tokens[:, :-1] == guesses, axis=1)
            reached = jnp.pad(right, ((0, 0), (1, 0)), constant_values=1) == 1
            reached &= inside & (jnp.cumsum(ends, axis=1) - ends == 0)
            count = jnp.sum(reached, axis=1, dtype=jnp.int32)
            cache = commit_tokens(model, cache, seen, tokens, count)
            if helping is not None:
                helper_cache = commit_tokens(helping, helper_cache, drafted_cache, tokens, count)
            done = done | jnp.any(reached & ends, axis=1)
            return steps + 1, append_tokens(rows, new_tokens, count), done, cache, helper_cache

        rows = rows.push(draws.choose(process(logits, choice, rows), choice, rows))
        start = (jnp.int32(0), rows, rows.find_ended_rows(), cache, helper_cache)
        steps, rows, _, cache, helper_cache = jax.lax.while_loop(has_unfinished_rows, step, start)
        # Rows end at their own pace: bring the first new token of each to one place.
        longest = jnp.max(rows.new)
        t = rows.ids.shape[1]
        places = jnp.arange(t) + (longest - rows.new)[:, None]
        ids = jnp.take_along_axis(rows.ids, jnp.minimum(places, t - 1), axis=1)
        ended = places >= t
        return Finished(jnp.where(ended, -1, ids), longest, steps, {}), cache, helper_cache

    return decode
