"""Hide torch from transformers. Python runs this file in every process that a test starts.

If torch is installed, transformers imports it, which is half of the start time of a process. No
package of this project imports torch; a process can still import torch explicitly.
"""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

_find_spec = importlib.util.find_spec


def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name == "torch" else _find_spec(name, package)


importlib.util.find_spec = find_spec
