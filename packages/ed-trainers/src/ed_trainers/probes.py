"""Periodic probes of the model: samples of its texts, and benchmarks.

Each probe adds a row to the metrics, and some lines to the terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
from ed_infra.chats import Prompt
from ed_infra.errors import ConfigError

from ed_trainers.batches import Dataset, HostBatch, evaluation_batches
from ed_trainers.options.base import TrainingArguments
from ed_trainers.rollout import Weights, until_end

#: Key of a preview's row: `[{"prompt": text, "completion": text}, ...]`.
SAMPLES = "samples"
#: Prefix of the keys of a benchmark's row.
BENCHMARK = "benchmark/"
#: Maximum number of tokens of a held-out document in a preview's prompt.
_BEGINNING = 32
# Only one side of a batch of pairs is shown.
_LEADS = ("", "chosen_", "anchor_")


class Probe(Protocol):
    """A periodic evaluation of the model."""

    @property
    def every(self) -> int:
        """Number of steps between two evaluations."""
        ...

    def look(self, weights: Weights) -> tuple[dict[str, Any], list[str]]:
        """Return a row of the metrics, and lines for the terminal; called on every process."""
        ...


class Benchmark(Protocol):
    """Runs tasks of lm-evaluation-harness with an engine; ed-elarge implements this with eSurge."""

    def __call__(self, tasks: Sequence[str], weights: Weights) -> Mapping[str, Mapping[str, float]]:
        """Return task -> metric -> value.

        Args:
            tasks: names of the tasks.
            weights: the evaluated weights; valid until this call returns.
        """
        ...


class PreviewTokenizer(Protocol):
    """The interface of a tokenizer for previews."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        ...


