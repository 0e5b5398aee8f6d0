"""Errors that teach: the value, what is allowed, how to go on. Imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EasyDeLError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(EasyDeLError, ValueError):
    """A value in a configuration is unknown, of the wrong kind, or contradicts another.

    Attributes:
        field: the key to change, where the error is about several; a caller who knows the source
            (YAML) points at its line.
    """

    def __init__(self, message: str, *, field: str | None = None):
        super().__init__(message)
        self.field = field


class MeshError(ConfigError):
    """A device mesh does not fit the devices, or a specification does not fit the mesh."""


class RegistryError(ConfigError):
    """A model type, task or trainer that nothing has registered."""


class CheckpointError(EasyDeLError, ValueError):
    """A checkpoint is missing, incomplete, or does not fit the model."""


#: Longer names have no suggestion: the time of a comparison grows with the square of the length.
MAX_COMPARED = 64


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, or an empty string.

    Capitals do not count: `SEED` is near `seed`.
    """
    if len(name) > MAX_COMPARED:
        return ""
    spelling = {str(k).lower(): str(k) for k in known}
    near = difflib.get_close_matches(str(name).lower(), spelling, n=1, cutoff=0.6)
    return f"; did you mean {spelling[near[0]]!r}?" if near else ""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """Build the error for a name that is not in a fixed list.

    Args:
        kind: what the name names, in words (`"attention mechanism"`).
        name: the name that is not known.
        known: every allowed name.
    """
    known = sorted({str(k) for k in known})
    listing = ", ".join(known)
    return ConfigError(
        f"unknown {kind} {name!r}{did_you_mean(str(name), known)} (known: {listing})"
    )
