"""Compare the perplexities of one model in several GGUF formats with llama.cpp, for docs/gguf.md.

    elarge examples/quickstart.yaml --set model.config.intermediate_size=768 \\
        --set trainer.max_training_steps=80 --set 'actions=[train]'
    EASYDEL_LLAMA_CPP_PYTHON=/path/to/python uv run python -m tools.gguf_perplexity DIRECTORY

The text is the help topics of Python's standard library, as tokens of the model's tokenizer, in
rows of equal lengths. Each token except the first of a row counts. llama.cpp computes the quantized
file decoded to float32, so both programs have equal weights, and also the quantized file itself,
whose products round activations.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from ed_elarge.certify.llama_cpp_logits import llama_cpp_logits
from ed_models.auto import AutoEasyDeLModelForCausalLM
from ed_models.checkpoints.tokenizers import load_tokenizer
from ed_models.conformance import ONE

from tools.gguf_formats import in_format
from tools.gguf_table import PERPLEXITY

FORMATS = ("F32", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
ROWS, LENGTH = 16, 256


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


def main() -> None:
    """Measure, print and store the perplexities."""
    parser = argparse.ArgumentParser(prog="python -m tools.gguf_perplexity")
    parser.add_argument("directory", type=Path, help="a language model with a tokenizer")
    directory = parser.parse_args().directory
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = load_tokenizer(directory)(text, add_special_tokens=False).input_ids
    ids = np.asarray(tokens[: ROWS * LENGTH], np.int32).reshape(ROWS, LENGTH)
    results: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = AutoEasyDeLModelForCausalLM.from_pretrained(directory, sharding_axis_dims=ONE)
        wide = model.save_gguf(Path(folder) / "wide.gguf", dtype="f32")
        for name in FORMATS:
            results[name] = [round(value, 6) for value in perplexities(wide, name, ids)]
            print(name, *results[name], flush=True)
    PERPLEXITY.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
