"""Llama 4 (Meta 2025): one expert and a shared one, chunked attention, a vision tower over tiles.

Language model:

- the sigmoid of the router's logit scales the input of the expert
- layers with rotary positions see their own chunk; the others see all, without positions, and their
  queries grow with their place (`attn_temperature_tuning`)
- queries and keys are normed, without weights, after they are turned; rotary pairs are neighbours
- `moe_layers` selects the layers with experts; dense ones have `intermediate_size_mlp`

Numbers follow Hugging Face's `modeling_llama4.py`; parameter names are its names. A row that is
padded on the left has the numbers of the row alone.

Vision tower:
- the class token follows the patches, which have learned and rotary positions
- squares of patches become one feature after two linear layers

Legend: t tiles, c channels, h height, w width, n patches of a tile, m features of a tile, v and d
hidden size of the tower and of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.activations import activation
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm, Rotary
from ed_layers.mlp import MLP, GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.body.tiles import STORED, TiledImageTextModel, joined_squares
from ed_models.body.vision import VisionLayer, VisionTower, get_height_width, tower_rules
from ed_models.modalities.images import TILES
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED, STANDARD, Rule, equal, renamed, split

#: Rules of the language model.
_TEXT_WEIGHTS = renamed(
    {"mlp": "feed_forward", "gate": "router", "shared_experts": "shared_expert"},
    Rule(
        ("{path}.experts.gate_proj.kernel", "{path}.experts.up_proj.kernel"),
        "{path}.experts.gate_up_proj",
        split(-1, equal),
    ),
    Rule("{path}.experts.down_proj.kernel", "{path}.experts.down_proj", equal),
    *STANDARD,
)


@register_config("llama4_text")
class Llama4TextConfig(EasyDeLBaseConfig, transformers.Llama4TextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "llama4_text"


class Llama4TextAttention(SelfAttention):
    """Chunks and rotary positions, or neither and queries that grow with their place."""

    def __init__(self, parts: Parts, index: int):
        config: Llama4TextConfig = parts.config
        turns = bool(config.no_rope_layers[index])  # 1 = rotary positions, in spite of the name
        chunked = config.layer_types[index] == "chunked_attention"
        super().__init__(
            parts,
            bias=config.attention_bias,
            norm=QKNorm(
                partial(parts.norm, weight=False) if config.use_qk_norm and turns else None,
                last=True,
            ),
            position=Rotary(interleaved=True) if turns else None,
            mask=MaskRule(chunk=config.attention_chunk_size if chunked else None),
        )
        self.grows = config.attn_temperature_tuning and not turns
        self.step, self.growth = config.floor_scale, config.attn_scale
        self.positions = config.max_position_embeddings

    def project_qkv(self, x, ctx):
        q, k, v = super().project_qkv(x, ctx)
        if self.grows:
            # A table: XLA's logarithms depend on the size of an array.
            steps = np.arange(int(self.positions // self.step) + 1)
            table = jnp.asarray(np.log1p(steps) * self.growth + 1.0, jnp.float32)
            scale = table[jnp.floor((ctx.position_ids + 1.0) / self.step).astype(jnp.int32)]
            q = (q * scale[:, :, None, None]).astype(q.dtype)
        return q, k, v


class Llama4TextDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Llama4TextConfig = parts.config
        if index in config.moe_layers:
            mlp = self.sparse(parts)
        else:
            mlp = GatedMLP(parts, config.intermediate_size_mlp)
        super().__init__(parts, self_attn=Llama4TextAttention(parts, index), mlp=mlp)

    @staticmethod
    def sparse(parts: Parts) -> SparseMLP:
        """The layer with experts."""
        config: Llama4TextConfig = parts.config
        experts, k = config.num_local_experts, config.num_experts_per_tok
        return SparseMLP(
            parts,
            gate=Router(parts, experts, k, score="sigmoid", normalize=False),
            experts=Experts(parts, experts, config.intermediate_size),
            shared=GatedMLP(parts),
            scale_inputs=True,
        )


class Llama4TextModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Llama4TextConfig
    layer_class = Llama4TextDecoderLayer

    @staticmethod
    def layer_kinds(config):
        kinds = zip(config.layer_types, config.no_rope_layers, strict=False)
        return [(*kind, i in config.moe_layers) for i, kind in enumerate(kinds)]


@register_module(TaskType.CAUSAL_LM, config=Llama4TextConfig, model_type="llama4_text")
class Llama4TextForCausalLM(CausalLM):
    """Llama 4 with a language-model head."""

    body_class = Llama4TextModel
    WEIGHTS = _TEXT_WEIGHTS
    MODULES = Modules(swapped=True)


class Llama4VisionConfig(EasyDeLBaseConfig, transformers.Llama4VisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "llama4_vision_model"


@register_config("llama4")
class Llama4Config(EasyDeLBaseConfig, transformers.Llama4Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "llama4"
    nested_configs: ClassVar[Mapping[str, type]] = {"vision_config": Llama4VisionConfig}


class Llama4VisionEmbeddings(nnx.Module):
    """A linear map of patches, a class token after the patches, and learned positions."""

    def __init__(self, parts: Parts):
        config: Llama4VisionConfig = parts.config
        self.patch = get_height_width(config.patch_size)
        rows, columns = (
            side // patch_side
            for side, patch_side in zip(
                get_height_width(config.image_size), self.patch, strict=True
            )
        )
        d, numbers = config.hidden_size, config.num_channels * self.patch[0] * self.patch[1]
        self.linear = parts.linear(numbers, d, axes=(None, "embed"))
        self.class_embedding = parts.table(d, axes=("embed",))
        self.positions = parts.table(rows * columns + 1, d, axes=(None, "embed"))

    def __call__(self, images: Float[Array, "t c h w"], **inputs: object) -> Float[Array, "t n v"]:
        t, c, h, w = images.shape
        p, q = self.patch
        x = images.reshape(t, c, h // p, p, w // q, q).transpose(0, 2, 4, 1, 3, 5)
        x = self.linear(x.reshape(t, (h // p) * (w // q), c * p * q))
        token, positions = (
            table.get_value().astype(x.dtype) for table in (self.class_embedding, self.positions)
        )
        token = jnp.broadcast_to(token, (t, 1, x.shape[-1]))
        return jnp.concatenate([x, token], axis=1) + positions


class Llama4VisionLayer(VisionLayer):
    """A pre-norm layer with rotary positions."""

    def __init__(self, parts: Parts, index: int):
        attention = SelfAttention(
            parts,
            bias=True,
            out_bias=True,
            position=Rotary(interleaved=True),
            mask=MaskRule(causal=False),
        )
        super().__init__(parts, index, self_attn=attention, mlp=MLP(parts, hidden_act="gelu"))


class Llama4VisionAdapter(nnx.Module):
    """Joins squares of patches; two linear layers with activations."""

    def __init__(self, parts: Parts):
        config: Llama4VisionConfig = parts.config
        self.side, width = int(1 / config.pixel_shuffle_ratio), config.projector_output_dim
        inner = config.projector_input_dim
        self.fc1 = parts.linear(config.intermediate_size, inner, axes=(None, "mlp"))
        self.fc2 = parts.linear(width, width, axes=("mlp", None))

    def __call__(self, x: Float[Array, "t n v"]) -> Float[Array, "t m f"]:
        gelu = activation("gelu")
        return gelu(self.fc2(gelu(self.fc1(joined_squares(x, self.side)))))


class Llama4VisionModel(VisionTower):
    """Embeddings, layers between two norms, and the adapter."""

    layer_class = Llama4VisionLayer
    names: ClassVar[Mapping[str, str]] = {
        "embeddings.linear": "patch_embedding.linear",
        "embeddings.class_embedding": "class_embedding",
        "embeddings.positions": "positional_embedding_vlm",
        "layers": "model.layers",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "adapter": "vision_adapter.mlp",
        "pre_norm": "layernorm_pre",
        "norm": "layernorm_post",
    }

    @staticmethod
    def build_norm(parts):
        return partial(parts.layer_norm, eps=1e-5)

    @staticmethod
    def embedding(parts):
        return Llama4VisionEmbeddings(parts)

    def add_parts(self, parts: Parts):
        self.pre_norm = parts.own_norm(parts.config.hidden_size)
        self.adapter = Llama4VisionAdapter(parts)

    def rope(self, size, key):
        config, (p, q) = self.config, get_height_width(self.config.patch_size)
        rows, columns = size[0] // p, size[1] // q
        row, column = np.divmod(np.arange(rows * columns), columns)
        half = config.hidden_size // config.num_attention_heads // 2
        theta = config.rope_parameters["rope_theta"]
        frequencies = theta ** -(np.arange(0, half, 2, dtype=np.float32) / half)
        angles = [(places[:, None] + 1) * frequencies for places in (column, row)]
        # The class token is not rotated.
        angles = jnp.asarray(np.pad(np.concatenate(angles, -1), ((0, 1), (0, 0))), jnp.float32)
        return jnp.cos(angles), jnp.sin(angles)

    def enter(self, x):
        return self.pre_norm(x)

    def leave(self, x):
        return self.adapter(self.norm(x)[:, :-1])


class Llama4Projector(nnx.Module):
    """A linear layer from the tower to the decoder."""

    def __init__(self, parts: Parts):
        config: Llama4Config = parts.config
        sizes = config.vision_config.vision_output_dim, config.text_config.hidden_size
        self.linear_1 = parts.linear(*sizes, axes=(None, "embed"))

    def __call__(self, x: Float[Array, "t m f"]) -> Float[Array, "t m d"]:
        return self.linear_1(x)


class Llama4Model(TiledImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = Llama4Config
    projector_class = Llama4Projector
    tower_class = Llama4VisionModel
    decoder_rules = _TEXT_WEIGHTS


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Llama4Config, model_type="llama4")
class Llama4ForConditionalGeneration(ConditionalLM):
    """Llama 4 with its vision tower and a language-model head."""

    body_class = Llama4Model
    modality = TILES
    TIED_WEIGHTS = NESTED_TIED
    MODULES = Modules(swapped=True)
    WEIGHTS = (
        *tower_rules("model.vision_tower", "vision_model", Llama4VisionModel.names),
        *renamed(STORED, *_TEXT_WEIGHTS),
    )
