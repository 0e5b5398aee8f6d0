"""llama.cpp and ik_llama.cpp as contenders: their `llama-batched-bench`, a process for each turn.

llama.cpp reads only GGUF files and loads no model without a tokenizer, and a checkpoint with random
weights has none. The tokenizer here has three special tokens, the bytes, and one piece for each
remaining id.

The source archives of `llama-cpp-python` and `ik-llama-cpp-python` contain both in `vendor`:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF
    cmake --build build --target llama-batched-bench llama-quantize llama-server
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.measure import Run, Timed, cores

#: Number of decode steps of a turn; the program reports their mean.
STEPS = 8
PROGRAM = "llama-batched-bench"
#: Formats that `llama-quantize` produces from a file in one of DTYPES.
QUANTIZED = ("q8_0", "q4_0")
SPECIAL = ("<unk>", "<s>", "</s>")


def write_gguf(checkpoint: Path, path: Path, dtype: str) -> None:
    """Write a checkpoint in Hugging Face layout as a GGUF file with the tokenizer of the benchmark.

    Args:
        checkpoint: Directory with `config.json` and `model.safetensors`.
        path: Path of the new file.
        dtype: Dtype of the matrices, "f32" or "bf16"; norms are float32.

    Raises:
        ValueError: The vocabulary is too small for the tokenizer.
    """
    from ed_models.checkpoints import hub  # imports transformers, which a start measures

    model: Any = hub.from_pretrained(checkpoint, sharding_axis_dims=(1, 1, 1, 1, 1))
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder), model.config.vocab_size)
        model.save_gguf(path, tokenizer=folder, dtype=dtype)


def quantize(source: Path, path: Path, dtype: str, llama_bin: Path) -> None:
    """Convert a file of `write_gguf` to one of QUANTIZED with llama.cpp's own program.

    llama.cpp keeps the head, or an embedding that is also the head, in a format of more bits.
    """
    command = [str(llama_bin / "llama-quantize"), str(source), str(path), dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


def save_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of `vocab` tokens: special tokens, the bytes, and words."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    words = vocab - len(SPECIAL) - 256
    if words < 0:
        raise ValueError(
            f"a vocabulary of {vocab} is too small: it needs at least {256 + len(SPECIAL)} tokens"
        )
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIAL, *in_bytes, *(f"\u2581t{word}" for word in range(words))]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(ids, [], unk_token=SPECIAL[0], byte_fallback=True))
    tokenizer.add_special_tokens([*SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


class LlamaCpp:
    """A Llama checkpoint in one of llama.cpp's formats.

    A process loads the file, warms up, computes a prompt of random tokens and decodes. It reports
    the duration of the prompt and of the decode, without the loading time. The cache is float16,
    the default of llama.cpp.

    Args:
        checkpoint: Directory that `write_gguf` reads.
        name: "llama.cpp" or "ik_llama.cpp".
        dtype: "f32", "bf16", "q8_0" or "q4_0".
        llama_bin: Directory of the programs.
    """

    def __init__(self, checkpoint: Path, name: str, dtype: str, llama_bin: Path):
        self.name, self.program = name, (llama_bin / PROGRAM).resolve(strict=True)
        quantized = dtype in QUANTIZED
        plain = "f32" if quantized else dtype
        self.file = checkpoint / f"{plain}.gguf"
        if not self.file.exists():
            write_gguf(checkpoint, self.file, plain)
        if quantized:
            wide, self.file = self.file, checkpoint / f"{name}-{dtype}.gguf"
            quantize(wide, self.file, dtype, llama_bin)
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
