"""Programs of this folder that run in another environment, with the library to compare with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any


def answer_of(python: str | None, program: str, question: Any, seconds: int) -> Any:
    """Return the JSON value on the last line of the output of a program.

    Args:
        python: the interpreter.
        program: name of a file of this folder.
        question: a JSON value for the standard input.
        seconds: limit of the time.
    """
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name(program))],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
