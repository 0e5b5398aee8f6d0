r"""Documented flows of the official clients with a server in a separate process.

`openai` and `anthropic` are in the test group; their flows over a scripted engine run by default.
The flows of `litellm`, `langchain`, `instructor` and `cohere`, and those over a model, run nightly.
These clients have many dependencies, so they require a separate environment:

    uv venv clients --python 3.11
    uv pip install -p clients litellm langchain langchain-openai langchain-anthropic \
        instructor cohere
    EASYDEL_CLIENTS_PYTHON=clients/bin/python pytest -m "" tests/e2e/test_official_clients.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "clients"
#: Modules that the flows of a client import.
CLIENTS = {
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "litellm": ("litellm",),
    "langchain": ("langchain", "langchain_openai", "langchain_anthropic"),
    "instructor": ("instructor", "openai", "anthropic"),
    "cohere": ("cohere",),
}
NIGHTLY = pytest.mark.nightly


def interpreter(client: str) -> str:
    """Return a Python with the client, or skip the test."""
    modules = CLIENTS[client]
    if all(importlib.util.find_spec(name) for name in modules):
        return sys.executable
    other = os.environ.get("EASYDEL_CLIENTS_PYTHON")
    if other is None:
        pytest.skip(
            f"{client} is not installed, and EASYDEL_CLIENTS_PYTHON does not name a Python that "
            "has it; see the docstring of this file for the installation"
        )
    found = subprocess.run([other, "-c", f"import {', '.join(modules)}"], capture_output=True)
    if found.returncode:
        pytest.skip(f"{other} cannot import {client}: {found.stderr.decode()[-300:]}")
    return other


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return a function that starts a server of a kind once and returns its URL."""
    running: dict[str, tuple[subprocess.Popen[str], str]] = {}

    def url_of(kind: str) -> str:
        if kind not in running:
            folder = tmp_path_factory.mktemp(kind)
            process = subprocess.Popen(
                [sys.executable, str(FOLDER / "server.py"), kind, str(folder)],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving at "), line
            running[kind] = process, line.split()[2]
        return running[kind][1]

    yield url_of
    for process, _ in running.values():
        process.terminate()
    for process, _ in running.values():
        assert process.wait(60) == 0, "the server exited with an error"


@pytest.mark.daily("openai*")
@pytest.mark.parametrize(
    ("client", "kinds"),
    [
        ("openai", ["scripted"]),
        ("anthropic", ["scripted"]),
        *(pytest.param(client, ["scripted", "tiny"], marks=NIGHTLY) for client in CLIENTS),
    ],
)
def test_official_clients_complete_documented_flows(
    client: str,
    kinds: list[str],
    start: Callable[[str], str],
    record_property: Callable[[str, object], None],
) -> None:
    python = interpreter(client)
    command = [python, str(FOLDER / f"{client}_flows.py"), *map(start, kinds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    flows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    failed = [one for one in flows if one["error"]]
    record_property("summary", f"{client}: {len(flows) - len(failed)} of {len(flows)} flows")
    errors = "\n".join(f"{one['server']} {one['flow']}:\n{one['error']}" for one in failed)
    assert not failed, errors
    assert done.returncode == 0 and flows, done.stderr
