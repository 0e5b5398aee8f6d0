"""Small run files, and copies of them with some keys changed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import yaml
from ed_elarge.actions.execution import execute
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_infra.testing import english_topics

GOOD: dict[str, Any] = {
    "model": {
        "config": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4},
        "tokenizer": {"train": {"vocab_size": 300}},
    },
    "mixture": {
        "informs": [{"type": "python", "data_files": "pydoc_data.topics:topics"}],
        "pack_tokens": True,
        "pack_seq_length": 64,
        "eval_fraction": 0.1,
    },
    "trainer": {"trainer_type": "sft", "total_batch_size": 8},
    "actions": ["validate", "train"],
}


def with_changes(**changes: Any) -> dict[str, Any]:
    """GOOD with dotted keys set (`trainer__seed=3`) or, given `...`, removed."""
    out = copy.deepcopy(GOOD)
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        holder = out
        for part in path:
            holder = holder.setdefault(part, {})
        if value is ...:
            holder.pop(last, None)
        else:
            holder[last] = value
    return out


def with_texts(folder: Path) -> Path:
    """A folder with some English texts."""
    texts = sorted(english_topics().values(), key=len)[20:40]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return folder


def small(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of seconds on the texts of `with_texts`, with some sections changed."""
    return {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
            },
            "tokenizer": {"train": {"vocab_size": 320}},
        },
        "sharding": {"axis_dims": [1, 1, 1, 1, 1]},
        "mixture": {
            "informs": [{"data_files": str(folder / "texts.jsonl"), "content_field": "text"}],
            "eval_fraction": 0.2,
            "pack_tokens": True,
            "pack_seq_length": 64,
            "cache_dir": str(folder / "cache"),
        },
        "trainer": {
            "max_training_steps": 3,
            "total_batch_size": 4,
            "learning_rate": 3e-3,
            "save_directory": str(folder / "run"),
            "use_tensorboard": False,
        },
        "esurge": {
            "max_model_len": 128,
            "max_num_seqs": 4,
            "page_size": 16,
            "max_num_batched_tokens": 64,
            "compile_runner": False,
        },
        "eval": {"tasks": ["heldout_perplexity", "heldout_cloze"], "limit": 3},
        "actions": ["train", "eval", {"generate": {"prompts": ["The ", "A "], "max_tokens": 3}}],
        **changes,
    }


def run(settings: dict[str, Any]) -> int:
    """Execute a run and return the exit code."""
    text = yaml.safe_dump(settings, sort_keys=False)
    return execute(normalize(nodes.parse_yaml(text, "run.yaml"), require_actions=True)).code
