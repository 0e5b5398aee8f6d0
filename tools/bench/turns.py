"""Later turns of conversations with a hybrid model: computed tokens, first token, states.

    python -m tools.bench.turns [--tokens 4096] [--rounds 3] [--conversations 64]

The model has random weights and the layers of Qwen3-Next (three gated delta rules, then attention,
with experts), with fewer and narrower layers. The first table compares the second turn of a
conversation with and without saved states. The second table contains the states of conversations
of eight turns with a still narrower model, and the memory that the engine states when it starts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
from ed_esurge import RequestOutput, SamplingParams, eSurge
from ed_esurge.engine.setup import device_bytes
from ed_esurge.runner.memory import get_recurrent_caches
from ed_esurge.runner.model_runner import ModelRunner
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_models.protocol import LanguageModel

from tools.bench.measure import command_line, machine, table

FIELDS: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "eos_token_id": None,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}
#: Tokens of an answer, and of the message of the next turn.
ANSWER, MESSAGE = 48, 64


def build(**fields: Any) -> LanguageModel:
    """Return a model with random weights."""
    config = registry.get_config("qwen3_next")(**{**FIELDS, **fields})
    module = registry.get_module(TaskType.CAUSAL_LM, "qwen3_next")
    dtype = jnp.float32
    return module.create(config, seed=0, dtype=dtype, param_dtype=dtype)


def start_engine(model: LanguageModel, **options: Any) -> eSurge:
    """Return an engine that compiles each shape on first use."""
    return eSurge(model, compile_runner=False, silent_mode=True, **options)


def answer(engine: eSurge, prompt: list[int], tokens: int) -> RequestOutput:
    """Return the greedy answer with exactly `tokens` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return engine.generate(prompt, params)[0]


def second_turns(options: argparse.Namespace) -> list[list[str]]:
    """Return the computed tokens and the time to the first token of second turns."""
    model, rng = build(), np.random.default_rng(0)
    sizes = {"max_num_seqs": 4, "max_model_len": options.tokens + 1024}
    engines = [
        start_engine(model, **sizes),
        start_engine(model, **sizes, enable_prefix_caching=False),
    ]
    seconds: list[list[float]] = [[], []]
    computed = [0, 0]
    for turn in range(options.rounds + 1):
        first = rng.integers(3, 4000, options.tokens - ANSWER - MESSAGE).tolist()
        message = rng.integers(3, 4000, MESSAGE).tolist()
        outputs: list[list[int]] = []
        for place, engine in enumerate(engines):
            answered = answer(engine, first, ANSWER).outputs[0].token_ids
            prompt = [*first, *answered, *message]
            began = time.perf_counter()
            output = answer(engine, prompt, 1)
            if turn:
                seconds[place].append(time.perf_counter() - began)
            computed[place] = len(prompt) - output.metrics.num_cached_tokens
            outputs.append(output.outputs[0].token_ids)
        if outputs[0] != outputs[1]:
            raise RuntimeError(f"the engines return different tokens: {outputs}")
    times = [statistics.median(values) for values in seconds]
    names = ("from a saved state", "computing all")
    for engine in engines:
        engine.terminate()
    return [
        [name, str(count), f"{value * 1e3:.0f}", f"{value / times[1]:.3f}"]
        for name, count, value in zip(names, computed, times, strict=True)
    ]


def conversations(options: argparse.Namespace) -> list[list[str]]:
    """Return the number and the memory of the states of conversations of eight turns."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 128, "moe_intermediate_size": 64}
    model, rng = build(**sizes), np.random.default_rng(1)
    pools = {"num_pages": 1024, "num_states": 3 * options.conversations}
    engine = start_engine(model, max_num_seqs=8, max_model_len=2048, page_size=64, **pools)
    runner, states = engine.loop.runner, engine.loop.scheduler.states
    assert isinstance(runner, ModelRunner), "one process runs the engine"
    assert states is not None, "the model has recurrent layers"
    system = rng.integers(3, 4000, 200).tolist()
    prompts = [[*system, *rng.integers(3, 4000, 40).tolist()] for _ in range(options.conversations)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    asked = cached = possible = 0
    for _ in range(8):
        outputs = engine.generate(prompts, params)
        for output in outputs:
            asked += len(output.prompt_token_ids)
            cached += output.metrics.num_cached_tokens
            possible += len(output.prompt_token_ids) - 40  # all but the new message
        prompts = [
            [*output.prompt_token_ids, *output.outputs[0].token_ids, *rng.integers(3, 4000, 40)]
            for output in outputs
        ]
    states_bytes = [
        device_bytes(part) for part in get_recurrent_caches(runner.memory.cache).values()
    ]
    one = sum(states_bytes) / (runner.memory.max_num_seqs + states.places)
    stated = runner.describe().split("saved states (")[1].split(")")[0]
    count = len(states)
    engine.terminate()
    cells = [options.conversations, states.places, f"{states.places * one / 2**20:.1f} MiB", stated]
    return [[*map(str, cells), f"{count}", f"{cached / asked:.3f}", f"{cached / possible:.3f}"]]


def main() -> None:
    """Print the tables."""
    parser = command_line("turns", __doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the second prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=64)
    options = parser.parse_args()
    print(machine(), end="\n\n")
    header = ["second turn", "computed tokens", "first token, ms", "relative"]
    print(table(header, second_turns(options)), end="\n\n")
    header = ["conversations", "places", "memory", "stated", "states", "cached", "of possible"]
    print(table(header, conversations(options)))


if __name__ == "__main__":
    main()
