"""Errors of speech to text that belong to the sender of a request."""

from __future__ import annotations

from ed_infra.errors import EasyDeLError


class AudioError(EasyDeLError):
    """A file is no audio file that this server reads."""


class AudioTooLongError(AudioError):
    """A recording exceeds the limit of seconds."""


class QueueFullError(EasyDeLError):
    """Too many transcriptions run or wait."""
