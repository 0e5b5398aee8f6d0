"""The command line: server, conversation and load test for a model directory or hub id.

    esurge serve MODEL     an OpenAI-compatible server
    esurge chat MODEL      a conversation in the terminal
    esurge run-batch MODEL the answers of a file of requests
    esurge join HOST:PORT  a replica for a server on another host
    esurge bench MODEL     load test of a server: throughput and latencies
    esurge bench serve ... load test with arrival times and data sets, as `vllm bench serve`

`python -m ed_esurge` is the same program.

Options of the engine are flags of the first two: `--max-model-len 4096`. A command is a file with
`add_arguments` and `run`, an entry of `COMMANDS`, and a case of `_module`.

Exit codes: 0 success; 2 invalid input (one message); 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType

from ed_infra.errors import EasyDeLError
from ed_infra.garbage import pause_collection
from ed_infra.logging import show_messages

from ed_esurge.command.flags import read_config

BAD_INPUT, INTERRUPTED = 2, 130
#: Command -> its description. The module of a command is imported only for that command.
COMMANDS = {
    "serve": "serve a model behind an OpenAI-compatible API",
    "chat": "talk with a model in the terminal",
    "run-batch": "answer the requests of a file",
    "join": "start a replica for a server on another host",
    "bench": "put load on a server and measure it",
    "bench-serve": "load test with arrival times and data sets; also `bench serve`",
}


def _module(command: str) -> ModuleType:
    match command:
        case "serve":
            from ed_esurge.command import serve as module
        case "chat":
            from ed_esurge.command import chat as module
        case "run-batch":
            from ed_esurge.command import run_batch as module
        case "join":
            from ed_esurge.command import join as module
        case "bench":
            from ed_esurge.command import bench as module
        case _:
            from ed_esurge.command import bench_serve as module
    return module


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the arguments (default: `sys.argv`) and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="esurge", description="Serve, chat with and measure language models."
    )
    text = f"esurge {metadata.version('ed-esurge')}"
    parser.add_argument("--version", action="version", version=text, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] == ["bench", "serve"]:
        words[:2] = ["bench-serve"]
    for name, doc in COMMANDS.items():
        if name not in words[:1]:
            commands.add_parser(name, help=doc)
            continue
        with pause_collection():
            module = _module(name)
        subparser = commands.add_parser(
            name,
            help=doc,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
    # transformers reads the variable at import, and advises to install torch, which is not used
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    subparsers = dict(commands.choices)
    values = parser.parse_args(words)
    show_messages(logging.INFO)
    try:
        if getattr(values, "config", None) is not None:
            # Flags of the file come first: a later flag replaces an earlier one.
            flags = read_config(values.config, subparsers[values.command])
            at = words.index(values.command) + 1
            values = parser.parse_args([*words[:at], values.model, *flags, *words[at:]])
        values.words = words
        return _module(values.command).run(values)
    except KeyboardInterrupt:
        return INTERRUPTED
    except EasyDeLError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
