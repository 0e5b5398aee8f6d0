"""Stream tokens from the engine."""

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

engine = ed.eSurge(
    model=model,
    tokenizer=tokenizer,
    max_model_len=64,
    max_num_seqs=2,
    page_size=16,
    hbm_utilization=0.3,
)
parameters = ed.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
text = ""
for output in engine.stream("the number", sampling_params=parameters):
    print(output.delta_text, end="", flush=True)
    text += output.delta_text
assert output.accumulated_text == text
print(f"{output.tokens_per_second:.2f} tokens/s, {output.num_generated_tokens} tokens")
