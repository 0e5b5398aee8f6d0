"""Periodic probes of the model: samples of its texts, and benchmarks.

Each probe adds a row to the metrics, and some lines to the terminal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.chats import Prompt
from ed_infra.errors import ConfigError
from ed_infra.rules import Rules

from ed_trainers.batches import BatchLoader, Dataset, HostBatch, evaluation_batches
from ed_trainers.optimizers import split_layers
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import LONGEST, WEIGHTS
from ed_trainers.rollout import Weights, until_end

#: Key of a preview's row: `[{"prompt": text, "completion": text}, ...]`.
SAMPLES = "samples"
#: Prefix of the keys of a benchmark's row.
BENCHMARK = "benchmark/"
# Training batches that are searched for documents.
_TRAIN_BATCHES = 64
# Number of bins of the histogram of a parameter.
_BINS = 64
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
        train: training batches, for `generation_use_train_prompts`.

    Raises:
        ConfigError: there is no tokenizer, or no source of prompts.
    """

    def __init__(
        self,
        arguments: TrainingArguments,
        tokenizer: object | None,
        held_out: Dataset | None,
        train: Dataset | None = None,
    ):
        if not hasattr(tokenizer, "decode"):
            raise ConfigError(
                "generation_interval shows texts: pass a tokenizer as processing_class, or omit "
                "generation_interval"
            )
        if arguments.generation_use_train_prompts and not isinstance(train, BatchLoader):
            raise ConfigError(
                "generation_use_train_prompts reads the first batches, and train_dataset is not a "
                "loader with batch_at(step): set generation_prompts instead"
            )
        given = arguments.generation_prompts or arguments.generation_use_train_prompts
        if not given and held_out is None:
            raise ConfigError(
                "generation_interval has no prompts: set generation_prompts, or pass an "
                "eval_dataset, whose documents then are begun"
            )
        self._arguments, self._held_out, self._train = arguments, held_out, train
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
        model = weights.model
        output = cast(Any, model).generate(
            ids,
            attention_mask=mask,
            max_new_tokens=arguments.generation_max_new_tokens,
            seed=self._compute_seed(weights.version),
            **read_preview_options(arguments),
        )
        samples, lines = [], []
        count = arguments.generation_num_return_sequences
        prompts = [prompt for prompt in self._prompts for _ in range(count)]
        for prompt, sequence in zip(prompts, output.sequences.tolist(), strict=True):
            answer = until_end(sequence[width:], model)
            read, completion_text = (
                self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, answer)
            )
            samples.append({"prompt": read, "completion": completion_text})
            lines.append(f"{read!r} continues {completion_text!r}")
        return {SAMPLES: samples}, lines if arguments.generation_preview_print else []

    def _compute_seed(self, version: int) -> int:
        seed = self._arguments.generation_seed
        return ((self._arguments.seed if seed is None else seed) + version) % 2**32

    def _find_prompts(self) -> list[list[int]]:
        arguments = self._arguments
        prompts = [self._encode(prompt) for prompt in arguments.generation_prompts]
        for prompt_text, prompt in zip(arguments.generation_prompts, prompts, strict=True):
            if not prompt:
                raise ConfigError(f"generation_prompts: {prompt_text!r} has no tokens")
        if arguments.generation_use_train_prompts:
            assert isinstance(self._train, BatchLoader)
            count = max(arguments.generation_num_prompts, len(prompts))
            for step in range(_TRAIN_BATCHES):
                if len(prompts) < count:
                    prompts += beginnings(self._train.batch_at(step))
            return prompts[:count]
        if prompts:
            return prompts
        assert self._held_out is not None
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


def read_preview_options(arguments: TrainingArguments) -> dict[str, object]:
    """Return the options of `generate` that differ from greedy decoding of one completion."""
    temperature, asked = arguments.generation_temperature, arguments.generation_do_sample
    is_sampled = bool(temperature) if asked is None else asked
    options: dict[str, object] = {"do_sample": is_sampled}
    if is_sampled:
        options["temperature"] = 1.0 if temperature is None else temperature
        options["top_p"] = arguments.generation_top_p
        options["num_return_sequences"] = arguments.generation_num_return_sequences
        if arguments.generation_top_k:
            options["top_k"] = arguments.generation_top_k
    penalties = {
        "repetition_penalty": (arguments.generation_repetition_penalty, 1.0),
        "presence_penalty": (arguments.generation_presence_penalty, 0.0),
        "frequency_penalty": (arguments.generation_frequency_penalty, 0.0),
    }
    return options | {n: value for n, (value, neutral) in penalties.items() if value != neutral}


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


