"""`generate`: continue prompts with one prefill and one compiled decoding loop.

Rows are right-aligned in a bucketed length, so few programs are compiled. The output of a row
depends neither on padding nor on the other rows. Use the engine (`ed_esurge`) for many requests;
`generate` is the reference for the tests of the engine.

Legend: b prompts, s prompt length, r rows of the output, n new tokens, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    repeat_rows,
    token_program,
)
from ed_models.generation.generated_rows import GeneratedRows
from ed_models.generation.options import GenerationOptions, get_vocab_size
from ed_models.generation.prompts import (
    SMALLEST_BUCKET,
    SMALLEST_START,
    PromptBatch,
    TokenRows,
    as_token_ids,
    bucket,
    decoder_start,
    encoder_inputs,
    get_processor_names,
    is_encoder_decoder,
    longest_sequence,
    prompt_inputs,
)
from ed_models.generation.stop_strings import TokenDecoder
from ed_models.protocol import LanguageModel

if TYPE_CHECKING:
    from transformers import GenerationConfig

_MOST_OUTPUT = 4 * 2**30


@dataclass(frozen=True)
class GenerateOutput:
    """The result of `generate`, with the attribute names of `transformers`.

    Attributes:
        sequences: int32 [r, s + n], the unmodified prompts followed by n new tokens. The
            `num_return_sequences` rows of a prompt are consecutive. A row that ended early is
            filled with the padding token.
        sequences_scores: beam search: sum of log-probabilities divided by a power of the length,
            [r].
        scores: with `output_scores`: processed scores from which each token was chosen, [n, r, v].
            Beam search: the scores of all beams of all prompts, [n, b * num_beams, v].
        logits: with `output_logits`: the logits before processing, in the shape of `scores`.
        logprobs: with `output_logprobs`: log-probability of each new token, [r, n]; 0 after the end
            of a row. The distribution is that of the model at temperature 1, or with
            `logprobs_mode="processed_logprobs"` the distribution of the draw.
        beam_indices: beam search: the beam that each new token continued, -1 after the end.
        steps: number of forward passes after the prefill; assisted generation needs fewer.
    """

    sequences: np.ndarray
    sequences_scores: np.ndarray | None = None
    scores: np.ndarray | None = None
    logits: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    beam_indices: np.ndarray | None = None
    steps: int = 0

    def __getitem__(self, row: int) -> np.ndarray:
        """Return a row of the sequences."""
        return self.sequences[row]


def generate(
    model: LanguageModel,
    input_ids: TokenRows | None,
    generation_config: GenerationConfig | Mapping[str, object] | None,
    *,
    attention_mask: TokenRows | None,
    inputs: Mapping[str, Any] | None,
    seed: int,
    tokenizer: TokenDecoder | None,
    assistant_model: LanguageModel | None,
    options: Mapping[str, object],
    checkpoint: str | None,
) -> GenerateOutput:
    """Generate a continuation of each row; see `EasyGenerationMixin.generate`.

    Args:
        options: options of a GenerationConfig, and arrays that `model.input_names` contains.
        checkpoint: text of the checkpoint's generation_config.json.
    """
    config = model.config
    array_names = *model.input_names, *get_processor_names(model)
    prompt_arrays = {name: options[name] for name in array_names if options.get(name) is not None}
    options = {name: value for name, value in options.items() if name not in array_names}
    if attention_mask is not None:
        prompt_arrays["attention_mask"] = attention_mask
    arrays = prompt_inputs(model, input_ids, {**(inputs or {}), **prompt_arrays})
    attention_mask = arrays.get("attention_mask")
    reads_encoder = is_encoder_decoder(model)
    if reads_encoder:
        length = arrays["decoder_input_ids"].shape[1] if "decoder_input_ids" in arrays else 1
    else:
        length = arrays["input_ids"].shape[1]
    generation_options = GenerationOptions.resolve(
        arguments=options,
        generation_config=generation_config,
        checkpoint=checkpoint,
        model_config=config,
        prompt_length=length,
        encoder_decoder=reads_encoder,
        tokenizer=tokenizer,
        assisted=assistant_model is not None,
    )
    if not (isinstance(seed, Integral) and not isinstance(seed, bool) and 0 <= seed < 2**32):
        raise ConfigError(f"seed is {seed!r}; it must be an integer from 0 to 2**32 - 1")
    padded = (
        generation_options.pad_is_known
        and generation_options.pad_token_id not in generation_options.eos_token_id
    )
    padding = generation_options.pad_token_id if padded else None
    vocab_size = get_vocab_size(config)
    if not reads_encoder:
        if options.get("decoder_start_token_id") is not None:
            raise ConfigError(
                f"decoder_start_token_id has no effect: {type(model).__name__} has no encoder"
            )
        prompts = PromptBatch.read(arrays["input_ids"], attention_mask, padding, vocab_size)
        encoder_names = [name for name in arrays if name not in ("input_ids", "attention_mask")]
        prompts = replace(prompts, inputs=arrays.select(encoder_names))
    else:
        if "input_ids" in arrays:
            ids = arrays["input_ids"]
            encoder_vocab_size = get_vocab_size(config, encoder=True)
            tokens = PromptBatch.read(ids, attention_mask, padding, encoder_vocab_size)
            encoder = encoder_inputs(tokens, longest_sequence(config))
        else:
            encoder_names = [name for name in arrays if not name.startswith("decoder_")]
            encoder = arrays.select(encoder_names)
        first, mask = decoder_start(model, generation_options.decoder_start_token_id, arrays)
        prompts = PromptBatch.read(as_token_ids(first), mask, None, vocab_size)
        prompts = replace(prompts, inputs=encoder)
    for language_model in (model, assistant_model):
        if language_model is not None:
            prompts.check_room(language_model.config, generation_options.max_new_tokens)
    if assistant_model is not None:
        _check_assistant(config, assistant_model.config)
    return _generate(model, assistant_model, prompts, generation_options, int(seed))


def transition_scores(
    sequences: Int[np.ndarray, "r t"],
    scores: Float[np.ndarray, "n m v"],
    beam_indices: Int[np.ndarray, "r n"] | None,
    normalize_logits: bool,
) -> Float[np.ndarray, "r n"]:
    """Compute the score of each new token; see `compute_transition_scores` of a model."""
    scores = np.asarray(scores, np.float32)
    if normalize_logits:
        shifted = scores - scores.max(axis=-1, keepdims=True)
        scores = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    if beam_indices is None:
        rows = np.arange(scores.shape[1])[:, None]
        beam_indices = np.broadcast_to(rows, (scores.shape[1], len(scores)))
    n = beam_indices.shape[1]
    new = np.asarray(sequences)[:, -n:]
    token_scores = scores[np.arange(n), np.maximum(beam_indices, 0), new]
    return np.where(beam_indices < 0, 0.0, token_scores)


def _generate(
    model: LanguageModel,
    assistant: LanguageModel | None,
    prompts: PromptBatch,
    options: GenerationOptions,
    seed: int,
) -> GenerateOutput:
    """Run the prefill, then the decoding loop that the options select."""
    # A decoder begins with one token, or with a few.
    smallest = SMALLEST_START if is_encoder_decoder(model) else SMALLEST_BUCKET
    tokens, valid = prompts.align_tokens(smallest)
    room = bucket(options.max_new_tokens)
    copies = options.num_return_sequences if options.beams is None else options.beams.size
    split, leaves = Split.of(cast(nnx.Module, model), model.config.mesh)
    _check_output(options, room, len(tokens) * copies, model.config)

    def prefill_prompts(split: Split, leaves: object) -> tuple[Any, Any]:
        width = tokens.shape[1] + room
        run = prefill_program(split)
        cache, logits = run(leaves, tokens, valid, prompts.inputs, capacity=width)
        return (cache, logits) if copies == 1 else repeat_rows(cache, logits, copies=copies)

    cache, logits = prefill_prompts(split, leaves)
    ids = np.concatenate([np.full((len(tokens), room), -1), np.where(valid, tokens, -1)], axis=1)
    source = None
    if options.choice.reads_source:
        source = jnp.asarray(np.repeat(prompts.source(model), copies, axis=0), jnp.int32)
    rows = GeneratedRows(
        ids=jnp.asarray(np.repeat(ids, copies, axis=0), jnp.int32),
        source=source,
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
    program_options = {"room": room, "outputs": options.outputs}
    if options.beams is not None:
        search_result, _ = beam_program(split)(
            leaves,
            cache,
            logits,
            rows,
            draws,
            options.choice,
            options.beams,
            pad,
            **program_options,
        )
        return _build_beam_output(search_result, prompts, options)
    if options.drafts is None:
        run = token_program(split)
        finished, _ = run(
            leaves, cache, logits, rows, draws, options.choice, pad, **program_options
        )
    else:
        helper, helping, helper_cache = None, [], None
        if assistant is not None:
            helper, helping = Split.of(cast(nnx.Module, assistant), assistant.config.mesh)
            helper_cache, _ = prefill_prompts(helper, helping)
        run = assisted_program(split, helper)
        program_inputs = (leaves, helping, cache, helper_cache)
        finished, *_ = run(
            *program_inputs, logits, rows, draws, options.choice, drafts=options.drafts
        )
    n = int(finished.new)
    new = on_host(finished.ids)[:, finished.ids.shape[1] - n :]
    step = {name: on_host(x)[:n] for name, x in finished.records.items()}
    if "logprobs" in step:
        step["logprobs"] = step["logprobs"].T
    return GenerateOutput(
        _behind(prompts, np.where(new < 0, pad, new)), steps=int(finished.steps), **step
    )


def _build_beam_output(
    search_result: Any, prompts: PromptBatch, options: GenerationOptions
) -> GenerateOutput:
    """Return the best beams of each prompt."""
    count = options.num_return_sequences
    scores, tokens, parents = (
        on_host(x)[:, :count].reshape(len(prompts.ids) * count, *x.shape[2:])
        for x in (search_result.best.scores, search_result.best.tokens, search_result.best.parents)
    )
    n = int((parents >= 0).sum(axis=1).max())
    steps = int(search_result.steps)
    return GenerateOutput(
        _behind(prompts, tokens[:, :n]),
        sequences_scores=scores,
        beam_indices=parents[:, :n],
        steps=steps,
        **{name: on_host(x)[: steps + 1] for name, x in search_result.records.items()},
    )


def _behind(prompts: PromptBatch, new: Int[np.ndarray, "r n"]) -> Int[np.ndarray, "r t"]:
    """Append the new tokens to their prompts."""
    copies = len(new) // len(prompts.ids)
    return np.concatenate([np.repeat(prompts.ids, copies, axis=0), new], axis=1)


def _check_output(
    options: GenerationOptions, room: int, rows: int, config: EasyDeLBaseConfig
) -> None:
    vocab_size = get_vocab_size(config) or 0
    per_step = rows * vocab_size * 4 * len(options.outputs & {"scores", "logits"})
    if per_step * room > _MOST_OUTPUT:
        raise ConfigError(
            f"output_scores and output_logits of {rows} rows and {vocab_size} tokens need "
            f"{per_step * room / 2**30:.1f} GiB for up to {room} steps; at most "
            f"{_MOST_OUTPUT >> 30} GiB are kept: request fewer new tokens, or output_logprobs"
        )


def _check_assistant(config: EasyDeLBaseConfig, assistant: EasyDeLBaseConfig) -> None:
    mine, assistant_size = get_vocab_size(config), get_vocab_size(assistant)
    if mine != assistant_size:
        raise ConfigError(
            f"the assistant_model has a vocabulary of {assistant_size} tokens, but the model has "
            f"{mine}: "
            "both must use the same tokenizer"
        )
