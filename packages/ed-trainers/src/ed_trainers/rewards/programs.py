"""Rewards of programs: run the code of completions with tests, in a sandbox.

The tests of a row are one of:

- a text of Python, appended to the program: it passes if the program ends without an error;
- a list of such texts, each a test of its own;
- a list of `{input: TEXT, output: TEXT}`: the program reads the input and prints the output;
- `{inputs: [TEXT, …], outputs: [TEXT, …]}`, the same in columns;
- a text of JSON with one of these lists.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ed_infra.errors import ConfigError

from ed_trainers.environments.sandbox import Sandbox

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Maximum number of tests of a row, and of bytes of a program: an argument of a command is limited.
_MOST_TESTS, _LONGEST_PROGRAM = 256, 100_000


class ProgramTest(NamedTuple):
    """A test of a program.

    Attributes:
        source: lines of Python that follow the program.
        text: standard input.
        output: expected standard output; None: any output.
    """

    source: str = ""
    text: str = ""
    output: str | None = None


def score_programs(
    texts: Sequence[str],
    tests: Sequence[object],
    *,
    sandbox: Sandbox,
    parallel: int,
    all_tests: bool,
) -> list[float | None]:
    """Return the share of the tests that the program of each text passes; None without tests.

    Args:
        texts: texts with programs; see `extract_program`.
        tests: the tests of each text, in one of the layouts of this module.
        sandbox: the limits of a run of a program.
        parallel: number of programs that run at the same time.
        all_tests: the reward is 1 if all tests pass, otherwise 0.

    Raises:
        ConfigError: tests have another layout, or there are too many.
    """
    read_tests = [None if rows is None else read_program_tests(rows) for rows in tests]
    with ThreadPoolExecutor(parallel) as pool:
        results = [
            [pool.submit(_passes, extract_program(text), test, sandbox) for test in own or ()]
            for text, own in zip(texts, read_tests, strict=True)
        ]
        passed = [[result.result() for result in own] for own in results]
    rewards: list[float | None] = []
    for own in passed:
        share = sum(own) / len(own) if own else None
        rewards.append(share if share is None or not all_tests else float(share == 1))
    return rewards


def extract_program(text: str) -> str:
    """Return the last fenced block of a text, or the text if it has no fence."""
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def read_program_tests(tests: object) -> list[ProgramTest]:
    """Return the tests of a row.

    Raises:
        ConfigError: the tests have another layout, or there are too many.
    """
    if isinstance(tests, str):
        if not tests.lstrip().startswith(("[", "{")):
            return [ProgramTest(tests)]
        try:
            tests = json.loads(tests)
        except ValueError:
            return [ProgramTest(str(tests))]  # Python that begins with a list
    if isinstance(tests, Mapping):
        columns = tests.get("inputs"), tests.get("outputs")
        if not all(isinstance(column, list) for column in columns):
            raise _unknown_layout(tests)
        inputs, outputs = columns
        assert isinstance(inputs, list)
        assert isinstance(outputs, list)
        if len(inputs) != len(outputs):
            raise ConfigError(f"tests have {len(inputs)} inputs and {len(outputs)} outputs")
        tests = [{"input": a, "output": b} for a, b in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list | tuple):
        raise _unknown_layout(tests)
    if len(tests) > _MOST_TESTS:
        raise ConfigError(
            f"a row has {len(tests)} tests, the maximum is {_MOST_TESTS}: join some of them"
        )
    return [_read_test(test) for test in tests]


def _read_test(test: object) -> ProgramTest:
    if isinstance(test, str):
        return ProgramTest(test)
    if isinstance(test, Mapping) and {"input", "output"} <= {*test}:
        return ProgramTest(text=str(test["input"]), output=str(test["output"]))
    raise _unknown_layout(test)


def _unknown_layout(tests: object) -> ConfigError:
    return ConfigError(
        f"{str(tests)[:100]!r} are no tests: write Python, a list of Python, or a list of "
        "{input: TEXT, output: TEXT}"
    )


def _passes(program: str, test: ProgramTest, sandbox: Sandbox) -> bool:
    """Return whether a program passes a test.

    A program that ends itself before the test did not pass, so its last line must be a word that
    it cannot know.
    """
    word = secrets.token_hex(16)
    code = f"{program}\n{test.source}\nprint()\nprint({word!r})\n"
    if len(code.encode(errors="replace")) > _LONGEST_PROGRAM or "\0" in code:
        return False
    result = sandbox.python(code, test.text)
    lines = [line.rstrip() for line in result.output.rstrip().split("\n")]
    if result.stopped_by or result.exit_code or lines[-1] != word:
        return False
    if test.output is None:
        return True
    expected = [line.rstrip() for line in test.output.rstrip().split("\n")]
    printed = "\n".join(lines[:-1]).rstrip().split("\n")
    return printed == expected
