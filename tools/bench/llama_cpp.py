"""llama.cpp and ik_llama.cpp as contenders: their `llama-batched-bench`, a process for each turn.

The source archives of `llama-cpp-python` and `ik-llama-cpp-python` contain both in `vendor`:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build build --target llama-batched-bench llama-quantize llama-server
"""

from __future__ import annotations

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
        name: "llama.cpp" or "ik_llama.cpp".
        dtype: "f32", "bf16", "q8_0" or "q4_0".
        llama_bin: Directory of the programs.
    """

    def __init__(self, checkpoint: Path, name: str, dtype: str, llama_bin: Path):
        from tools.bench import to_gguf  # the package `gguf` is optional

        self.name, self.program = name, (llama_bin / PROGRAM).resolve(strict=True)
        quantized = dtype in to_gguf.QUANTIZED
        plain = "f32" if quantized else dtype
        self.file = checkpoint / f"{plain}.gguf"
        if not self.file.exists():
            to_gguf.write(checkpoint, self.file, plain)
        if quantized:
            wide, self.file = self.file, checkpoint / f"{name}-{dtype}.gguf"
            to_gguf.quantize(wide, self.file, dtype, llama_bin)
        self.weight_bytes = self.file.stat().st_size

    def decoder(self, tokens: np.ndarray) -> Run:
        """Return a run that returns the seconds of one decode step after prompts of that shape."""
        rows, length = tokens.shape
        return lambda: Timed(rows / self.measured(rows, length, STEPS)["S_TG t/s"])

    def prefiller(self, tokens: np.ndarray) -> Run:
        """Return a run that returns the seconds of prompts of that shape."""
        rows, length = tokens.shape
        return lambda: Timed(rows * length / self.measured(rows, length, 1)["S_PP t/s"])

    def measured(self, rows: int, length: int, steps: int) -> dict[str, float]:
        """Return the columns of the table that the program prints for one setting."""
        settings = {
            "-m": self.file,
            "-c": rows * (length + steps),
            "-t": cores(),
            "-npp": length,
            "-ntg": steps,
            "-npl": rows,
        }
        words = [str(word) for pair in settings.items() for word in pair]
        if self.name == "ik_llama.cpp" and rows > 1:
            words.append("-no-fa")  # its flash attention fails for several sequences
        done = subprocess.run([self.program, *words], capture_output=True, text=True)
        output = done.stdout + done.stderr  # ik_llama.cpp prints the table to the latter
        table = [line for line in output.splitlines() if line.startswith("|")]
        if done.returncode or len(table) < 3:
            raise RuntimeError(f"{PROGRAM} {' '.join(words)} failed:\n{done.stderr}")
        header, _, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
        return {name: float(cell) for name, cell in zip(header, row, strict=True)}
