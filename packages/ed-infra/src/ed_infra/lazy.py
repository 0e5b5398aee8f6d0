"""Lazy package namespaces (PEP 562): a package imports a module at the first use of its names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def attach(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package from one table.

    Args:
        package: The `__name__` of the package.
        names: Public name -> module that defines it (`"Rules": "ed_infra.rules"`). A target
            `"module:attribute"` exports the attribute under another name.

    Returns:
        `(__getattr__, __dir__, __all__)`, to be bound in the package's `__init__`.
    """

    def __getattr__(name: str) -> object:
        target = names.get(name)
        if target is None:
            from ed_infra.errors import did_you_mean

            hint = did_you_mean(name, names)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        module, _, attribute = target.partition(":")
        loaded = importlib.import_module(module)  # noqa: TID251 - the only exception
        value = loaded if attribute == "*" else getattr(loaded, attribute or name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return __getattr__, __dir__, sorted(names)
