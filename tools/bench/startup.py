"""Measure starts: the parts of an engine's start, and the first answers of a server.

    python -m tools.bench.startup engine             SmolLM2-135M's shape, random weights
    python -m tools.bench.startup server
    EASYDEL_LLAMA_CPP_PYTHON=PYTHON python -m tools.bench.startup server --rounds 3
    python -m tools.bench.startup server --layers 2 --rounds 1

A process starts with an empty cache of compiled programs ("cold"), and then with the cache of the
first ("warm"; the median of the rounds).

The parts of an engine's start: imports, reading the checkpoint, building the engine (tracing, and
compiling or reading compiled programs), and the first token. The memory of the process is compared
with the bytes of weights and pages.

Times of a server begin with the process of `esurge serve` and end with the complete answer of one
token over HTTP. "Prefix" is a prompt of 448 tokens whose pages a former server stored. The memory
limit of `--model-dir` holds one of two models, so each request for the other model swaps them; a
line has the total duration and that of loading, as the server reports them. The first swap ends the
compilation in the background. With llama.cpp, a process loads the same weights in float32,
evaluates the prompt and samples one token, without HTTP. Its swap loads a second file in the same
process, and its prefix reads a saved state.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from tools.bench.decode import SHAPES, VOCAB
from tools.bench.measure import command_line, machine, run_worker, status, table

ONE, LEAVES = (1, 1, 1, 1, 1), {"scan_layers": False}
PARTS = ("imports", "loading", "engine", "first token")
SECONDS = 900
PROMPT, LONG = [*range(300, 316)], [*range(300, 748)]
SWAP_FLAGS = ("--max-model-len", "512", "--max-num-seqs", "4", "--cpu-cache-gib", "0.25")
#: The server in a process without torch, which transformers would import.
PROGRAM = (
    "import sys; sys.modules['torch'] = None\n"
    "from ed_esurge.command.main import main\n"
    "raise SystemExit(main())"
)
#: llama.cpp: load, first token, load a second time, save or load the state of a prompt.
LLAMA_CPP = """
import json, pickle, sys, time
from pathlib import Path
from llama_cpp import Llama
path, state, *numbers = sys.argv[1:]
prompt = [int(number) for number in numbers]
def load():
    return Llama(path, n_ctx=512, n_batch=512, verbose=False)
llm = load()
if Path(state).exists():
    llm.load_state(pickle.loads(Path(state).read_bytes()))
next(llm.generate(prompt, temp=0))
first = time.time()
Path(state).write_bytes(pickle.dumps(llm.save_state()))
began = time.time()
llm = load()
next(llm.generate(prompt, temp=0))
print(json.dumps({"first": first, "swap": time.time() - began}))
"""


def save_model(directory: Path, layers: int | None) -> None:
    """Write a checkpoint with random weights."""
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    shape = {**SHAPES["llama"], "vocab_size": VOCAB}
    shape["num_hidden_layers"] = layers or shape["num_hidden_layers"]
    config = LlamaConfig(**shape, sharding_axis_dims=ONE)
    LlamaForCausalLM.create(config, seed=0).save_pretrained(directory)


def create_environment(cache: Path) -> dict[str, str]:
    """Return the environment of a process whose compiled programs are in a folder of their own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    return environment | {
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(cache),
    }


# ---- the engine


