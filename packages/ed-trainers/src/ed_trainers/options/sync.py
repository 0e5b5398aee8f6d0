"""Options of a reference that follows the learner. Free of jax. The names are TRL's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import Steps, StrictFlag

#: Weight of the learner in a mixture.
Mixup = Annotated[float, Field(gt=0, le=1)]


class SyncArguments(TrainingArguments):
    """TR-DPO (Gorbatovski et al., arXiv:2404.09656)."""

    sync_ref_model: StrictFlag = False
    """Update the reference from the learner. The weights of the reference are then part of the
    checkpoints. Not for models with adapters, whose reference is the base model."""
    ref_model_mixup_alpha: Mixup = 0.6
    """Weight of the learner in each update of the reference; the rest is the weight of the old
    reference. 1 copies the learner."""
    ref_model_sync_steps: Steps = 512
    """Steps between two updates of the reference."""

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        if self.sync_ref_model:
            return super().idle()
        names = ("ref_model_mixup_alpha", "ref_model_sync_steps")
        idle = [name for name in names if name in self.model_fields_set]
        return [*super().idle(), *((name, "sync_ref_model is false") for name in idle)]
