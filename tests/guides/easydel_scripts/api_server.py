"""Create a server with two names of an engine, and its requests."""

import easydel as ed
import jax.numpy as jnp
from easydel.inference.esurge import eSurge
from easydel.inference.esurge.server import eSurgeApiServer
from easydel.inference.sampling_params import SamplingParams
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")
model = ed.AutoEasyDeLModelForCausalLM.from_pretrained(
    "model",
    dtype=jnp.float32,
    param_dtype=jnp.float32,
    sharding_axis_dims=(1, 1, 1, 1, 1),
    auto_shard_model=True,
)

engine = eSurge(model=model, tokenizer=tokenizer, max_model_len=64, max_num_seqs=2)
server = eSurgeApiServer({"tiny": engine}, require_api_key=False)
assert list(server.engines) == ["tiny"]
print(engine.generate("the number", SamplingParams(max_tokens=2))[0].get_text())
