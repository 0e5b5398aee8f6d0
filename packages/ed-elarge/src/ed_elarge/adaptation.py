"""The keys of sections that adapt a model: low-rank adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from ed_infra.options import Options
from pydantic import BeforeValidator, Field

Pattern = Annotated[str, Field(min_length=1)]
Patterns = Annotated[
    tuple[Pattern, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


class LoraSection(Options):
    """Low-rank adapters on the model's layers; all other parameters stay as they are."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "r": "rank",
        "lora_rank": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "target_modules": "targets",
        "lora_pattern": "targets",
        "use_rslora": "rslora",
        "use_dora": "dora",
    }

    rank: Annotated[int, Field(ge=1, le=2**14)] = 16
    """Inner dimension of an adapter."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """What an adapter adds is multiplied by `alpha / rank`. None: `rank`."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of an adapter's inputs, in training."""
    targets: Patterns | None = None
    """Patterns over the names of linear layers and embeddings. None: every linear layer but the
    head."""
    rslora: bool = False
    """Multiply by `alpha / sqrt(rank)` instead."""
    dora: bool = False
    """Learn the length of each column of the weights too."""
