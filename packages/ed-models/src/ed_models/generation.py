"""`generate`: prompts in, tokens out, by one prefill and one compiled decoding loop.

Rows are packed against the right edge of a bucketed length, so few programs are compiled, and what
a row says depends neither on padding nor on the other rows. The engine (`ed_esurge`) is the tool
for many requests; this one is the reference it is compared with.

Legend: b rows, s prompt length, v vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from flax import nnx
from jaxtyping import Bool, Int

from ed_models.generation_options import GenerationOptions
from ed_models.inputs import longest_sequence
from ed_models.protocol import LanguageModel
from ed_models.sampling import next_token, row_keys

if TYPE_CHECKING:
    from transformers import GenerationConfig

_SMALLEST_BUCKET = 16
Rows = jax.Array | np.ndarray | Sequence[Sequence[int]]


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns.

    Attributes:
        sequences: int32 [b, s + n], the prompts as they came and then n new tokens. A row that
            ended earlier than others is filled with the padding token.
    """

    sequences: np.ndarray


class EasyGenerationMixin:
    """Adds `generate` to a `LanguageModel`."""

    config: EasyDeLBaseConfig
    generation_json: str | None = None

    def generate(
        self,
        input_ids: Rows,
        *,
        attention_mask: Rows | None = None,
        generation_config: GenerationConfig | Mapping[str, object] | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        seed: int = 0,
    ) -> GenerateOutput:
        """Continue each row.

        Args:
            input_ids: [b, s]; shorter rows are padded on the left.
            attention_mask: [b, s], 1 for a token, 0 for padding. Without it, padding tokens at the
                start of a row count as padding where they are known and are no end-of-sequence
                token.
            generation_config: a `transformers.GenerationConfig`, or a mapping with its names;
                arguments of this call win over it. The checkpoint's own generation_config.json
                says only what the special tokens are: how to sample is for the caller to say.
            max_new_tokens: default 128.
            do_sample: draw tokens; by default the likeliest is taken.
            temperature, top_k, top_p, min_p, repetition_penalty: see
                `ed_models.sampling.TokenChoice`.
            eos_token_id: tokens that end a row, kept in it; `[]` for none.
            pad_token_id: what fills rows that ended; default: the first end-of-sequence token.
            seed: 0 to 2**32 - 1; a token is drawn by the seed, its row's number and its position.

        Raises:
            ConfigError: the prompts are no token ids of the vocabulary, an option is out of range
                or without effect, or the model has too few positions for the result.
        """
        ids = _token_ids(input_ids)
        options = GenerationOptions.resolve(
            arguments={
                "max_new_tokens": max_new_tokens,
                "do_sample": do_sample,
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "min_p": min_p,
                "repetition_penalty": repetition_penalty,
                "eos_token_id": eos_token_id,
                "pad_token_id": pad_token_id,
            },
            generation_config=generation_config,
            checkpoint=self.generation_json,
            model_config=self.config,
            prompt_length=ids.shape[1],
        )
        whole = isinstance(seed, Integral) and not isinstance(seed, bool)
        if not (whole and 0 <= seed < 2**32):
            raise ConfigError(f"seed is {seed!r}; it must be a whole number, 0 to 2**32 - 1")
        kept = _kept(ids, attention_mask, options)
        lengths = kept.sum(axis=1).astype(np.int32)
        if not lengths.all():
            raise ConfigError(f"row {int(np.argmin(lengths))} of input_ids is nothing but padding")
        ids = _in_vocabulary(ids, kept, self.config)
        _check_positions(self.config, int(lengths.max()), options.max_new_tokens)

        tokens, valid = right_aligned(ids, kept, bucket(int(lengths.max())))
        room = bucket(options.max_new_tokens)
        graphdef, state = nnx.split(self)
        leaves, structure = jax.tree.flatten(state)
        prefill, decode = _programs(graphdef, structure, self.config.mesh)
        cache, logits = prefill(leaves, tokens, valid, capacity=tokens.shape[1] + room)
        seen = None
        if options.choice.repetition_penalty is not None:
            seen = np.zeros(logits.shape, bool)
            for row, prompt in enumerate(ids):
                seen[row, prompt[kept[row]]] = True
        new, count, _ = decode(
            leaves,
            cache,
            logits,
            seen,
            lengths,
            options.choice,
            np.uint32(seed),
            np.asarray(options.eos_token_id or (-1,), np.int32),
            np.int32(options.pad_token_id),
            np.int32(options.max_new_tokens),
            room=room,
        )
        return GenerateOutput(np.concatenate([ids, np.asarray(new)[:, : int(count)]], axis=1))


