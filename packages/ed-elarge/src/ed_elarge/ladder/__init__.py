"""Ladders: small models that predict the learning rate and the loss of a large run.

The rungs are trained from the smallest to the largest, within a budget of time. On every rung but
the last, several learning rates are tried; the last rung uses the rate that the others predict. In
µP all models have the same best rate, so only the two smallest rungs try rates. The smallest rung
is repeated with other seeds, which measures the noise of a loss.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ed_infra.errors import ConfigError

from ed_elarge.config.normalize import normalize
from ed_elarge.config.run_config import RunConfig
from ed_elarge.errors import Document
from ed_elarge.ladder.rungs import FEWEST_STEPS, Rung, check_run, list_sizes, scale_run
from ed_elarge.ladder.scaling_law import (
    FEWEST_RUNGS,
    PowerLaw,
    Prediction,
    extrapolate_rate,
    find_minimum,
    predict_loss,
)
from ed_elarge.ladder.trial import Trial, count_model, get_target_steps, train_trial

#: Folder of the trials, in the directory of the run.
FOLDER = "ladder"
#: Factor between two tried learning rates, and the largest number of trials of a rung.
RATE_STEP, MOST_TRIALS = 2.0, 6
#: Rungs that try learning rates in µP.
TUNED_RUNGS = 2
#: Seeds of the smallest rung, in addition to that of the run.
MORE_SEEDS = 2
_PRINT = partial(print, flush=True)


@dataclass
class Ladder:
    """A ladder of a run file.

    Attributes:
        values: the values of the run file.
        run: the large run.
        budget: seconds for all trials.
        count: largest number of rungs.
        ratio: factor between the parameters of two rungs.
        say: prints a text.
    """

    values: Mapping[str, Any]
    run: RunConfig
    budget: float
    count: int = 4
    ratio: float = 3.0
    say: Callable[[str], None] = _PRINT
    _began: float = field(default_factory=time.monotonic)
    _last_trial: Trial | None = None

    def plan(self) -> tuple[Rung, list[Rung]]:
        """Return the large run and the rungs, smallest first, without trials.

        Raises:
            ConfigError: smaller models of the run do not predict it, or there are too few.
        """
        check_run(self.run)
        trainer, steps, length = get_target_steps(self.run)
        rows = trainer.total_batch_size

        config, parameters, per_token = count_model(self.run, length)
        tokens = steps * rows * length
        target = Rung({}, parameters, steps, tokens, per_token * tokens, batch_size=rows)
        rungs = []
        for size in list_sizes(config, self.count, self.ratio):
            _, smaller, per_token = count_model(self._scale(size.fields, 1.0), length)
            rung_steps = max(round(steps * smaller / parameters), min(FEWEST_STEPS, steps))
            tokens = rung_steps * rows * length
            flops = per_token * tokens
            rungs.append(Rung(size.fields, smaller, rung_steps, tokens, flops, batch_size=rows))
        if len(rungs) < FEWEST_RUNGS:
            raise ConfigError(
                f"the model is so small that only {len(rungs)} smaller sizes exist, and a law "
                f"needs {FEWEST_RUNGS}: predict a larger model, or lower --ratio"
            )
        return target, rungs

    def climb(self) -> dict[str, Any]:
        """Train the rungs, and return the prediction as JSON values.

        Raises:
            ConfigError: the budget ends before the law has enough rungs.
        """
        target, planned = self.plan()
        rungs, noise = list[Rung](), 0.0
        assert self.run.trainer is not None, "`check_run` checks the section"
        rate = self.run.trainer.learning_rate
        for number, rung in enumerate(planned):
            is_tuned = self._is_tuned(number, len(planned))
            if not is_tuned:
                rate = self._predict_rate(rungs, rung.parameters).value
            trials = list(self._try_rates(rung, rate, only_one=not is_tuned))
            if not trials:
                self.say(f"the budget ends before the rung of {rung.parameters:,} parameters")
                break
            best = min(trials, key=lambda trial: trial.loss)
            rate = find_minimum([t.learning_rate for t in trials], [t.loss for t in trials])
            if number == 0:
                noise, more = self._measure_noise(rung, best)
                trials += more
            rungs.append(
                replace(
                    rung,
                    learning_rate=rate,
                    loss=best.loss,
                    seconds=sum(trial.seconds for trial in trials),
                    trials=tuple(trial.to_dict() for trial in trials),
                )
            )
        if len(rungs) < FEWEST_RUNGS:
            raise ConfigError(
                f"the budget of {self.budget:,.0f} s was sufficient for {len(rungs)} rungs, and a "
                f"law needs {FEWEST_RUNGS}: raise --budget"
            )
        return self._describe(target, rungs, noise)

    @property
    def has_one_rate(self) -> bool:
        """Whether the best learning rate is the same for all models."""
        return self.run.model is not None and self.run.model.has_widths

    def _is_tuned(self, number: int, count: int) -> bool:
        if self.has_one_rate:
            return number < TUNED_RUNGS
        return number < count - 1 or number < FEWEST_RUNGS - 1

    def _describe(self, target: Rung, rungs: list[Rung], noise: float) -> dict[str, Any]:
        law, loss = predict_loss(
            [rung.flops for rung in rungs],
            [rung.loss for rung in rungs],
            target.flops,
            noise=noise,
            seeds=1 + MORE_SEEDS,
        )
        rate = self._predict_rate(rungs, target.parameters)
        return build_prediction(self.run, target, rungs, (law, loss, rate, noise))

    def _predict_rate(self, rungs: list[Rung], parameters: int) -> Prediction:
        tuned = [rung for rung in rungs if len(rung.trials) > 1]
        return extrapolate_rate(
            [rung.parameters for rung in tuned],
            [rung.learning_rate for rung in tuned],
            parameters,
            step=RATE_STEP,
            steepest=0.0 if self.has_one_rate else -1.0,
        )

    def _try_rates(self, rung: Rung, rate: float, *, only_one: bool) -> Iterator[Trial]:
        """Yield trials around a rate, and further ones while the best is at an end."""
        rates = [rate] if only_one else [rate, rate / RATE_STEP, rate * RATE_STEP]
        losses: dict[float, float] = {}
        while rates and len(losses) < MOST_TRIALS:
            trial = self._run_trial(rung, rates.pop(0))
            if trial is None:
                return
            losses[trial.learning_rate] = trial.loss
            yield trial
            if not rates and not only_one:
                best = min(losses, key=lambda one: losses[one])
                if best == min(losses):
                    rates = [best / RATE_STEP]
                elif best == max(losses):
                    rates = [best * RATE_STEP]

    def _measure_noise(self, rung: Rung, best: Trial) -> tuple[float, list[Trial]]:
        """Return the relative standard deviation of a loss over seeds, and the trials."""
        trials = []
        for number in range(1, MORE_SEEDS + 1):
            trial = self._run_trial(rung, best.learning_rate, best.seed + number)
            if trial is not None:
                trials.append(trial)
        losses = [best.loss, *(trial.loss for trial in trials)]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        return spread / statistics.fmean(losses), trials

    def _run_trial(self, rung: Rung, rate: float, seed: int | None = None) -> Trial | None:
        """Train a rung once; None if the budget does not suffice."""
        remaining = self.budget - (time.monotonic() - self._began)
        if self._last_trial is not None and self._last_trial.predict_seconds(rung) > remaining:
            return None
        assert self.run.trainer is not None, "`check_run` checks the section"
        seed = self.run.trainer.seed if seed is None else seed
        name = f"{rung.parameters}-{rate:.3g}-{seed}"
        changes = {
            "learning_rate": rate,
            "seed": seed,
            "save_directory": str(self.run.directory / FOLDER / name),
        }
        trial = train_trial(self._scale(rung.fields, self._share(rung), rung.steps, changes), rung)
        self._last_trial = trial
        self.say(
            f"{rung.parameters:,} parameters, {rung.steps:,} steps, learning rate {rate:.3g}: "
            f"{trial.metric} {trial.loss:.4f}, {trial.seconds:.1f} s"
        )
        return trial

    def _share(self, rung: Rung) -> float:
        _, steps, _ = get_target_steps(self.run)
        return rung.steps / steps

    def _scale(
        self,
        fields: Mapping[str, int],
        share: float,
        steps: int | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> RunConfig:
        """Return the run of a rung; data, order and tokenizer are those of the large run."""
        mixture = self.run.mixture
        assert mixture is not None, "`check_run` checks the section"
        more = {} if steps is None else {"max_training_steps": steps}
        values = scale_run(
            self.values, self.run, fields=fields, share=share, changes={**more, **(changes or {})}
        )
        values["mixture"] = {**values["mixture"], "seed": mixture.seed}
        section = self.run.model.tokenizer_section if self.run.model is not None else None
        if section is not None and section.train is not None:
            path = str(self.run.directory / "tokenizer")
            values["model"] = {**values["model"], "tokenizer": {"name_or_path": path}}
        return normalize(Document("the ladder", value=values))


def build_prediction(
    run: RunConfig,
    target: Rung,
    rungs: list[Rung],
    fitted: tuple[PowerLaw, Prediction, Prediction, float],
) -> dict[str, Any]:
    """Return the content of `prediction.json`."""
    law, loss, rate, noise = fitted
    metric = str(rungs[0].trials[0]["metric"])
    trainer = run.trainer
    assert trainer is not None, "`check_run` checks the section"
    has_widths = run.model is not None and run.model.has_widths
    return {
        "target": {
            "parameters": target.parameters,
            "steps": target.steps,
            "tokens": target.tokens,
            "flops": target.flops,
            "learning_rate": trainer.learning_rate,
            "batch_size": target.batch_size,
        },
        "loss": {"metric": metric, "share": 0.0 if metric == "eval_loss" else 0.1} | loss.to_dict(),
        "learning_rate": rate.to_dict()
        | {
            "method": "the same rate at all widths (µP)"
            if has_widths
            else "power law over the rungs"
        },
        "batch_size": {"value": target.batch_size, "method": "the batch of the run file"},
        "law": law.to_dict(),
        "noise": noise,
        "rungs": [rung.to_dict() for rung in rungs],
        "seconds": sum(rung.seconds for rung in rungs),
    }


def write_prediction(run: RunConfig, prediction: Mapping[str, Any]) -> Path:
    """Write `prediction.json` into the directory of the large run, and return its path."""
    from ed_trainers.report.comparison import PREDICTION

    run.directory.mkdir(parents=True, exist_ok=True)
    path = run.directory / PREDICTION
    path.write_text(json.dumps(prediction, indent=2) + "\n", "utf-8")
    return path
