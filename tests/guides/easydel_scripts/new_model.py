"""Create a model from a configuration, and look at its parts."""

import easydel as ed
import jax.numpy as jnp
from easydel.modules.llama import LlamaConfig, LlamaForCausalLM
from flax import nnx as nn

config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_mechanism="vanilla",
    sharding_axis_dims=(1, 1, 1, 1, 1),
)
model = LlamaForCausalLM(config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nn.Rngs(0))
model = model.shard_model()
assert isinstance(model, ed.EasyDeLBaseModule)
assert model.model_type == "llama" and model.module_dtype == jnp.float32
print(model.get_decoder().__class__.__name__, model.flops_per_token(sequence_length=16))
half = model.to_dtype(jnp.bfloat16)
assert half.module_dtype == jnp.bfloat16
lazy = LlamaForCausalLM.lazy_init(config=config, rngs=nn.Rngs(0))
assert lazy.graphtree_params_shape
