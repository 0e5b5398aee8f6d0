"""The task of the worker process that reads audio files, see `ed_esurge.children.worker`."""

from __future__ import annotations

import contextlib
from typing import Any

from ed_esurge.children.messages import RefusedError, SendAnswer
from ed_esurge.children.worker import run_worker
from ed_esurge.speech.library_files import LibraryFile
from ed_esurge.speech.samples import AudioError, AudioTooLongError, check_form, mono

# Kinds of messages: rate of the recording, float32 samples, a recording that is too long.
RATE, SAMPLES, TOO_LONG = b"R", b"S", b"L"


def _prepare() -> None:
    """Import the library, which the children share."""
    with contextlib.suppress(ImportError, OSError):  # each file reports the missing library
        import soundfile  # noqa: F401


def _work(data: bytes, options: dict[str, Any], say: SendAnswer) -> None:
    """Read an audio file, and write its rate and its samples.

    Args:
        options: `seconds`, the length of the longest accepted recording.

    Raises:
        RefusedError: the file cannot be read, or is too long (`TOO_LONG`).
    """
    try:
        file = LibraryFile(data)
        check_form(file.rate, file.channels)
        say(RATE, str(file.rate).encode())
        for block in mono(file.blocks(), int(options["seconds"] * file.rate)):
            say(SAMPLES, block.data.cast("B"))
    except AudioTooLongError as error:
        raise RefusedError(str(error), TOO_LONG) from None
    except AudioError as error:
        raise RefusedError(str(error)) from None


if __name__ == "__main__":
    run_worker(_prepare, _work)
