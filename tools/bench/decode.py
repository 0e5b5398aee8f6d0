"""Compare prefill and decode of a small model with `transformers` on torch, in one run.

uv run python -m tools.bench.decode                     SmolLM2-135M's shape, random weights
uv run python -m tools.bench.decode --family qwen3_moe qwen3_next --batch 1 8 --rounds 7
uv run python -m tools.bench.decode --batch 1 8 --layers 8 --rounds 5
uv run python -m tools.bench.decode --forms "torch float32" float32 bfloat16 int8 int4
uv run python -m tools.bench.decode --family llama-1b --forms "torch bfloat16" bfloat16   on a GPU
uv run python -m tools.bench.decode --llama-bin llama.cpp/build/bin --prompt 512 2048
uv run python -m tools.bench.decode --ik-llama-bin build/bin --forms "ik_llama.cpp q4_0" int4

All contenders load the same checkpoint, and the logits are compared first; formats of 16 bits and
less differ. int8 and int4 round activations to 8 bits, as llama.cpp's q8_0 and q4_0 do; embedding
and head are quantized. Other contenders are omitted without their programs: llama.cpp and
ik_llama.cpp (`tools.bench.llama_cpp`), and OpenVINO (`tools.bench.open_vino`).

Runs of 8 steps are interleaved, and each contender starts at `--context` tokens. The time of a run
is the mean of its steps. A cell contains the minimum and, in parentheses, the median, because other
load only adds time; the load of the machine is printed. If a step reads every weight, its lower
bound is the time to read all weights once at the bandwidth that the same run measures. torch runs
on the GPU if jax has one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.llama_cpp import STEPS, LlamaCpp
from tools.bench.measure import (
    Run,
    Timed,
    all_turns,
    command_line,
    machine,
    report_failure,
    table,
    to_numpy,
    torch_device,
    wait_for_torch,
)
from tools.bench.open_vino import FORMATS, PYTHON, OpenVino

VOCAB = 49152
SMALL = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
#: Shapes by model type and size: dense (the config.json of HuggingFaceTB/SmolLM2-135M and of
#: unsloth/Llama-3.2-1B), experts, and a hybrid of the gated delta rule and attention.
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
    "llama-1b": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
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


def mean(steps: Callable[[], None]) -> Timed:
    """Return the mean seconds of STEPS steps."""
    began = time.perf_counter()
    steps()
    return Timed((time.perf_counter() - began) / STEPS)


class Torch:
    """`transformers` in its usual configuration: a dynamic cache, no gradients."""

    def __init__(self, directory: Path, dtype: str = "float32"):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.device = torch, torch_device()
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        self.model = model.eval().to(self.device)
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits of the last token."""
        ids = self.torch.tensor(tokens, device=self.device)
        with self.torch.inference_mode():
            out = self.model(ids, use_cache=True, logits_to_keep=1)
        return to_numpy(out.logits[:, -1])

    def prefiller(self, tokens: np.ndarray) -> Run:
        """Return a run of `prefill`."""
        return partial(self.prefill, tokens)

    def decoder(self, tokens: np.ndarray) -> Run:
        """Return a run that decodes STEPS more tokens and returns the mean seconds of a step."""
        torch = self.torch
        with torch.inference_mode():
            ids = torch.tensor(tokens, device=self.device)
            out = self.model(ids, use_cache=True, logits_to_keep=1)
        state = {"cache": out.past_key_values, "token": out.logits[:, -1].argmax(-1)[:, None]}

        def steps():
            for _ in range(STEPS):
                with torch.inference_mode():
                    out = self.model(state["token"], past_key_values=state["cache"], use_cache=True)
                    state["token"] = out.logits[:, -1].argmax(-1)[:, None]
            wait_for_torch()

        return partial(mean, steps)


