"""Serve an engine for the flows of the clients: `python server.py scripted|tiny BATCH_DIRECTORY`.

`scripted` acts like an agent: it calls an offered tool and reports the result. `tiny` is a random
Llama of two layers: its text is noise, but grammars apply.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ed_esurge.config import EngineConfig
from ed_esurge.server.launch import serve
from ed_esurge.speech.engine import SpeechEngine
from ed_esurge.testing import ScriptedEngine, ScriptedTranscriber, byte_tokenizer

MODEL = "tiny"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# <tool_call> <think> #}"
)


def reply(prompt: str) -> str:
    """Return the next reply of an agent."""
    last = prompt.rpartition("<|end|>")[0].rpartition("<|")[2]
    role, _, content = last.partition("|>")
    if role == "tool":
        return f"It is {content}."
    if prompt.startswith("<tools>") and "weather" in content:
        tools = json.loads(prompt.removeprefix("<tools>").partition("</tools>\n")[0])
        call = {"name": tools[0]["function"]["name"], "arguments": {"city": "Bern"}}
        thoughts = "<think>\nI look it up.\n</think>\n\n"
        return f"{thoughts}<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return "The capital is Bern."


def scripted() -> Any:
    """Return an engine that follows a script, and a model for speech with a word per second."""
    tokenizer = byte_tokenizer(TEMPLATE)
    engine = ScriptedEngine(
        lambda tokens, _: reply(tokenizer.decode(tokens)),
        tokenizer=tokenizer,
        max_model_len=16384,
        config=EngineConfig(),  # reduces `max_tokens`: litellm sends 128,000
    )
    return {MODEL: engine, "speech": SpeechEngine(ScriptedTranscriber())}


def tiny() -> Any:
    """Return an engine with a random model."""
    from ed_esurge import eSurge
    from ed_infra.testing import tiny_llama
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    fields = tiny_llama(
        vocab_size=258,
        num_hidden_layers=2,
        initializer_range=0.2,
        max_position_embeddings=8192,
        eos_token_id=257,
    )
    fields.pop("model_type")
    config = LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    return eSurge(
        LlamaForCausalLM.create(config, seed=1),
        byte_tokenizer(TEMPLATE),
        model_name=MODEL,
        max_model_len=8192,
        max_num_seqs=8,
        max_num_seq_buckets=(8,),
        max_num_batched_tokens=256,
        min_input_pad=256,
        page_size=64,
        num_pages=512,
        compile_runner=False,
        silent_mode=True,
    )


if __name__ == "__main__":
    kind, directory = sys.argv[1:]
    serve({"scripted": scripted, "tiny": tiny}[kind](), port=0, batch_directory=directory)
