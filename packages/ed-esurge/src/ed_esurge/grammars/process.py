"""The server's interface to the worker process of one tokenizer."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from ed_esurge.children.process import StartedProcess, start_python
from ed_esurge.grammars.build import GrammarSource
from ed_esurge.grammars.limits import GrammarError

_ENDED = (
    "the process that compiles grammars ended, often for lack of memory: send the request again, "
    "with a smaller grammar if the error returns"
)

GrammarFuture = Future[tuple[str, float]]
"""The grammar in llguidance's format and the processor time of the trial in seconds, or a
`GrammarError`."""


class TrialProcess(StartedProcess["_Connection"]):
    """Tries grammars in a worker process.

    Args:
        tokenizer: arguments of `ed_esurge.grammars.build.make_tokenizer`.
    """

    def __init__(self, tokenizer: tuple[Any, ...]) -> None:
        super().__init__(partial(_Connection, tokenizer))
        self._numbers = itertools.count()

    def submit(self, source: GrammarSource) -> GrammarFuture:
        """Try a grammar. Blocks while a new process starts."""
        kind, content = source
        answer: GrammarFuture = Future()
        with self._lock:
            connection = self._connect()
            number = next(self._numbers)
            connection.answers[number] = answer
            try:
                connection.send({"id": number, "kind": kind, "content": content})
            except OSError:
                connection.fail(number)
        return answer


class _Connection:
    """One process and its pending answers."""

    def __init__(self, tokenizer: tuple[Any, ...]) -> None:
        self.answers: dict[int, GrammarFuture] = {}
        self.process = start_python(
            "ed_esurge.grammars.worker", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        threading.Thread(target=self._read, name="esurge-grammar-trials", daemon=True).start()
        with contextlib.suppress(OSError):  # `submit` reports the end of the process
            self.send(tokenizer)

    def send(self, message: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def fail(self, number: int) -> None:
        """Fail a job because the process has ended, unless the job has an answer."""
        answer = self.answers.pop(number, None)
        if answer is not None:
            answer.set_exception(GrammarError(_ENDED))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()

    def _read(self) -> None:
        """Deliver answers. When the process ends, fail the pending jobs."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._pass_on(json.loads(line))
        self.process.wait()
        for number in list(self.answers):
            self.fail(number)

    def _pass_on(self, said: Mapping[str, Any]) -> None:
        # Not in the loop of `_read`: a variable there would keep the last answer, and with the
        # answer the grammars of the engine, until the next one comes.
        answer = self.answers.pop(said["id"])
        if "error" in said:
            answer.set_exception(GrammarError(said["error"]))
        else:
            answer.set_result((said["text"], said["seconds"]))
