"""Options of `cross_encoder`. Free of jax."""

from __future__ import annotations

from typing import Annotated, Literal

from ed_infra.options import Positive, choice
from pydantic import Field, ValidationInfo, field_validator

from ed_trainers.options.base import RowKind, TrainingArguments, conflict

#: The losses of `cross_encoder`.
BCE, SCORE_MSE, CONTRASTIVE = "binary_cross_entropy", "mse", "localized_contrastive"
CROSS_ENCODER_LOSSES = (BCE, SCORE_MSE, CONTRASTIVE)
CROSS_ENCODER_ALIASES = {
    "bce": BCE,
    "BinaryCrossEntropyLoss": BCE,
    "MSELoss": SCORE_MSE,
    "lce": CONTRASTIVE,
}


class CrossEncoderArguments(TrainingArguments):
    """A cross-encoder (reranker): a score for each pair of a query and a document."""

    DEFAULT_LENGTH = 512
    trainer_type: Literal["cross_encoder"] = "cross_encoder"
    num_negatives: Annotated[int, Field(ge=0, le=1024)] = 0
    """With localized_contrastive: number of negative documents of a row: `negative`, a text or
    a list of texts, or `negative_1`, `negative_2`, …."""
    pos_weight: Positive | None = None
    """With binary_cross_entropy: factor on the loss of the label 1. None: 1."""
    loss_type: Annotated[
        str,
        choice("loss_type", CROSS_ENCODER_LOSSES, CROSS_ENCODER_ALIASES),
        Field(validate_default=True),
    ] = BCE
    """`binary_cross_entropy` and `mse`: the score of a pair follows its `label`, 0 to 1, or any
    number with `mse`. `localized_contrastive`: the cross-entropy of the positive document
    among the positive and the negative documents of its row (arXiv:2101.08751)."""

    @field_validator("loss_type")
    @classmethod
    def _fits(cls, value: str, info: ValidationInfo) -> str:
        negatives = info.data.get("num_negatives", 0)
        if (value == CONTRASTIVE) != (negatives > 0):
            change = "set num_negatives" if value == CONTRASTIVE else "omit num_negatives"
            reads = "compares" if value == CONTRASTIVE else "does not read"
            raise conflict(f"loss_type {value} {reads} negative documents: {change}")
        if value != BCE and info.data.get("pos_weight") is not None:
            raise conflict(f"pos_weight has no effect with loss_type {value}: omit it")
        return value

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the documents of a row that are compared; empty if a row has one document."""
        if self.loss_type != CONTRASTIVE:
            return ()
        return ("positive", *(f"negative_{i + 1}" for i in range(self.num_negatives)))

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        if self.loss_type == CONTRASTIVE:
            return RowKind("candidate", {"negatives": self.num_negatives})
        return RowKind("relevance")
