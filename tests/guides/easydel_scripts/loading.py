"""Load a model with a configuration of kernels and precision, and save it."""

import easydel as ed
import jax.numpy as jnp
from jax import lax

model = ed.AutoEasyDeLModelForCausalLM.from_pretrained(
    "model",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    precision=lax.Precision.DEFAULT,
    backend=ed.EasyDeLBackends.CPU,
    platform=ed.EasyDeLPlatforms.JAX,
    auto_shard_model=True,
    sharding_axis_dims=(1, 1, 1, 1, 1),
    sharding_axis_names=("dp", "fsdp", "ep", "tp", "sp"),
    config_kwargs=ed.EasyDeLBaseConfigDict(
        attn_mechanism=ed.AttentionMechanisms.VANILLA,
        attn_dtype=jnp.float32,
        freq_max_position_embeddings=64,
        mask_max_position_embeddings=64,
        gradient_checkpointing=ed.EasyDeLGradientCheckPointers.NONE,
    ),
    partition_axis=ed.PartitionAxis(),
    from_torch=True,
)
logits = model(input_ids=jnp.ones((1, 4), "i4")).logits
assert logits.shape[:2] == (1, 4)
model.save_pretrained("saved")
