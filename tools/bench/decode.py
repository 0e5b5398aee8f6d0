"""Prefill and decode of a small Llama against `transformers` on torch, float32, in one run.

uv run python -m tools.bench.decode                     SmolLM2-135M's shape, random weights
uv run python -m tools.bench.decode --batch 1 8 --layers 8 --rounds 5

Both load the same checkpoint, and their logits are compared first. A decode step is the median of
interleaved steps that begin at `--context` tokens; its floor is the time to read every weight once
at the read bandwidth that the same run measures.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.measure import Run, machine, read_bandwidth, table, take_turns

# HuggingFaceTB/SmolLM2-135M's config.json.
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
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


def save_random(directory: Path, layers: int) -> None:
    """A checkpoint of `SHAPE` with random weights, as torch writes it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=layers)).save_pretrained(directory)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--batch", type=int, nargs="+", default=[1, 8, 32])
    add("--context", type=int, default=32)
    add("--prompt", type=int, default=512)
    add("--layers", type=int, default=30)
    add("--mechanism", default="auto", help="attn_mechanism of the prompt")
    add("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(machine())
    tokens = partial(np.random.default_rng(0).integers, SHAPE["vocab_size"])
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_random(directory, given.layers)
        torch = Torch(directory)
        capacity = max(given.prompt, given.context + given.rounds + 2)
        ours = Ours(directory, capacity, given.mechanism)
    prompt = tokens(size=(1, given.prompt))
    apart = np.abs(torch.prefill(prompt) - ours.prefill(prompt)).max()
    floor = ours.weight_bytes / read_bandwidth()
    print(f"largest difference of logits: {apart:.1e}")
    print(f"reading {ours.weight_bytes / 1e6:.0f} MB of weights takes {floor * 1e3:.1f} ms\n")

    def row(label: str, runs: dict[str, Run], rounds: int, share: bool) -> list[str]:
        seconds = take_turns(runs, rounds=rounds)
        cells = [f"{seconds[name] * 1e3:.1f}" for name in ("torch", "ours")]
        ratio = f"{seconds['torch'] / seconds['ours']:.2f}"
        return [label, *cells, ratio, f"{floor / seconds['ours']:.0%}" if share else ""]

    rows = []
    runs: dict[str, Run]
    for batch in given.batch:
        start = tokens(size=(batch, given.context))
        runs = {"torch": torch.decoder(start), "ours": ours.decoder(start)}
        rows.append(row(f"decode, batch {batch}", runs, given.rounds, share=True))
    runs = {"torch": partial(torch.prefill, prompt), "ours": partial(ours.prefill, prompt)}
    rows.append(row(f"prefill, {given.prompt} tokens", runs, max(3, given.rounds // 3), False))
    print(table(["", "torch ms", "ours ms", "torch / ours", "of the read limit"], rows))


if __name__ == "__main__":
    main()
