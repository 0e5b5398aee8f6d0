"""Power laws: loss against compute, and the learning rate against the number of parameters.

The law of the loss is `L(C) = E + A · C^-α` with E ≥ 0 and A ≥ 0 (Hestness et al. 2017; Hoffmann et
al. 2022 with one variable). For a fixed exponent the law is linear in E and A, so the fit is exact
over a grid of exponents. The interval is a bootstrap over the noise of the losses and over the
rungs: each draw may omit one rung.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from ed_infra.errors import ConfigError
from numpy.typing import NDArray

Vector = NDArray[np.float64]

#: Exponents of the grid. Published exponents of the loss over compute are 0.05 to 0.4.
EXPONENTS: Vector = np.geomspace(0.02, 1.0, 197)
#: Rungs that a law needs: it has three values.
FEWEST_RUNGS = 3
#: Draws of the bootstrap, and the share of the draws inside of an interval.
DRAWS, LEVEL = 500, 0.9


@dataclass(frozen=True)
class PowerLaw:
    """A fitted law `floor + scale · (C / reference)^-exponent`.

    Attributes:
        floor: the loss that no compute reduces.
        scale: the reducible loss at the reference.
        exponent: how fast the reducible loss falls.
        reference: compute at which the reducible loss is `scale`.
    """

    floor: float
    scale: float
    exponent: float
    reference: float

    def predict(self, compute: float | Vector) -> Vector:
        """Return the loss at some compute."""
        ratio = np.asarray(compute, np.float64) / self.reference
        return self.floor + self.scale * ratio**-self.exponent

    def to_dict(self) -> dict[str, float]:
        """Return the values by name."""
        return asdict(self)


@dataclass(frozen=True)
class Prediction:
    """A value and the interval that contains it with a probability.

    Attributes:
        value: the value.
        low: lower end.
        high: upper end.
        level: the probability.
    """

    value: float
    low: float
    high: float
    level: float = LEVEL

    def to_dict(self) -> dict[str, float]:
        """Return the values by name."""
        return asdict(self)


def fit_law(compute: Sequence[float] | Vector, losses: Sequence[float] | Vector) -> PowerLaw:
    """Fit the law to losses by least squares of their logarithms' linearization.

    The residuals are relative: each is divided by its loss.

    Args:
        compute: [rungs] FLOPs of each rung.
        losses: [rungs] loss of each rung.

    Raises:
        ConfigError: there are fewer rungs than the law has values.
    """
    x, y = np.asarray(compute, np.float64), np.asarray(losses, np.float64)
    if len(x) < FEWEST_RUNGS:
        raise ConfigError(
            f"a law of three values needs {FEWEST_RUNGS} rungs, got {len(x)}: raise --budget or "
            "--rungs"
        )
    reference = float(np.exp(np.log(x).mean()))
    basis = (x / reference)[None, :] ** -EXPONENTS[:, None]  # [exponents, rungs]
    floors, scales, errors = _fit_linear(basis, y)
    best = int(errors.argmin())
    return PowerLaw(float(floors[best]), float(scales[best]), float(EXPONENTS[best]), reference)


def _fit_linear(basis: Vector, y: Vector) -> tuple[Vector, Vector, Vector]:
    """Return floor ≥ 0, scale ≥ 0 and the sum of squares for each row of `basis`."""
    weight = 1.0 / y**2
    total = weight.sum()
    mean_x, mean_y = (basis * weight).sum(1) / total, (y * weight).sum() / total
    centered = basis - mean_x[:, None]
    variance = (weight * centered**2).sum(1)
    covariance = (weight * centered * (y - mean_y)).sum(1)
    scale = np.where(variance > 0, covariance / np.where(variance > 0, variance, 1.0), 0.0)
    floor = mean_y - scale * mean_x
    # On the boundary, one of the two values is 0.
    through_zero = (weight * basis * y).sum(1) / (weight * basis**2).sum(1)
    scale, floor = np.where(floor < 0, through_zero, scale), np.where(floor < 0, 0.0, floor)
    scale, floor = np.where(scale < 0, 0.0, scale), np.where(scale < 0, mean_y, floor)
    residual = floor[:, None] + scale[:, None] * basis - y
    return floor, scale, (weight * residual**2).sum(1)


def predict_loss(
    compute: Sequence[float],
    losses: Sequence[float],
    target: float,
    *,
    noise: float = 0.0,
    seed: int = 0,
) -> tuple[PowerLaw, Prediction]:
    """Return the law, and the predicted loss at a compute with its interval.

    Args:
        compute: [rungs] FLOPs of each rung.
        losses: [rungs] loss of each rung.
        target: FLOPs of the predicted run.
        noise: relative standard deviation of a loss over seeds, if it was measured.
        seed: seed of the bootstrap.
    """
    x, y = np.asarray(compute, np.float64), np.asarray(losses, np.float64)
    law = fit_law(x, y)
    fitted = law.predict(x)
    freedom = max(len(x) - FEWEST_RUNGS, 1)
    spread = math.sqrt(float((((y - fitted) / y) ** 2).sum()) / freedom)
    sigma = max(spread, noise)
    random, predictions = np.random.default_rng(seed), np.empty(DRAWS)
    for draw in range(DRAWS):
        left_out = random.integers(-1, len(x)) if len(x) > FEWEST_RUNGS else -1
        kept = np.arange(len(x)) != left_out
        # A draw varies the measured losses, so the interval does not rest on the fitted curve.
        sample = y * (1.0 + sigma * random.standard_normal(len(y)))
        drawn_law = fit_law(x[kept], sample[kept])
        error = 1.0 + sigma * random.standard_normal()
        predictions[draw] = float(drawn_law.predict(target)) * error
    low, high = np.quantile(predictions, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    value = float(law.predict(target))
    return law, Prediction(value, min(float(low), value), max(float(high), value))


def find_minimum(rates: Sequence[float], losses: Sequence[float]) -> float:
    """Return the learning rate with the lowest loss: of a parabola over logarithms of rates.

    The parabola passes through the best trial and its neighbors. The result is inside of the tried
    rates.
    """
    order = np.argsort(rates)
    x, y = np.log(np.asarray(rates, np.float64)[order]), np.asarray(losses, np.float64)[order]
    best = int(y.argmin())
    if best in (0, len(y) - 1):
        return float(math.exp(x[best]))
    part = slice(best - 1, best + 2)
    square, slope, _ = np.polyfit(x[part] - x[best], y[part], 2)
    shift = -slope / (2 * square) if square > 0 else 0.0
    return float(math.exp(x[best] + min(max(shift, x[part][0] - x[best]), x[part][-1] - x[best])))


def extrapolate_rate(
    parameters: Sequence[float], rates: Sequence[float], target: float, *, step: float
) -> Prediction:
    """Return the learning rate at a number of parameters, by a power law over the rungs.

    The interval covers the residuals of the law, and at least half of a step of the trials.

    Args:
        parameters: [rungs] numbers of parameters.
        rates: [rungs] best learning rates.
        target: number of parameters of the large run.
        step: factor between two trials.
    """
    x, y = np.log(np.asarray(parameters, np.float64)), np.log(np.asarray(rates, np.float64))
    if len(x) < 2:
        value, slope, spread = float(y[0]), 0.0, 0.0
    else:
        slope, _ = np.polyfit(x - x.mean(), y, 1)
        # The best rate falls with the width, at most in proportion to the parameters.
        slope = float(min(max(slope, -1.0), 0.0))
        value = float(y.mean() + slope * (math.log(target) - x.mean()))
        residual = y - y.mean() - slope * (x - x.mean())
        spread = math.sqrt(float((residual**2).sum()) / max(len(x) - 2, 1))
    half = max(math.log(step) / 2, 1.645 * spread)
    return Prediction(math.exp(value), math.exp(value - half), math.exp(value + half))