class Previews:
    """Completions of some prompts.

    Args:
        arguments: `generation_*` and `seed`.
        tokenizer: encodes prompts and decodes completions.
        held_out: source of prompts, if the arguments name none.

    Raises:
        ConfigError: there is no tokenizer, or no source of prompts.
    """

    def __init__(
        self, arguments: TrainingArguments, tokenizer: object | None, held_out: Dataset | None
    ):
        if not hasattr(tokenizer, "decode"):
            raise ConfigError(
                "generation_interval shows texts: pass a tokenizer as processing_class, or omit "
                "generation_interval"
            )
        if not arguments.generation_prompts and held_out is None:
            raise ConfigError(
                "generation_interval has no prompts: set generation_prompts, or pass an "
                "eval_dataset, whose documents then are begun"
            )
        self._arguments, self._held_out = arguments, held_out
        self._tokenizer = cast(PreviewTokenizer, tokenizer)
        self._prompts: list[list[int]] = []

    @property
    def every(self) -> int:
        """Number of steps between two previews."""
        assert self._arguments.generation_interval is not None
        return self._arguments.generation_interval

    def look(self, weights: Weights) -> tuple[dict[str, Any], list[str]]:
        """Complete every prompt; each preview has a different seed."""
        arguments = self._arguments
        if not self._prompts:
            self._prompts = self._find_prompts()
        width = max(map(len, self._prompts))
        ids = np.zeros((len(self._prompts), width), np.int32)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(self._prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        sampled = arguments.generation_temperature > 0
        settings = {
            "temperature": arguments.generation_temperature,
            "top_p": arguments.generation_top_p,
        }
        model = weights.model
        output = cast(Any, model).generate(
            ids,
            attention_mask=mask,
            max_new_tokens=arguments.generation_max_new_tokens,
            do_sample=sampled,
            seed=arguments.seed + weights.version,
            **(settings if sampled else {}),
        )
        samples, lines = [], []
        for prompt, sequence in zip(self._prompts, output.sequences.tolist(), strict=True):
            answer = until_end(sequence[width:], model)
            read, completion_text = (
                self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, answer)
            )
            samples.append({"prompt": read, "completion": completion_text})
            lines.append(f"{read!r} continues {completion_text!r}")
        return {SAMPLES: samples}, lines

    def _find_prompts(self) -> list[list[int]]:
        arguments = self._arguments
        if arguments.generation_prompts:
            prompts = [self._encode(prompt) for prompt in arguments.generation_prompts]
            for prompt_text, prompt in zip(arguments.generation_prompts, prompts, strict=True):
                if not prompt:
                    raise ConfigError(f"generation_prompts: {prompt_text!r} has no tokens")
            return prompts
        assert self._held_out is not None
        prompts: list[list[int]] = []
        for batch in evaluation_batches(self._held_out, arguments.max_evaluation_steps)[0]:
            prompts += beginnings(batch)
            if len(prompts) >= arguments.generation_num_prompts:
                break
        if not prompts:
            raise ConfigError(
                "eval_dataset has no documents to begin: set generation_prompts for previews"
            )
        return prompts[: arguments.generation_num_prompts]

    def _encode(self, prompt: Prompt) -> list[int]:
        """Return the ids of a text, or of a conversation with the start of an answer."""
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if getattr(self._tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "generation_prompts has a conversation, and the tokenizer has no chat template: "
                "set one (in a run file model.tokenizer.chat_template), or use texts"
            )
        encoded = cast(Any, self._tokenizer).apply_chat_template(
            [*prompt], add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(encoded["input_ids"])


def beginnings(batch: HostBatch | object) -> list[list[int]]:
    """Return the beginnings of the documents of a batch: their prompts, or the first half of each.

    Args:
        batch: a batch of any method: `input_ids` [b, s] with or without `labels` and `segment_ids`,
            one side of pairs, or prompts.
    """
    if not isinstance(batch, Mapping):
        return [list(prompt) for prompt in cast(Any, batch).input_ids]
    lead = next(lead for lead in _LEADS if f"{lead}input_ids" in batch)
    ids = np.asarray(batch[f"{lead}input_ids"])
    labels = np.asarray(batch.get(f"{lead}labels", ids))
    segments = np.asarray(
        batch.get(f"{lead}segment_ids", batch.get(f"{lead}attention_mask", np.ones_like(ids)))
    )
    prompt_ids = []
    for row in range(len(ids)):
        for segment in range(1, int(segments[row].max(initial=0)) + 1):
            document_mask = segments[row] == segment
            tokens, learned = ids[row][document_mask].tolist(), labels[row][document_mask] != -100
            prompt = int(np.argmax(learned)) if learned.any() else 0
            prompt_ids.append(tokens[: prompt or min(max(len(tokens) // 2, 1), _BEGINNING)])
    return [tokens for tokens in prompt_ids if tokens]


class Benchmarks:
    """Metrics of tasks.

    Args:
        arguments: `benchmarks`, `benchmark_interval`.
        run: runs the tasks.
    """

    def __init__(self, arguments: TrainingArguments, run: Benchmark):
        self._arguments, self._run = arguments, run

    @property
    def every(self) -> int:
        """Number of steps between two runs of all tasks."""
        assert self._arguments.benchmark_interval is not None
        return self._arguments.benchmark_interval

    def look(self, weights: Weights) -> tuple[dict[str, Any], list[str]]:
        """Run every task."""
        figures = self._run(self._arguments.benchmarks, weights)
        row = {
            f"{BENCHMARK}{task}/{name}": value
            for task, task_metrics in figures.items()
            for name, value in task_metrics.items()
        }
        return row, [f"{name.removeprefix(BENCHMARK)} {value:.4g}" for name, value in row.items()]


def build_probes(
    arguments: TrainingArguments,
    model: object,
    tokenizer: object | None,
    held_out: Dataset | None,
    benchmark: Benchmark | None,
) -> tuple[Probe, ...]:
    """Return the probes of the arguments.

    Raises:
        ConfigError: a probe lacks a tokenizer, prompts or a benchmark.
    """
    probes: list[Probe] = []
    if arguments.generation_interval is not None:
        _check_writes(model, "generation_interval")
        probes.append(Previews(arguments, tokenizer, held_out))
    if arguments.benchmark_interval is not None and arguments.benchmarks:
        if benchmark is None:
            raise ConfigError(
                "benchmarks need an engine, and the trainer has none: train with ed-elarge, or "
                "pass benchmark= to the trainer, a function of (tasks, weights)"
            )
        probes.append(Benchmarks(arguments, benchmark))
    return tuple(probes)


def _check_writes(model: object, option: str) -> None:
    if not hasattr(model, "generate"):
        raise ConfigError(
            f"{option} needs a model that writes texts, and {type(model).__name__} writes none: "
            f"omit {option}"
        )
