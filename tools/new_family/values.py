"""Find the configuration field that a measured value comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tools.new_family.tiny import list_fields

#: Fields of sizes and ids, which are never factors.
_NO_FACTORS = ("token_id", "num_", "_size", "_theta", "_positions", "layers", "_range", "_coef")
TOLERANCE = 1e-3


def list_numbers(config: Any) -> Iterator[tuple[str, float]]:
    """Return the numeric fields of a configuration that may be factors."""
    for name in list_fields(type(config)):
        value = getattr(config, name, None)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and value and not any(part in name for part in _NO_FACTORS):
            yield name, float(value)


def name_value(config: Any, value: float) -> str | None:
    """Return an expression of configuration fields with a value; None = no such expression.

    The forms are a field, its reciprocal, the reciprocal of its root, the root of the hidden size,
    and the depth scale of MiniCPM.
    """
    if is_near(value, 1.0):
        return "1.0"
    forms: dict[str, Callable[[float], float]] = {
        "config.{}": lambda number: number,
        "1 / config.{}": lambda number: 1 / number,
        "config.{}**-0.5": lambda number: abs(number) ** -0.5,
    }
    for form, function in forms.items():
        for name, number in list_numbers(config):
            if is_near(function(number), value):
                return form.format(name)
    others = {
        "config.hidden_size**0.5": config.hidden_size**0.5,
        "config.scale_depth / config.num_hidden_layers**0.5": getattr(config, "scale_depth", 0.0)
        / math.sqrt(config.num_hidden_layers),
        "config.dim_model_base / config.hidden_size": getattr(config, "dim_model_base", 0)
        / config.hidden_size,
    }
    return next((text for text, number in others.items() if is_near(number, value)), None)


def is_near(a: float, b: float) -> bool:
    """Return whether two numbers are equal up to rounding."""
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1e-6)


def find_ratio(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return the factor f with a = f * b; None = there is none."""
    a, b = a.reshape(-1).astype(np.float64), b.reshape(-1).astype(np.float64)
    factor = float(a @ b / (b @ b))
    error = float(np.abs(a - factor * b).max())
    return factor if error <= 1e-4 * max(1.0, float(np.abs(a).max())) else None
