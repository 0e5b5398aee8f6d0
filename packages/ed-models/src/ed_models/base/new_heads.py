"""Random values of heads that checkpoints of other tasks lack."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.logging import get_logger, once

from ed_models.base.export import TORCH_CLASSES
from ed_models.weights.blocks import Shapes

logger = get_logger(__name__)


#: Last parts of the names of parameters that only training reads: they replace masked inputs.
TRAINING_ONLY = ("mask_token", "masked_spec_embed")


def new_training_tensors(config: EasyDeLBaseConfig, missing: Shapes) -> dict[str, np.ndarray]:
    """Return random values of missing parameters that only training reads, and log them.

    Args:
        config: configuration of the checkpoint.
        missing: shapes of the tensors that the checkpoint lacks.
    """
    names = [name for name in missing if name.rpartition(".")[2] in TRAINING_ONLY]
    if names:
        once(
            logger,
            f"the checkpoint has no {', '.join(names)}, which only training with masked inputs "
            "reads: the values are random",
        )
    rng, std = np.random.default_rng(0), getattr(config, "initializer_range", 0.02)
    return {name: rng.normal(0.0, std, missing[name]).astype(np.float32) for name in names}


def new_heads(
    task: TaskType,
    config: EasyDeLBaseConfig,
    missing: Shapes,
    owners: Collection[str],
    norms: Collection[str | None] = (),
) -> dict[str, np.ndarray]:
    """Return random matrices, zero biases and norms of one; log a warning.

    Args:
        task: the task that is loaded. A checkpoint of this task gets no new values.
        config: configuration of the checkpoint; `architectures` names the saved class.
        missing: shapes of the tensors that the checkpoint lacks.
        owners: names of the layers that may be new.
        norms: names of norms among them.
    """
    saved = config.architectures or []
    ending = TORCH_CLASSES[task].removeprefix("AutoModel")
    if ending and any(name.endswith(ending) for name in saved):
        return {}
    new, rng = dict[str, np.ndarray](), np.random.default_rng(0)
    std = getattr(config, "initializer_range", 0.02)
    for name, shape in missing.items():
        owner = name.rpartition(".")[0]
        if not {name, owner} & {*owners}:
            continue
        if len(shape) == 2:
            new[name] = rng.normal(0.0, std, shape).astype(np.float32)
        else:
            is_norm = owner in norms and name.endswith(".weight")
            new[name] = np.full(shape, float(is_norm), np.float32)
    if new:
        once(
            logger,
            f"the checkpoint was saved from {', '.join(saved) or 'an unknown class'}: "
            f"{', '.join(new)} are randomly initialized and must be trained",
        )
    return new
