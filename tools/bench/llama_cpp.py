"""llama.cpp as a contender: its `llama-batched-bench`, one process for each turn."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np

from tools.bench.measure import Run, Timed, cores

#: Number of decode steps of a turn; the program reports their mean.
STEPS = 8
PROGRAM = "llama-batched-bench"


class LlamaCpp:
    """A Llama checkpoint in one of llama.cpp's formats.

    A process loads the file, warms up, computes a prompt of random tokens and decodes. It reports
    the duration of the prompt and of the decode, without the loading time. The cache is float16,
    the default of llama.cpp.

    Args:
        checkpoint: Directory that `to_gguf.write` reads.
        dtype: "f32", "bf16", "q8_0" or "q4_0".
        llama_bin: Directory of llama.cpp's programs.
    """

    def __init__(self, checkpoint: Path, dtype: str, llama_bin: Path):
        from tools.bench import to_gguf  # the package `gguf` is optional

        self.program = llama_bin / PROGRAM
        self.file = checkpoint / f"{dtype}.gguf"
        if dtype in to_gguf.QUANTIZED:
            wide = checkpoint / "f32.gguf"
            if not wide.exists():
                to_gguf.write(checkpoint, wide, "f32")
            to_gguf.quantize(wide, self.file, dtype, llama_bin)
        else:
            to_gguf.write(checkpoint, self.file, dtype)
        self.weight_bytes = self.file.stat().st_size

    def decoder(self, tokens: np.ndarray) -> Run:
        """Return a run that returns the seconds of one decode step after prompts of that shape."""
        rows, length = tokens.shape
        return lambda: Timed(self.measured(rows, length, STEPS)["t_tg"] / STEPS)

    def prefiller(self, tokens: np.ndarray) -> Run:
        """Return a run that returns the seconds of prompts of that shape."""
        rows, length = tokens.shape
        return lambda: Timed(self.measured(rows, length, 1)["t_pp"])

    def measured(self, rows: int, length: int, steps: int) -> dict[str, float]:
        """Return the figures that the program prints for one setting."""
        settings = {
            "-m": self.file,
            "-c": rows * (length + steps),
            "-t": cores(),
            "-npp": length,
            "-ntg": steps,
            "-npl": rows,
            "--output-format": "jsonl",
        }
        words = [str(word) for pair in settings.items() for word in pair]
        done = subprocess.run([self.program, *words], capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise RuntimeError(f"{PROGRAM} {' '.join(words)} failed:\n{done.stderr}")
        return json.loads(lines[-1])
