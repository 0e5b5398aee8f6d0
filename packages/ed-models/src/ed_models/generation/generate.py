"""`generate`: prompts in, tokens out, by one prefill and one compiled decoding loop.

Rows are packed against the right edge of a bucketed length, so few programs are compiled, and what
a row says depends neither on padding nor on the other rows. The engine (`ed_esurge`) is the tool
for many requests; this one is the reference it is compared with.

Legend: b prompts, s prompt length, r rows of the output, n new tokens, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, cast

import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.distributed import on_host
from ed_infra.errors import ConfigError
from flax import nnx
from jaxtyping import Float, Int

from ed_models.generation.assisted import assisted_program
from ed_models.generation.beams import beam_program
from ed_models.generation.decoding import (
    Draws,
    Split,
    draw_keys,
    prefill_program,
    repeated,
    token_program,
)
from ed_models.generation.options import GenerationOptions
from ed_models.generation.processors import Rows
from ed_models.generation.prompts import Prompts, TokenRows, bucket, token_ids
from ed_models.generation.stop_strings import Decoder
from ed_models.protocol import LanguageModel

if TYPE_CHECKING:
    import jax
    from transformers import GenerationConfig

_MOST_OUTPUT = 4 * 2**30


@dataclass(frozen=True)
class GenerateOutput:
    """What `generate` returns, with the names of `transformers`.

    Attributes:
        sequences: int32 [r, s + n], the prompts as they came and then n new tokens; the
            `num_return_sequences` of a prompt lie beside each other. A row that ended earlier than
            others is filled with the padding token.
        sequences_scores: of beams: the sum of log-probabilities over a power of the length; [r].
        scores: with `output_scores`: what the next token was chosen by, processed; [n, r, v]. Of
            beam search: of all beams of all prompts, [n, b * num_beams, v].
        logits: with `output_logits`: the same before processing.
        logprobs: with `output_logprobs`: log-probability of each new token under the model itself
            at temperature 1, or with `logprobs_mode="processed_logprobs"` in the distribution that
            the token was drawn from; [r, n]. 0 behind the end of a row.
        beam_indices: of beams: for each new token the beam that it continued, -1 behind the end.
        steps: forwards of the model behind the prompt; assistance saves some.
    """

    sequences: np.ndarray
    sequences_scores: np.ndarray | None = None
    scores: np.ndarray | None = None
    logits: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    beam_indices: np.ndarray | None = None
    steps: int = 0


class EasyGenerationMixin:
    """Adds `generate` to a `LanguageModel`."""

    config: EasyDeLBaseConfig
    generation_json: str | None = None

    def generate(
        self,
        input_ids: TokenRows,
        generation_config: GenerationConfig | Mapping[str, object] | None = None,
        *,
        attention_mask: TokenRows | None = None,
        seed: int = 0,
        tokenizer: Decoder | None = None,
        assistant_model: LanguageModel | None = None,
        logits_processor: Callable[..., jax.Array] | Sequence[Callable[..., jax.Array]] = (),
        **options: object,
    ) -> GenerateOutput:
        """Continue each row.

        Args:
            input_ids: [b, s]; shorter rows are padded on the left.
            generation_config: a `transformers.GenerationConfig`, or a mapping with its names;
                arguments of this call win over it. The checkpoint's own generation_config.json
                says only what the special tokens are: how to sample is for the caller to say.
            attention_mask: [b, s], 1 for a token, 0 for padding. Without it, padding tokens at the
                start of a row count as padding where they are known and are no end-of-sequence
                token.
            seed: 0 to 2**32 - 1; a token is drawn by the seed, its row's number and its position.
            tokenizer: what `stop_strings` read; anything with `decode(ids) -> str`.
            assistant_model: a smaller model of the same vocabulary, which drafts
                `num_assistant_tokens` at a time; the output stays that of plain decoding.
            logits_processor: functions `(input_ids, scores) -> scores` of jax arrays, traced into
                the loop behind the other processors and before temperature and filters. `input_ids`
                [r, t] are right-aligned, -1 to the left of a row's first token; `scores` [r, v].
                Programs are compiled for each function: keep it, rather than make a new one.
            options: those of a GenerationConfig, by name (docs/models.md has the list), and
                `presence_penalty`, `frequency_penalty`, `output_logprobs`, `logprobs_mode`. By
                default: 128 new tokens, the likeliest each time, until an end-of-sequence token.
                `eos_token_id=None` disables the end-of-sequence token.

        Raises:
            ConfigError: the prompts are no token ids of the vocabulary, an option is unknown, out
                of range or without effect, or the model has too few positions for the result.
        """
        ids = token_ids(input_ids)
        chosen = GenerationOptions.resolve(
            arguments=options | {"logits_processor": logits_processor or None},
            generation_config=generation_config,
            checkpoint=self.generation_json,
            model_config=self.config,
            prompt_length=ids.shape[1],
            tokenizer=tokenizer,
            assisted=assistant_model is not None,
        )
        if not (isinstance(seed, Integral) and not isinstance(seed, bool) and 0 <= seed < 2**32):
            raise ConfigError(f"seed is {seed!r}; it must be a whole number, 0 to 2**32 - 1")
        padded = chosen.pad_is_known and chosen.pad_token_id not in chosen.eos_token_id
        prompts = Prompts.read(
            ids, attention_mask, chosen.pad_token_id if padded else None, self.config
        )
        for model in (self, assistant_model):
            if model is not None:
                prompts.check_room(model.config, chosen.max_new_tokens)
        if assistant_model is not None:
            _check_assistant(self.config, assistant_model.config)
        return _generate(cast(LanguageModel, self), assistant_model, prompts, chosen, int(seed))

    def prepare_inputs_for_generation(
        self,
        input_ids: Int[jax.Array, "b s"],
        max_length: int,
        pad_token_id: int | None = None,
        *,
        attention_mask: Int[jax.Array, "b s"] | None = None,
    ) -> dict[str, Any]:
        """What the model is called with beside the tokens of a prompt: their mask, an empty cache.

        Args:
            max_length: tokens that a row can have, the prompt's included.
            pad_token_id: the token that is padding, if there is no `attention_mask`.
        """
        if attention_mask is None and pad_token_id is not None:
            attention_mask = (input_ids != pad_token_id).astype(jnp.int32)
        model = cast(LanguageModel, self)
        return {
            "attention_mask": attention_mask,
            "past_key_values": model.init_cache(input_ids.shape[0], max_length),
        }

    def compute_transition_scores(
        self,
        sequences: Int[np.ndarray, "r t"],
        scores: Float[np.ndarray, "n m v"],
        beam_indices: Int[np.ndarray, "r n"] | None = None,
        normalize_logits: bool = False,
    ) -> Float[np.ndarray, "r n"]:
        """The score of each new token, out of what `output_scores` kept.

        Args:
            sequences, scores, beam_indices: of the `GenerateOutput`.
            normalize_logits: turn scores into log-probabilities first.

        Returns:
            0 where beams had ended.
        """
        scores = np.asarray(scores, np.float32)
        if normalize_logits:
            shifted = scores - scores.max(axis=-1, keepdims=True)
            scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        if beam_indices is None:
            rows = np.arange(scores.shape[1])[:, None]
            beam_indices = np.broadcast_to(rows, (scores.shape[1], len(scores)))
        n = beam_indices.shape[1]
        new = np.asarray(sequences)[:, -n:]
        found = scores[np.arange(n), np.maximum(beam_indices, 0), new]
        return np.where(beam_indices < 0, 0.0, found)


def _generate(
    model: LanguageModel,
    assistant: LanguageModel | None,
    prompts: Prompts,
    options: GenerationOptions,
    seed: int,
) -> GenerateOutput:
    """Prefill, then the loop that the options ask for."""
    tokens, valid = prompts.aligned()
    room = bucket(options.max_new_tokens)
    copies = options.num_return_sequences if options.beams is None else options.beams.size
    split, leaves = Split.of(cast(nnx.Module, model), model.config.mesh)
    _check_output(options, room, len(tokens) * copies, model.config)

    def prefilled(split: Split, leaves: Any) -> tuple[Any, Any]:
        width = tokens.shape[1] + room
        cache, logits = prefill_program(split)(leaves, tokens, valid, capacity=width)
        return (cache, logits) if copies == 1 else repeated(cache, logits, copies=copies)

    cache, logits = prefilled(split, leaves)
    ids = np.concatenate([np.full((len(tokens), room), -1), np.where(valid, tokens, -1)], axis=1)
    rows = Rows(
        ids=jnp.asarray(np.repeat(ids, copies, axis=0), jnp.int32),
        new=jnp.zeros((len(ids) * copies,), jnp.int32),
        limit=jnp.int32(options.max_new_tokens),
        eos=jnp.asarray(options.eos_token_id or (-1,), jnp.int32),
        stops=options.stops,
    )
    keys = None
    if options.choice.do_sample:
        keys = draw_keys(jnp.uint32(seed), rows=len(tokens), copies=copies)
    draws = Draws(keys, jnp.asarray(np.repeat(prompts.lengths, copies)))
    pad = np.int32(options.pad_token_id)
    kept = {"room": room, "outputs": options.outputs}
    if options.beams is not None:
        found, _ = beam_program(split)(
            leaves, cache, logits, rows, draws, options.choice, options.beams, pad, **kept
        )
        return _of_beams(found, prompts, options)
    if options.drafts is None:
        run = token_program(split)
        finished, _ = run(leaves, cache, logits, rows, draws, options.choice, pad, **kept)
    else:
        helper, helping, helper_cache = None, [], None
        if assistant is not None:
            helper, helping = Split.of(cast(nnx.Module, assistant), assistant.config.mesh)
            helper_cache, _ = prefilled(helper, helping)
        run = assisted_program(split, helper)
        both = (leaves, helping, cache, helper_cache)
        finished, *_ = run(*both, logits, rows, draws, options.choice, drafts=options.drafts)
    n = int(finished.new)
    new = on_host(finished.ids)[:, finished.ids.shape[1] - n :]
    step = {name: on_host(x)[:n] for name, x in finished.kept.items()}
    if "logprobs" in step:
        step["logprobs"] = step["logprobs"].T
    return GenerateOutput(
        _behind(prompts, np.where(new < 0, pad, new)), steps=int(finished.steps), **step
    )


def _of_beams(found: Any, prompts: Prompts, options: GenerationOptions) -> GenerateOutput:
    """The best beams of each prompt."""
    count = options.num_return_sequences
    scores, tokens, parents = (
        on_host(x)[:, :count].reshape(len(prompts.ids) * count, *x.shape[2:])
        for x in (found.best.scores, found.best.tokens, found.best.parents)
    )
    n = int((parents >= 0).sum(axis=1).max())
    steps = int(found.steps)
    return GenerateOutput(
        _behind(prompts, tokens[:, :n]),
        sequences_scores=scores,
        beam_indices=parents[:, :n],
        steps=steps,
        **{name: on_host(x)[: steps + 1] for name, x in found.kept.items()},
    )


def _behind(prompts: Prompts, new: Int[np.ndarray, "r n"]) -> Int[np.ndarray, "r t"]:
    """New tokens behind their prompts."""
    copies = len(new) // len(prompts.ids)
    return np.concatenate([np.repeat(prompts.ids, copies, axis=0), new], axis=1)


def _check_output(
    options: GenerationOptions, room: int, rows: int, config: EasyDeLBaseConfig
) -> None:
    vocab_size = getattr(config.get_text_config(), "vocab_size", 0)
    per_step = rows * vocab_size * 4 * len(options.outputs & {"scores", "logits"})
    if per_step * room > _MOST_OUTPUT:
        raise ConfigError(
            f"output_scores and output_logits of {rows} rows and {vocab_size} tokens need "
            f"{per_step * room / 2**30:.1f} GiB for up to {room} steps; at most "
            f"{_MOST_OUTPUT >> 30} GiB are kept: ask for fewer new tokens, or for output_logprobs"
        )


def _check_assistant(config: EasyDeLBaseConfig, assistant: EasyDeLBaseConfig) -> None:
    mine, other = (getattr(c.get_text_config(), "vocab_size", None) for c in (config, assistant))
    if mine != other:
        raise ConfigError(
            f"the assistant_model has a vocabulary of {other} tokens, the model one of {mine}; an "
            "assistant must speak the same tokens, so take one with the same tokenizer"
        )
