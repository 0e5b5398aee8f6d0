"""The methods, one file each, and `trainer_class`, which finds one by its name.

The table of methods is in `ed_trainers.arguments`, jax-free; a file is imported when its method is
asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ed_infra import lazy

from ed_trainers.arguments import METHODS, method

if TYPE_CHECKING:
    from ed_trainers.trainer import Trainer

_load, _, _ = lazy.attach(__name__, {name: entry.trainer for name, entry in METHODS.items()})


def trainer_class(trainer_type: str) -> type[Trainer]:
    """Return the trainer of a method; the method's file is imported here.

    Raises:
        ConfigError: the method is not known.
    """
    method(trainer_type)
    return cast("type[Trainer]", _load(trainer_type))