@functools.lru_cache(maxsize=8)
def _programs(graphdef: nnx.GraphDef, structure, mesh: jax.sharding.Mesh):
    """The compiled functions of one model: prefill and decoding loop.

    They close over the graphdef and take flat leaves: as a static argument it would be hashed on
    every call. The mesh is part of the key because the module reads it from its config. Another
    bucket compiles another program, and so does another structure of the `TokenChoice`, of the
    loop alone; its numbers are arguments.
    """

    def merged(leaves: list[jax.Array]) -> LanguageModel:
        return nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))

    @functools.partial(jax.jit, static_argnames="capacity")
    def prefill(leaves, tokens, valid, *, capacity):
        model = merged(leaves)
        b, s = tokens.shape
        cache = model.init_cache(b, capacity)
        last = jnp.arange(b) * s + s - 1
        out = model(tokens, attention_mask=valid, past_key_values=cache, logits_at=last)
        return out.past_key_values, out.logits

    @functools.partial(jax.jit, static_argnames="room", donate_argnums=1)
    def decode(leaves, cache, logits, seen, lengths, choice, seed, eos, pad, limit, *, room):
        model = merged(leaves)
        b = logits.shape[0]
        rows, keys = jnp.arange(b), row_keys(seed, b)

        def choose(n, logits, seen, done):
            token = next_token(logits, choice, keys=keys, positions=lengths + n, seen=seen)
            token = jnp.where(done, pad, token)
            if seen is not None:
                seen = seen.at[rows, token].set(True)
            return token, seen, done | jnp.isin(token, eos)

        def unfinished(state):
            n, _, _, done, _, _ = state
            return (n < limit) & ~jnp.all(done)

        def step(state):
            n, token, seen, done, tokens, cache = state
            out = model(token[:, None], past_key_values=cache, logits_at=rows)
            token, seen, done = choose(n, out.logits, seen, done)
            tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (0, n))
            return n + 1, token, seen, done, tokens, out.past_key_values

        token, seen, done = choose(0, logits, seen, jnp.zeros((b,), bool))
        tokens = jnp.full((b, room), pad, jnp.int32).at[:, 0].set(token)
        start = (jnp.int32(1), token, seen, done, tokens, cache)
        n, _, _, _, tokens, cache = jax.lax.while_loop(unfinished, step, start)
        return tokens, n, cache  # the cache only so that its donated memory is used

    return prefill, decode


def bucket(n: int) -> int:
    """Round up to a power of two, at least 16: so many programs are compiled, and no more."""
    return max(_SMALLEST_BUCKET, 1 << (n - 1).bit_length())


def right_aligned(ids: np.ndarray, kept: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Move each row's tokens to the right edge of [b, width]; returns tokens and validity."""
    tokens = np.zeros((len(ids), width), np.int32)
    valid = np.zeros((len(ids), width), np.int32)
    for row, (values, keep) in enumerate(zip(ids, kept, strict=True)):
        packed = values[keep]
        tokens[row, width - len(packed) :] = packed
        valid[row, width - len(packed) :] = 1
    return tokens, valid


def _token_ids(input_ids: Rows) -> Int[np.ndarray, "b s"]:
    """The prompts as an array of integers."""
    try:
        ids = np.asarray(input_ids)
    except ValueError:
        raise ConfigError(
            "the rows of input_ids have different lengths; pad them on the left to one length, "
            "and give attention_mask"
        ) from None
    if ids.ndim != 2 or 0 in ids.shape:
        raise ConfigError(
            f"input_ids has shape {list(ids.shape)}; it must be [rows, tokens], at least one each"
        )
    if ids.dtype.kind not in "iu":
        raise ConfigError(f"input_ids has dtype {ids.dtype}; token ids are whole numbers")
    return ids


def _in_vocabulary(
    ids: Int[np.ndarray, "b s"], kept: Bool[np.ndarray, "b s"], config: EasyDeLBaseConfig
) -> Int[np.ndarray, "b s"]:
    """The prompts as int32, after a check of all tokens that are no padding."""
    size = getattr(config.get_text_config(), "vocab_size", None) or 2**31
    for row, at in np.argwhere(kept & ((ids < 0) | (ids >= size))):
        raise ConfigError(
            f"token {ids[row, at]} (row {row}, position {at} of input_ids) is not in the model's "
            f"vocabulary of {size} tokens; was the tokenizer made for another model?"
        )
    return ids.astype(np.int32)


def _kept(
    ids: Int[np.ndarray, "b s"], attention_mask: Rows | None, options: GenerationOptions
) -> Bool[np.ndarray, "b s"]:
    """Which entries of the prompts are tokens."""
    if attention_mask is not None:
        mask = np.asarray(attention_mask)
        if mask.shape != ids.shape:
            raise ConfigError(
                f"attention_mask has shape {list(mask.shape)}, input_ids {list(ids.shape)}; "
                "they must be equal"
            )
        return mask != 0
    if not options.pad_is_known or options.pad_token_id in options.eos_token_id:
        return np.ones(ids.shape, bool)
    return np.logical_or.accumulate(ids != options.pad_token_id, axis=1)


def _check_positions(config: EasyDeLBaseConfig, prompt: int, new: int) -> None:
    limit = longest_sequence(config.get_text_config())
    if limit is None or prompt + new <= limit:
        return
    raise ConfigError(
        f"{prompt} prompt tokens and max_new_tokens={new} need {prompt + new} positions, but the "
        f"model was made for max_position_embeddings={limit}; ask for at most {limit - prompt} "
        "new tokens"
        if prompt < limit
        else f"the prompt has {prompt} tokens, which leaves no room in the model's "
        f"max_position_embeddings={limit}; shorten it"
    )
