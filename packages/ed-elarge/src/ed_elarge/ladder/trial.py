"""One training of a rung: its loss, its seconds, and the size of a model without arrays."""

from __future__ import annotations

import io
import math
import statistics
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_infra.errors import ConfigError

from ed_elarge.config.run_config import RunConfig
from ed_elarge.ladder.rungs import DecoderConfig, Rung

if TYPE_CHECKING:
    from ed_trainers.options.base import TrainingArguments

#: Share of the last steps whose mean loss is the loss of a run without held-out data.
_LAST_SHARE = 0.1


@dataclass(frozen=True)
class Trial:
    """A training of a rung.

    Attributes:
        learning_rate: its learning rate.
        batch_size: sequences of a batch.
        seed: its seed.
        metric: `eval_loss` with held-out data; else `loss`, the mean of the last steps.
        loss: the value.
        seconds: of the whole training.
        step_seconds: of its steps, without compilation and evaluation.
        flops: of its steps.
    """

    learning_rate: float
    batch_size: int
    seed: int
    metric: str
    loss: float
    seconds: float
    step_seconds: float
    flops: float

    def predict_seconds(self, rung: Rung) -> float:
        """Return the seconds of a training of a rung, at the speed of this trial."""
        return self.seconds - self.step_seconds + self.step_seconds * rung.flops / self.flops

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        return asdict(self)


def get_target_steps(run: RunConfig) -> tuple[TrainingArguments, int, int]:
    """Return the trainer of a run, the number of its updates, and the tokens of a row.

    Raises:
        ConfigError: the run file does not set both.
    """
    trainer, (length, _) = run.trainer, run.sequence_length
    assert trainer is not None, "`check_run` checks the section"
    if trainer.max_training_steps is None or length is None:
        raise ConfigError(
            "a ladder scales the steps of the run: set trainer.max_training_steps, and the length "
            "of a row (mixture.pack_seq_length or trainer.max_length)"
        )
    return trainer, trainer.max_training_steps, length


def count_model(run: RunConfig, length: int) -> tuple[DecoderConfig, int, float]:
    """Return the configuration of the model of a run, its parameters, and FLOPs of a token.

    No array is created.

    Args:
        run: the run, with `model.config`.
        length: tokens of a row.
    """
    from ed_data.tokens.tokenizers import count_ids
    from ed_models.base.flops import count_token_flops
    from flax import nnx

    from ed_elarge.model import eLargeModel
    from ed_elarge.plan.abstract import abstract_model

    tokenizer = eLargeModel.from_run(run).build_tokenizer()
    model = abstract_model(run, count_ids(tokenizer))
    parameters = nnx.state(model, nnx.Param)
    size = sum(
        math.prod(getattr(variable.get_value(), "shape", ()))
        for _, variable in nnx.to_flat_state(parameters)
    )
    flops = count_token_flops(parameters, None, model.config).count_training(length)
    return model.config, size, flops


def train_trial(run: RunConfig, rung: Rung) -> Trial:
    """Train a rung, and return its loss."""
    from ed_infra.compilation.cache import keep_compiled_programs

    from ed_elarge.model import eLargeModel

    trainer = run.trainer
    assert trainer is not None, "`check_run` checks the section"
    keep_compiled_programs()
    elm = eLargeModel.from_run(run)
    try:
        with redirect_stdout(io.StringIO()):  # the header of each run
            metrics = elm.train().metrics
    finally:
        elm.clear_cache()
    metric = "eval_loss" if "eval_loss" in metrics else "loss"
    loss = metrics[metric] if metric == "eval_loss" else average_last(Path(trainer.save_directory))
    return Trial(
        trainer.learning_rate,
        trainer.total_batch_size,
        trainer.seed,
        metric,
        loss,
        metrics["seconds"],
        metrics["productive_seconds"],
        rung.flops,
    )


def average_last(directory: Path) -> float:
    """Return the mean loss of the last steps of a run."""
    from ed_trainers.figures.metrics import RECORD, read_metrics

    losses = [row["loss"] for row in read_metrics(directory / RECORD) if "loss" in row]
    return statistics.fmean(losses[-max(round(len(losses) * _LAST_SHARE), 1) :])
