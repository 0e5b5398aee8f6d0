"""Compare GGUF files with llama.cpp, for the tests and for the tables of docs/gguf.md.

    EASYDEL_LLAMA_CPP_PYTHON=/path/to/python
    uv run python -m tests.parity.gguf_comparisons logits [MODEL_TYPE ...]
    uv run python -m tests.parity.gguf_comparisons formats [--every] [--rounded] [MODEL_TYPE ...]
    uv run python -m tests.parity.gguf_comparisons perplexities DIRECTORY

`logits` compares every configuration of the conformance suite that a GGUF file represents: tiny
models with random weights, which are written as float32; llama.cpp and this project compute logits
from that file.

`formats` compares all formats of some families, and with `--every` two formats of every
architecture. llama.cpp quantizes the model, and decodes the quantized file to float32. This project
reads the quantized file, and llama.cpp computes the decoded one, so both compute in float32 from
the same codes. (From the quantized file itself, llama.cpp rounds activations.) llama.cpp reads
GELU, in the approximation by tanh, from a table of float16 numbers. `--rounded` computes GELU in
the same way here, to show that models with GELU differ only by this table.

`perplexities` compares one model with a tokenizer in several formats:

    elarge examples/pretrain.yaml --set model.config.intermediate_size=768 \\
        --set trainer.max_training_steps=80 --set 'actions=[train]'

The text is the help topics of Python's standard library, as tokens of the model's tokenizer, in
rows of equal lengths. Each token except the first of a row counts.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_elarge.certify.llama_cpp_logits import PYTHON_VARIABLE, interpreter, llama_cpp_logits
from ed_infra.errors import CheckpointError
from ed_layers.activations import ACTIVATIONS
from ed_layers.native import products
from ed_models.auto import AutoEasyDeLModelForCausalLM
from ed_models.checkpoints import hub
from ed_models.checkpoints.gguf.files import read_parts
from ed_models.checkpoints.gguf.table import ARCHITECTURES
from ed_models.checkpoints.tokenizers import load_tokenizer
from ed_models.conformance import ONE, Cases, Subject, forward

from tests.gguf_cases import gguf_subjects, has_rounded_limits
from tools.bench.measure import command_line
from tools.gguf_table import COMMON, FORMATS, NEW_TOKENS, PERPLEXITY, RESULTS, ROUNDED

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
#: Model types that llama.cpp runs and the low-level interface here does not: encoders.
WITHOUT_LOGITS = frozenset({"t5", "umt5", "bert", "nomic_bert"})
#: Formats and tokens of the perplexities.
PERPLEXITY_FORMATS = ("F32", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
TEXTS, LENGTH = 16, 256


def compared(*model_types: str) -> dict[str, Subject]:
    """Return the language models of the table: those of these model types, or all."""
    return {
        str(subject): subject
        for subject in gguf_subjects(*model_types)
        if subject.model_type not in WITHOUT_LOGITS and has_rounded_limits(subject)
    }


def difference(subject: Subject, folder: Path) -> float:
    """Return the largest difference of a logit, relative to the largest logit.

    Raises:
        CheckpointError: a GGUF file does not represent the model.
    """
    path = subject.model.save_gguf(folder / "model.gguf", dtype="f32")
    own = hub.from_pretrained(path, task=subject.task, sharding_axis_dims=ONE)
    logits = np.asarray(subject.output(forward(own, **subject.build_full_inputs())))
    found, _ = llama_cpp_logits(path, subject.ids)
    return float(np.abs(found - logits).max() / np.abs(logits).max())


def quantize(source: Path, target: Path, file_type: int) -> None:
    """Write a GGUF file in another format by llama.cpp."""
    python = interpreter()
    if python is None:
        raise RuntimeError(
            f"llama-cpp-python is not installed: install it, or set {PYTHON_VARIABLE}"
        )
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
    logits = np.asarray(subject.output(forward(own, **subject.build_full_inputs())))
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


def perplexity(logits: np.ndarray, ids: np.ndarray) -> float:
    """Return the perplexity of rows of tokens: all tokens after the first of each row.

    Args:
        logits: [b, s, v].
        ids: [b, s].
    """
    before = logits[:, :-1].astype(np.float64)
    largest = before.max(axis=-1, keepdims=True)
    total = np.log(np.exp(before - largest).sum(axis=-1)) + largest[..., 0]
    chosen = np.take_along_axis(before, ids[:, 1:, None].astype(np.int64), -1)[..., 0]
    return float(np.exp((total - chosen).mean()))


def perplexities(wide: Path, name: str, ids: np.ndarray) -> list[float]:
    """Return the perplexities of a file in a format: by this project, by llama.cpp for the decoded
    file, and by llama.cpp for the file itself.

    Args:
        wide: the model as a GGUF file in float32.
        name: the format.
        ids: tokens, int32 [b, s].
    """
    quantized, decoded = (wide, wide) if name == "F32" else in_format(wide, name)
    own = AutoEasyDeLModelForCausalLM.from_pretrained(quantized, sharding_axis_dims=ONE)
    logits = [np.asarray(own(input_ids=row[None]).logits, np.float32)[0] for row in ids]
    found = [perplexity(np.stack(logits), ids)]
    return found + [
        perplexity(llama_cpp_logits(path, ids)[0], ids) for path in (decoded, quantized)
    ]


def measure_logits(model_types: Sequence[str]) -> None:
    """Measure, print and store the differences of files in float32."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    worst: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, subject in compared(*model_types).items():
            try:
                error = difference(subject, Path(folder))
            except CheckpointError as refused:
                print(f"{name}: not written: {refused}", flush=True)
                continue
            except RuntimeError as failed:
                print(f"{name}: {failed}", flush=True)
                continue
            print(f"{name}: {error:.1e}", flush=True)
            worst[subject.model_type] = max(error, worst.get(subject.model_type, 0.0))
            results[subject.model_type] = float(f"{worst[subject.model_type]:.1e}")
            text = json.dumps(dict(sorted(results.items())), indent=2)
            RESULTS.write_text(text + "\n", encoding="utf-8")


