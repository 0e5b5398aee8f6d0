"""`compare_answers`: whether texts end with the answers of mathematics problems.

`math-verify` compares, in a process of its own, which ends at its time limit: an answer such as a
tower of powers can take any time, and the limits of `math-verify` itself need the main thread. The
process stays for the next call.

As a program, this file is that process: it reads lines of JSON `[text, answer]` and writes lines
`true`, `false` or `null`, which means that the answer cannot be read.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ed_infra.errors import ConfigError

# Seconds that the import of the libraries may take.
_START_SECONDS = 60.0
# Maximum number of characters; the answer is at the end of a text.
_LONGEST_TEXT = 50_000
# Bytes of memory of the process; sympy itself takes about 100 MiB.
_MEMORY = 2**31


def compare_answers(
    texts: Sequence[str], answers: Sequence[str | None], seconds: float
) -> list[float | None]:
    """Return 1 for each text that ends with its answer, and 0 for the others.

    Args:
        texts: texts with LaTeX.
        answers: the right answers. The result is None for None, and for an answer that cannot be
            read.
        seconds: time limit of one comparison, after which the result is 0.

    Raises:
        ConfigError: `math-verify` is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(
            "the reward math_verify needs the package math-verify: pip install 'ed-trainers[math]'"
        )
    with _PROCESS.lock:
        return [
            None if answer is None else _PROCESS.compare(text[-_LONGEST_TEXT:], answer, seconds)
            for text, answer in zip(texts, answers, strict=True)
        ]


class _Process:
    """The process that compares, started with its first question."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(self, text: str, answer: str, seconds: float) -> float | None:
        """Return the reward of one text."""
        if self._process is None:
            self._process = self._start()
        reply = self._ask(self._process, text, answer, seconds)
        if reply is None:  # the comparison took too long or ended the process
            self.end()
            return 0.0
        verdict = json.loads(reply)
        return None if verdict is None else float(verdict)

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        # The first answer also waits for the imports.
        if self._ask(process, r"\boxed{1}", "1", _START_SECONDS) is None:
            process.kill()
            raise ConfigError(
                f"math-verify compared no answer within {_START_SECONDS:g} seconds: check that "
                f"`{sys.executable} -c 'import math_verify'` works"
            )
        return process

    def _ask(
        self, process: subprocess.Popen[str], text: str, answer: str, seconds: float
    ) -> str | None:
        """Return the line of a reply; None after the time limit, or if the process ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        limit = time.monotonic() + seconds
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps([text, answer]) + "\n")
            process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(max(limit - time.monotonic(), 0)):
                return None
        return process.stdout.readline() or None

    def end(self) -> None:
        """End the process, if it runs; the next question starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_PROCESS = _Process()
atexit.register(_PROCESS.end)


# --- the process ---


def _compare(text: str, answer: str) -> bool | None:
    """Return whether a text ends with an answer; the settings are those of TRL's reward."""
    from math_verify import (  # pyright: ignore[reportMissingImports]
        LatexExtractionConfig,
        parse,
        verify,
    )

    expected = parse(answer, parsing_timeout=None)
    if not expected:
        expected = parse(f"${answer}$", parsing_timeout=None)
    if not expected:
        return None
    config = LatexExtractionConfig(
        normalization_config=type(LatexExtractionConfig().normalization_config)(units=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    stated = parse(
        text, extraction_config=[config], extraction_mode="first_match", parsing_timeout=None
    )
    return bool(verify(expected, stated, timeout_seconds=None))


def _main() -> None:
    """Answer lines until the input ends."""
    import resource

    # Only modules of packages: the folder of this file is no place of imports.
    sys.path[:] = [place for place in sys.path if Path(place) != Path(__file__).parent]
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # Other output of the libraries must not look like an answer.
    replies, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        text, answer = json.loads(line)
        try:
            verdict = _compare(text, answer)
        except (Exception, MemoryError):  # any text of a model may come here
            verdict = False
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    _main()
