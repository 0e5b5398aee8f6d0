"""An engine that borrows the weights of a training run, for completions and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ed_esurge import EngineConfig, eSurge
from ed_esurge.config import NOTHING, Records
from ed_esurge.core.commands import DropWeights
from ed_esurge.tokenizer import Tokenizer
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.groups import GRPOArguments
from ed_trainers.options.online import OnlineArguments
from ed_trainers.roles.value_head import without_value_head
from ed_trainers.rollout import Weights

from ed_elarge.config.action_options import EvalOptions
from ed_elarge.config.sections import add_rollout_defaults
from ed_elarge.evaluation import harness
from ed_elarge.model import eLargeModel


class LentEngine:
    """An engine that has weights only inside `serving`. Its cache pages stay allocated.

    Args:
        engine: An engine for the trained model's architecture, for exclusive use by the training.
    """

    def __init__(self, engine: eSurge):
        self.engine = engine

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        *,
        length: int | None = None,
        completions: int | None = None,
        benchmarks: bool = False,
        records: Records = NOTHING,
    ) -> LentEngine:
        """Create the engine of a run.

        Args:
            model: The trained model; the engine keeps none of its arrays.
            tokenizer: The tokenizer, which defines the end tokens.
            config: Options of the engine; for rollouts those of `add_rollout_defaults`.
            length: Tokens of a row of rollouts; None without rollouts.
            completions: See `add_rollout_defaults`.
            benchmarks: See `add_rollout_defaults`.
            records: What the outputs contain in addition.

        Raises:
            ConfigError: The context is too short for a row.
        """
        if length is not None:
            config = add_rollout_defaults(
                config, length=length, completions=completions, benchmarks=benchmarks
            )
        engine = eSurge(without_value_head(model), tokenizer, config, records=records)
        if length is not None and engine.max_model_len < length:
            raise ConfigError(
                f"prompts and completions need up to {length} tokens (max_prompt_length + "
                f"max_completion_length), and the context of the engine has "
                f"{engine.max_model_len}: lower one of them, or raise esurge.max_model_len or the "
                "model's max_position_embeddings"
            )
        with engine.together():
            engine.execute(DropWeights())
        return cls(engine)

    @contextmanager
    def serving(self, weights: Weights) -> Iterator[eSurge]:
        """Lend the weights, without a value head, to the engine for the duration of the block."""
        with (
            self.engine.together(),
            self.engine.weights(without_value_head(weights.model)),
        ):
            yield self.engine


def get_records(arguments: TrainingArguments) -> Records:
    """Return what training repeats of the sampling."""
    if not isinstance(arguments, GRPOArguments):
        return NOTHING
    return Records(arguments.routing_replay, arguments.sampling_mask_replay)


def engine_of_run(elm: eLargeModel, model: LanguageModel) -> LentEngine:
    """Return the engine that rollouts and benchmarks of a training run share.

    Args:
        elm: The run; it creates the engine at the first call.
        model: The trained model with its current weights.

    Raises:
        ConfigError: See `LentEngine.of`.
    """
    arguments = elm.build_training_arguments()
    sampled = arguments if isinstance(arguments, OnlineArguments) else None
    return elm.once(
        "lent_engine",
        lambda: LentEngine.of(
            model,
            elm.part("tokenizer"),
            elm.config.engine_of_training(),
            length=sampled.row_length if sampled else None,
            completions=sampled.completions_per_generation if sampled else None,
            benchmarks=bool(arguments.benchmarks and arguments.benchmark_interval),
            records=get_records(arguments),
        ),
    )


class EngineBenchmark:
    """Runs the tasks of `trainer.benchmarks`; see `ed_trainers.probes.Benchmark`.

    The results are written to `benchmarks/<step>.json` in the run's directory.

    Args:
        elm: The run: its tasks, the section `eval` and the section `esurge`.

    Raises:
        ConfigError: lm-eval is not installed, a task is unknown, or its data is not available.
    """

    def __init__(self, elm: eLargeModel):
        self._elm = elm
        arguments = elm.build_training_arguments()
        options = {**arguments.benchmark_options, "tasks": arguments.benchmarks}
        self._tasks = elm.prepare_eval(EvalOptions.model_validate(options))

    def __call__(self, tasks: Sequence[str], weights: Weights) -> dict[str, dict[str, float]]:
        """Run the tasks with the current weights, and return task -> metric -> value."""
        results = self._elm.config.directory / "benchmarks" / f"{weights.version}.json"
        with engine_of_run(self._elm, weights.model).serving(weights) as engine:
            metrics = harness.list_figures(self._tasks.run(engine, results))
        # The files contain the standard errors; curves of a run do not.
        return {
            task: {n: value for n, value in values.items() if not n.endswith(harness.ERROR)}
            for task, values in metrics.items()
        }
