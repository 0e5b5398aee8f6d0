"""Save a tiny random model, load it, serve it over HTTP, and compare one answer with `generate`.

Runs where only ed-models and ed-esurge are installed.
"""

import json
import sys
import tempfile
import urllib.request

import jax.numpy as jnp
from ed_esurge import eSurge
from ed_esurge.server.launch import background
from ed_esurge.testing import byte_tokenizer
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.families.llama import LlamaConfig

PROMPT, NEW_TOKENS = "Serve this.", 12

tokenizer = byte_tokenizer()
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
float32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
with tempfile.TemporaryDirectory() as folder:
    AutoEasyDeLModelForCausalLM.from_config(config, **float32).save_pretrained(folder)
    model = AutoEasyDeLModelForCausalLM.from_pretrained(folder, **float32)

engine = eSurge(model, tokenizer, max_model_len=64, max_num_seqs=2, page_size=16)
body = {
    "model": "tiny",
    "prompt": PROMPT,
    "max_tokens": NEW_TOKENS,
    "temperature": 0,
    "logprobs": 1,
}
with background(engine, served_model_name="tiny") as url:
    request = urllib.request.Request(
        f"{url}/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        completion = json.load(answer)

prompt_ids = tokenizer(PROMPT, return_tensors="np")["input_ids"]
sequences = model.generate(prompt_ids, max_new_tokens=NEW_TOKENS).sequences
expected = tokenizer.decode([int(t) for t in sequences[0, prompt_ids.shape[1] :]])
text = completion["choices"][0]["text"]
if text.rstrip("\ufffd") != expected.rstrip("\ufffd"):
    sys.exit(f"the server answered {text!r}, generate {expected!r}")
loaded = sorted({"optax", "orbax", "torch"} & set(sys.modules))
used = completion["usage"]
print(
    f"served: {used['prompt_tokens']} prompt and {used['completion_tokens']} completion tokens, "
    f"equal to generate; of optax, orbax and torch, loaded: {', '.join(loaded) or 'none'}"
)
