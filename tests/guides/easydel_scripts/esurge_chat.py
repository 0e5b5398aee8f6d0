"""Generate for several prompts, and answer a conversation with tools."""

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

engine = ed.eSurge(model, tokenizer, max_model_len=128, max_num_seqs=2, page_size=16)
parameters = ed.SamplingParams(max_tokens=4, temperature=0.7, seed=1)
outputs = engine.generate(["one", "two"], parameters)
assert len(outputs) == 2 and all(output.finished for output in outputs)
print(outputs[0].get_text())
messages = [{"role": "user", "content": "What is two and two?"}]
for chunk in engine.chat(messages, sampling_params=parameters, stream=True):
    print(chunk.delta_text, end="")
answer = engine.chat(messages, sampling_params=parameters)
print(answer.outputs[0].text)
