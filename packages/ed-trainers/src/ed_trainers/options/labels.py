"""Options of the methods of single answers with a label, good or bad. Free of jax."""

from __future__ import annotations

from typing import Annotated, Literal

from ed_infra.options import NotNegative, choice

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.noise import NoiseArguments
from ed_trainers.options.preference import AnswerArguments, ReferenceArguments
from ed_trainers.options.sync import SyncArguments

KTO_LOSSES = ("kto", "apo_zero_unpaired")


class LabelledArguments(TrainingArguments):
    """Options of `kto` and `bco`."""

    desirable_weight: NotNegative = 1.0
    """Factor on the loss of good answers."""
    undesirable_weight: NotNegative = 1.0
    """Factor on the loss of bad answers."""


class KTOArguments(
    AnswerArguments, LabelledArguments, ReferenceArguments, SyncArguments, NoiseArguments
):
    """Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306)."""

    trainer_type: Literal["kto"] = "kto"
    loss_type: Annotated[str, choice("loss_type", KTO_LOSSES)] = "kto"
    """The loss; `apo_zero_unpaired` (arXiv:2408.06266) does not estimate the divergence."""


class BCOArguments(
    AnswerArguments, LabelledArguments, ReferenceArguments, SyncArguments, NoiseArguments
):
    """Binary classifier optimization (Jung et al., arXiv:2404.04656)."""

    trainer_type: Literal["bco"] = "bco"
