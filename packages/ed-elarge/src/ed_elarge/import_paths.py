"""The import paths of EasyDeL and EasyLM: modules without a file, whose source is in a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType


class SourceFinder(MetaPathFinder, InspectLoader):
    """Finds and loads the modules of one package, also for `python -m` and `pickle`.

    Args:
        sources: module path -> source. A path with further parts in the table is a package.
    """

    def __init__(self, sources: Mapping[str, str]):
        self.sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a module of the table."""
        if fullname not in self.sources:
            return None
        # `python -m` makes the origin the first word of `sys.argv`, which jax reads as a text.
        return spec_from_loader(fullname, self, origin=__file__)

    def is_package(self, fullname: str) -> bool:
        """Return whether the table has modules inside this module."""
        return any(module.startswith(f"{fullname}.") for module in self.sources)

    def get_source(self, fullname: str) -> str:
        """Return the source of a module of the table."""
        return self.sources[fullname]


def add_modules(sources: Mapping[str, str]) -> None:
    """Make the modules of a table importable; see `SourceFinder`."""
    sys.meta_path.append(SourceFinder(sources))


def write_command(module: str, name: str) -> str:
    """Return the source of a module that runs a function as its `main`."""
    return f'from {module} import {name} as main\n\nif __name__ == "__main__":\n    main()\n'