@dataclass(frozen=True)
class LogWatcher:
    """A function of single parameters, whose values are logged every few steps.

    Attributes:
        name: first part of the names of its metrics: `<name>/<parameter>/<key>`.
        fn: returns key -> number for the array of a parameter of one layer, or a pair of the counts
            and the edges of a histogram. Every process calls it, with the same arrays.
        interval: number of steps between two calls; the last step counts.
        pattern: regular expression over the names of the trained parameters.
    """

    name: str
    fn: Callable[[jax.Array], Mapping[str, object]]
    interval: int = 500
    pattern: str = ".*"

    def __post_init__(self) -> None:
        if isinstance(self.interval, bool) or not 1 <= self.interval <= LONGEST:
            raise ConfigError(
                f"watcher {self.name!r} has the interval {self.interval!r}: set a number of steps, "
                f"1 to {LONGEST}"
            )
        if not self.name:
            raise ConfigError("a watcher needs a name, the first part of its metrics")


class WatcherProbe:
    """Values of a watcher.

    Args:
        watcher: the function and its parameters.

    Raises:
        ConfigError: the pattern is no regular expression.
    """

    def __init__(self, watcher: LogWatcher):
        self._watcher = watcher
        self._rules = Rules([(watcher.pattern, True)], kind=f"pattern of {watcher.name}")

    @property
    def every(self) -> int:
        """Number of steps between two calls."""
        return self._watcher.interval

    def look(self, weights: Weights) -> tuple[dict[str, Any], list[str]]:
        """Call the function for each parameter that matches.

        Raises:
            ConfigError: no parameter matches, or the function returned no mapping of numbers and
                histograms.
        """
        row: dict[str, Any] = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(weights.params)[0]:
            for name, array in split_layers(path, leaf):
                if self._rules.match(name) is None:
                    continue
                for key, value in self._call(name, array).items():
                    row[f"{self._watcher.name}/{name}/{key}"] = value
        self._rules.check_used()
        return row, []

    def _call(self, name: str, array: jax.Array) -> dict[str, object]:
        values = self._watcher.fn(array)
        try:
            return {str(key): _to_row_value(value) for key, value in values.items()}
        except (AttributeError, TypeError, ValueError):
            raise ConfigError(
                f"the function of watcher {self._watcher.name!r} returned {values!r:.200} for "
                f"{name}: it must return a mapping of numbers, or of (counts, edges) of histograms"
            ) from None


def _to_row_value(value: object) -> float | dict[str, list[float]]:
    """Return a number or a histogram as JSON values."""
    if not isinstance(value, tuple | list):
        return float(np.asarray(value))
    counts, edges = (np.asarray(part, np.float64) for part in value)
    if counts.ndim != 1 or edges.shape != (len(counts) + 1,):
        raise ValueError("a histogram has one more edge than counts")
    if not np.isfinite(edges).all():  # JSON has no such numbers
        return math.nan
    return {"counts": counts.tolist(), "edges": edges.tolist()}


@jax.jit
def describe_weights(array: jax.Array) -> dict[str, object]:
    """Return the mean, standard deviation, minimum, maximum and histogram of an array."""
    values = array.astype(jnp.float32)
    return {
        "mean": jnp.mean(values),
        "std": jnp.std(values),
        "min": jnp.min(values),
        "max": jnp.max(values),
        "histogram": jnp.histogram(values, _BINS),
    }


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
    watchers: Iterable[LogWatcher] = (),
    train: Dataset | None = None,
) -> tuple[Probe, ...]:
    """Return the probes of the arguments, and those of the watchers.

    Raises:
        ConfigError: a probe lacks a tokenizer, prompts or a benchmark, or a pattern is invalid.
    """
    probes: list[Probe] = [WatcherProbe(watcher) for watcher in watchers]
    steps = arguments.weight_distribution_log_steps
    if steps is not None:
        pattern = arguments.weight_distribution_pattern
        probes.append(WatcherProbe(LogWatcher(WEIGHTS, describe_weights, steps, pattern)))
    if arguments.generation_interval is not None:
        _check_writes(model, "generation_interval")
        probes.append(Previews(arguments, tokenizer, held_out, train))
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
