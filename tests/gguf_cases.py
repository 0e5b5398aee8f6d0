"""Tiny models of the architectures of GGUF files: those of the conformance suite, and further ones.

llama.cpp supports fewer values than the families; the further configurations have only such values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ed_infra.enums import TaskType
from ed_models.checkpoints.gguf.table import ARCHITECTURES
from ed_models.conformance import Cases, Subject

from tests.conformance.cases import subjects

NAME = "as llama.cpp has it"
WINDOW, FULL = "sliding_attention", "full_attention"
#: Model type -> changes of its first configuration.
FURTHER: Mapping[str, Mapping[str, Any]] = {
    "cohere": {"use_qk_norm": False},
    "cohere2": {"head_dim": 8, "num_hidden_layers": 4, "layer_types": [*[WINDOW] * 3, FULL]},
    "deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "dots1": {"num_key_value_heads": 4},
    "exaone4": {"sliding_window": None, "layer_types": [FULL] * 3},
    "falcon_mamba": {"mixer_rms_eps": 1e-5, "layer_norm_epsilon": 1e-5},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 6,
        "layer_types": [*[WINDOW] * 5, FULL],
    },
    "gpt_oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "qwen3": {"attention_bias": False},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "starcoder2": {"sliding_window": None},
}
#: Tasks whose models a GGUF file contains.
TASKS = (TaskType.CAUSAL_LM, TaskType.SEQUENCE_TO_SEQUENCE, TaskType.BASE_MODULE)


def gguf_subjects(*model_types: str) -> Iterator[Subject]:
    """Yield the models of these types, or of all types of the table."""
    known = {row.model_type for row in ARCHITECTURES}
    seen = set()
    for subject in subjects():
        name = subject.model_type
        if name not in known or (model_types and name not in model_types):
            continue
        if subject.task not in TASKS:
            continue
        if name in FURTHER and name not in seen:
            first = subject.cases.rows[next(iter(subject.cases.rows))]
            cases = Cases({NAME: {**first, **FURTHER[name]}}, tiny=subject.cases.tiny)
            yield type(subject)(name, NAME, subject.module_class, cases)
        seen.add(name)
        yield subject


def has_rounded_limits(subject: Subject) -> bool:
    """Return whether llama.cpp computes the positions of a model: it rounds the limits of YaRN."""
    rope = subject.model.config.to_dict().get("rope_parameters") or {}
    return rope.get("truncate") is not False