def measure_formats(families: Sequence[str], *, every: bool, rounded: bool) -> None:
    """Measure, print and store the differences of quantized files."""
    results = json.loads(FORMATS.read_text(encoding="utf-8")) if FORMATS.is_file() else {}
    known = sorted({row.model_type for row in ARCHITECTURES} - WITHOUT_LOGITS)
    for model_type in families or (known if every else FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            subject = wide_subject(model_type)
            try:
                wide = subject.model.save_gguf(Path(folder) / "wide.gguf", dtype="f32")
            except CheckpointError as refused:
                print(f"{model_type}: not written: {refused}", flush=True)
                continue
            for name in COMMON if every or rounded else FILE_TYPES:
                try:
                    error, tokens = compare(subject, wide, name)
                except RuntimeError as failed:
                    print(f"{model_type} {name}: {failed}", flush=True)
                    continue
                print(f"{model_type} {name}: {error:.1e}, {tokens} tokens", flush=True)
                key = f"{name}{ROUNDED}" if rounded else name
                results.setdefault(key, {})[model_type] = [float(f"{error:.1e}"), tokens]
                results[key] = dict(sorted(results[key].items()))
                text = json.dumps(dict(sorted(results.items())), indent=2)
                FORMATS.write_text(text + "\n", encoding="utf-8")


def measure_perplexities(directory: Path) -> None:
    """Measure, print and store the perplexities."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = load_tokenizer(directory)(text, add_special_tokens=False).input_ids
    ids = np.asarray(tokens[: TEXTS * LENGTH], np.int32).reshape(TEXTS, LENGTH)
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = AutoEasyDeLModelForCausalLM.from_pretrained(directory, sharding_axis_dims=ONE)
        wide = model.save_gguf(Path(folder) / "wide.gguf", dtype="f32")
        for name in PERPLEXITY_FORMATS:
            results[name] = [round(value, 6) for value in perplexities(wide, name, ids)]
            print(name, *results[name], flush=True)
    PERPLEXITY.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, and measure."""
    parser = command_line("tests.parity.gguf_comparisons", __doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("logits").add_argument("families", nargs="*", metavar="MODEL_TYPE")
    formats = kinds.add_parser("formats")
    formats.add_argument("families", nargs="*", metavar="MODEL_TYPE")
    formats.add_argument("--every", action="store_true", help="two formats of every architecture")
    formats.add_argument("--rounded", action="store_true", help="round GELU as llama.cpp does")
    kinds.add_parser("perplexities").add_argument("directory", type=Path)
    options = parser.parse_args()
    if options.kind == "logits":
        measure_logits(options.families)
    elif options.kind == "perplexities":
        measure_perplexities(options.directory)
    else:
        with as_llama_cpp() if options.rounded else nullcontext():
            measure_formats(options.families, every=options.every, rounded=options.rounded)


if __name__ == "__main__":
    main()
