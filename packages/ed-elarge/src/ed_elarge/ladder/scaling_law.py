"""Power laws: loss against compute, and the learning rate against the number of parameters.

The law of the loss is `L(C) = E + A · C^-α` with E ≥ 0 and A ≥ 0 (Hestness et al. 2017; Hoffmann et
al. 2022 with one variable). For a fixed exponent the law is linear in E and A, so the fit is exact
over a grid of exponents. The interval is a bootstrap over the noise of the losses, the rungs, the
form of the law, and the error of an extrapolation among the rungs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
#: Relative error of the law at the largest rung at which half of the draws use other forms.
DOUBT = 0.02
#: Largest factor between the deviation of a draw and the measured one.
MOST_SCALE = 3.0


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
    seeds: int = 3,
    seed: int = 0,
) -> tuple[PowerLaw, Prediction]:
    """Return the law, and the predicted loss at a compute with its interval.

    The value is the median of the draws, and the interval contains `LEVEL` of them. A draw varies

    - the losses of the rungs and of the target by the noise, whose deviation is uncertain, too;
    - the rungs: a fit of the law may omit one of more than three;
    - the form, because no law is known to hold beyond the rungs (`FORMS`). Half of the draws use
      other forms if the law, fitted to the smaller rungs, misses the largest one by `DOUBT`;
    - the drift: the error of the form at the largest rung per log C.

    A target below the largest rung has no error of an extrapolation.

    Args:
        compute: [rungs] FLOPs of each rung, in increasing order.
        losses: [rungs] loss of each rung.
        target: FLOPs of the predicted run.
        noise: relative standard deviation of a loss over seeds, if it was measured.
        seeds: number of seeds with which the noise was measured.
        seed: seed of the bootstrap.
    """
    x, y = np.asarray(compute, np.float64), np.asarray(losses, np.float64)
    law = fit_law(x, y)
    # A misfit of the law is part of its drift; it is noise only if no noise was measured.
    residuals, freedom = (y - law.predict(x)) / y, max(len(x) - FEWEST_RUNGS, 1)
    spread = math.sqrt(float((residuals**2).sum()) / freedom)
    sigma, freedom = (noise, seeds - 1) if noise else (spread, freedom)
    distance, step = max(math.log(target / x[-1]), 0.0), math.log(x[-1] / x[-2])
    drifts = np.array([abs(measure_drift(x, y, form)) for form in FORMS])
    drifts[1:] = drifts[1:].max()  # one of the two may hit the largest rung by chance
    share = 1 / (1 + (drifts[0] * step / DOUBT) ** 2) if distance else 1.0
    shares = [share, *[(1 - share) / (len(FORMS) - 1)] * (len(FORMS) - 1)]
    random, predictions = np.random.default_rng(seed), np.empty(DRAWS)
    choices = random.choice(len(FORMS), size=DRAWS, p=shares)
    for draw, choice in enumerate(choices):
        scale = math.sqrt(freedom / random.chisquare(freedom)) if sigma else 0.0
        deviation = sigma * min(scale, MOST_SCALE)
        sample = y * np.exp(deviation * random.standard_normal(len(y)))
        omits = choice == 0 and len(x) > FEWEST_RUNGS
        left_out = random.integers(-1, len(x)) if omits else -1
        kept = np.arange(len(x)) != left_out
        prediction = FORMS[choice](x[kept], sample[kept], target)
        drift = drifts[choice] * distance
        error = deviation * random.standard_normal() + drift * random.standard_normal()
        predictions[draw] = prediction * math.exp(error)
    low, value, high = np.quantile(predictions, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2])
    return law, Prediction(float(value), float(low), float(high))


def measure_drift(
    compute: Vector, losses: Vector, form: Callable[[Vector, Vector, float], float]
) -> float:
    """Return log(loss / prediction) of the largest rung per log C, predicted by the others.

    Two rungs determine only a line, so the drift of a line is that of all forms of three rungs.
    """
    if len(compute) <= FEWEST_RUNGS:
        form = extrapolate_line
    predicted = form(compute[:-1], losses[:-1], float(compute[-1]))
    return math.log(losses[-1] / predicted) / math.log(compute[-1] / compute[-2])


def extrapolate_law(compute: Vector, losses: Vector, target: float) -> float:
    """Return the loss at the target on the law of `fit_law`."""
    return float(fit_law(compute, losses).predict(target))


def extrapolate_line(compute: Vector, losses: Vector, target: float) -> float:
    """Return the loss at the target on the power law through the two largest rungs."""
    x, y = np.log(compute), np.log(losses)
    slope = min(float((y[-1] - y[-2]) / (x[-1] - x[-2])), 0.0)
    return float(math.exp(y[-1] + slope * (math.log(target) - x[-1])))


def extrapolate_parabola(compute: Vector, losses: Vector, target: float) -> float:
    """Return the loss at the target on a parabola of log L over log C.

    The slope does not become positive, nor more than twice as steep as at the largest rung.
    """
    x, y = np.log(compute), np.log(losses)
    bend, slope, offset = (float(value) for value in np.polyfit(x - x[-1], y, 2))
    slope, distance = min(slope, 0.0), math.log(target) - x[-1]
    end = min(max(slope + 2 * bend * distance, 2 * slope), 0.0)
    return float(math.exp(offset + (slope + end) / 2 * distance))


#: Forms of the curve beyond the largest rung. Losses of small models often fall faster than a law.
FORMS = (extrapolate_law, extrapolate_line, extrapolate_parabola)


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
    parameters: Sequence[float],
    rates: Sequence[float],
    target: float,
    *,
    step: float,
    steepest: float = -1.0,
) -> Prediction:
    """Return the learning rate at a number of parameters, by a power law over the rungs.

    The interval covers the residuals of the law, and at least half of a step of the trials.

    Args:
        parameters: [rungs] numbers of parameters.
        rates: [rungs] best learning rates.
        target: number of parameters of the large run.
        step: factor between two trials.
        steepest: smallest exponent of the law: the best rate falls at most in proportion to the
            parameters. 0 in µP, where all models have the same best rate.
    """
    x, y = np.log(np.asarray(parameters, np.float64)), np.log(np.asarray(rates, np.float64))
    if len(x) < 2:
        value, slope, spread = float(y[0]), 0.0, 0.0
    else:
        slope, _ = np.polyfit(x - x.mean(), y, 1)
        slope = float(min(max(slope, steepest), 0.0))
        value = float(y.mean() + slope * (math.log(target) - x.mean()))
        residual = y - y.mean() - slope * (x - x.mean())
        spread = math.sqrt(float((residual**2).sum()) / max(len(x) - 2, 1))
    half = max(math.log(step) / 2, 1.645 * spread)
    return Prediction(math.exp(value), math.exp(value - half), math.exp(value + half))
