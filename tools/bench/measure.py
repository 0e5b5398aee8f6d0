"""Timing that is robust against noise: interleaved runs, compared by medians and ratios."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Run = Callable[[], object]


class Timed(float):
    """Seconds that a run measured itself, excluding its preparation."""


def settled(run: Run, seconds: float = 0.1) -> Run:
    """Return a run that repeats a short call, and returns the seconds of one call.

    The threads of other libraries wait actively for some milliseconds after their calls, and the
    caches hold their weights. The first call is therefore counted only if it is long.
    """

    def repeated() -> Timed:
        began = time.perf_counter()
        run()
        passed = time.perf_counter() - began
        if passed > seconds:
            return Timed(passed)
        count, began = 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            run()
            count += 1
        return Timed(passed / count)

    return repeated


def take_turns(
    contenders: dict[str, Run],
    *,
    rounds: int,
    of: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Return the median seconds of each contender, or another summary `of` its rounds."""
    return {name: of(times) for name, times in all_turns(contenders, rounds=rounds).items()}


def all_turns(contenders: dict[str, Run], *, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in every round.

    A round runs each contender once, so that a slow moment of the machine affects all of them. The
    first round warms up and is not counted. A run returns when its work is done. A contender that
    raises an error is left out of further rounds, and its seconds are NaN: `table` prints "failed".
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    running = dict(contenders)
    gc.collect()
    for turn in range(rounds + 1):
        for name, run in [*running.items()]:
            began = time.perf_counter()
            try:
                result = run()
            except Exception as error:
                report_failure(name, error)
                del running[name]
                seconds[name] = [math.nan]
                continue
            passed = time.perf_counter() - began
            if turn:
                seconds[name].append(result if isinstance(result, Timed) else passed)
    return seconds


def report_failure(name: str, error: Exception) -> None:
    """Print the error of a contender, without which the others continue."""
    print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def run_worker(script: str, words: Iterable[str], environment: Mapping[str, str]) -> Any:
    """Run `python -m tools.bench.<script>` in a separate process with memory of its own.

    Returns:
        The value of the last line that the process prints, from JSON.

    Raises:
        RuntimeError: The process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"tools.bench.{script}", *words],
        env={**environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"tools.bench.{script} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_growth(run: Run) -> int:
    """Return the peak growth of this process's resident memory during a run, in bytes (Linux)."""
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    run()
    return max(0, status("VmHWM") - before)


def resident() -> int:
    """Return the resident memory in bytes, after free memory was returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")


def status(field: str) -> int:
    """Return a size in bytes from the process's status."""
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def machine() -> str:
    """Return one line that describes the hardware and the versions of a measurement."""
    import jax

    device = jax.devices()[0]
    kind = cpu_name() if device.platform == "cpu" else f"{device.device_kind} x{len(jax.devices())}"
    versions = [f"Python {platform.python_version()}"]
    for name in ("jax", "torch", "transformers"):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{kind}, {cores()} cores; {', '.join(versions)}"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """Return the processor's model, with the widest of its vector instructions of x86."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    name = re.search(r"model name\s*: (.*)", text)
    wide = " (AVX-512)" if "avx512f" in text else " (AVX2)" if "avx2" in text else ""
    return f"{name[1] if name else platform.machine()}{wide}"


def torch_device() -> str:
    """Return torch's name of jax's default device: "cuda" or "cpu"."""
    import jax

    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def wait_for_torch() -> None:
    """Return after torch's work on the device is done."""
    if torch_device() == "cuda":
        import torch

        torch.cuda.synchronize()


def to_numpy(array: Any) -> np.ndarray:
    """Return an array of jax or torch in float32 on the host; float64 stays float64."""
    import jax
    import numpy as np

    if isinstance(array, jax.Array):
        wide = array.dtype == np.float64
        return np.asarray(array, np.float64 if wide else np.float32)
    return array.detach().float().cpu().numpy()


def command_line(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m tools.bench.<name>`, or of another module with dots in its
    name. `--help` prints the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m {name if '.' in name else f'tools.bench.{name}'}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns; a cell with NaN is "failed"."""
    rows = [[re.sub(r".*\bnan\b.*", "failed", cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )
