"""Subjects of models of images. Legend: b images, c channels, h height, w width, d hidden."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.enums import TaskType
from ed_infra.testing import require_torch

from ed_models.conformance.subjects import B, Cases, S, Subject

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Rows and columns of patches of images of different sizes. With one column, torch 2.13 gives all
#: patches the position of the first one.
_SIZES = ((3, 4), (2, 5), (6, 2), (1, 2))


class VisionSubject(Subject):
    """A vision tower: hidden states, and pooled features if the tower has them."""

    checks = ("parity", "gradients", "saved", "layouts", "meshes")
    task = TaskType.BASE_VISION
    zero_gradient = 16.0  # that of the bias that all keys share

    def __init__(self, model_type: str, row: str, module_class: type[Any], cases: Cases):
        super().__init__(model_type, row, module_class, cases)
        config, rng = self.fields.get("vision_config", self.fields), np.random.default_rng(1)
        channels: int = config.get("num_channels", 3)
        if "image_size" in config:
            height, width = np.broadcast_to(config["image_size"], 2)
            pixels = rng.normal(size=(B, channels, height, width))
            self.images = {"pixel_values": pixels.astype(np.float32)}
        else:
            pixels = rng.normal(
                size=(B, max(map(math.prod, _SIZES)), channels * config["patch_size"] ** 2)
            )
            real = np.arange(pixels.shape[1]) < np.prod(_SIZES, axis=1)[:, None]
            self.images = {
                "pixel_values": (pixels * real[..., None]).astype(np.float32),
                "pixel_attention_mask": real.astype(np.int32),
                "spatial_shapes": np.array(_SIZES, np.int32),
            }

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.fields.get("text_config", self.fields).get("vocab_size", 160)

    @property
    def real(self) -> np.ndarray:
        return np.ones(B, bool)

    def build_full_inputs(self) -> dict[str, Any]:
        return dict(self.images)

    def build_padded_inputs(self) -> dict[str, Any]:
        return self.build_full_inputs()

    def output(self, result: Any) -> Any:
        hidden, pooled = result.last_hidden_state, result.pooler_output
        if pooled is None:  # the tower of Pixtral has one row for all images in `transformers`
            return hidden.reshape(B, -1, hidden.shape[-1])
        join = jnp.concatenate if isinstance(hidden, jax.Array) else require_torch().cat
        return join([hidden.reshape(hidden.shape[0], -1), pooled], 1)

    def torch_arrays(self) -> dict[str, Any]:
        """Return the arguments of Hugging Face's model."""
        torch = require_torch()
        arrays = {name: torch.tensor(np.asarray(x)) for name, x in self.training().items()}
        return {n: x if x.is_floating_point() else x.long() for n, x in arrays.items()}

    def torch_outputs(self, model: PreTrainedModel) -> np.ndarray:
        torch = require_torch()
        arrays = {
            name: x for name, x in self.torch_arrays().items() if name in self.build_full_inputs()
        }
        with torch.no_grad():
            return self.output(model(**arrays)).float().numpy()

    def torch_loss(self) -> Any:
        return self.output(self.torch_model(**self.torch_arrays())).square().mean()


class ImageClassifierSubject(VisionSubject):
    """A vision tower that classifies images."""

    checks = ("parity", "gradients", "saved", "meshes")
    task = TaskType.IMAGE_CLASSIFICATION

    def training(self) -> dict[str, Any]:
        return {**self.build_full_inputs(), "labels": np.array([1, 0, 1, 1])}

    def output(self, result: Any) -> Any:
        return result.logits

    def torch_loss(self) -> Any:
        return self.torch_model(**self.torch_arrays()).loss


class ImageTextMatchSubject(VisionSubject):
    """A model that compares images with texts: similarities and both embeddings."""

    checks = ("parity", "gradients", "saved", "layouts", "meshes")
    task = TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION

    def __init__(self, model_type: str, row: str, module_class: type[Any], cases: Cases):
        super().__init__(model_type, row, module_class, cases)
        # Texts end with the end token, followed by padding.
        end = self.fields["text_config"]["eos_token_id"]
        self.mask = np.stack([np.arange(S) < S - pad for pad in self.pad]).astype(np.int32)
        self.ids = np.where(self.mask, self.ids, 0)
        self.ids[np.arange(B), S - 1 - np.array(self.pad)] = end

    def build_full_inputs(self) -> dict[str, Any]:
        return {"input_ids": self.ids, **self.images}

    def build_padded_inputs(self) -> dict[str, Any]:
        return {**self.build_full_inputs(), "attention_mask": self.mask}

    def output(self, result: Any) -> Any:
        parts = result.logits_per_image, result.image_embeds, result.text_embeds
        join = jnp.concatenate if isinstance(parts[0], jax.Array) else require_torch().cat
        return join(parts, 1)

    def torch_outputs(self, model: PreTrainedModel) -> np.ndarray:
        torch = require_torch()
        arrays = {**self.torch_arrays(), "attention_mask": torch.tensor(self.mask)}
        with torch.no_grad():
            return self.output(model(**arrays)).float().numpy()

    def torch_loss(self) -> Any:
        return self.torch_model(**self.torch_arrays(), return_loss=True).loss
