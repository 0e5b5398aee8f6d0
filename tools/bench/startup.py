"""Measure the time from process start to the engine's first token, and the resident memory.

    python -m tools.bench.startup                    SmolLM2-135M's shape, random weights
    python -m tools.bench.startup --layers 4 --rounds 1
    python -m tools.bench.startup --max-num-seqs 32

Each start is a separate process: first with an empty cache of compiled programs ("cold"), then with
the cache of the first ("warm"; the median of the rounds). The parts of a start: imports, reading
the checkpoint, building the engine (tracing, and compiling or reading compiled programs), and the
first token. The memory of the process is compared with the bytes of weights and pages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.bench.decode import SHAPES, VOCAB
from tools.bench.measure import command_line, machine, status, table

ONE, LEAVES = (1, 1, 1, 1, 1), {"scan_layers": False}
PARTS = ("imports", "loading", "engine", "first token")
REST = "rest of the programs"


def make(directory: Path, layers: int | None) -> None:
    """Write a checkpoint with random weights."""
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    shape = {**SHAPES["llama"], "vocab_size": VOCAB}
    shape["num_hidden_layers"] = layers or shape["num_hidden_layers"]
    config = LlamaConfig(**shape, sharding_axis_dims=ONE)
    LlamaForCausalLM.create(config, seed=0).save_pretrained(directory)


def work(directory: str, options: str) -> dict[str, Any]:
    """Start the engine in this process, and return the duration of each part."""
    began = time.time() - _age()
    sys.modules["torch"] = None  # type: ignore[assignment]
    import ed_models.families.llama  # noqa: F401
    import jax
    from ed_esurge import SamplingParams, eSurge
    from ed_esurge.runner.model_runner import ModelRunner
    from ed_infra.compilation.cache import keep_compiled_programs
    from ed_models.checkpoints import hub
    from flax import nnx

    keep_compiled_programs()
    moments = [began, time.time()]
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


def _age() -> float:
    """Return the seconds since this process began."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - ticks / os.sysconf("SC_CLK_TCK")


def start(directory: Path, cache: Path, options: str) -> dict[str, Any]:
    """Start the engine once in a separate process."""
    words = ["--worker", str(directory), options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench.startup", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the engine did not start:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(layers: int | None, rounds: int, options: dict[str, Any]) -> str:
    """Start cold once and warm `rounds` times, and return a table."""
    with tempfile.TemporaryDirectory() as folder:
        directory, cache = Path(folder) / "model", Path(folder) / "cache"
        make(directory, layers)
        cold = start(directory, cache, json.dumps(options))
        warm = [start(directory, cache, json.dumps(options)) for _ in range(rounds)]
    rows = [_row("cold", [cold]), _row("warm", warm)]
    names = [
        "",
        *PARTS,
        "total",
        "processor time",
        REST,
        "shapes",
        "weights + pages",
        "resident",
        "peak",
    ]
    return table(names, rows)


def _row(name: str, starts: list[dict[str, Any]]) -> list[str]:
    by_part = zip(*(one["seconds"] for one in starts), strict=True)
    seconds = [statistics.median(part) for part in by_part]
    sizes = [
        f"{statistics.median(s[key] for s in starts) / 2**30:.2f} GiB"
        for key in ("needed", "resident", "peak")
    ]
    *parts, rest = seconds
    processor = statistics.median(one["processor"] for one in starts)
    times = [f"{value:.2f} s" for value in [*parts, sum(parts), processor, rest]]
    return [name, *times, str(starts[0]["shapes"]), *sizes]


def main() -> None:
    parser = command_line("startup", __doc__)
    parser.add_argument("--layers", type=int, help="layers of the model; default: 30")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    values = parser.parse_args()
    if values.worker:
        print(json.dumps(work(*values.worker)))
        return
    names = ("max_num_seqs", "max_num_batched_tokens")
    chosen = {name: getattr(values, name) for name in names if getattr(values, name) is not None}
    print(machine())
    print(measure(values.layers, values.rounds, chosen))


if __name__ == "__main__":
    main()
