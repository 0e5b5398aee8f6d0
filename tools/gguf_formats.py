"""Compare quantized GGUF files with llama.cpp, for the tables in docs/gguf.md.

    EASYDEL_LLAMA_CPP_PYTHON=/path/to/python uv run python -m tools.gguf_formats [MODEL_TYPE ...]
    … python -m tools.gguf_formats --every [MODEL_TYPE ...]
    … python -m tools.gguf_formats --rounded MODEL_TYPE ...

The first command compares all formats of some families, and the second one two formats of every
architecture. Each family has a small model with random weights. llama.cpp quantizes the model, and
decodes the quantized file to float32. This project reads the quantized file, and llama.cpp computes
the decoded one, so both compute in float32 from the same codes. (From the quantized file itself,
llama.cpp rounds activations.)

llama.cpp reads GELU, in the approximation by tanh, from a table of float16 numbers. The third
command computes GELU in the same way here, to show that models with GELU differ only by this table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_elarge.certify.llama_cpp_logits import VARIABLE, interpreter, llama_cpp_logits
from ed_infra.errors import CheckpointError
from ed_layers.activations import ACTIVATIONS
from ed_layers.native import products
from ed_models.checkpoints import hub
from ed_models.checkpoints.gguf.files import read_parts
from ed_models.checkpoints.gguf.table import ROWS
from ed_models.conformance import ONE, Cases, Subject, forward

from tests.gguf_cases import gguf_subjects
from tools.gguf_results import WITHOUT_LOGITS
from tools.gguf_table import COMMON, FORMATS, NEW_TOKENS, ROUNDED

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "mixtral", "olmo2")
#: Format -> number of llama.cpp's file type. The others need a matrix of importance, or are rarely
#: used for whole files.
FILE_TYPES = {
    "F16": 1,
    "BF16": 32,
    "Q8_0": 7,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 12,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "TQ1_0": 36,
    "TQ2_0": 37,
}
FLOAT32 = 0
#: A row of a matrix has whole blocks of every format.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "ffn_hidden_size": 256,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "rotary_dim": 32,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
QUANTIZE = """
import sys, llama_cpp
parameters = llama_cpp.llama_model_quantize_default_params()
parameters.ftype, parameters.pure, parameters.allow_requantize = int(sys.argv[3]), True, True
source, target = sys.argv[1].encode(), sys.argv[2].encode()
sys.exit(llama_cpp.llama_model_quantize(source, target, parameters))
"""


def quantize(source: Path, target: Path, file_type: int) -> None:
    """Write a GGUF file in another format by llama.cpp."""
    python = interpreter()
    if python is None:
        raise RuntimeError(f"llama-cpp-python is not installed: install it, or set {VARIABLE}")
    command = [python, "-I", "-c", QUANTIZE, str(source), str(target), str(file_type)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"llama.cpp does not quantize {source.name}: {done.stderr[-300:]}")


def rounded_gelu(x: jax.Array) -> jax.Array:
    """Return GELU as llama.cpp computes it: by tanh, from float16 to float16."""
    near = jax.nn.gelu(x.astype(jnp.float16).astype(jnp.float32), approximate=True)
    near = near.astype(jnp.float16).astype(x.dtype)
    return jnp.where(x <= -10, 0, jnp.where(x >= 10, x, near))


@contextmanager
def as_llama_cpp() -> Iterator[None]:
    """Compute GELU within the block as llama.cpp does."""
    kept, fused = dict(ACTIVATIONS), dict(products.ACTS)
    for name in [name for name in kept if "gelu" in name]:
        ACTIVATIONS[name] = rounded_gelu
        products.ACTS.pop(name, None)
    try:
        yield
    finally:
        ACTIVATIONS.update(kept)
        products.ACTS.update(fused)


def wide_subject(model_type: str) -> Subject:
    """Return the first configuration of a family with rows of whole blocks."""
    first = next(iter(gguf_subjects(model_type)))
    changes = {name: value for name, value in SIZES.items() if name in first.fields}
    cases = Cases({"wide": {**first.fields, **changes}}, tiny=False)
    return type(first)(model_type, "wide", first.module_class, cases)


def compare(subject: Subject, wide: Path, name: str) -> tuple[float, int]:
    """Return the largest difference of a logit, relative to the largest logit, and the number of
    equal greedy tokens before the first other one.

    Args:
        subject: the model.
        wide: the model as a GGUF file in float32.
        name: a format; llama.cpp converts the file to the format.
    """
    quantized, decoded = (wide, wide) if name == "F32" else in_format(wide, name)
    found, tokens = llama_cpp_logits(decoded, subject.ids, NEW_TOKENS)
    own = hub.from_pretrained(quantized, task=subject.task, sharding_axis_dims=ONE)
    logits = np.asarray(subject.output(forward(own, **subject.whole())))
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    made = own.generate(subject.ids, **options, eos_token_id=None)
    equal = np.asarray(made.sequences)[:, subject.ids.shape[1] :] == tokens
    before = int(np.cumprod(equal, axis=1).sum(axis=1).min())
    return float(np.abs(found - logits).max() / np.abs(logits).max()), before


def in_format(wide: Path, name: str) -> tuple[Path, Path]:
    """Return a file in a format, and a file with the same values in float32.

    Raises:
        RuntimeError: llama.cpp does not convert the file, or no matrix fits the format.
    """
    quantized, decoded = wide.with_name("quantized.gguf"), wide.with_name("decoded.gguf")
    quantize(wide, quantized, FILE_TYPES[name])
    if all(tensor.format != name for tensor in read_parts(quantized).tensors.values()):
        raise RuntimeError(f"no matrix of {wide.name} fits {name}: its rows are no whole blocks")
    quantize(quantized, decoded, FLOAT32)
    return quantized, decoded


def main() -> None:
    """Read the options, and measure."""
    parser = argparse.ArgumentParser(prog="python -m tools.gguf_formats")
    parser.add_argument("families", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--every", action="store_true", help="two formats of every architecture")
    parser.add_argument("--rounded", action="store_true", help="round GELU as llama.cpp does")
    options = parser.parse_args()
    with as_llama_cpp() if options.rounded else nullcontext():
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Measure the families of the options, and store the differences."""
    results = json.loads(FORMATS.read_text(encoding="utf-8")) if FORMATS.is_file() else {}
    known = sorted({row.model_type for row in ROWS} - WITHOUT_LOGITS)
    for model_type in options.families or (known if options.every else FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            subject = wide_subject(model_type)
            try:
                wide = subject.model.save_gguf(Path(folder) / "wide.gguf", dtype="f32")
            except CheckpointError as refused:
                print(f"{model_type}: not written: {refused}", flush=True)
                continue
            for name in COMMON if options.every or options.rounded else FILE_TYPES:
                try:
                    error, tokens = compare(subject, wide, name)
                except RuntimeError as failed:
                    print(f"{model_type} {name}: {failed}", flush=True)
                    continue
                print(f"{model_type} {name}: {error:.1e}, {tokens} tokens", flush=True)
                key = f"{name}{ROUNDED}" if options.rounded else name
                results.setdefault(key, {})[model_type] = [float(f"{error:.1e}"), tokens]
                results[key] = dict(sorted(results[key].items()))
                text = json.dumps(dict(sorted(results.items())), indent=2)
                FORMATS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
