"""The names and commands of EasyLM, with the parts of this project.

The import package `EasyLM` has EasyLM's paths for these names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ed_infra import lazy

if TYPE_CHECKING:
    from ed_elarge.easylm.classes import CheckpointManager as CheckpointManager
    from ed_elarge.easylm.classes import DataProcessor as DataProcessor
    from ed_elarge.easylm.classes import LLaMAModel as LLaMAModel
    from ed_elarge.easylm.classes import ModelServer as ModelServer
    from ed_elarge.easylm.classes import create_optimizer as create_optimizer

_CLASSES = "ed_elarge.easylm.classes"
__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    {
        "CheckpointManager": _CLASSES,
        "DataProcessor": _CLASSES,
        "LLaMAModel": _CLASSES,
        "ModelServer": _CLASSES,
        "create_optimizer": _CLASSES,
    },
)
