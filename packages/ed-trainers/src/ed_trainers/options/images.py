"""Options of the methods for models of images. Free of jax."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from ed_trainers.options.base import TrainingArguments, conflict
from ed_trainers.options.classification import ClassifierArguments


class ImageClassificationArguments(ClassifierArguments):
    """Classification of images: the cross-entropy of the class of each image."""

    ROWS = "image_classification"

    trainer_type: Literal["image_classification"] = "image_classification"


class ContrastiveArguments(TrainingArguments):
    """Images and their captions in one space: the loss of the model's family, CLIP's or SigLIP's,
    over all pairs of the step."""

    trainer_type: Literal["contrastive"] = "contrastive"

    @field_validator("gradient_accumulation_steps")
    @classmethod
    def _whole_step(cls, value: int) -> int:
        if value != 1:
            raise conflict(
                "contrastive would compare images and texts only within a microbatch, not in the "
                "whole step: set gradient_accumulation_steps to 1"
            )
        return value
