"""Options of `ctc`. Free of jax."""

from __future__ import annotations

from typing import ClassVar, Literal

from ed_infra.options import Positive

from ed_trainers.options.base import TrainingArguments


class CTCArguments(TrainingArguments):
    """Connectionist temporal classification (Graves et al. 2006): the log-probability of a
    transcript, summed over all alignments of its labels with the time steps.

    The model's configuration has `ctc_loss_reduction` and `ctc_zero_infinity`, as in transformers.
    An evaluation logs `eval_wer` and `eval_cer`, the error rates of words and characters."""

    DEFAULT_LENGTH: ClassVar[int] = 448

    trainer_type: Literal["ctc"] = "ctc"
    learning_rate: Positive = 1e-4
