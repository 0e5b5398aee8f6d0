"""Options of `embedding`. Free of jax."""

from __future__ import annotations

from typing import Annotated, Literal

from ed_infra.options import Count, Positive, choice
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from ed_trainers.options.base import NoiseArguments, RowKind, StrictFlag, conflict

Temperatures = Annotated[
    tuple[Positive, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: (value,) if isinstance(value, int | float) else value),
]
#: The losses of `embedding`, with the names of sentence-transformers.
RANKING, COSINE, COSENT = "multiple_negatives_ranking", "cosine_similarity", "cosent"
MARGIN_MSE, MSE = "margin_mse", "mse"
EMBEDDING_LOSSES = (RANKING, COSINE, COSENT, MARGIN_MSE, MSE)
EMBEDDING_ALIASES = {
    "infonce": RANKING,
    "mnrl": RANKING,
    "MultipleNegativesRankingLoss": RANKING,
    "CosineSimilarityLoss": COSINE,
    "CoSENTLoss": COSENT,
    "MarginMSELoss": MARGIN_MSE,
    "MSELoss": MSE,
}
#: Losses that compare each pair with the other pairs of the step.
WHOLE_STEP = (RANKING, COSENT)
#: Losses of pairs with a score.
SCORED = (COSINE, COSENT)


class EmbeddingArguments(NoiseArguments):
    """Embeddings of texts: pairs with the same meaning, pairs with a score, or a teacher."""

    trainer_type: Literal["embedding"] = "embedding"
    num_negatives: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of negative texts of a row, for multiple_negatives_ranking and margin_mse: `negative`,
    a text or a list of texts, or `negative_1`, `negative_2`, …."""
    temperature: Temperatures = (0.05,)
    """Divisor of the cosines of multiple_negatives_ranking and cosent: 1 / `scale` of
    sentence-transformers. The losses of several temperatures are averaged."""
    symmetric: StrictFlag = False
    """With multiple_negatives_ranking: also find the anchor of each positive."""
    matryoshka_dims: tuple[Count, ...] = ()
    """Lengths to which embeddings are cut (arXiv:2205.13147); each length has a separate loss. The
    whole embedding has a loss only if its length is listed."""
    matryoshka_weights: tuple[Positive, ...] | None = None
    """Weights of the losses of `matryoshka_dims`; None: 1 each."""
    mini_batch_size: Count | None = None
    """Number of rows whose activations exist at the same time (GradCache, arXiv:2101.06983). The
    loss still compares all texts of the step. None: all rows."""
    loss_type: Annotated[
        str,
        choice("loss_type", EMBEDDING_LOSSES, EMBEDDING_ALIASES),
        Field(validate_default=True),
    ] = RANKING
    """`multiple_negatives_ranking` (InfoNCE, arXiv:1807.03748): the positive of each anchor among
    all positives and negatives of the step. `cosine_similarity` and `cosent`: the cosine of
    `sentence1` and `sentence2` follows `score`. `margin_mse`: the margin between positive and
    negatives equals that of a teacher. `mse`: each embedding equals that of `teacher_model`."""

    @field_validator("matryoshka_weights")
    @classmethod
    def _one_each(
        cls, value: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        dims = info.data.get("matryoshka_dims", value)
        if value is not None and len(value) != len(dims):
            raise conflict(
                f"{len(value)} weights for {len(dims)} matryoshka_dims: set one per dimension"
            )
        return value

    @field_validator("loss_type")
    @classmethod
    def _fits(cls, value: str, info: ValidationInfo) -> str:
        parts, negatives = (
            info.data.get("gradient_accumulation_steps"),
            info.data.get("num_negatives", 0),
        )
        if value in WHOLE_STEP and parts not in (None, 1):
            raise conflict(
                f"embedding with loss_type {value} would compare texts only within a microbatch, "
                "not in the whole step: set gradient_accumulation_steps to 1, and mini_batch_size "
                "to limit the memory"
            )
        if value == MARGIN_MSE and not negatives:
            raise conflict("margin_mse compares a positive with negatives: set num_negatives")
        if negatives and value not in (RANKING, MARGIN_MSE):
            raise conflict(f"loss_type {value} reads no negatives: omit num_negatives")
        if value == MSE and info.data.get("matryoshka_dims"):
            raise conflict("mse compares whole embeddings: omit matryoshka_dims")
        return value

    @property
    def sides(self) -> tuple[str, ...]:
        """Names of the texts of a row."""
        if self.loss_type in SCORED:
            return ("sentence1", "sentence2")
        negatives = (f"negative_{number + 1}" for number in range(self.num_negatives))
        return ("anchor", "positive", *negatives)

    @property
    def scores(self) -> tuple[str, ...]:
        """Names of the numbers of a row."""
        if self.loss_type in SCORED:
            return ("score",)
        count = self.num_negatives if self.loss_type == MARGIN_MSE else 0
        return tuple(f"margin_{number + 1}" for number in range(count))

    @property
    def rows(self) -> RowKind:
        """Kind of the rows."""
        if self.loss_type in SCORED:
            return RowKind("scored_pair")
        margins = self.loss_type == MARGIN_MSE
        if not self.num_negatives:
            return RowKind("embedding")
        return RowKind("embedding", {"negatives": self.num_negatives, "margins": margins})

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        reason = f"loss_type is {self.loss_type}"
        temperature_names = () if self.loss_type in WHOLE_STEP else ("temperature",)
        symmetric_names = () if self.loss_type == RANKING else ("symmetric",)
        unused = [
            name for name in (*temperature_names, *symmetric_names) if name in self.model_fields_set
        ]
        return [*super().idle(), *((name, reason) for name in unused)]
