"""The methods, one file each, and `trainer_class`, which returns the trainer of a method.

The table of methods is in `ed_trainers.arguments`, which does not import jax; the file of a method
is imported when its trainer is requested.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ed_trainers.arguments import method

if TYPE_CHECKING:
    from ed_trainers.trainer import Trainer


@cache
def trainer_class(trainer_type: str) -> type[Trainer]:
    """Return the trainer of a method, shipped or of an installed package.

    Raises:
        ConfigError: the method is unknown.
    """
    from ed_trainers.contract import Method
    from ed_trainers.trainer import Trainer, trainer_of

    entry = method(trainer_type)
    implementation = entry.load()
    if isinstance(implementation, Method):
        return trainer_of(implementation, entry, f"{trainer_type}_trainer")
    assert isinstance(implementation, type)
    assert issubclass(implementation, Trainer)
    return implementation
