"""Python runs this in every process that a test starts: transformers does not find torch there.

transformers imports torch with its own modules wherever torch is installed, which is half of the
start of a process. No package imports torch, and a process that does so itself still can.
"""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

_find_spec = importlib.util.find_spec


def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name == "torch" else _find_spec(name, package)


importlib.util.find_spec = find_spec
