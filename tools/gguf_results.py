"""Measure the differences between this project's logits and those of llama.cpp, for docs/gguf.json.

    EASYDEL_LLAMA_CPP_PYTHON=/path/to/python uv run python -m tools.gguf_results [MODEL_TYPE ...]

Each family of the conformance suite has tiny models with random weights. A model that a GGUF file
represents is written as float32; llama.cpp and this project compute logits from that file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from ed_elarge.certify.llama_cpp_logits import llama_cpp_logits
from ed_infra.errors import CheckpointError
from ed_models.checkpoints import hub
from ed_models.conformance import ONE, Subject, forward

from tests.gguf_cases import gguf_subjects, has_rounded_limits
from tools.gguf_table import RESULTS

#: Model types that llama.cpp runs and the low-level interface here does not: encoders.
WITHOUT_LOGITS = frozenset({"t5", "umt5", "bert", "nomic_bert"})


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
    logits = np.asarray(subject.output(forward(own, **subject.whole())))
    found, _ = llama_cpp_logits(path, subject.ids)
    return float(np.abs(found - logits).max() / np.abs(logits).max())


def main() -> None:
    """Measure, print and store the differences."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    worst: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, subject in compared(*sys.argv[1:]).items():
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


if __name__ == "__main__":
    main()
