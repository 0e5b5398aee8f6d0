"""Logits and greedy tokens of llama.cpp, in a process of their own.

    python llama_cpp_logits.py model.gguf ids.npz logits.npz [NEW_TOKENS]

llama.cpp ends its process when it rejects a file. The package `llama-cpp-python` is built from
source: it is in this environment, or `EASYDEL_LLAMA_CPP_PYTHON` names an interpreter with
the package. `ids.npz` contains `ids` int32 [b, s]; `logits.npz` gets `logits` float32
[b, s, v], and `tokens` int32 [b, n] that continue the rows.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

#: Variable of the environment that names an interpreter with `llama_cpp`.
PYTHON_VARIABLE = "EASYDEL_LLAMA_CPP_PYTHON"
_SECONDS = 300
#: Bytes of a file below which one thread computes.
SMALL_FILE = 1 << 26


def interpreter() -> str | None:
    """Return the interpreter with `llama_cpp`; None if there is none."""
    installed = importlib.util.find_spec("llama_cpp") is not None
    return os.environ.get(PYTHON_VARIABLE) or (sys.executable if installed else None)


def llama_cpp_logits(
    model: Path, ids: np.ndarray, new_tokens: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits [b, s, v] and the greedy tokens that follow [b, n], computed by llama.cpp.

    Args:
        model: a GGUF file.
        ids: tokens, int32 [b, s].
        new_tokens: number of greedy tokens.

    Raises:
        RuntimeError: llama.cpp does not load or run the model, or is not installed.
    """
    python = interpreter()
    if python is None:
        raise RuntimeError(
            f"llama-cpp-python is not installed: install it, or set {PYTHON_VARIABLE}"
        )
    with tempfile.TemporaryDirectory() as folder:
        ids_path, logits_path = Path(folder) / "ids.npz", Path(folder) / "logits.npz"
        np.savez(ids_path, ids=ids)
        command = [
            python,
            "-I",
            __file__,
            str(model),
            str(ids_path),
            str(logits_path),
            str(new_tokens),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode:
            raise RuntimeError(f"llama.cpp failed: {done.stderr[-2000:]}")
        with np.load(logits_path) as file:
            return file["logits"], file["tokens"]


class LlamaCpp:
    """A model of llama.cpp with caches in float32."""

    def __init__(self, path: str, length: int):
        import llama_cpp  # type: ignore[import-not-found]

        self.api: Any = llama_cpp
        self.api.llama_backend_init()
        parameters = self.api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = self.api.llama_model_load_from_file(path.encode(), parameters)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.vocab = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.length = length
        # The threads of a small model wait for each other longer than they compute.
        self.threads = 1 if os.path.getsize(path) < SMALL_FILE else 2

    def context(self) -> Any:
        parameters = self.api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = self.length
        parameters.type_k = parameters.type_v = 0  # GGML_TYPE_F32
        parameters.n_threads = parameters.n_threads_batch = self.threads
        parameters.swa_full = True
        if hasattr(parameters, "flash_attn_type"):
            parameters.flash_attn_type = 0
        return self.api.llama_init_from_model(self.model, parameters)

    def logits(self, context: object, tokens: list[int], start: int) -> np.ndarray:
        """Return the logits of tokens at consecutive positions."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        failed = self.api.llama_decode(context, batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        rows = []
        for i in range(len(tokens)):
            values = self.api.llama_get_logits_ith(context, i)
            pointer = ctypes.cast(values, ctypes.POINTER(ctypes.c_float))
            rows.append(np.ctypeslib.as_array(pointer, (self.vocab,)).copy())
        self.api.llama_batch_free(batch)
        return np.stack(rows)


def _main() -> None:
    """Read ids, and write the logits and the greedy tokens."""
    path = sys.argv[1]
    ids_path = sys.argv[2]
    logits_path = sys.argv[3]
    new_tokens = int(sys.argv[4])
    with np.load(ids_path) as file:
        ids = file["ids"]
    model = LlamaCpp(path, -(-(ids.shape[1] + new_tokens) // 32) * 32)
    logits, tokens = [], []
    for row in ids:
        context = model.context()
        logits.append(model.logits(context, row.tolist(), 0))
        last, continued = logits[-1][-1], []
        for step in range(new_tokens):
            continued.append(int(last.argmax()))
            if step + 1 < new_tokens:
                last = model.logits(context, continued[-1:], ids.shape[1] + step)[-1]
        tokens.append(continued)
        model.api.llama_free(context)
    np.savez(logits_path, logits=np.stack(logits), tokens=np.asarray(tokens, np.int32))


if __name__ == "__main__":
    _main()