def start_engine(directory: str, options: str) -> dict[str, Any]:
    """Start the engine in this process, and return the duration of each part."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    moments = [time.time() - age]
    sys.modules["torch"] = None  # type: ignore[assignment]
    import ed_models.families.llama  # noqa: F401
    import jax
    from ed_esurge import SamplingParams, eSurge
    from ed_esurge.runner.model_runner import ModelRunner
    from ed_infra.compilation.cache import keep_compiled_programs
    from ed_models.checkpoints import hub
    from flax import nnx

    keep_compiled_programs()
    moments.append(time.time())
    model = hub.from_pretrained(directory, sharding_axis_dims=ONE, config_kwargs=LEAVES)
    held = sum(leaf.nbytes for leaf in jax.block_until_ready(jax.tree.leaves(nnx.state(model))))
    moments.append(time.time())
    engine = eSurge(model, silent_mode=True, **json.loads(options))
    del model
    moments.append(time.time())
    engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=1))
    moments.append(time.time())
    processor = time.process_time()
    runner = engine.loop.runner
    assert isinstance(runner, ModelRunner)
    runner.functions.load_all()
    moments.append(time.time())
    return {
        "processor": processor,
        "seconds": [b - a for a, b in pairwise(moments)],
        "shapes": len(runner.buckets.shapes),
        "needed": held + runner.memory.cache_bytes(),
        "resident": status("VmRSS"),
        "peak": status("VmHWM"),
    }


def measure_engine(folder: Path, rounds: int, options: dict[str, Any]) -> str:
    """Start an engine cold once and warm `rounds` times in processes, and return a table."""
    words = ["--worker", str(folder / "one"), json.dumps(options)]

    def start() -> dict[str, Any]:
        return run_worker("startup", ["engine", *words], create_environment(folder / "cache"))

    rows = []
    for name, starts in (("cold", [start()]), ("warm", [start() for _ in range(rounds)])):
        by_part = zip(*(one["seconds"] for one in starts), strict=True)
        *parts, rest = [statistics.median(part) for part in by_part]
        processor = statistics.median(one["processor"] for one in starts)
        seconds = [f"{value:.2f} s" for value in [*parts, sum(parts), processor, rest]]
        sizes = [
            f"{statistics.median(one[key] for one in starts) / 2**30:.2f} GiB"
            for key in ("needed", "resident", "peak")
        ]
        rows.append([name, *seconds, str(starts[0]["shapes"]), *sizes])
    header = ["", *PARTS, "total", "processor time", "rest of the programs", "shapes"]
    return table([*header, "weights + pages", "resident", "peak"], rows)


# ---- the server


@contextmanager
def running(words: Sequence[str], cache: Path) -> Iterator[str]:
    """Run `esurge serve` during the block, and yield the address of the API.

    Args:
        words: further words of the command line.
        cache: folder for compiled programs.

    Raises:
        RuntimeError: the server did not start.
    """
    command = ["serve", "--port", "0", "--log-level", "warning", *words]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *command],
            env=create_environment(cache),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None
            lines = (re.search(r"serving at (\S+)", line) for line in process.stdout)
            url = next((found[1] for found in lines if found), None)
            if url is None:
                errors.seek(0)
                raise RuntimeError(f"the server did not start:\n{errors.read()[-2000:]}")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)


def count_pending(url: str) -> int:
    """Return the number of programs that a server compiles in the background."""
    answer = httpx.get(url.replace("/v1", "/health"), timeout=SECONDS).json()
    return int(answer.get("programs_pending", 0))


def ask(url: str, prompt: list[int], tokens: int = 1) -> float:
    """Return the seconds of a request for a number of tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    answer = httpx.post(f"{url}/completions", json=body, timeout=SECONDS)
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == tokens
    return time.perf_counter() - began


@contextmanager
def served(model: Path, cache: Path, *flags: str) -> Iterator[tuple[str, float]]:
    """Run a server during the block; yield its address and the seconds until its first answer."""
    began = time.perf_counter()
    with running([str(model), *flags], cache) as url:
        ask(url, PROMPT)
        yield url, time.perf_counter() - began


def measure_starts(model: Path, cache: Path, rounds: int) -> dict[str, float]:
    """Return the seconds of cold and warm starts, and of answers during compilation."""
    with served(model, cache) as (url, cold):
        slowest, began = 0.0, time.perf_counter()
        while count_pending(url):
            slowest = max(slowest, ask(url, PROMPT, 8))
        complete = cold + time.perf_counter() - began
        usual = statistics.median(ask(url, PROMPT, 8) for _ in range(5))
    warm = []
    for _ in range(rounds):
        with served(model, cache) as (_, seconds):
            warm.append(seconds)
    return {
        "start without programs": cold,
        "all programs compiled after": complete,
        "slowest 8 tokens before that": slowest,
        "8 tokens after that": usual,
        "start with cached programs": statistics.median(warm),
    }


def measure_prefixes(model: Path, cache: Path, pages: Path, rounds: int) -> dict[str, float]:
    """Return the seconds of a prompt before and after a restart."""
    flags = ("--prefix-cache-directory", str(pages), "--kv-offloading-size", "0.5")
    with served(model, cache, *flags) as (url, _):
        while count_pending(url):
            time.sleep(0.5)
        new = ask(url, LONG)
    again = []
    for _ in range(rounds):
        with served(model, cache, *flags) as (url, _):
            again.append(ask(url, LONG))
    name = f"prompt of {len(LONG)} tokens"
    return {f"{name}, new": new, f"{name}, after a restart": statistics.median(again)}


