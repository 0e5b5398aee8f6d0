"""Measure the first commands of the README in a fresh clone: install, fine-tune, serve.

    uv run python -m tools.bench.fresh_clone [--work FOLDER] [--until install]

The commands are those of the README's blocks. `uv` may read its own cache, so the first row is the
time of an installation whose packages are downloaded. The server is stopped after its first answer.
The table has processor and elapsed time; run it on an idle machine.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tools.bench.measure import command_line
from tools.workspace import ROOT

PARTS = ("install", "fine-tune", "serve")
#: The commands of the README that are measured, without the installation of uv.
COMMAND = re.compile(r"^(?:pip install uv && )?(uv run elarge examples/\w+\.yaml)$", re.MULTILINE)
ADDRESS = "http://127.0.0.1:11556"
#: Chats that the run did not train on; the server gets the first question.
CHATS = "examples/data/appointments_heldout.jsonl"


class FreshCloneError(Exception):
    """A command of the README failed in a fresh clone."""


class Row(NamedTuple):
    """The time of a command in seconds."""

    command: str
    elapsed: float
    processor: float


def read_commands(readme: str) -> list[str]:
    """Return the commands of the README's first blocks: fine-tuning, then serving.

    Raises:
        FreshCloneError: the README has other commands.
    """
    commands = COMMAND.findall(readme)[:2]
    if [Path(command.split()[-1]).stem for command in commands] != ["quickstart", "serve"]:
        raise FreshCloneError(f"the README begins with other commands: {commands}")
    return commands


def list_variables() -> dict[str, str]:
    """Return the environment of a user's shell, without the settings of a checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    values = {name: value for name, value in os.environ.items() if name not in hidden}
    return {
        name: value for name, value in values.items() if name not in ("UV_NO_SYNC", "UV_PROJECT")
    }


def measure_command(command: str, work: Callable[[], None]) -> Row:
    """Call a function that runs a command in child processes, and return its time."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Row(command, time.perf_counter() - began, processor)


def run_command(command: str, folder: Path) -> None:
    """Run a command, and show its output.

    Raises:
        FreshCloneError: the command failed.
    """
    done = subprocess.run(shlex.split(command), cwd=folder, env=list_variables())
    if done.returncode:
        raise FreshCloneError(f"{command} ended with {done.returncode}")


@contextmanager
def start_command(command: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server during the block, and stop the server as Ctrl-C does."""
    server = subprocess.Popen(
        shlex.split(command), cwd=folder, env=list_variables(), start_new_session=True
    )
    try:
        yield server
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGINT)
        server.wait(120)


def write_request(chats: str) -> bytes:
    """Return the body of a request with the first of the chats, without its answer."""
    *messages, _ = json.loads(chats.partition("\n")[0])["messages"]
    return json.dumps({"messages": messages, "max_tokens": 64}).encode()


def serve_answer(command: str, folder: Path, seconds: float = 900) -> None:
    """Serve until the first answer of a chat.

    Raises:
        FreshCloneError: the server ended, or did not answer in time.
    """
    request = urllib.request.Request(
        f"{ADDRESS}/v1/chat/completions",
        write_request((folder / CHATS).read_text("utf-8")),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + seconds
    with start_command(command, folder) as server:
        while time.monotonic() < deadline and server.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    print(answer.read().decode())
                    return
            except urllib.error.HTTPError as error:
                raise FreshCloneError(
                    f"the server refused the request: {error.read()!r}"
                ) from error
            except OSError:
                time.sleep(0.2)
    raise FreshCloneError(f"{command} did not answer")


def measure_clone(folder: Path, until: str = PARTS[-1]) -> list[Row]:
    """Clone this repository into a folder, run the commands there, and return their times.

    Raises:
        FreshCloneError: a command failed.
    """
    run_command(f"git clone --quiet {shlex.quote(str(ROOT))} {shlex.quote(str(folder))}", ROOT)
    fine_tune, serve = read_commands((folder / "README.md").read_text("utf-8"))
    work = {
        "install": ("uv sync", lambda: run_command("uv sync --quiet", folder)),
        "fine-tune": (fine_tune, lambda: run_command(fine_tune, folder)),
        "serve": (f"{serve}, until the first answer", lambda: serve_answer(serve, folder)),
    }
    parts = PARTS[: PARTS.index(until) + 1]
    return [measure_command(*work[part]) for part in parts]


def main() -> None:
    """Measure the commands, and print a table."""
    parser = command_line("tools.bench.fresh_clone", __doc__)
    parser.add_argument("--work", type=Path, help="folder of the clone; default: a temporary one")
    parser.add_argument("--until", choices=PARTS, default=PARTS[-1], help="the last command")
    values = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = values.work or Path(name) / "clone"
        rows = measure_clone(folder.absolute(), values.until)
        if values.work is None:
            shutil.rmtree(folder)
    print("| command | processor time | time |\n| --- | --- | --- |")
    for row in rows:
        print(f"| `{row.command}` | {row.processor:.0f} s | {row.elapsed:.0f} s |")


if __name__ == "__main__":
    main()
