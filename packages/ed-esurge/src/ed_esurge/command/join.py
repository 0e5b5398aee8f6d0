"""Start a replica for a server on another host (`esurge serve --data-parallel-size`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ed_esurge.command.load import ModelArguments, served_engine


def join(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="The address that the server prints.")
    ],
    model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model of the server; default: the model that lacks the most replicas.",
        ),
    ] = None,
) -> None:
    """Start a replica for a server on another host (`esurge serve --data-parallel-size`).

    The replica executes requests until the server ends.
    """
    from ed_esurge.processes.replica import serve_replica

    def create(arguments: Mapping[str, Any]) -> Any:
        return served_engine(ModelArguments.model_validate(arguments))

    serve_replica(address, model_name, create)