class Ours:
    """This project: a dense cache that the program donates, and on a CPU unrolled layers.

    One program decodes STEPS tokens, as the program of `generate` decodes all.

    Args:
        quantized: Fields of a quantization configuration for every matrix; None: not quantized.
    """

    def __init__(
        self,
        directory: Path,
        capacity: int,
        mechanism: str,
        dtype: str = "float32",
        quantized: dict[str, Any] | None = None,
    ):
        import jax
        from ed_layers.packing import pack
        from ed_models import AutoEasyDeLModelForCausalLM
        from ed_models.generation.sampling import first_argmax
        from flax import nnx

        self.jax = jax
        settings = {"scan_layers": torch_device() != "cpu", "attn_mechanism": mechanism}
        loading: dict[str, Any] = {"config_kwargs": settings}
        if dtype != "float32":
            loading |= {"dtype": dtype, "param_dtype": dtype}
        if quantized is not None:
            rules = [("", quantized)]
            loading |= {"quantization_config": rules, "apply_quantization": True}
        model: Any = AutoEasyDeLModelForCausalLM.from_pretrained(directory, **loading)
        # As the engine serves codes.
        model = pack(model)
        self.model, self.capacity = model, capacity
        graphdef, state = nnx.split(model)
        self.leaves, structure = jax.tree.flatten(state)
        self.weight_bytes = sum(leaf.nbytes for leaf in self.leaves)

        def forward(leaves, cache, tokens):
            merged: Any = nnx.merge(graphdef, jax.tree.unflatten(structure, leaves))
            b, s = tokens.shape
            last = np.arange(b) * s + s - 1
            out = merged(tokens, past_key_values=cache, logits_at=last)
            return out.logits, first_argmax(out.logits)[:, None], out.past_key_values

        def with_new_cache(leaves, tokens):
            return forward(leaves, model.init_cache(*tokens.shape), tokens)

        def decode(leaves, cache, token):
            def step(_, carry):
                cache, token = carry
                _, token, cache = forward(leaves, cache, token)
                return cache, token

            return jax.lax.fori_loop(0, STEPS, step, (cache, token))

        self.forward = jax.jit(forward, donate_argnums=1)
        self.decode = jax.jit(decode, donate_argnums=1)
        self.with_new_cache = jax.jit(with_new_cache)

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits of the last token."""
        return np.asarray(self.with_new_cache(self.leaves, tokens)[0])

    def prefiller(self, tokens: np.ndarray) -> Run:
        """Return a run of `prefill`."""
        return partial(self.prefill, tokens)

    def decoder(self, tokens: np.ndarray) -> Run:
        """Return a run that decodes STEPS more tokens and returns the mean seconds of a step."""
        cache = self.model.init_cache(len(tokens), self.capacity)
        _, token, cache = self.forward(self.leaves, cache, tokens)
        state = [cache, token]

        def steps():
            state[:] = self.jax.block_until_ready(self.decode(self.leaves, *state))

        return partial(mean, steps)


def model_type(family: str) -> str:
    """Return the model type of a name of SHAPES."""
    return family.partition("-")[0]


def save_random(directory: Path, family: str, layers: int | None) -> None:
    """Write a torch checkpoint of the family's shape with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**SHAPES[family], "vocab_size": VOCAB}
    if layers is not None:
        fields["num_hidden_layers"] = layers
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type(family), **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


#: Name of a row -> dtype, and the quantization of every matrix.
OURS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("float32", {"dtype": "w8a8"}),
    "int4": ("float32", {"dtype": "w4a8", "group_size": 32}),
}
THEIRS = {"torch float32": "float32", "torch bfloat16": "bfloat16"}
OPEN_VINO = {f"OpenVINO {dtype}": dtype for dtype in FORMATS}
#: Name -> option with the directory of its programs.
LLAMAS = {"llama.cpp": "llama_bin", "ik_llama.cpp": "ik_llama_bin"}
GGUF = [f"{name} {dtype}" for name in LLAMAS for dtype in ("bf16", "q8_0", "q4_0")]
#: Slots of the cache per sequence.
CAPACITY = 512
Contender = Torch | Ours | LlamaCpp | OpenVino


