"""Measure how long a server needs: start, swap of models, and a known prefix after a restart.

    python -m tools.bench.first_answer               SmolLM2-135M's shape, random weights
    EASYDEL_LLAMA_CPP_PYTHON=PYTHON python -m tools.bench.first_answer --rounds 3
    python -m tools.bench.first_answer --layers 2 --rounds 1

Times begin with the process of `esurge serve` and end with the complete answer of one token over
HTTP. "cold" has no compiled programs; "warm" has the programs of the cold start. "swap" loads
another cached model in a running server of `--model-dir`. "prefix" asks a prompt of 448 tokens
whose pages a former server stored. With llama.cpp, a process loads the same weights in float32,
evaluates the prompt and samples one token, without HTTP. Its swap loads a second file in the same
process, and its prefix reads a saved state.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from ed_elarge.certify.llama_cpp_logits import interpreter

from tools.bench import swapping, to_gguf
from tools.bench.decode import VOCAB
from tools.bench.measure import command_line, machine, table
from tools.bench.server_process import SECONDS, pending, running
from tools.bench.startup import make

PROMPT, LONG = [*range(300, 316)], [*range(300, 748)]
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


@dataclass
class Started:
    """A running server.

    Attributes:
        url: address of the API.
        first: seconds from the start of the process to the first answer.
    """

    url: str
    first: float

    def ask(self, prompt: list[int], tokens: int = 1) -> float:
        """Return the seconds of a request."""
        return ask(self.url, prompt, tokens)

    def pending(self) -> int:
        """Return the number of programs that are compiled in the background."""
        return pending(self.url)


def ask(url: str, prompt: list[int], tokens: int) -> float:
    """Return the seconds of a request for a number of tokens."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    answer = httpx.post(f"{url}/completions", json=body, timeout=SECONDS)
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == tokens
    return time.perf_counter() - began


@contextmanager
def served(model: Path, cache: Path, prompt: list[int], *flags: str) -> Iterator[Started]:
    """Start a server in a process, ask for one token, and stop the server after the block."""
    began = time.perf_counter()
    with running([str(model), *flags], cache) as url:
        ask(url, prompt, 1)
        yield Started(url, time.perf_counter() - began)


def starts(model: Path, cache: Path, rounds: int) -> list[list[str]]:
    """Return the rows of cold and warm starts."""
    with served(model, cache, PROMPT) as server:
        cold, slowest, began = server.first, 0.0, time.perf_counter()
        while server.pending():
            slowest = max(slowest, server.ask(PROMPT, 8))
        complete = cold + time.perf_counter() - began
        usual = statistics.median(server.ask(PROMPT, 8) for _ in range(5))
    warm = []
    for _ in range(rounds):
        with served(model, cache, PROMPT) as server:
            warm.append(server.first)
    return [
        ["start without programs", _seconds(cold)],
        ["all programs compiled after", _seconds(complete)],
        ["slowest 8 tokens before that", _seconds(slowest)],
        ["8 tokens after that", _seconds(usual)],
        ["start with cached programs", _seconds(statistics.median(warm))],
    ]


def prefixes(model: Path, cache: Path, pages: Path, rounds: int) -> list[list[str]]:
    """Return the rows of a prompt before and after a restart."""
    flags = ("--prefix-cache-directory", str(pages), "--kv-offloading-size", "0.5")
    with served(model, cache, PROMPT, *flags) as server:
        while server.pending():
            time.sleep(0.5)
        first = server.ask(LONG)
    again = []
    for _ in range(rounds):
        with served(model, cache, PROMPT, *flags) as server:
            again.append(server.ask(LONG))
    return [
        [f"prompt of {len(LONG)} tokens, new", _seconds(first)],
        [f"prompt of {len(LONG)} tokens, after a restart", _seconds(statistics.median(again))],
    ]


def llama_cpp(model: Path, python: str, rounds: int) -> list[list[str]]:
    """Return the rows of llama.cpp."""
    file, found = model / "f32.gguf", list[dict[str, float]]()
    to_gguf.write(model, file, "f32")
    for name, prompt in (("start", PROMPT), ("long", LONG)):
        state = model / f"{name}.state"
        for _ in range(rounds + 1):  # the first also writes the state
            began = time.time()
            words = [python, "-c", LLAMA_CPP, str(file), str(state), *map(str, prompt)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                raise RuntimeError(f"llama.cpp failed:\n{done.stderr[-2000:]}")
            times: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            found.append({"first": times["first"] - began, "swap": times["swap"]})
    new, known = found[1 : rounds + 1], found[rounds + 2 :]

    def median(runs: list[dict[str, float]], name: str) -> str:
        return _seconds(statistics.median(run[name] for run in runs))

    return [
        ["llama.cpp: start", median(new, "first")],
        ["llama.cpp: load another file", median(new, "swap")],
        [f"llama.cpp: start with {len(LONG)} tokens, new", _seconds(found[rounds + 1]["first"])],
        [f"llama.cpp: start with {len(LONG)} tokens, saved", median(known, "first")],
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f}"


def main() -> None:
    parser: argparse.ArgumentParser = command_line("first_answer", __doc__)
    parser.add_argument("--layers", type=int, help="layers of the model; default: 30")
    parser.add_argument("--rounds", type=int, default=3)
    values = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = folder / "models"
        make(models / "one", values.layers)
        to_gguf.save_tokenizer(models / "one", VOCAB)
        rows = starts(models / "one", folder / "cache", values.rounds)
        rows += prefixes(models / "one", folder / "cache", folder / "pages", values.rounds)
        if python := interpreter():
            copy = folder / "copy"
            shutil.copytree(models / "one", copy)
            rows += llama_cpp(copy, python, values.rounds)
        print(table(["", "s"], rows))
        shutil.copytree(models / "one", models / "two")
        print("\nSwap of two models, of which one fits the limit of memory:")
        print(swapping.served(models, folder / "swaps", values.rounds))


if __name__ == "__main__":
    main()
