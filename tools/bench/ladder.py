"""Predict the loss of a run by a ladder of small models, train the run, and grade the prediction.

    python -m tools.bench.ladder            # three data sets of this repository
    python -m tools.bench.ladder --data python --steps 300

The rungs and the run have µP widths. The result is JSON: for each data set the sizes, the learning
rate, the interval of the loss, the loss of the run, and whether the loss is inside.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.ladder import Ladder, write_prediction
from ed_elarge.model import eLargeModel

ROOT = Path(__file__).parents[2]
#: Data set -> patterns of its files.
DATA = {
    "english": ("docs/*.md", "docs/*/*.md", "packages/*/*.md"),
    "python": ("packages/ed-models/src/**/*.py",),
    "c++": ("packages/ed-layers/native/*.cc", "packages/ed-layers/native/*.h"),
}
#: Characters of a text.
PART = 2000


def write_texts(name: str, folder: Path) -> Path:
    """Write the texts of a data set as JSON lines, and return the path."""
    files = sorted({path for pattern in DATA[name] for path in ROOT.glob(pattern)})
    text = "\n".join(path.read_text("utf-8") for path in files)
    path = folder / "texts.jsonl"
    parts = [text[start : start + PART] for start in range(0, len(text), PART)]
    path.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts), "utf-8")
    return path


def build_run(name: str, folder: Path, *, heads: int, layers: int, steps: int) -> dict[str, Any]:
    """Return the run file of the large run."""
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 16 * heads,
                "intermediate_size": 40 * heads,
                "num_attention_heads": heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": layers,
                "max_position_embeddings": 64,
                "tie_word_embeddings": True,
            },
            "tokenizer": {"train": {"vocab_size": 320}},
            "parametrization": "mup",
            "base_widths": {
                "hidden_size": 32,
                "intermediate_size": 80,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
        },
        "sharding": {"axis_dims": [1, 1, 1, 1, 1]},
        "base_config": {"values": {"scan_layers": False}},
        "mixture": {
            "informs": [{"data_files": str(write_texts(name, folder)), "content_field": "text"}],
            "eval_fraction": 0.05,
            "pack_tokens": True,
            "pack_seq_length": 64,
            "cache_dir": str(folder / "cache"),
        },
        "trainer": {
            "max_training_steps": steps,
            "total_batch_size": 8,
            "learning_rate": 1e-2,
            "warmup_ratio": 0.05,
            "scheduler": "cosine",
            "max_evaluation_steps": 12,
            "save_directory": str(folder / "run"),
            "use_tensorboard": False,
            "progress_bar_type": "none",
            "save_strategy": "no",
        },
        "actions": ["train"],
    }


def grade(values: dict[str, Any], *, rungs: int, ratio: float) -> dict[str, Any]:
    """Climb the ladder of a run, train the run at the predicted rate, and return both."""
    began = time.process_time()
    run = normalize(Document("ladder", value=values))
    ladder = Ladder(values, run, 1e9, rungs, ratio)
    prediction = ladder.climb()
    write_prediction(run, prediction)
    rate = prediction["learning_rate"]["value"]
    trainer = {**values["trainer"], "learning_rate": rate}
    metrics = eLargeModel({**values, "trainer": trainer}).train().metrics
    loss, target = prediction["loss"], prediction["target"]
    return {
        "parameters": [rung["parameters"] for rung in prediction["rungs"]] + [target["parameters"]],
        "flops": [rung["flops"] for rung in prediction["rungs"]] + [target["flops"]],
        "losses": [rung["loss"] for rung in prediction["rungs"]],
        "learning_rate": prediction["learning_rate"],
        "noise": prediction["noise"],
        "loss": loss,
        "actual": metrics[loss["metric"]],
        "inside": loss["low"] <= metrics[loss["metric"]] <= loss["high"],
        "processor_seconds": time.process_time() - began,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the graded prediction of each data set as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=DATA, action="append")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rungs", type=int, default=4)
    parser.add_argument("--ratio", type=float, default=2.5)
    options = parser.parse_args(arguments)
    sizes = {"heads": options.heads, "layers": options.layers, "steps": options.steps}
    for name in options.data or DATA:
        with tempfile.TemporaryDirectory() as folder:
            values = build_run(name, Path(folder), **sizes)
            graded = grade(values, rungs=options.rungs, ratio=options.ratio)
            print(json.dumps({"data": name, **graded}), flush=True)


if __name__ == "__main__":
    main()
