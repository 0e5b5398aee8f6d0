"""`Phase`: the generations of a method that samples: complete prompts, score, make rows.

A phase starts every `updates_per_generation` steps. `Phase.generate` completes prompts with the
present weights, and the method's function `rows` turns the completions into the arrays of the loss:
scores, advantages, and log-probabilities of models before the steps change them. Then the steps are
trained on these rows like on any batch. `RolloutFeed` yields the rows step by step.

Legend: n rows of a generation, s positions.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import CausalLMOutput
from ed_infra.sharding.axes import LogicalAxes
from ed_models.protocol import LanguageModel
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ed_trainers.batches import BatchLoader, Dataset, Feed, HostBatch
from ed_trainers.contract import A, Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.policy import Policy, Truncation, token_policy
from ed_trainers.online.completions import (
    Completions,
    PromptRows,
    SampledPrompts,
    build_completions,
    get_images,
    get_prompt_rows,
)
from ed_trainers.online.episodes import build_episode_factory, sample_episodes
from ed_trainers.online.model_rollout import ModelRollout
from ed_trainers.options.online import OnlineArguments
from ed_trainers.placement import TOKENS, pad_rows
from ed_trainers.roles.extension import Extension, PolicyWeights
from ed_trainers.rollout import AheadRollout, Rollout, SampleRequest, Weights
from ed_trainers.state import EasyDeLState
from ed_trainers.stored.arrays import read_npz

R = TypeVar("R", bound="OnlineRun")
#: Arrays of a generation, each [n, ...], and figures for the log.
PhaseRows = tuple[dict[str, np.ndarray], dict[str, float]]
RowsOf = Callable[[R, Completions, Weights, int], PhaseRows]
Complete = Callable[[R, HostBatch, Weights, int], Completions]
Question = Callable[..., dict[str, jax.Array]]
#: Returns the prompts of a round of a generation.
ReadPrompts = Callable[[int], HostBatch]

#: Number of the generations of held-out prompts; the seeds of their samples depend on it.
HELD_OUT = 2**31
_ROLLOUT, _LEDGER, _METHOD = "rollout", "ledger", "method"


@dataclass(frozen=True, kw_only=True)
class OnlineMethod(Method[R]):
    """A method that samples; see `online_method`."""

    rows: RowsOf[R]
    complete: Complete[R] | None
    axes: Mapping[str, LogicalAxes]


def online_method(
    *,
    run: type[R],
    rows: RowsOf[R],
    loss: Callable[[R, Models, Batch, jax.Array | None], Loss],
    token_arrays: tuple[str, ...],
    progress_columns: tuple[str, ...],
    axes: LogicalAxes = TOKENS,
    complete: Complete[R] | None = None,
    extension: Extension | None = None,
) -> OnlineMethod[R]:
    """Return the record of a method that samples.

    Args:
        run: the class of the run, whose fields are the objects of the method.
        rows: returns the arrays of the loss, each [n, ...], and figures for the log, from
            completions, the weights that sampled them and the number of the generation. Completions
            are ordered by prompt, `rows_per_prompt * completions_per_row` for each prompt.
        loss: see `Method.loss`.
        token_arrays: names of the arrays of `rows` with one value per token, besides `targets` and
            `weights`.
        progress_columns: see `Method.progress_columns`.
        axes: logical axes of the arrays with one value per token.
        complete: returns the completions of a batch of prompts; default: `Phase.sample`.
        extension: see `Method.extension`.
    """
    return OnlineMethod(
        run=run,
        prepare=lambda run, batch: run.phase.prepare(batch),
        loss=loss,
        held_out=lambda run, batches, state: run.phase.held_out(batches, state),
        feed=lambda run, dataset: RolloutFeed(dataset, run.phase),
        whole_batches=True,  # all processes complete and score the same prompts together
        per_token=False,
        progress_columns=progress_columns,
        extension=extension,
        rows=rows,
        complete=complete,
        axes=dict.fromkeys(
            ("input_ids", "segment_ids", "position_ids", "targets", "weights", *token_arrays), axes
        ),
    )


class OnlineRun(MethodRun[A]):
    """A run of a method that samples. A subclass creates its other objects first."""

    phase: Phase

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        self.phase = Phase(self)

    def select_prompts(self, read: ReadPrompts, weights: Weights, number: int) -> SampledPrompts:
        """Return the completions of the prompts of a generation that are trained.

        A method that selects prompts by their completions overrides this function.

        Args:
            read: returns the prompts of a round, from 0.
            weights: the weights to sample with.
            number: number of the generation.
        """
        completions = self.phase.complete(read(0), weights, number)
        return SampledPrompts(completions, {}, sum(map(len, completions.completion_ids)))


class Generation(NamedTuple):
    """The completions of one generation, ready for training.

    Attributes:
        number: number of the generation, from 0.
        rows: arrays of the loss, each [n, ...].
        figures: figures for the log.
        samples: some completions with their rewards, see `Completions.to_samples`.
    """

    number: int
    rows: dict[str, np.ndarray]
    figures: dict[str, float]
    samples: Sequence[Mapping[str, object]] = ()


class Phase:
    """Completes prompts, and evaluates models on the completions.

    Args:
        run: the run of a method of `online_method`.
    """

    def __init__(self, run: OnlineRun):
        method = run.record
        assert isinstance(method, OnlineMethod), "the record of `online_method`"
        assert isinstance(run.arguments, OnlineArguments), "the options of a method that samples"
        self.run, self.options, self.chunk = run, run.arguments, run.arguments.lmhead_chunksize
        self._rows, self._complete, self._axes = method.rows, method.complete, method.axes
        self._programs: dict[Question, Callable[..., dict[str, jax.Array]]] = {}
        self._figures: dict[str, float] = {}  # of the rollout
        self._create_episode = None
        if self.options.environment is not None or run.tools is not None:
            self._create_episode = build_episode_factory(
                self.options.environment,
                run.reward_folders,
                lambda: run.tokenizer,
                self.options.max_turns,
                run.tools,
            )
        if method.complete is not None and isinstance(run.rollout, AheadRollout):
            raise ConfigError(
                f"{run.name} decides for each generation how prompts are completed, so it cannot "
                "issue prompts ahead: omit the section asynchronous"
            )
        if self.options.rounds_per_generation > 1 and isinstance(run.rollout, AheadRollout):
            raise ConfigError(
                "filter_groups selects prompts by the rewards of their completions, and "
                "asynchronous training issues all prompts before: omit filter_groups, or the "
                "section asynchronous"
            )

    def generate(
        self, batch: HostBatch, weights: Weights, number: int, more: ReadPrompts | None = None
    ) -> Generation:
        """Complete a loader's batch of prompts, and make rows of the completions.

        Args:
            batch: prompts.
            weights: the weights to sample with.
            number: number of the generation; the seeds of the samples depend on it.
            more: returns the prompts of a later round, from 1, for a method that selects prompts.
        """
        began = time.monotonic()
        if more is None:
            completions, selection_figures = self.complete(batch, weights, number), {}
            tokens = sum(map(len, completions.completion_ids))
        else:
            completions, selection_figures, tokens = self.run.select_prompts(
                lambda later: more(later) if later else batch, weights, number
            )
        seconds = time.monotonic() - began
        rows, figures = self.get_rows(completions, weights, number)
        figures = {**figures, **selection_figures}
        rollout_metrics = {
            "rollout_tokens": float(tokens),
            "rollout_seconds": seconds,
            "rollout_tokens_per_second": tokens / max(seconds, 1e-9),
            **self._figures,
        }
        count = 0 if number == HELD_OUT else self.options.num_completions_to_log
        samples = completions.to_samples(number, count)
        log_figures = {**completions.figures(), **figures, **rollout_metrics}
        return Generation(number, rows, log_figures, samples)

    def get_rows(self, completions: Completions, weights: Weights, number: int) -> PhaseRows:
        """Return the arrays of the loss, and figures for the log; see `online_method`."""
        return self._rows(self.run, completions, weights, number)

    def complete(self, batch: HostBatch, weights: Weights, number: int) -> Completions:
        """Return the completions of a batch of prompts, as the method obtains them."""
        if self._complete is not None:
            return self._complete(self.run, batch, weights, number)
        return self.sample(batch, weights, number=number)

    def sample(
        self,
        batch: HostBatch,
        weights: Weights,
        *,
        number: int,
        copies: int | None = None,
        rollout: Rollout | None = None,
        later: int = 0,
    ) -> Completions:
        """Complete prompts by a rollout, each prompt several times.

        Args:
            batch: prompts.
            weights: the weights to sample with.
            number: number of the generation. The seeds depend on the seed of the run, on this
                number and on the position of the completion.
            copies: completions of each prompt; None is the number that `rows` reads.
            rollout: replaces the rollout of the trainer.
            later: number of the round in its generation, from 0.

        Raises:
            ConfigError: the batch holds no prompts, or there is no rollout.
        """
        run = self.run
        rollout = rollout or run.rollout
        if rollout is None:
            raise ConfigError(
                f"{run.name} needs a rollout that completes prompts: pass rollout=, such as "
                "ed_elarge.engine.rollout.EngineRollout(engine)"
            )
        request = self.request(batch, number, copies, later)
        assert isinstance(batch, PromptRows), "checked by request"
        if isinstance(rollout, AheadRollout) and number != HELD_OUT:
            sampled, self._figures = rollout.take(number, weights.version)
        else:
            images = get_images(batch)
            repeated = {name: np.repeat(x, request.copies, axis=0) for name, x in images.items()}
            lent = self.policy(weights)
            if self._create_episode is None:
                ids = [prompt for prompt in request.prompts for _ in range(request.copies)]
                more = {"images": repeated} if repeated else {}
                sampled = rollout.generate(ids, request.params, lent, seeds=request.seeds, **more)
            else:
                sampled = sample_episodes(rollout, request, lent, self._create_episode, repeated)
        if len(sampled) != len(request.seeds):
            raise ConfigError(
                f"the rollout returned {len(sampled)} completions of {len(request.seeds)} prompts: "
                "it must return one for each prompt, in their order"
            )
        prompts = [list(prompt) for prompt in request.prompts]
        read = None if run.tools is None else run.tools.read
        return build_completions(batch, prompts, sampled, request.copies, run.tokenizer, read)

    def policy(self, weights: Weights) -> Weights:
        """Return the weights of the model alone, without those of an extension."""
        extension = self.run.record.extension
        return weights if extension is None else PolicyWeights(weights, extension)

    def request(
        self, batch: HostBatch, number: int, copies: int | None = None, later: int = 0
    ) -> SampleRequest:
        """Return the prompts and seeds of a generation.

        Args:
            batch: prompts.
            number: number of the generation.
            copies: see `sample`.
            later: number of the round in its generation, on which the seeds depend.

        Raises:
            ConfigError: the batch holds no prompts, a prompt is empty, or truncation would remove
                tokens of images.
        """
        run, options = self.run, self.options
        if not isinstance(batch, PromptRows):
            raise ConfigError(
                f"{run.name} requires batches of prompts, not {type(batch).__name__}: pass a "
                "loader of ed_data.build_prompts"
            )
        if copies is None:
            copies = options.completions_per_generation // options.loader_batch_size
        prompt_ids = [list(ids)[-options.max_prompt_length :] for ids in batch.input_ids]
        for row, prompt in enumerate(prompt_ids):
            if not prompt:
                raise ConfigError(
                    f"prompt {row} of the batch is empty: it needs at least one token"
                )
        images = get_images(batch)
        cut = next(
            (n for n, ids in enumerate(batch.input_ids) if len(ids) > len(prompt_ids[n])), None
        )
        if images and cut is not None:
            raise ConfigError(
                f"prompt {cut} of the batch has {len(batch.input_ids[cut])} tokens, and truncation "
                f"at max_prompt_length={options.max_prompt_length} would remove tokens of images: "
                "raise max_prompt_length, or set mixture.tokenization.max_length to drop long "
                "prompts"
            )
        params = {
            "max_tokens": options.max_completion_length,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "min_p": options.min_p,
        }
        numbers = (number, later) if later else (number,)
        draws = np.random.SeedSequence((run.arguments.seed, *numbers))
        seeds = draws.generate_state(len(prompt_ids) * copies, np.uint32).tolist()
        return SampleRequest(
            number, prompt_ids, copies, params, seeds, get_prompt_rows(batch, prompt_ids)
        )

    def build_rollout(self, make: Callable[[Models], object]) -> Rollout:
        """Return a rollout by `generate` of another model than the learner.

        Args:
            make: returns the model from all models, the learner with its present weights.
        """
        frozen = self.run.frozen
        return ModelRollout(
            lambda learner: make(Models(learner, frozen.merge(frozen.leaves))), rows=self.run.rows
        )

    # --- asking models ---

    def ask(
        self,
        question: Question,
        rows: Mapping[str, np.ndarray],
        weights: Weights,
        axes: Mapping[str, LogicalAxes] | None = None,
    ) -> dict[str, np.ndarray]:
        """Evaluate the models on rows, without gradient, one microbatch after the other.

        Args:
            question: a function of `(run, models, batch)` that returns arrays [n, ...] by name;
                traced, and compiled once for each shape. Pass a function of a module: programs are
                cached by function.
            rows: arrays [n, ...].
            weights: the learner's weights.
            axes: logical axes of the arrays by name; default: those of the rows of a generation.
        """
        run = self._programs.get(question)
        if run is None:
            run = self._programs[question] = self._program(question, weights.graphdef)
        size = self.run.rows
        inputs = self.run.with_features(Inputs(rows, self._axes if axes is None else axes))
        count = len(next(iter(rows.values())))
        state, leaves = weights.state, self.run.frozen.leaves
        pieces = []
        for start in range(0, count, size):
            stop = start + size
            piece = Inputs({n: array[start:stop] for n, array in inputs.items()}, inputs.declared)
            placed = self.run.placement.place(pad_rows(piece, size), stacked=False)
            pieces.append(jax.device_get(run(state, leaves, placed)))
        return {
            name: np.concatenate([piece[name] for piece in pieces])[:count] for name in pieces[0]
        }

    def _program(
        self, question: Question, graphdef: nnx.GraphDef
    ) -> Callable[..., dict[str, jax.Array]]:
        replicated_sharding = NamedSharding(self.run.placement.config.mesh, PartitionSpec())
        merge = self.run.frozen.merge

        def program(state: nnx.State, leaves: tuple[jax.Array, ...], batch: Batch):
            learner = cast(LanguageModel, nnx.merge(graphdef, state))
            return question(self.run, Models(learner, merge(leaves)), batch)

        return jax.jit(program, out_shardings=replicated_sharding)

    # --- for the loop and the evaluation ---

    def prepare(self, batch: HostBatch) -> Prepared:
        """Return rows of a generation as inputs, or complete prompts with the present weights."""
        if isinstance(batch, Mapping):
            return Inputs(batch, self._axes)
        return Inputs(self.generate(batch, self.run.weights(), HELD_OUT).rows, self._axes)

    def held_out(self, batches: Iterable[HostBatch], state: EasyDeLState) -> Iterator[Prepared]:
        """Yield rows of held-out prompts, completed with the evaluated weights."""
        for batch in batches:
            weights = Weights(
                state.graphdef, state.graphstate, state.graphother, version=int(state.step)
            )
            try:
                rows = self.generate(batch, weights, HELD_OUT).rows
            finally:
                weights.end()
            yield Inputs(rows, self._axes)


def compute_policy(
    run: OnlineRun,
    model: LanguageModel,
    rows: Batch,
    key: jax.Array | None = None,
    *,
    truncated: bool = False,
    entropy_gradient: bool = False,
) -> tuple[CausalLMOutput, Policy]:
    """Return the figures of the tokens of rows [n, s] at the temperature of the sampling.

    Args:
        run: the run of the method.
        model: the learner or a frozen model.
        rows: `input_ids`, `targets` [n, s] and the other inputs of the model.
        key: dropout key.
        truncated: also compute `sampled_logps`, if the sampling has filters.
        entropy_gradient: whether the loss reads the entropy.
    """
    phase = run.phase
    options = phase.options
    truncation = Truncation(options.top_k, options.top_p, options.min_p)
    return token_policy(
        model,
        rows,
        key,
        placement=run.placement,
        temperature=options.temperature,
        chunk=phase.chunk,
        truncation=truncation if truncated and truncation.active else None,
        entropy_gradient=entropy_gradient,
    )


class RolloutFeed(Feed):
    """Rows of generations, by step.

    The first step of a generation completes and scores its prompts, with the weights before that
    step. The rows are divided into `steps_per_generation` optimizer steps, `num_iterations` times.
    A checkpoint within a generation contains its rows, because the weights that sampled the
    completions no longer exist. A checkpoint between two generations does not.

    Args:
        dataset: prompts of each generation, as for `Feed`.
        phase: completes and scores the prompts.
    """

    def __init__(self, dataset: Dataset, phase: Phase):
        super().__init__(dataset)
        self._phase, self._options, self._run = phase, phase.options, phase.run
        self._now: Generation | None = None
        self._continues = False  # whether the next step uses the present generation
        rollout = self._run.rollout
        self._ahead = rollout if isinstance(rollout, AheadRollout) else None
        self._rounds = self._options.rounds_per_generation
        if not isinstance(dataset, BatchLoader) and (self._ahead is not None or self._rounds > 1):
            kind = "filter_groups" if self._ahead is None else "asynchronous training"
            raise ConfigError(
                f"prompts are read in another order than the steps: {kind} needs a loader with "
                "batch_at(step), such as those of ed_data.build_prompts"
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of updates in one pass over the prompts, if the dataset has a length."""
        return self._count_updates(super().steps_per_epoch)

    def count_steps(self, epochs: int) -> int | None:
        """Return the number of updates of several passes, if the dataset has a length."""
        return self._count_updates(super().count_steps(epochs))

    def _count_updates(self, batches: int | None) -> int | None:
        """Return the number of updates on a number of batches of prompts; unused ones count."""
        if batches is None:
            return None
        return max(batches // self._rounds, 1) * self._options.updates_per_generation

    def batch(self, step: int) -> HostBatch:
        """Return the rows of update `step`; the first update of a generation samples.

        Raises:
            ConfigError: the number of rows of a generation differs from that of its steps.
        """
        options, size = self._options, self._run.arguments.sequences_per_step
        number, within = divmod(step, options.updates_per_generation)
        if self._now is None or self._now.number != number:
            self._now = None  # free the memory before the next generation
            weights = self._run.weights()
            if self._ahead is not None:
                self._issue(self._ahead, number, weights)
            first, read = number * self._rounds, super().batch
            more = (lambda later: read(first + later)) if self._rounds > 1 else None
            generation = self._phase.generate(read(first), weights, number, more)
            self._now = self.shuffle_rows(generation)
        self._continues = within + 1 < options.updates_per_generation
        self.figures, self.samples = self._now.figures, self._now.samples
        begin = within % options.steps_per_generation * size
        return {name: array[begin : begin + size] for name, array in self._now.rows.items()}

    def _issue(self, rollout: AheadRollout, number: int, weights: Weights) -> None:
        """Publish the weights, and issue all generations that may be sampled now."""
        rollout.publish(self._phase.policy(weights))
        total = self._run.arguments.max_training_steps
        if total is None:
            total = self.count_steps(self._run.arguments.num_train_epochs) or 0
        end = -(-total // self._options.updates_per_generation)
        for later in range(number, min(number + rollout.max_staleness + 1, end)):
            rollout.issue(self._phase.request(super().batch(later), later))

    def shuffle_rows(self, generation: Generation) -> Generation:
        """Return a generation with shuffled rows, if it has the right number of rows."""
        options, arguments = self._options, self._run.arguments
        expected_rows = arguments.sequences_per_step * options.steps_per_generation
        rows = len(next(iter(generation.rows.values())))
        if rows != expected_rows:
            raise ConfigError(
                f"a generation has {rows} rows, but {arguments.sequences_per_step} completions of "
                f"a step times steps_per_generation {options.steps_per_generation} is "
                f"{expected_rows}: "
                f"train_dataset must have {arguments.loader_batch_size} prompts per batch"
            )
        if options.steps_per_generation == 1:
            return generation
        # The rows of a group are consecutive: each step should get rows of many groups.
        order = np.random.default_rng((arguments.seed, generation.number)).permutation(rows)
        return generation._replace(
            rows={name: array[order] for name, array in generation.rows.items()}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the prompts and, within a generation, its rows."""
        state = super().state_dict()
        if values := self._run.state_dict():
            state[_METHOD] = values
        if self._ahead is not None:
            state[_LEDGER] = self._ahead.state_dict()
        if self._continues and self._now is not None:
            file = io.BytesIO()
            np.savez_compressed(file, **self._now.rows)  # type: ignore[arg-type]
            state[_ROLLOUT] = {
                "number": self._now.number,
                "rows": base64.b64encode(file.getvalue()).decode("ascii"),
                "figures": self._now.figures,
                "samples": self._now.samples,
            }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a saved position; see `Feed.load_state_dict`."""
        saved, self._now = state.get(_ROLLOUT), None
        self._run.load_state_dict(state.get(_METHOD, {}))
        if self._ahead is not None:
            self._ahead.load_state_dict(state.get(_LEDGER, {}))
        if saved is not None:
            rows = io.BytesIO(base64.b64decode(saved["rows"]))
            arrays = read_npz(rows, "the generation of the checkpoint")
            samples = saved.get("samples", ())
            self._now = Generation(int(saved["number"]), arrays, dict(saved["figures"]), samples)
        super().load_state_dict(_select_prompt_state(state))

    def difference(self, state: Mapping[str, Any], step: int) -> str | None:
        """See `Feed.difference`."""
        return super().difference(_select_prompt_state(state), step)


def _select_prompt_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in state.items() if name not in (_ROLLOUT, _LEDGER, _METHOD)}
