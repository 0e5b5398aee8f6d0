"""Error classes and suggestions. A message contains the value, the constraint and a solution."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EasyDeLError(Exception):
    """Base class of the errors of this project."""


class ConfigError(EasyDeLError, ValueError):
    """A value of a configuration is unknown, has the wrong type, or contradicts another value.

    Attributes:
        field: The key to change. The YAML runner reports its line.
    """

    def __init__(self, message: str, *, field: str | None = None):
        super().__init__(message)
        self.field = field


class MeshError(ConfigError):
    """A device mesh does not match the devices, or a specification does not match the mesh."""


class RegistryError(ConfigError):
    """A model type, task or trainer is not registered."""


class CheckpointError(EasyDeLError, ValueError):
    """A checkpoint is missing, incomplete, or does not match the model."""


#: Longer names get no suggestion: the time of a comparison is quadratic in the length.
MAX_COMPARED = 64


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, or an empty string.

    The comparison ignores case.
    """
    if len(name) > MAX_COMPARED:
        return ""
    spelling = {str(k).lower(): str(k) for k in known}
    near = difflib.get_close_matches(str(name).lower(), spelling, n=1, cutoff=0.6)
    return f"; did you mean {spelling[near[0]]!r}?" if near else ""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name.

    Args:
        kind: Description of the name (`"attention mechanism"`).
        name: The unknown name.
        known: All allowed names.
    """
    known = sorted({str(k) for k in known})
    listing = ", ".join(known)
    return ConfigError(
        f"unknown {kind} {name!r}{did_you_mean(str(name), known)} (known: {listing})"
    )
