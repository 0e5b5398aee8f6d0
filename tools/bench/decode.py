"""Prefill and decode of a small model against `transformers` on torch, float32, in one run.

uv run python -m tools.bench.decode                     SmolLM2-135M's shape, random weights
uv run python -m tools.bench.decode --family qwen3_moe qwen3_next --batch 1 8 --rounds 7
uv run python -m tools.bench.decode --batch 1 8 --layers 8 --rounds 5

Both load the same checkpoint, and their logits are compared first. A decode step is the median of
interleaved steps that begin at `--context` tokens. Where a step reads every weight, its floor is
the time to read them once at the read bandwidth that the same run measures.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.measure import Run, machine, read_bandwidth, table, take_turns

VOCAB = 49152
SMALL = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
#: Shapes by model type: dense (HuggingFaceTB/SmolLM2-135M's config.json), experts, and a hybrid of
#: the gated delta rule and attention.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "qwen3_moe": {**SMALL, **EXPERTS, "num_hidden_layers": 12},
    "qwen3_next": {
        **SMALL,
        **EXPERTS,
        "num_hidden_layers": 12,
        "shared_expert_intermediate_size": 256,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}


class Torch:
    """`transformers` as it is used: a dynamic cache, no gradients."""

    def __init__(self, directory: Path):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of the last token."""
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor(tokens), use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].numpy()

    def decoder(self, tokens: np.ndarray) -> Run:
        """A function that decodes one more token each time it is called."""
        torch = self.torch
        with torch.inference_mode():
            out = self.model(torch.tensor(tokens), use_cache=True, logits_to_keep=1)
        state = {"cache": out.past_key_values, "token": out.logits[:, -1].argmax(-1)[:, None]}

        def step():
            with torch.inference_mode():
                out = self.model(state["token"], past_key_values=state["cache"], use_cache=True)
                state["token"] = out.logits[:, -1].argmax(-1)[:, None]

        return step


class Ours:
    """This project: unrolled leaves, a dense cache that the step donates."""

    def __init__(self, directory: Path, capacity: int, mechanism: str):
        import jax
        from ed_models import AutoEasyDeLModelForCausalLM
        from flax import nnx

        self.jax = jax
        settings = {"scan_layers": False, "attn_mechanism": mechanism}
        model: Any = AutoEasyDeLModelForCausalLM.from_pretrained(directory, config_kwargs=settings)
        self.model, self.capacity = model, capacity
        graphdef, state = nnx.split(model)
        self.leaves, structure = jax.tree.flatten(state)
        self.weight_bytes = sum(leaf.nbytes for leaf in self.leaves)

        def forward(leaves, cache, tokens):
            merged: Any = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
            b, s = tokens.shape
            last = np.arange(b) * s + s - 1
            out = merged(tokens, past_key_values=cache, logits_at=last)
            return out.logits, out.logits.argmax(-1)[:, None], out.past_key_values

        self.forward = jax.jit(forward, donate_argnums=1)

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of the last token."""
        cache = self.model.init_cache(len(tokens), self.capacity)
        return np.asarray(self.forward(self.leaves, cache, tokens)[0])

    def decoder(self, tokens: np.ndarray) -> Run:
        """A function that decodes one more token each time it is called."""
        cache = self.model.init_cache(len(tokens), self.capacity)
        _, token, cache = self.forward(self.leaves, cache, tokens)
        state = {"cache": cache, "token": token}

        def step():
            _, token, cache = self.forward(self.leaves, state["cache"], state["token"])
            state.update(token=self.jax.block_until_ready(token), cache=cache)

        return step


def save_random(directory: Path, family: str, layers: int | None) -> None:
    """A checkpoint of the family's shape with random weights, as torch writes it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**SHAPES[family], "vocab_size": VOCAB}
    if layers is not None:
        fields["num_hidden_layers"] = layers
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def measure(family: str, options: argparse.Namespace) -> None:
    """Compare the logits of one family, time its steps, and print a table."""
    tokens = partial(np.random.default_rng(0).integers, VOCAB)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_random(directory, family, options.layers)
        torch = Torch(directory)
        capacity = max(options.prompt, options.context + options.rounds + 2)
        ours = Ours(directory, capacity, options.mechanism)
    prompt = tokens(size=(1, options.prompt))
    apart = np.abs(torch.prefill(prompt) - ours.prefill(prompt)).max()
    print(f"\n{family}: largest difference of logits {apart:.1e}")
    reads_all = "num_experts" not in SHAPES[family]
    floor = ours.weight_bytes / read_bandwidth() if reads_all else None
    if floor is not None:
        print(f"reading {ours.weight_bytes / 1e6:.0f} MB of weights takes {floor * 1e3:.1f} ms")
    print()

    def row(label: str, runs: dict[str, Run], rounds: int, floor: float | None) -> list[str]:
        seconds = take_turns(runs, rounds=rounds)
        cells = [f"{seconds[name] * 1e3:.1f}" for name in ("torch", "ours")]
        ratio = f"{seconds['torch'] / seconds['ours']:.2f}"
        return [label, *cells, ratio, f"{floor / seconds['ours']:.0%}" if floor else ""]

    rows = []
    runs: dict[str, Run]
    for batch in options.batch:
        start = tokens(size=(batch, options.context))
        runs = {"torch": torch.decoder(start), "ours": ours.decoder(start)}
        rows.append(row(f"decode, batch {batch}", runs, options.rounds, floor))
    runs = {"torch": partial(torch.prefill, prompt), "ours": partial(ours.prefill, prompt)}
    rows.append(row(f"prefill, {options.prompt} tokens", runs, max(3, options.rounds // 3), None))
    print(table(["", "torch ms", "ours ms", "torch / ours", "of the read limit"], rows))


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--family", nargs="+", choices=sorted(SHAPES), default=["llama"])
    add("--batch", type=int, nargs="+", default=[1, 8, 32])
    add("--context", type=int, default=32)
    add("--prompt", type=int, default=512)
    add("--layers", type=int, help="default: those of the family's shape")
    add("--mechanism", default="auto", help="attn_mechanism of the prompt")
    add("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(machine())
    for family in options.family:
        measure(family, options)


if __name__ == "__main__":
    main()
