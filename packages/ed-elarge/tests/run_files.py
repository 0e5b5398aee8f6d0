"""A small run file, and copies of it with some keys changed."""

from __future__ import annotations

import copy
from typing import Any

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
