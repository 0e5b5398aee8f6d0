"""OpenELM (Apple 2024): deeper layers have more heads and a wider feed-forward layer.

- `num_query_heads`, `num_kv_heads` and `ffn_multipliers` have an entry for each layer
- query and key heads are RMS-normed
- one tensor for queries, keys and values, and one for gate and up projection

Parameter names and numbers follow the authors' `modeling_openelm.py`.
"""

from __future__ import annotations

from dataclasses import field, replace

from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, carry, fused, renamed


@register_config("openelm")
class OpenELMConfig(EasyDeLBaseConfig):
    """The authors' fields, and execution fields from `EasyDeLBaseConfig`."""

    model_type = "openelm"
    attribute_map = {
        "hidden_size": "model_dim",
        "num_hidden_layers": "num_transformer_layers",
        "max_position_embeddings": "max_context_length",
        "hidden_act": "activation_fn_name",
        "tie_word_embeddings": "share_input_output_layers",
    }
    vocab_size: int = 32000
    max_context_length: int = 2048
    num_transformer_layers: int = 12
    model_dim: int = 2048
    head_dim: int = 128
    num_query_heads: list[int] = field(default_factory=list)
    num_kv_heads: list[int] = field(default_factory=list)
    ffn_multipliers: list[float] = field(default_factory=list)
    ffn_dim_divisor: int = 256
    ffn_with_glu: bool = True
    activation_fn_name: str = "swish"
    normalization_layer_name: str = "rms_norm"
    normalize_qk_projections: bool = False
    share_input_output_layers: bool = False
    rms_norm_eps: float = 1e-6
    rope_freq_constant: float = 10000
    initializer_range: float = 0.02
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    def validate(self):
        """Raise ConfigError for lists of another length, and for layers without a gate."""
        super().validate()
        for name in ("num_query_heads", "num_kv_heads", "ffn_multipliers"):
            if len(getattr(self, name)) != self.num_transformer_layers:
                raise ConfigError(
                    f"openelm: {name} has {len(getattr(self, name))} entries, but the model has "
                    f"num_transformer_layers={self.num_transformer_layers}: give one for each layer"
                )
        for name, only in {"ffn_with_glu": True, "normalization_layer_name": "rms_norm"}.items():
            if getattr(self, name) != only:
                raise ConfigError(
                    f"openelm: {name}={getattr(self, name)!r} is not supported, only {only!r}"
                )


def ffn_dim(config: OpenELMConfig, index: int) -> int:
    """Return the size of a layer's feed-forward layer: a multiple of the divisor, and not more
    than a tenth smaller than the exact product."""
    exact, divisor = config.ffn_multipliers[index] * config.model_dim, config.ffn_dim_divisor
    size = max(divisor, int(exact + divisor / 2) // divisor * divisor)
    return size + divisor if size < 0.9 * exact else size


class OpenELMDecoderLayer(DecoderLayer):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: OpenELMConfig = parts.config
        kv_heads = config.num_kv_heads[index]
        attention = SelfAttention(
            parts,
            heads=config.num_query_heads[index],
            kv_heads=kv_heads,
            norm=QKNorm(parts.norm if config.normalize_qk_projections else None),
            group="full" if kv_heads == config.num_kv_heads[0] else f"full_{kv_heads}",
        )
        super().__init__(parts, self_attn=attention, mlp=GatedMLP(parts, ffn_dim(config, index)))


class OpenELMModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = OpenELMConfig
    layer_class = OpenELMDecoderLayer

    @staticmethod
    def layer_kinds(config):
        layers = range(config.num_transformer_layers)
        sizes = (ffn_dim(config, i) for i in layers)
        return list(zip(config.num_query_heads, config.num_kv_heads, sizes, strict=True))

    def rope_settings(self):
        theta = {"rope_theta": self.config.rope_freq_constant}
        return {
            kind: replace(settings, parameters={**settings.parameters, **theta})
            for kind, settings in super().rope_settings().items()
        }


@register_module(TaskType.CAUSAL_LM, config=OpenELMConfig, model_type="openelm")
class OpenELMForCausalLM(CausalLM):
    """OpenELM with a language-model head."""

    body_class = OpenELMModel
    WEIGHTS = (
        *renamed(
            {
                "model": "transformer",
                "embed_tokens": "token_embeddings",
                "self_attn.o_proj": "attn.out_proj",
                "self_attn": "attn",
                "input_layernorm": "attn_norm",
                "post_attention_layernorm": "ffn_norm",
                "mlp.down_proj": "ffn.proj_2",
                "mlp": "ffn",
            },
            *fused(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
            *fused(("gate_proj", "up_proj"), "proj_1"),
            *STANDARD,
        ),
        # A second head of untied models, which their forward pass does not use.
        carry("transformer.classifier.{path}"),
    )
