"""`OnlineTrainer`: what the methods share that learn from completions of their own.

Every `updates_per_generation` steps comes a phase: prompts are completed by a `Rollout` with the
present weights, and the method makes rows of the completions: their scores, and whatever a model
says of them before the steps move it. Then the steps learn from the rows as from any batch.

Legend: n rows of a generation, s positions.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, cast

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import CausalLMOutput
from ed_models.protocol import LanguageModel
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ed_trainers.batches import Dataset, Feed, HostBatch
from ed_trainers.callbacks import Callback
from ed_trainers.contract import Batch, Models
from ed_trainers.losses.policy import Policy, Truncation, token_policy
from ed_trainers.online.completions import Completions, Content, PromptBatch
from ed_trainers.online.feed import Generation, RolloutFeed
from ed_trainers.online.model_rollout import ModelRollout
from ed_trainers.options.online import OnlineArguments
from ed_trainers.placement import pad_rows
from ed_trainers.probes import Benchmark
from ed_trainers.rollout import Rollout, Sampled, Weights
from ed_trainers.state import EasyDeLState
from ed_trainers.stored.processor import Saveable
from ed_trainers.trainer import Trainer

#: What a model says of rows: arrays [n, ...] by name.
Scored = dict[str, np.ndarray]
Score = Callable[[Models, Batch], dict[str, jax.Array]]

#: Number of the generations of held-out prompts; it draws their seeds.
HELD_OUT = 2**31


class OnlineTrainer(Trainer):
    """Trains a model on completions that it gives itself.

    Loaders give prompts (`PromptBatch`). A method adds `rows_of` to `Trainer`'s loss; where it
    completes prompts in another way, it overrides `generate`.

    Args:
        rollout: completes the prompts.

    See `Trainer` for the others; `processing_class` turns completions into text.

    Raises:
        ConfigError: there is no rollout.
    """

    arguments: OnlineArguments
    per_token: ClassVar[bool] = False

    def __init__(
        self,
        arguments: OnlineArguments,
        model: LanguageModel | EasyDeLState,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        processing_class: Saveable | None = None,
        *,
        rollout: Rollout | None = None,
        callbacks: Iterable[Callback] = (),
        frozen: Mapping[str, LanguageModel] | None = None,
        benchmark: Benchmark | None = None,
    ):
        self.rollout = rollout
        self._programs: dict[Score, Callable[..., dict[str, jax.Array]]] = {}
        super().__init__(
            arguments,
            model,
            train_dataset,
            eval_dataset,
            processing_class,
            callbacks=callbacks,
            frozen=frozen,
            benchmark=benchmark,
        )

    # --- what a method says ---

    @abstractmethod
    def rows_of(
        self, completions: Completions, weights: Weights
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Make the rows that the loss reads, each [n, ...], and figures for the log.

        Args:
            completions: `rows_per_prompt * completions_per_row` of each prompt, side by side.
            weights: that sampled them; `compute` asks models about rows.
        """

    def generate(self, batch: HostBatch, weights: Weights, number: int) -> Generation:
        """Complete a loader's batch of prompts, and make rows of the completions.

        Args:
            batch: prompts.
            weights: to sample with.
            number: of the generation; draws the seeds.
        """
        began = time.monotonic()
        completions = self.complete(batch, weights, number=number)
        seconds = time.monotonic() - began
        rows, figures = self.rows_of(completions, weights)
        tokens = float(sum(map(len, completions.completion_ids)))
        of_rollout = {
            "rollout_tokens": tokens,
            "rollout_seconds": seconds,
            "rollout_tokens_per_second": tokens / max(seconds, 1e-9),
        }
        return Generation(number, rows, {**completions.figures(), **figures, **of_rollout})

    # --- sampling ---

    def complete(
        self,
        batch: HostBatch,
        weights: Weights,
        *,
        number: int,
        copies: int | None = None,
        rollout: Rollout | None = None,
        **settings: Any,
    ) -> Completions:
        """Complete prompts, each several times.

        Args:
            batch: prompts.
            weights: to sample with.
            number: of the generation. Seeds follow from the run's, from this and from the place of
                the completion.
            copies: of each prompt; None is as many as `rows_of` wants.
            rollout: in place of the one that the trainer was made with.
            settings: of the sampling, over those of the arguments.

        Raises:
            ConfigError: the batch holds no prompts, or there is no rollout.
        """
        if not isinstance(batch, PromptBatch):
            raise ConfigError(
                f"{type(self).__name__} takes batches of prompts, not "
                f"{type(batch).__name__}: give a loader of ed_data.build_prompts"
            )
        rollout = rollout or self.rollout
        if rollout is None:
            raise ConfigError(
                f"{type(self).__name__} has nothing that completes prompts: give rollout=, such as "
                "ed_elarge.engine.rollout.EngineRollout(engine)"
            )
        arguments = self.arguments
        if copies is None:
            copies = arguments.rows_per_prompt * arguments.completions_per_row
        kept = [list(ids)[-arguments.max_prompt_length :] for ids in batch.input_ids]
        ids = [prompt for prompt in kept for _ in range(copies)]
        for row, prompt in enumerate(kept):
            if not prompt:
                raise ConfigError(f"prompt {row} of the batch is empty: nothing can follow it")
        params = {
            "max_tokens": arguments.max_completion_length,
            "temperature": arguments.temperature,
            "top_p": arguments.top_p,
            "top_k": arguments.top_k,
            "min_p": arguments.min_p,
            **settings,
        }
        seeds = np.random.SeedSequence((arguments.seed, number)).generate_state(len(ids), np.uint32)
        sampled = rollout.generate(ids, params, weights, seeds=seeds.tolist())
        if len(sampled) != len(ids):
            raise ConfigError(
                f"the rollout gave {len(sampled)} completions of {len(ids)} prompts: it must give "
                "one each, in their order"
            )
        written: list[Content] = list(getattr(batch, "prompts", kept))
        fields: Mapping[str, list[Any]] = getattr(batch, "fields", {})
        completions = self._as_written(written, sampled, copies)
        return Completions(
            prompts=[prompt for prompt in written for _ in range(copies)],
            prompt_ids=ids,
            completion_ids=[list(one.token_ids) for one in sampled],
            logprobs=[list(one.logprobs) for one in sampled],
            completions=completions,
            ended=[one.ended for one in sampled],
            fields={
                name: [value for value in values for _ in range(copies)]
                for name, values in fields.items()
            },
            documents=self._documents(batch, completions, copies),
        )

    def rollout_of(self, make: Callable[[Models], object]) -> Rollout:
        """Return what completes prompts by `generate` of another model than the learner.

        Args:
            make: returns that model; it gets all models, the learner with its present weights.
        """
        arguments, frozen = self.arguments, self.method.frozen
        return ModelRollout(
            lambda learner: make(Models(learner, frozen.merge(frozen.leaves))),
            rows=arguments.total_batch_size // arguments.gradient_accumulation_steps,
        )

    def _as_written(
        self, prompts: list[Content], sampled: list[Sampled], copies: int
    ) -> list[Content]:
        """Completions in the kind of their prompts."""
        decode = getattr(self.processing_class, "decode", None)
        out: list[Content] = []
        for i, one in enumerate(sampled):
            prompt, ids = prompts[i // copies], list(one.token_ids)
            if decode is None or (isinstance(prompt, list) and not _is_chat(prompt)):
                out.append(ids)
                continue
            text = str(decode(ids, skip_special_tokens=True))
            out.append([{"role": "assistant", "content": text}] if _is_chat(prompt) else text)
        return out

    def _documents(
        self, batch: PromptBatch, completions: list[Content], copies: int
    ) -> Callable[[], list[list[int]]] | None:
        """Return what encodes each prompt with its completions, if the batch can."""
        encode = getattr(batch, "with_answers", None)
        if encode is None or not hasattr(self.processing_class, "decode"):
            return None
        groups = [completions[at : at + copies] for at in range(0, len(completions), copies)]
        return lambda: [ids for number, group in enumerate(groups) for ids in encode(number, group)]

    # --- asking models ---

    def compute(self, score: Score, rows: Mapping[str, np.ndarray], weights: Weights) -> Scored:
        """Ask the models about rows, without gradient, as many at once as a microbatch has.

        Args:
            score: a function of `(Models, Batch)` that returns arrays [n, ...] by name; traced, and
                compiled once for each shape: pass the same function again.
            rows: arrays [n, ...].
            weights: the learner's.
        """
        run = self._programs.get(score)
        if run is None:
            run = self._programs[score] = self._program(score, weights.graphdef)
        arguments = self.arguments
        size = arguments.total_batch_size // arguments.gradient_accumulation_steps
        count = len(next(iter(rows.values())))
        state, leaves = weights.state, self.method.frozen.leaves
        pieces = []
        for start in range(0, count, size):
            piece = {name: array[start : start + size] for name, array in rows.items()}
            placed = self.placement.place(pad_rows(piece, size), stacked=False)
            pieces.append(jax.device_get(run(state, leaves, placed)))
        return {
            name: np.concatenate([piece[name] for piece in pieces])[:count] for name in pieces[0]
        }

    def policy(
        self,
        model: LanguageModel,
        rows: Batch,
        key: jax.Array | None = None,
        *,
        truncated: bool = False,
    ) -> tuple[CausalLMOutput, Policy]:
        """Return the figures of the tokens of rows [n, s], at the temperature of the sampling.

        Args:
            truncated: also compute `sampled_logps`, where the sampling has filters.
        """
        arguments = self.arguments
        truncation = Truncation(arguments.top_k, arguments.top_p, arguments.min_p)
        return token_policy(
            model,
            rows,
            key,
            placement=self.placement,
            temperature=arguments.temperature,
            chunk=arguments.lmhead_chunksize,
            truncation=truncation if truncated and truncation.active else None,
        )

    def _program(self, score: Score, graphdef: nnx.GraphDef) -> Callable[..., dict[str, jax.Array]]:
        whole = NamedSharding(self.placement.config.mesh, PartitionSpec())
        merge = self.method.frozen.merge

        def run(state: nnx.State, leaves: tuple[jax.Array, ...], batch: Batch):
            learner = cast(LanguageModel, nnx.merge(graphdef, state))
            return score(Models(learner, merge(leaves)), batch)

        return jax.jit(run, out_shardings=whole)

    # --- for the loop and the evaluation ---

    @property
    def whole_batches(self) -> bool:
        """All processes complete and score the same prompts together."""
        return True

    def feed_of(self, dataset: Dataset) -> Feed:
        """See `RolloutFeed`."""
        return RolloutFeed(
            dataset,
            self.arguments,
            lambda batch, number: self.generate(batch, self.weights(), number),
        )

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Pass on rows of a generation; complete prompts, with the present weights."""
        if isinstance(batch, Mapping):
            return dict(batch)
        return self.generate(batch, self.weights(), HELD_OUT).rows

    def held_out(
        self, batches: Iterable[HostBatch], state: EasyDeLState
    ) -> Iterator[dict[str, np.ndarray]]:
        """Complete held-out prompts with the weights that are evaluated."""
        for batch in batches:
            weights = Weights(
                state.graphdef, state.graphstate, state.graphother, version=int(state.step)
            )
            try:
                rows = self.generate(batch, weights, HELD_OUT).rows
            finally:
                weights.end()
            yield rows


def _is_chat(content: Content) -> bool:
    return isinstance(content, list) and bool(content) and isinstance(content[0], dict)
