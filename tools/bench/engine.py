"""Measure the engine: its Python overhead, its rate against `generate`, and its options.

    python -m tools.bench.engine                        SmolLM2-135M's shape, random weights
    python -m tools.bench.engine --layers 4 --rounds 2
    python -m tools.bench.engine --only python generate

python      CPU time of a step with a device that returns immediately
generate    decoded tokens per second, relative to the model's own `generate`
prefixes    prompts of 448 tokens that share all but 16, alone and after one another
speculation n-gram proposals, on greedy output that repeats itself
invariant   `batch_invariant` of the model and of the engine, against the same requests without
overlap     `async_scheduling` and `overlap_execution`, against the same requests without both
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_esurge import SamplingParams, eSurge
from ed_esurge.outputs import RequestOutput
from ed_esurge.runner.buckets import StepShape
from ed_esurge.runner.functions import Functions
from ed_esurge.runner.uncompiled import ProgramKey
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.families.mamba2 import Mamba2Config, Mamba2ForCausalLM
from ed_models.protocol import LanguageModel

from tools.bench.decode import SHAPES, VOCAB
from tools.bench.measure import Run, command_line, machine, table, take_turns
from tools.bench.serve import STREAMED, tokenizer

PROMPT, MODEL_LEN = 32, 512
MODELS = {**STREAMED, "1B": (SHAPES["llama-1b"], VOCAB)}
HEADERS = {
    "python": ["sequences", "ms a step", "tokens/s without a device"],
    "generate": ["model", "sequences", "engine, tokens/s", "generate, tokens/s", "ratio"],
    "prefixes": ["prompts", "cold, ms", "warm, ms", "speed-up"],
    "speculation": ["sequences", "without, tokens/s", "with, tokens/s", "speed-up", "accepted"],
    "invariant": ["option of", "requests", "without, tokens/s", "with, tokens/s", "cost"],
    "overlap": ["model", "sequences", "options", "tokens/s", "relative to neither"],
}


def build(
    name: str, layers: int | None, dtype: str = "float32", **fields: Any
) -> tuple[LanguageModel, Any]:
    """Return a model with random weights and its tokenizer."""
    shape, vocab = MODELS[name]
    if layers is not None:
        shape = {**shape, "num_hidden_layers": layers}
    unrolled = jax.default_backend() == "cpu"  # the layouts that `esurge serve` selects
    layout = {"sharding_axis_dims": (1, 1, 1, 1, 1), "scan_layers": not unrolled}
    config = LlamaConfig(**shape, **layout, vocab_size=vocab, eos_token_id=None, **fields)
    kind = jnp.dtype(dtype)
    return LlamaForCausalLM.create(config, seed=0, dtype=kind, param_dtype=kind), tokenizer(vocab)


def engine(model: LanguageModel, pieces: Any, seqs: int, **options: Any) -> eSurge:
    """Return an engine for `seqs` sequences that compiles each shape on first use."""
    sizes = {"max_num_seqs": seqs, "max_model_len": MODEL_LEN}
    fields = {"enable_prefix_caching": False, **sizes, **options}
    return eSurge(model, pieces, compile_runner=False, silent_mode=True, **fields)


def greedy(tokens: int) -> SamplingParams:
    """Return greedy sampling parameters for exactly `tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of random words, equal for equal seeds."""
    return np.random.default_rng(seed).integers(300, 2000, (count, length)).tolist()


# ---- own Python


def own_python(options: argparse.Namespace) -> list[list[str]]:
    """Return the milliseconds of scheduler, batch and text, for each number of sequences."""
    model, pieces = build("pretrain.yaml's", 1)
    rows = []
    for seqs in options.python:
        made = engine(model, pieces, seqs, max_num_seq_buckets=(seqs,), num_scheduler_steps=1)
        runner: Any = made.loop.runner
        runner.functions = Instant(runner.functions, runner.max_logprobs)
        for number, prompt in enumerate(prompts(seqs, 4)):
            made.add_request(str(number), prompt, greedy(400))
        spent = []
        for turn in range(8):
            began = time.process_time()
            for _ in range(40):
                made.step()
            if turn:
                spent.append((time.process_time() - began) / 40)
        made.terminate()
        least = min(spent)
        rows.append([str(seqs), f"{least * 1e3:.3f}", f"{seqs / least:.0f}"])
    return rows


class Instant:
    """Device functions whose steps immediately return one token per sequence."""

    background = None

    def __init__(self, real: Functions, max_logprobs: int) -> None:
        self._real, self._max_logprobs = real, max_logprobs
        self._packed: dict[int, np.ndarray] = {}

    def usable(self, shape: StepShape) -> bool:
        """Return True: no step waits for a compiler."""
        return True

    def __getitem__(self, name: ProgramKey) -> Callable[..., Any]:
        if isinstance(name, StepShape):
            return lambda leaves, cache, last, buffer: (None, None, None, cache, None)
        kind, rows = name
        if kind != "sample":
            return self._real[name]
        if rows not in self._packed:
            width = 3 + 2 * self._max_logprobs
            self._packed[rows] = np.full((rows, width), 300, np.int32)
        packed = self._packed[rows]
        return lambda state, logits, numbers, allowed: (packed, state, None)


# ---- rates


def against_generate(options: argparse.Namespace) -> list[list[str]]:
    """Return tokens per second of the engine and of `generate`, prompts included."""
    rows = []
    for name in options.models:
        layers = None if name == "pretrain.yaml's" else options.layers
        model, pieces = build(name, layers, options.dtype)
        for seqs in options.sequences:
            made, asked = engine(model, pieces, seqs), prompts(seqs, PROMPT)
            ids, params = np.array(asked), greedy(options.tokens)
            settings = {"max_new_tokens": options.tokens, "do_sample": False}

            def whole(ids: np.ndarray = ids, model: Any = model, settings: Any = settings):
                return np.asarray(model.generate(ids, **settings).sequences)

            runs: dict[str, Run] = {"engine": answer(made, asked, params), "generate": whole}
            rows.append([name, str(seqs), *_rates(runs, seqs * options.tokens, options)])
            made.terminate()
    return rows


def answer(made: eSurge, asked: list[list[int]], params: SamplingParams) -> Run:
    """Return a run that generates with an engine."""
    return lambda: made.generate(asked, params)


def _rates(runs: dict[str, Run], tokens: int, options: argparse.Namespace) -> list[str]:
    """Return tokens per second of two contenders, and the ratio of the first to the second.

    Args:
        tokens: number of tokens that a run counts.
    """
    seconds = [*take_turns(runs, rounds=options.rounds).values()]
    first, second = (tokens / value for value in seconds)
    return [f"{first:.1f}", f"{second:.1f}", f"{first / second:.2f}"]


def prefixes(options: argparse.Namespace) -> list[list[str]]:
    """Return the time to the first token of prompts with cached and with new beginnings."""
    model, pieces = build("135M", options.layers, options.dtype)
    made = engine(model, pieces, 8, enable_prefix_caching=True)
    rows = []
    for count in (1, 8):
        cold, warm = [], []
        for turn in range(options.rounds + 1):
            known = prompts(1, 432, seed=100 * count + turn)[0]
            tails = [*prompts(2 * count, 16, seed=turn)]
            alone = prompts(count, 448, seed=1000 + 100 * count + turn)
            cold.append(_seconds(made, alone))
            made.generate(known, greedy(1))
            warm.append(_seconds(made, [known + tail for tail in tails[:count]]))
        first, second = (statistics.median(values[1:]) for values in (cold, warm))
        times = [f"{first * 1e3:.1f}", f"{second * 1e3:.1f}"]
        rows.append([str(count), *times, f"{first / second:.1f}"])
    return rows


def _seconds(made: eSurge, asked: list[list[int]]) -> float:
    began = time.perf_counter()
    made.generate(asked, greedy(1))
    return time.perf_counter() - began


def speculation(options: argparse.Namespace) -> list[list[str]]:
    """Compare speculation with plain decoding on repeating text; the tokens must be equal."""
    model, pieces = build("135M", options.layers, options.dtype)
    rows = []
    for seqs in (1, 4):
        plain = engine(model, pieces, 4 * seqs)
        wanted = {"method": "ngram", "num_speculative_tokens": 3}
        eager = engine(model, pieces, 4 * seqs, speculative_config=wanted)
        asked = repeating(plain, seqs)
        params = greedy(options.tokens)
        _check_same(plain.generate(asked, params), eager.generate(asked, params))
        runs = {"with": answer(eager, asked, params), "without": answer(plain, asked, params)}
        fast, slow, ratio = _rates(runs, seqs * options.tokens, options)
        stats = eager.stats()
        share = stats["spec_decode_num_accepted_tokens"] / stats["spec_decode_num_draft_tokens"]
        rows.append([str(seqs), slow, fast, ratio, f"{share:.0%}"])
        for made in (plain, eager):
            made.terminate()
    return rows


def repeating(made: eSurge, count: int) -> list[list[int]]:
    """Return prompts that end in the cycle that greedy decoding of random weights reaches."""
    started = made.generate(prompts(count, 8), greedy(256))
    return [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in started]


def _check_same(one: Sequence[RequestOutput], other: Sequence[RequestOutput]) -> None:
    for a, b in zip(one, other, strict=True):
        if a.outputs[0].token_ids != b.outputs[0].token_ids:
            raise RuntimeError("the two engines return different tokens")


def invariant(options: argparse.Namespace) -> list[list[str]]:
    """Compare sums in one order, and one fixed shape for every step, with neither."""
    model, pieces = build("135M", options.layers, options.dtype)
    ordered, _ = build("135M", options.layers, options.dtype, batch_invariant=True)
    recurrent, ordered_recurrent = (
        recurrent_model(options, batch_invariant=on) for on in (False, True)
    )
    # The model without the option, the model with it, and the options of the second engine.
    owners: dict[str, tuple[LanguageModel, LanguageModel, dict[str, Any]]] = {
        "model": (model, ordered, {}),
        "model, Mamba-2": (recurrent, ordered_recurrent, {}),
        "engine": (model, model, {"batch_invariant": True}),
    }
    new = options.tokens
    # Number of sequences, tokens of each prompt, new tokens of each, and counted tokens.
    requests = {
        "1 sequence": (1, PROMPT, new, new),
        "8 sequences": (8, PROMPT, new, 8 * new),
        "a prompt of 448 tokens": (1, 448, 1, 448),
    }
    rows = []
    for owner, (first, second, extra) in owners.items():
        for name, (seqs, length, each, counted) in requests.items():
            engines = {
                "without": engine(first, pieces, 8),
                "with": engine(second, pieces, 8, **extra),
            }
            asked, params = prompts(seqs, length), greedy(each)
            runs = {key: answer(made, asked, params) for key, made in engines.items()}
            rows.append([owner, name, *_rates(runs, counted, options)])
            for made in engines.values():
                made.terminate()
    return rows


def recurrent_model(options: argparse.Namespace, **fields: Any) -> LanguageModel:
    """Return a Mamba-2 model with random weights, of the width of the 135M model."""
    shape, vocab = MODELS["135M"]
    width = shape["hidden_size"]
    config = Mamba2Config(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=options.layers or shape["num_hidden_layers"],
        expand=2,
        head_dim=64,
        num_heads=2 * width // 64,
        state_size=64,
        n_groups=1,
        eos_token_id=None,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        scan_layers=jax.default_backend() != "cpu",
        **fields,
    )
    kind = jnp.dtype(options.dtype)
    return Mamba2ForCausalLM.create(config, seed=0, dtype=kind, param_dtype=kind)


OVERLAPS: dict[str, dict[str, Any]] = {
    "neither": {"async_scheduling": False},
    "`overlap_execution`": {"async_scheduling": False, "overlap_execution": True},
    "`async_scheduling`": {"async_scheduling": True},
    "both": {"async_scheduling": True, "overlap_execution": True},
}


def overlap(options: argparse.Namespace) -> list[list[str]]:
    """Compare starting the next step before the text of the current step with starting it after."""
    rows = []
    for name in options.models:
        layers = None if name == "pretrain.yaml's" else options.layers
        model, pieces = build(name, layers, options.dtype)
        for seqs in options.sequences:
            engines = {each: engine(model, pieces, seqs, **o) for each, o in OVERLAPS.items()}
            asked, params = prompts(seqs, PROMPT), greedy(options.tokens)
            runs = {each: answer(made, asked, params) for each, made in engines.items()}
            seconds = take_turns(runs, rounds=options.rounds)
            for each, value in seconds.items():
                rate, ratio = seqs * options.tokens / value, seconds["neither"] / value
                rows.append([name, str(seqs), each, f"{rate:.1f}", f"{ratio:.2f}"])
            for made in engines.values():
                made.terminate()
    return rows


MEASURES = {
    "python": own_python,
    "generate": against_generate,
    "prefixes": prefixes,
    "speculation": speculation,
    "invariant": invariant,
    "overlap": overlap,
}


def create_parser() -> argparse.ArgumentParser:
    """Return the parser of the options, which every measurement reads."""
    parser = command_line("engine", __doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=[*MEASURES], default=[*MEASURES])
    add("--python", type=int, nargs="+", default=[1, 8, 32, 64], metavar="SEQUENCES")
    add(
        "--sequences",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        help="sequences in the comparison with `generate`",
    )
    add("--tokens", type=int, default=64)
    add("--models", nargs="+", choices=[*MODELS], default=[*STREAMED])
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--layers", type=int, help="layers of the models, except of pretrain.yaml; default: all")
    add("--rounds", type=int, default=5)
    return parser


def main() -> None:
    options = create_parser().parse_args()
    print(machine())
    for part in options.only:
        rows = MEASURES[part](options)
        print(f"\n{part} (load of the machine: {os.getloadavg()[0]:.1f})\n")
        print(table(HEADERS[part], rows), flush=True)


if __name__ == "__main__":
    main()
