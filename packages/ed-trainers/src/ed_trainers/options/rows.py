"""The kind of the rows that a method reads. Free of jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RowKind:
    """The kind of the rows of a method, for the program that builds the loader.

    Attributes:
        name: name of a schema of `ed_data.schema`.
        settings: arguments of the function `<name>_schema` of that module, which returns the
            schema; empty for a schema without arguments.
    """

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)
