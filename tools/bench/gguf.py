"""Compare decode steps over GGUF files with llama.cpp, in one run.

    EASYDEL_LLAMA_CPP_PYTHON=PYTHON python -m tools.bench.gguf
    EASYDEL_LLAMA_CPP_PYTHON=PYTHON python -m tools.bench.gguf --layers 8 --batch 1 8 --rounds 5

The files have SmolLM2-135M's shape and random weights; llama.cpp quantizes every matrix. This
project keeps the codes of the files: `gguf` has float32 activations, and `gguf_a8` rounds
activations to 8 bits, like llama.cpp. Both programs use all cores and a context of 32 tokens. A
cell contains the minimum and, in parentheses, the median of a step in ms.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ed_elarge.certify.llama_cpp_logits import PYTHON_VARIABLE, interpreter

from tests.parity.gguf_comparisons import FILE_TYPES, quantize
from tools.bench.decode import CAPACITY, VOCAB, Ours, save_random
from tools.bench.llama_cpp import STEPS, write_gguf
from tools.bench.measure import Run, Timed, all_turns, command_line, cores, machine, table

CONTEXT = 32
#: Contender of this project -> format of the file, and quantization of the matrices.
OURS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "ours F32": ("F32", None),
    "ours Q8_0, gguf": ("Q8_0", {"dtype": "gguf"}),
    "ours Q8_0, gguf_a8": ("Q8_0", {"dtype": "gguf_a8"}),
    "ours Q4_0, gguf": ("Q4_0", {"dtype": "gguf"}),
    "ours Q4_0, gguf_a8": ("Q4_0", {"dtype": "gguf_a8"}),
}
#: llama.cpp: a prompt for each sequence, steps that warm up, and measured steps.
PROGRAM = """
import sys, time, llama_cpp as api
path, rows, length, steps, threads = sys.argv[1], *map(int, sys.argv[2:])
api.llama_backend_init()
model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
options = api.llama_context_default_params()
options.n_ctx = rows * (length + 2 * steps + 32)
options.n_batch = options.n_ubatch = rows * length
options.n_seq_max = rows
options.n_threads = options.n_threads_batch = threads
context = api.llama_init_from_model(model, options)
def decode(first, count):
    batch = api.llama_batch_init(rows * count, 0, 1)
    batch.n_tokens = rows * count
    for i in range(rows * count):
        batch.token[i], batch.pos[i] = 300 + i % 997, first + i % count
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, i // count
        batch.logits[i] = i % count == count - 1
    assert api.llama_decode(context, batch) == 0
    api.llama_get_logits_ith(context, rows * count - 1)
    api.llama_batch_free(batch)
decode(0, length)
for step in range(2 * steps):
    if step == steps:
        began = time.perf_counter()
    decode(length + step, 1)
print((time.perf_counter() - began) / steps)
"""


def llama_cpp_step(python: str, file: Path, rows: int) -> Timed:
    """Return the seconds of one decode step of llama.cpp."""
    numbers = map(str, (rows, CONTEXT, STEPS, cores()))
    command = [python, "-I", "-c", PROGRAM, str(file), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"llama.cpp does not decode {file.name}: {done.stderr[-300:]}")
    return Timed(float(done.stdout))


def main() -> None:
    parser = command_line("gguf", __doc__)
    add = parser.add_argument
    add("--formats", nargs="+", choices=["F32", *FILE_TYPES], default=["F32", "Q8_0", "Q4_0"])
    add("--batch", type=int, nargs="+", default=[1, 8])
    add("--layers", type=int, help="number of layers; default: 30")
    add("--rounds", type=int, default=7)
    options = parser.parse_args()
    python = interpreter()
    if python is None:
        parser.error(f"llama-cpp-python is not installed: install it, or set {PYTHON_VARIABLE}")
    tokens = np.random.default_rng(0).integers(VOCAB, size=(max(options.batch), CONTEXT))
    with tempfile.TemporaryDirectory() as name:
        wide = Path(name) / "F32.gguf"
        save_random(Path(name), "llama", options.layers)
        write_gguf(Path(name), wide, "f32")
        files, ours = {}, {}
        for form in options.formats:
            files[form] = wide.with_name(f"{form}.gguf")
            if form != "F32":
                quantize(wide, files[form], FILE_TYPES[form])
            for title, (own, quantized) in OURS.items():
                if own == form:
                    ours[title] = Ours(files[form], CAPACITY, "auto", "float32", quantized)
        rows: dict[str, list[str]] = {}
        for batch in options.batch:
            runs: dict[str, Run] = {
                f"llama.cpp {form}": partial(llama_cpp_step, python, file, batch)
                for form, file in files.items()
            }
            runs |= {title: one.decoder(tokens[:batch]) for title, one in ours.items()}
            for title, seconds in all_turns(runs, rounds=options.rounds).items():
                least, median = min(seconds) * 1e3, statistics.median(seconds) * 1e3
                rows.setdefault(title, [title]).append(f"{least:.1f} ({median:.1f})")
    print(f"{machine()}; load {os.getloadavg()[0]:.1f}\n")
    print(table(["ms", *(f"batch {batch}" for batch in options.batch)], [*rows.values()]))


if __name__ == "__main__":
    main()
