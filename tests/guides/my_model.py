"""The custom model of EasyDeL's guides: a configuration class, and a module with the mixins."""

from __future__ import annotations

from ed_infra.enums import TaskType
from ed_infra.outputs import LayerReport
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts
from ed_models.base.methods import EasyBridgeMixin, EasyGenerationMixin
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from flax import nnx


def register(config_class: type, model_type: str = "my_model") -> type[CausalLM]:
    """Register a configuration of the guide with the model below, and return the model's class."""

    class MyModel(CausalLM, EasyGenerationMixin, EasyBridgeMixin):
        body_class = MyBody

    register_config(model_type)(config_class)
    return register_module(TaskType.CAUSAL_LM, config=config_class, model_type=model_type)(MyModel)


class MyLayer(DecoderLayer):
    """A layer that applies attention and feed-forward after the same norm."""

    def __init__(self, parts: Parts, index: int):
        self.norm = parts.norm(parts.config.hidden_size, eps=1e-6)
        self.self_attn = SelfAttention(parts)
        self.mlp = GatedMLP(parts, hidden_act="silu")

    def __call__(self, x, ctx, cache, layer):
        attended, cache = self.self_attn(self.norm(x), ctx, cache, layer)
        x = x + attended
        return x + self.mlp(self.norm(x), ctx), cache, LayerReport()


class MyBody(Decoder):
    """A decoder of embedding, layers and norm."""

    layer_class = MyLayer

    @staticmethod
    def final_norm(parts: Parts) -> nnx.Module:
        return parts.norm(parts.config.hidden_size, eps=1e-6)