def load(directory: Path, family: str, options: argparse.Namespace) -> dict[str, Contender]:
    """Return the contenders by name; all load the checkpoint of the directory."""
    capacity = max(CAPACITY, options.context + options.rounds + 2)
    contenders: dict[str, Contender] = {}
    for form in options.forms:
        try:
            if form in THEIRS:
                contenders[form] = Torch(directory, THEIRS[form])
            elif form in OURS:
                contenders[form] = Ours(directory, capacity, options.mechanism, *OURS[form])
            elif model_type(family) != "llama":
                continue
            elif form in OPEN_VINO:
                if python := os.environ.get(PYTHON):
                    contenders[form] = OpenVino(directory, OPEN_VINO[form], python)
            elif form in GGUF:
                name, _, dtype = form.partition(" ")
                if programs := getattr(options, LLAMAS[name]):
                    contenders[form] = LlamaCpp(directory, name, dtype, programs)
        except Exception as error:
            report_failure(form, error)
    missing = ", ".join(form for form in options.forms if form not in contenders)
    print(f"omitted: {missing or 'none'}")
    return contenders


def print_differences(contenders: dict[str, Contender], prompt: np.ndarray) -> None:
    """Print the differences of logits from those of the first; llama.cpp's program returns none."""
    logits = {f: of.prefill(prompt) for f, of in contenders.items() if not isinstance(of, LlamaCpp)}
    first, *others = logits
    apart = (f"{form} {np.abs(logits[form] - logits[first]).max():.1e}" for form in others)
    print(f"largest difference of logits from those of {first}: {', '.join(apart)}")


def measure(family: str, options: argparse.Namespace) -> None:
    """Compare the logits of one family, time its steps, and print a table."""
    from ed_elarge.command.limits import read_bandwidth

    tokens = partial(np.random.default_rng(0).integers, VOCAB)
    bandwidth, reads_all = read_bandwidth(), "num_experts" not in SHAPES[family]
    rows: dict[str, list[str]] = {}

    def column(runs: dict[str, Run], rounds: int) -> None:
        for form, seconds in all_turns(runs, rounds=rounds).items():
            least, median = min(seconds) * 1e3, statistics.median(seconds) * 1e3
            rows[form].append(f"{least:.1f} ({median:.1f})")

    with tempfile.TemporaryDirectory() as name:
        save_random(Path(name), family, options.layers)
        contenders = load(Path(name), family, options)
        print(f"\n{family}")
        print_differences(contenders, tokens(size=(1, options.prompt[0])))
        for form, of in contenders.items():
            floor = f"{of.weight_bytes / bandwidth * 1e3:.1f}" if reads_all else ""
            rows[form] = [form, f"{of.weight_bytes / 1e6:.0f}", floor]
        for batch in options.batch:
            start = tokens(size=(batch, options.context))
            column({form: of.decoder(start) for form, of in contenders.items()}, options.rounds)
        for length in options.prompt:
            prompt = tokens(size=(1, length))
            runs = {form: of.prefiller(prompt) for form, of in contenders.items()}
            column(runs, max(3, options.rounds // 3))
        for of in contenders.values():
            if isinstance(of, OpenVino):
                of.close()
    steps = [f"decode, batch {batch}" for batch in options.batch]
    prompts = [f"prefill, {length}" for length in options.prompt]
    print(f"load of the machine: {os.getloadavg()[0]:.1f}\n")
    print(table(["ms", "weights, MB", "read limit", *steps, *prompts], [*rows.values()]))


def main() -> None:
    parser = command_line("decode", __doc__)
    add = parser.add_argument
    add("--family", nargs="+", choices=sorted(SHAPES), default=["llama"])
    forms = [*THEIRS, *GGUF, *OPEN_VINO, *OURS]
    add("--forms", nargs="+", choices=forms, default=forms)
    add("--batch", type=int, nargs="+", default=[1, 8, 32])
    add("--context", type=int, default=32)
    add("--prompt", type=int, nargs="+", default=[512])
    add("--layers", type=int, help="number of layers; default: the family's")
    add("--mechanism", default="auto", help="attn_mechanism for the prompt")
    add("--rounds", type=int, default=15)
    add("--llama-bin", type=Path, help="directory of llama.cpp's programs")
    add("--ik-llama-bin", type=Path, help="directory of ik_llama.cpp's programs")
    options = parser.parse_args()
    print(machine())
    for family in options.family:
        measure(family, options)


if __name__ == "__main__":
    main()
