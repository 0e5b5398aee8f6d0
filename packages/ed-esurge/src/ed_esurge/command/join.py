"""Start a replica for a server on another host (`esurge serve --data-parallel-size`)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ed_esurge.command.load import served_engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a replica."""
    parser.add_argument("address", metavar="HOST:PORT", help="the address that the server prints")
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        help="model of the server (default: the model that lacks the most replicas)",
    )


def run(values: argparse.Namespace) -> int:
    """Connect to the server, create its engine, and execute its requests until it ends."""
    from ed_esurge.processes.replica import serve_replica

    def create(arguments: Mapping[str, Any]) -> Any:
        return served_engine(argparse.Namespace(**arguments))

    serve_replica(values.address, values.model_name, create)
    return 0
