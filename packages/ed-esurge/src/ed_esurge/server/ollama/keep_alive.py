"""Ollama's `keep_alive`: how long a model stays loaded after a request."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, Field
from starlette.requests import Request

from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import IGNORED

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"[+-]?(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+|[+-]?\d+(?:\.\d*)?")
#: Longest finite duration in seconds, about 31 years.
MAX_SECONDS = 10**9
_PART = re.compile(r"(\d+(?:\.\d*)?)(ns|us|µs|ms|s|m|h)")


def parse_duration(value: object) -> object:
    """Return a duration in seconds: a number, or Go's notation `1h30m`. Negative = infinity.

    Raises:
        InvalidField: the text is no duration, or the duration is too long.
    """
    if isinstance(value, str):
        text = value.strip()
        if len(text) > 64 or not _DURATION.fullmatch(text):
            raise InvalidField(f"{value!r:.80} is no duration: send seconds, or text such as 5m")
        parts = _PART.findall(text)
        amount = sum(float(number) * _UNITS[unit] for number, unit in parts)
        value = amount if parts else abs(float(text))
        value = -value if text.startswith("-") else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value > MAX_SECONDS:
            raise InvalidField(
                f"the duration is longer than {MAX_SECONDS} seconds: send -1 to keep the model "
                "loaded"
            )
        return math.inf if value < 0 else float(value)
    return value


KeepAlive = Annotated[
    Annotated[float, Field(allow_inf_nan=True)] | None, BeforeValidator(parse_duration)
]


def keep(model: ServedModel, seconds: float | None, request: Request) -> None:
    """Apply the `keep_alive` of a request. Models of the start stay loaded, so the field has no
    effect on them, which `X-Ignored-Fields` reports."""
    if seconds is None:
        return
    if model.on_demand:
        model.activity.keep(seconds)
    elif (ignored := request.scope.get(IGNORED)) is not None and math.isfinite(seconds):
        ignored.add("keep_alive")
