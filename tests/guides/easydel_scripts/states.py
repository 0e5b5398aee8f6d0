"""Create, save and load a training state."""

import easydel as ed
import jax.numpy as jnp
import optax
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")
model = ed.AutoEasyDeLModelForCausalLM.from_pretrained(
    "model",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    sharding_axis_dims=(1, 1, 1, 1, 1),
    auto_shard_model=True,
)

state = ed.EasyDeLState.create(model=model, tx=optax.adamw(1e-3), init_opt_state=True)
state = state.shard_state()
state.save_state("state")
loaded = ed.EasyDeLState.load_state("state", tx=optax.adamw(1e-3), dtype=jnp.float32)
assert int(loaded.step) == 0
assert loaded.model.num_parameters if hasattr(loaded.model, "num_parameters") else True
other = ed.AutoStateForCausalLM.from_pretrained("model", dtype=jnp.float32)
assert other.size > 0
