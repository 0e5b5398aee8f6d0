"""Generate with a model, without an engine."""

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

inputs = tokenizer(["the number"], return_tensors="np")
output = model.generate(
    input_ids=inputs["input_ids"],
    attention_mask=inputs["attention_mask"],
    max_new_tokens=4,
    do_sample=True,
    temperature=0.7,
    top_p=0.9,
)
print(tokenizer.decode(output.sequences[0]))
