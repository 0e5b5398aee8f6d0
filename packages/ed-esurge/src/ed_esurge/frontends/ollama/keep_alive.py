"""Ollama's `keep_alive`: how long a model stays loaded after a request."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator, Field
from starlette.requests import Request

from ed_esurge.server.activity import parse_keep_alive
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import IGNORED_KEYS


def parse_duration(value: object) -> object:
    """Return a duration in seconds, see `parse_keep_alive`.

    Raises:
        InvalidField: the text is no duration, or the duration is too long.
    """
    try:
        return parse_keep_alive(value)
    except ValueError as error:
        raise InvalidField(str(error)) from None


KeepAlive = Annotated[
    Annotated[float, Field(allow_inf_nan=True)] | None, BeforeValidator(parse_duration)
]


def keep_model(model: ServedModel, seconds: float | None, request: Request) -> None:
    """Apply the `keep_alive` of a request. Models of the start stay loaded, so the field has no
    effect on them, which `X-Ignored-Fields` reports."""
    if seconds is None:
        return
    if model.activity is not None:
        model.activity.keep(seconds)
    elif (ignored := request.scope.get(IGNORED_KEYS)) is not None and math.isfinite(seconds):
        ignored.add("keep_alive")
