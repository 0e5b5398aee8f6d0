"""An engine that is lent the weights of a training, for completions and for benchmarks alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ed_esurge import EngineConfig, eSurge
from ed_esurge.core.commands import DropWeights
from ed_esurge.tokenizer import Tokenizer
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel
from ed_trainers.options.online import OnlineArguments
from ed_trainers.rollout import Weights
from ed_trainers.value_head import without_value_head

from ed_elarge.model import eLargeModel


class LentEngine:
    """An engine that has weights within `serving` alone; its pages are there all the time.

    Args:
        engine: serves a model of the learner's architecture; nobody else uses it while training.
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
        benchmarks: bool = False,
    ) -> LentEngine:
        """Make the engine of a run.

        Args:
            model: the learner; the engine keeps none of its arrays.
            tokenizer: says which tokens end a completion.
            config: options of the engine. What it leaves open is chosen for rollouts where there
                are any: shapes are compiled when they first come, and the engine is silent.
            length: of a row of rollouts, in tokens; None where there are none. The longest context
                is that of a row, where the configuration leaves it open.
            benchmarks: whether these run too: their prompts may be longer than a row.

        Raises:
            ConfigError: the context is too short for a row.
        """
        left: dict[str, Any] = {}
        if length is not None:
            left = {"compile_runner": False, "silent_mode": True}
            left |= {} if benchmarks else {"max_model_len": length}
        left = {k: v for k, v in left.items() if k not in config.model_fields_set}
        engine = eSurge(without_value_head(model), tokenizer, config.replace(**left))
        if length is not None and engine.max_model_len < length:
            raise ConfigError(
                f"prompts and completions take up to {length} tokens (max_prompt_length + "
                f"max_completion_length), and the engine has {engine.max_model_len}: lower one of "
                "them, or raise esurge.max_model_len or the model's max_position_embeddings"
            )
        with engine.together():
            engine.execute(DropWeights())
        return cls(engine)

    @contextmanager
    def serving(self, weights: Weights) -> Iterator[eSurge]:
        """Return the engine with weights, without a value head, until the block ends."""
        with (
            self.engine.together(),
            self.engine.weights(without_value_head(weights.model)),
        ):
            yield self.engine


def engine_of_run(elm: eLargeModel, model: LanguageModel) -> LentEngine:
    """The engine of the section `esurge` for a training, made when it is first asked for.

    Args:
        elm: rollouts and benchmarks of the section `trainer` share the engine.
        model: the learner with its present weights.

    Raises:
        ConfigError: see `LentEngine.of`.
    """
    arguments = elm.build_training_arguments()
    return elm.once(
        "lent_engine",
        lambda: LentEngine.of(
            model,
            elm.part("tokenizer"),
            elm.config.esurge,
            length=arguments.row_length if isinstance(arguments, OnlineArguments) else None,
            benchmarks=bool(arguments.benchmarks and arguments.benchmark_interval),
        ),
    )
