"""Subjects of models of images. Legend: b images, c channels, h height, w width, d hidden."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.enums import TaskType
from ed_infra.testing import require_torch

from ed_models.conformance.subjects import B, Cases, Subject


class VisionSubject(Subject):
    """A vision tower: hidden states, and pooled features if the tower has them."""

    checks = ("parity", "gradients", "saved", "layouts", "meshes")
    task = TaskType.BASE_VISION
    zero_gradient = 16.0  # that of the bias that all keys share

    def __init__(self, model_type: str, row: str, module_class: type[Any], cases: Cases):
        super().__init__(model_type, row, module_class, cases)
        config = self.fields.get("vision_config", self.fields)
        height, width = np.broadcast_to(config["image_size"], 2)
        shape = B, config.get("num_channels", 3), height, width
        pixels = np.random.default_rng(1).normal(size=shape)
        self.pixel_values = pixels.astype(np.float32)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.fields.get("text_config", self.fields).get("vocab_size", 160)

    @property
    def real(self) -> np.ndarray:
        return np.ones(B, bool)

    def whole(self) -> dict[str, Any]:
        return {"pixel_values": self.pixel_values}

    def padded(self) -> dict[str, Any]:
        return self.whole()

    def output(self, result: Any) -> Any:
        hidden, pooled = result.last_hidden_state, result.pooler_output
        if pooled is None:
            return hidden
        join = jnp.concatenate if isinstance(hidden, jax.Array) else require_torch().cat
        return join([hidden, pooled[:, None]], 1)

    def torch_arrays(self) -> dict[str, Any]:
        """Return the arguments of Hugging Face's model."""
        torch = require_torch()
        arrays = {name: torch.tensor(np.asarray(x)) for name, x in self.training().items()}
        return {n: x if x.is_floating_point() else x.long() for n, x in arrays.items()}

    def torch_outputs(self, model: Any) -> np.ndarray:
        torch = require_torch()
        arrays = {name: x for name, x in self.torch_arrays().items() if name in self.whole()}
        with torch.no_grad():
            return self.output(model(**arrays)).float().numpy()

    def torch_loss(self) -> Any:
        return self.output(self.torch_model(**self.torch_arrays())).square().mean()
