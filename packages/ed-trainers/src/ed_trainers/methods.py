"""Method name -> trainer. The options of each method are in `ed_trainers.arguments`, jax-free."""

from __future__ import annotations

from ed_infra.errors import unknown_name

from ed_trainers.sft import SFTTrainer
from ed_trainers.trainer import Trainer

TRAINERS: dict[str, type[Trainer]] = {"sft": SFTTrainer}


def trainer_class(trainer_type: str) -> type[Trainer]:
    """Return the trainer of a method.

    Raises:
        ConfigError: the method is not known.
    """
    try:
        return TRAINERS[trainer_type]
    except KeyError:
        raise unknown_name("trainer_type", trainer_type, TRAINERS) from None
