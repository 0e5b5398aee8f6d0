"""DINOv3 (Siméoni et al. 2025): a self-supervised vision transformer with rotary positions.

- queries and keys of the patches are rotated by the height and the width of their position; the
  class token and the registers are not
- training shifts, stretches and scales the positions at random (`pos_embed_*`)
- layers with trained factors on their outputs; a gated feed-forward layer in the largest models

Numbers and parameter names follow Hugging Face's `modeling_dinov3_vit.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, Rotary
from ed_layers.mlp import MLP, GatedMLP
from ed_layers.parts import Parts

from ed_models.adapters.peft_layout import Modules
from ed_models.body.scaled_vision import ScaledVisionLayer
from ed_models.body.vision import VisionEmbeddings, VisionTower


@register_config("dinov3_vit")
class DINOv3ViTConfig(EasyDeLBaseConfig, transformers.DINOv3ViTConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "dinov3_vit"


class DINOv3Layer(ScaledVisionLayer):
    """A pre-norm layer with rotary positions; each projection has its own field for a bias."""

    def __init__(self, parts: Parts, index: int):
        config = parts.config
        attention = SelfAttention(
            parts,
            bias=config.query_bias,
            key_bias=config.key_bias,
            value_bias=config.value_bias,
            out_bias=config.proj_bias,
            position=Rotary(),
            mask=MaskRule(causal=False),
        )
        mlp = GatedMLP if config.use_gated_mlp else MLP
        super().__init__(parts, index, self_attn=attention, mlp=mlp(parts, bias=config.mlp_bias))


@register_module(TaskType.BASE_VISION, config=DINOv3ViTConfig, model_type="dinov3_vit")
class DINOv3ViTModel(VisionTower):
    """Embeddings, layers and a norm; the pooled output is the class token."""

    layer_class = DINOv3Layer
    names = {
        "embeddings.patch_embedding": "embeddings.patch_embeddings",
        "layers": "layer",
        "self_attn": "attention",
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
    }
    # The modules of transformers 5; checkpoints have `layer.0` alone.
    MODULES = Modules({"layer": "model.layer"})
    ignored_names = ("embeddings.register_tokens",)  # a model without registers has an empty tensor

    @staticmethod
    def embedding(parts):
        return VisionEmbeddings(
            parts,
            tokens=["cls_token"],
            lead=2,
            registers=parts.config.num_register_tokens,
            masks=2,
            positions=False,
        )

    def rope(self, size, key):
        config, (p, q) = self.config, self.embeddings.patch_embedding.size
        rows, columns = size[0] // p, size[1] // q
        axes = [(np.arange(n) + 0.5) / n * 2 - 1 for n in (rows, columns)]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
        places = jnp.asarray(grid, jnp.float32)
        if key is not None:
            places = self.augment_positions(places, key)
        half = config.hidden_size // config.num_attention_heads // 2
        exponents = np.arange(0, 1, 2 / half, dtype=np.float32)
        angles = 2 * jnp.pi * places[:, :, None] / config.rope_theta**exponents
        angles = jnp.pad(angles.reshape(-1, half), ((self.embeddings.prefix, 0), (0, 0)))
        return jnp.cos(angles), jnp.sin(angles)

    def augment_positions(self, places: jax.Array, key: jax.Array) -> jax.Array:
        """Return positions that are shifted, stretched along each axis, and scaled at random."""
        config = self.config
        keys = jax.random.split(jax.random.fold_in(key, 0), 3)
        if config.pos_embed_shift is not None:
            most = config.pos_embed_shift
            places = places + jax.random.uniform(keys[0], (1, 2), minval=-most, maxval=most)
        factors = (config.pos_embed_jitter, (1, 2)), (config.pos_embed_rescale, (1, 1))
        for (most, shape), axis_key in zip(factors, keys[1:], strict=True):
            if most is not None:
                most = np.log(most)
                change = jax.random.uniform(axis_key, shape, minval=-most, maxval=most)
                places = places * jnp.exp(change)
        return places

    def pool_features(self, x):
        return x[:, 0]
