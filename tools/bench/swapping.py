"""Measure how long a server needs to swap the models of `--model-dir`.

    python -m tools.bench.swapping                   two models of SmolLM2-135M's shape
    python -m tools.bench.swapping --layers 4 --rounds 2

The memory limit holds one of two models, so that each request for the other model unloads the
first. A line is one kind of request: its median total duration and duration of loading, as the
server reports them. The first load compiles a few programs, and the other programs are compiled
in the background. The swap after it ends that compilation, and the models share the programs.
Later swaps come when all programs are compiled. A server with cached programs follows.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from tools.bench.measure import command_line, machine, table
from tools.bench.server_process import pending, running
from tools.bench.startup import make

FLAGS = ("--max-model-len", "512", "--max-num-seqs", "4", "--cpu-cache-gib", "0.25")
NANOSECONDS = 1e9


def served(folder: Path, cache: Path, rounds: int) -> str:
    """Return the table of the durations.

    Args:
        folder: directory of the models `one` and `two`.
        cache: folder for compiled programs.
    """
    import ollama
    from ed_esurge.command import serve
    from ed_esurge.command.model_directory import estimate
    from ed_esurge.server.library.checkpoint_files import CheckpointFiles

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    words = ["--model-dir", str(folder), *FLAGS]
    needed = estimate(parser.parse_args(words), CheckpointFiles(folder / "one"))
    words += ["--model-memory", str(1.5 * needed / 2**30)]
    lines: dict[str, list[tuple[float, float]]] = {}

    def ask(url: str, kind: str, name: str) -> None:
        options = {"temperature": 0, "num_predict": 1}
        client = ollama.Client(host=url.removesuffix("/v1"))
        answer = client.generate(name, "A", raw=True, options=options)
        times = answer.total_duration or 0, answer.load_duration or 0
        seconds = times[0] / NANOSECONDS, times[1] / NANOSECONDS
        lines.setdefault(kind, []).append(seconds)

    def swaps(url: str, kind: str) -> None:
        for _ in range(rounds):
            for name in ("one", "two"):
                ask(url, kind, name)
                ask(url, "loaded", name)

    with running(words, cache) as url:
        ask(url, "first load", "one")
        ask(url, "swap while programs compile", "two")
        while pending(url):
            time.sleep(0.5)
        swaps(url, "swap")
    with running(words, cache) as url:
        ask(url, "first load, cached programs", "two")
        swaps(url, "swap, cached programs")
    rows = [
        [
            kind,
            str(len(times)),
            f"{statistics.median(total for total, _ in times):.2f}",
            f"{statistics.median(loading for _, loading in times):.2f}",
        ]
        for kind, times in lines.items()
    ]
    size = f"{needed / 2**30:.2f} GiB for each model\n"
    return size + table(["request", "count", "total, s", "loading, s"], rows)


def main() -> None:
    parser = command_line("swapping", __doc__)
    parser.add_argument("--layers", type=int, help="layers of the models; default: 30")
    parser.add_argument("--rounds", type=int, default=3)
    values = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name) / "models", Path(name) / "cache"
        make(folder / "one", values.layers)
        from ed_esurge.testing import byte_tokenizer

        byte_tokenizer().save_pretrained(folder / "one")
        shutil.copytree(folder / "one", folder / "two")
        print(served(folder, cache, values.rounds))


if __name__ == "__main__":
    main()
