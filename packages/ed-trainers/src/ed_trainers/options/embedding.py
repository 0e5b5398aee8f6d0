"""Options of `embedding`. Free of jax."""

from __future__ import annotations

from typing import Annotated, Literal

from ed_infra.options import Count, Positive
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from ed_trainers.options.base import Flag, conflict
from ed_trainers.options.noise import NoiseArguments

Temperatures = Annotated[
    tuple[Positive, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: (value,) if isinstance(value, int | float) else value),
]


class EmbeddingArguments(NoiseArguments):
    """Embeddings of pairs of texts with the same meaning (InfoNCE, arXiv:1807.03748).

    The negatives of an anchor are the other positives of the step, so a step is one microbatch.
    """

    trainer_type: Literal["embedding"] = "embedding"
    temperature: Temperatures = (0.05,)
    """Divisor of the cosines. The losses of several temperatures are averaged."""
    symmetric: Flag = False
    """Also find the anchor of each positive."""
    matryoshka_dims: tuple[Count, ...] = ()
    """Lengths to which embeddings are cut (arXiv:2205.13147); each length has a separate loss. The
    whole embedding has a loss only if its length is listed."""
    matryoshka_weights: tuple[Positive, ...] | None = None
    """Weights of the losses of `matryoshka_dims`; None: 1 each."""

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

    @field_validator("gradient_accumulation_steps")
    @classmethod
    def _one_microbatch(cls, value: int) -> int:
        if value != 1:
            raise conflict(
                "embedding would compare texts only within a microbatch, not in the whole step: "
                "set gradient_accumulation_steps to 1"
            )
        return value