def measure_llama_cpp(model: Path, python: str, rounds: int) -> dict[str, float]:
    """Return the seconds of llama.cpp."""
    from tools.bench.llama_cpp import write_gguf

    file, runs = model / "f32.gguf", list[dict[str, float]]()
    write_gguf(model, file, "f32")
    for name, prompt in (("start", PROMPT), ("long", LONG)):
        for _ in range(rounds + 1):  # the first also writes the state
            began = time.time()
            words = [python, "-c", LLAMA_CPP, str(file), str(model / f"{name}.state")]
            words += map(str, prompt)
            done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                raise RuntimeError(f"llama.cpp failed:\n{done.stderr[-2000:]}")
            times: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            runs.append({"first": times["first"] - began, "swap": times["swap"]})
    new, known = runs[1 : rounds + 1], runs[rounds + 2 :]
    name = f"llama.cpp: start with {len(LONG)} tokens"
    return {
        "llama.cpp: start": statistics.median(run["first"] for run in new),
        "llama.cpp: load another file": statistics.median(run["swap"] for run in new),
        f"{name}, new": runs[rounds + 1]["first"],
        f"{name}, saved": statistics.median(run["first"] for run in known),
    }


def measure_swaps(folder: Path, cache: Path, rounds: int) -> str:
    """Return the table of swaps of two models, of which one fits the limit of memory.

    Args:
        folder: directory of the models `one` and `two`.
        cache: folder for compiled programs.
    """
    import ollama
    from ed_esurge.command import serve
    from ed_esurge.command.model_directory import estimate
    from ed_esurge.command.program import parse_words
    from ed_esurge.frontends.library.checkpoint_files import CheckpointFiles

    words = ["--model-dir", str(folder), *SWAP_FLAGS]
    values = parse_words(serve.serve, words)
    arguments = values["loading"].replace(engine=values["engine"])
    needed = estimate(arguments, CheckpointFiles(folder / "one"))
    words += ["--model-memory", str(1.5 * needed / 2**30)]
    durations: dict[str, list[tuple[float, float]]] = {}

    def generate(url: str, kind: str, name: str) -> None:
        options = {"temperature": 0, "num_predict": 1}
        client = ollama.Client(host=url.removesuffix("/v1"))
        answer = client.generate(name, "A", raw=True, options=options)
        nanoseconds = answer.total_duration or 0, answer.load_duration or 0
        durations.setdefault(kind, []).append((nanoseconds[0] / 1e9, nanoseconds[1] / 1e9))

    def swap(url: str, kind: str) -> None:
        for _ in range(rounds):
            for name in ("one", "two"):
                generate(url, kind, name)
                generate(url, "loaded", name)

    with running(words, cache) as url:
        generate(url, "first load", "one")
        generate(url, "swap while programs compile", "two")
        while count_pending(url):
            time.sleep(0.5)
        swap(url, "swap")
    with running(words, cache) as url:
        generate(url, "first load, cached programs", "two")
        swap(url, "swap, cached programs")
    rows = [
        [
            kind,
            str(len(times)),
            *(f"{statistics.median(part):.2f}" for part in zip(*times, strict=True)),
        ]
        for kind, times in durations.items()
    ]
    return table(["request", "count", "total, s", "loading, s"], rows)


def measure_server(folder: Path, rounds: int) -> None:
    """Print the tables of a server and of llama.cpp."""
    # An engine that starts imports neither of these modules.
    from ed_elarge.certify.llama_cpp_logits import interpreter

    from tools.bench.llama_cpp import save_tokenizer

    model, cache = folder / "one", folder / "cache"
    save_tokenizer(model, VOCAB)
    seconds = measure_starts(model, cache, rounds)
    seconds |= measure_prefixes(model, cache, folder / "pages", rounds)
    if python := interpreter():
        copy = folder / "copy"
        shutil.copytree(model, copy)
        seconds |= measure_llama_cpp(copy, python, rounds)
    print(table(["", "s"], [[name, f"{value:.2f}"] for name, value in seconds.items()]))
    models = folder / "models"
    shutil.copytree(model, models / "one")
    shutil.copytree(model, models / "two")
    print(f"\n{measure_swaps(models, folder / 'swaps', rounds)}")


def main() -> None:
    parser = command_line("startup", __doc__)
    parser.add_argument("kind", choices=["engine", "server"])
    parser.add_argument("--layers", type=int, help="layers of the model; default: 30")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, help="of the engine")
    parser.add_argument("--max-num-batched-tokens", type=int, help="of the engine")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    values = parser.parse_args()
    if values.worker:
        print(json.dumps(start_engine(*values.worker)))
        return
    names = ("max_num_seqs", "max_num_batched_tokens")
    options = {name: getattr(values, name) for name in names if getattr(values, name) is not None}
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name) / "one", values.layers)
        if values.kind == "engine":
            print(measure_engine(Path(name), values.rounds, options))
        else:
            measure_server(Path(name), values.rounds)


if __name__ == "__main__":
    main()
