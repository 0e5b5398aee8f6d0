"""Measure how long a server needs to swap the models of `--model-dir`.

    python -m tools.bench.swapping                   two models of SmolLM2-135M's shape
    python -m tools.bench.swapping --layers 4 --rounds 2

The memory limit holds one of two models, so that each request for the other model unloads the
first. A line is one kind of request: its median total duration and duration of loading, as the
server reports them. First loads compile; swaps read compiled programs.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

from tools.bench.measure import command_line, machine, table
from tools.bench.startup import make

FLAGS = ("--max-model-len", "512", "--max-num-seqs", "4", "--cpu-cache-gib", "0.25")
NANOSECONDS = 1e9


def served(folder: Path, rounds: int) -> str:
    """Return the table of the durations."""
    import ollama
    from ed_esurge.command import serve
    from ed_esurge.command.model_directory import estimate, model_directory
    from ed_esurge.server.launch import background
    from ed_esurge.server.library.checkpoint_files import CheckpointFiles

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    values = parser.parse_args(["--model-dir", str(folder), *FLAGS])
    needed = estimate(values, CheckpointFiles(folder / "one"))
    values.model_memory = 1.5 * needed / 2**30
    lines: dict[str, list[tuple[float, float]]] = {"first load": [], "swap": [], "loaded": []}
    with background({}, model_directory=model_directory(values)) as url:
        client = ollama.Client(host=url.removesuffix("/v1"))

        def ask(kind: str, name: str) -> None:
            options = {"temperature": 0, "num_predict": 1}
            answer = client.generate(name, "A", raw=True, options=options)
            times = answer.total_duration or 0, answer.load_duration or 0
            lines[kind].append((times[0] / NANOSECONDS, times[1] / NANOSECONDS))

        for turn in range(rounds + 1):
            for name in ("one", "two"):
                ask("swap" if turn else "first load", name)
                ask("loaded", name)
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
        folder = Path(name)
        make(folder / "one", values.layers)
        from ed_esurge.testing import byte_tokenizer

        byte_tokenizer().save_pretrained(folder / "one")
        shutil.copytree(folder / "one", folder / "two")
        print(served(folder, values.rounds))


if __name__ == "__main__":
    main()
