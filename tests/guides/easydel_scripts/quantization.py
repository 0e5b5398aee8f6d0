"""Quantize the weights of a model."""

import easydel as ed
import jax.numpy as jnp
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")
model = ed.AutoEasyDeLModelForCausalLM.from_pretrained(
    "model",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    sharding_axis_dims=(1, 1, 1, 1, 1),
    auto_shard_model=True,
)

model = model.quantize(
    quantization_config=ed.EasyDeLQuantizationConfig(
        dtype=ed.QuantizationType.NF4,
        group_size=16,
    ),
    apply_quantization=True,
)
assert model.is_quantized
print(model(input_ids=jnp.ones((1, 4), "i4")).logits.shape)
