"""Compare methods that train models of images with the models of transformers on torch."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.method_cases import harness

_ROWS = 6
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
    "initializer_range": 0.3,
}
_TEXT = {
    **{name: value for name, value in _TOWER.items() if not name.endswith("_size")},
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "vocab_size": harness.VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@cache
def folder(kind: str) -> Path:
    """Save a tiny random model of transformers: `ViTForImageClassification`, …."""
    import torch
    import transformers

    torch.manual_seed(0)
    path = Path(tempfile.mkdtemp(prefix="images-"))
    if kind == "ViTForImageClassification":
        # Without biases of keys, whose gradients are rounding errors.
        config: Any = transformers.ViTConfig(**_TOWER, qkv_bias=False)
        config.num_labels = 3
    elif kind == "CLIPModel":
        config = transformers.CLIPConfig(
            text_config={**_TEXT, "eos_token_id": 63}, vision_config=_TOWER, projection_dim=24
        )
    else:
        config = transformers.SiglipConfig(text_config=_TEXT, vision_config=_TOWER)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name in ("logit_scale", "logit_bias"):
                value.fill_(1.5 if name == "logit_scale" else -3.0)
    model.save_pretrained(path)
    return path


def compare(method: str, kind: str, model_type: str, batch: harness.Arrays, **more: Any):
    """Compare a method with the loss of a model of transformers, in float64."""
    import jax.numpy as jnp
    import torch
    import transformers
    from ed_infra import registry
    from ed_trainers.arguments import METHODS
    from transformers.core_model_loading import revert_weight_conversion

    model = registry.get_module(METHODS[method].task, model_type).from_pretrained(
        folder(kind),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    ours = harness.our_outcome(harness.trainer_of(method, model), batch)
    theirs = getattr(transformers, kind).from_pretrained(folder(kind)).eval().double()
    tensors = {name: torch.tensor(array) for name, array in batch.items()}
    tensors = {n: x.double() if x.is_floating_point() else x.long() for n, x in tensors.items()}
    wanted = harness.their_outcome(theirs, theirs(**tensors, **more).loss, {})
    # The names of the checkpoint, which are not those in memory.
    stored = revert_weight_conversion(
        theirs, {name: torch.tensor(value) for name, value in wanted.gradients.items()}
    )
    gradients = {name: value.numpy() for name, value in stored.items()}
    return harness.errors(ours, replace(wanted, gradients=gradients))


def images() -> np.ndarray:
    """Return random images."""
    return np.random.default_rng(0).normal(size=(_ROWS, 3, 8, 8)).astype(np.float32)


def texts() -> np.ndarray:
    """Return random texts, which end with the token 63."""
    ids = np.random.default_rng(1).integers(3, 60, (_ROWS, 12)).astype(np.int32)
    for row in range(_ROWS):
        ids[row, 6 + row] = 63
        ids[row, 7 + row :] = 0
    return ids


def image_classification() -> dict[str, float]:
    """Compare `image_classification` with `ViTForImageClassification`."""
    labels = np.arange(_ROWS, dtype=np.int32) % 3
    batch = {"pixel_values": images(), "labels": labels}
    return compare("image_classification", "ViTForImageClassification", "vit", batch)


def clip() -> dict[str, float]:
    """Compare `contrastive` with `CLIPModel`."""
    batch = {"pixel_values": images(), "input_ids": texts()}
    return compare("contrastive", "CLIPModel", "clip", batch, return_loss=True)


def siglip() -> dict[str, float]:
    """Compare `contrastive` with `SiglipModel`."""
    batch = {"pixel_values": images(), "input_ids": texts()}
    return compare("contrastive", "SiglipModel", "siglip", batch, return_loss=True)


CASES = {
    "image_classification": harness.Case(
        "`ViTForImageClassification` of transformers", image_classification
    ),
    "contrastive, CLIP": harness.Case("`CLIPModel` of transformers", clip),
    "contrastive, SigLIP": harness.Case("`SiglipModel` of transformers", siglip),
}
