"""Steps whose memory `tools.bench.plan` predicts and compiles: models, meshes and trainer settings.

A case is a mapping of changed values of `BASE`. The keys of `SETTINGS` configure the run; all other
keys are fields of the model.
"""

from __future__ import annotations

from typing import Any

from ed_elarge.config.normalize import normalize
from ed_elarge.config.run_config import RunConfig
from ed_elarge.errors import Document

Case = dict[str, Any]

SETTINGS = (
    *("length", "rows", "mesh", "remat", "optimizer", "accumulation", "chunk", "lora"),
    *("dtype", "param_dtype", "topology", "method"),
)
BASE: Case = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "length": 512,
    "rows": 16,
    "mesh": [1, 8, 1, 1, 1],
    "remat": "nothing_saveable",
    "optimizer": "adamw",
    "accumulation": 1,
    "chunk": None,
    "lora": None,
    "dtype": "float32",
    "param_dtype": "float32",
    "topology": None,
    "method": "sft",
}
SMALL_HEAD = {"vocab_size": 1024, "length": 1024}
_TP8: Case = {
    "mesh": [1, 1, 1, 8, 1],
    "num_key_value_heads": 8,
    "vocab_size": 64000,
    "rows": 2,
}
#: Gradients of whole weights need more memory than the tokens.
_FEW_TOKENS: Case = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "length": 256,
    "rows": 8,
}
#: Steps of Llama, Qwen3 and Mixtral on simulated devices.
STEPS: dict[str, Case] = {
    "base": {},
    "1024 tokens": {"length": 1024},
    "2048 tokens": {"length": 2048},
    "32 rows": {"rows": 32},
    "12 layers": {"num_hidden_layers": 12},
    "2 layers": {"num_hidden_layers": 2},
    "small head": SMALL_HEAD,
    "small head, 512 tokens": {"vocab_size": 1024},
    "small head, 2048 tokens": {"vocab_size": 1024, "length": 2048},
    "32000 words": {"vocab_size": 32000},
    "64000 words": {"vocab_size": 64000},
    "chunks of 256": {"vocab_size": 32000, "chunk": 256},
    "chunks of 512": {"vocab_size": 32000, "chunk": 512},
    "wide feed-forward": {**SMALL_HEAD, "intermediate_size": 2816},
    "16 heads": {**SMALL_HEAD, "num_attention_heads": 16, "num_key_value_heads": 16},
    "8 key heads": {**SMALL_HEAD, "num_key_value_heads": 8},
    "1024 features": {**SMALL_HEAD, "hidden_size": 1024},
    "1024 features, 32000 words": {"hidden_size": 1024, "vocab_size": 32000},
    "all kept": {"remat": ""},
    "all kept, 1024 tokens": {"remat": "", "length": 1024},
    "all kept, small head": {**SMALL_HEAD, "remat": ""},
    "all kept, wide": {**SMALL_HEAD, "remat": "", "intermediate_size": 2816},
    "all kept, 12 layers": {**SMALL_HEAD, "remat": "", "num_hidden_layers": 12},
    "all kept, 8 key heads": {**SMALL_HEAD, "remat": "", "num_key_value_heads": 8},
    "dots": {**SMALL_HEAD, "remat": "dots_saveable"},
    "dots, 12 layers": {**SMALL_HEAD, "remat": "dots_saveable", "num_hidden_layers": 12},
    "dots without batch": {**SMALL_HEAD, "remat": "dots_with_no_batch_dims_saveable"},
    "tp 2": {"mesh": [1, 4, 1, 2, 1]},
    "tp 2, small head": {**SMALL_HEAD, "mesh": [1, 4, 1, 2, 1]},
    "tp 4": {"mesh": [1, 2, 1, 4, 1]},
    "tp 8": _TP8,
    "tp 8, 4 rows": {**_TP8, "rows": 4},
    "tp 8, all kept": {**_TP8, "remat": ""},
    "tp 4, dp 2": {**_TP8, "mesh": [2, 1, 1, 4, 1], "rows": 4},
    "tp 4, sp 2": {**_TP8, "mesh": [1, 1, 1, 4, 2]},
    "dp 8": {"mesh": [8, 1, 1, 1, 1]},
    "dp 8, small head": {**SMALL_HEAD, "mesh": [8, 1, 1, 1, 1]},
    "dp 8, 32000 words": {"mesh": [8, 1, 1, 1, 1], "vocab_size": 32000},
    "dp 8, 1024 features": {"mesh": [8, 1, 1, 1, 1], "vocab_size": 32000, "hidden_size": 1024},
    "dp 8, adapters": {"mesh": [8, 1, 1, 1, 1], "vocab_size": 32000, "lora": 8},
    "dp 8, dpo": {"mesh": [8, 1, 1, 1, 1], "vocab_size": 32000, "method": "dpo", "rows": 8},
    "dp 2": {"mesh": [2, 4, 1, 1, 1]},
    "sp 2": {"mesh": [1, 4, 1, 1, 2]},
    "sp 2, small head": {**SMALL_HEAD, "mesh": [1, 4, 1, 1, 2]},
    "one device": {"mesh": [1, 1, 1, 1, 1], "rows": 4},
    "two microbatches": {"accumulation": 2},
    "two microbatches, small head": {**SMALL_HEAD, "accumulation": 2},
    "lion": {"optimizer": "lion"},
    "sgd": {"optimizer": "sgd"},
    "qwen3": {"model_type": "qwen3"},
    "adapters": {**SMALL_HEAD, "lora": 8},
    "adapters, all kept": {**SMALL_HEAD, "lora": 8, "remat": ""},
    "experts": {"model_type": "mixtral", "num_local_experts": 8, "vocab_size": 1024},
    "16 experts": {"model_type": "mixtral", "num_local_experts": 16, "vocab_size": 1024},
    "dpo": {"method": "dpo", "rows": 8},
    "dpo, small head": {**SMALL_HEAD, "method": "dpo", "rows": 8},
    "dpo, 32000 words": {"method": "dpo", "vocab_size": 32000, "rows": 8},
    "dpo, 16 rows": {"method": "dpo"},
    "dpo, tp 2": {"method": "dpo", "mesh": [1, 4, 1, 2, 1], "rows": 8},
    "dpo, adapters": {"method": "dpo", "rows": 8, "lora": 8},
    "orpo": {"method": "orpo", "rows": 8},
    "cpo, 32000 words": {"method": "cpo", "vocab_size": 32000, "rows": 8},
    "grpo": {"method": "grpo"},
    "grpo, 32000 words": {"method": "grpo", "vocab_size": 32000},
    "grpo, adapters": {"method": "grpo", "lora": 8},
    "gspo, tp 2": {"method": "gspo", "mesh": [1, 4, 1, 2, 1]},
    "few tokens, 64000 words": {**_FEW_TOKENS, "vocab_size": 64000},
    "few tokens, small head": {**_FEW_TOKENS, "vocab_size": 1024},
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
#: Fields of families that differ from those of `BASE`; None omits a field.
FAMILIES: dict[str, Case] = {
    "cohere": {"head_dim": None},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 64},
    "gemma3_text": {"query_pre_attn_scalar": 64},
    "glm4": {"pad_token_id": 0},
    "gpt2": {"num_key_value_heads": None, "intermediate_size": None, "head_dim": None},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512},
    "granite": {"head_dim": None},
    "ministral3": {},
    "mistral": {},
    "olmo": {"head_dim": None},
    "olmo2": {"head_dim": None},
    "olmo3": {"head_dim": None},
    "olmoe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 512,
        "head_dim": None,
    },
    "phi": {"num_key_value_heads": 8, "head_dim": None},
    "phi3": {"pad_token_id": 0, "head_dim": None},
    "qwen2": {"head_dim": None},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 512, "head_dim": None},
    "qwen3_moe": {**_EXPERTS, "head_dim": None},
    "seed_oss": {},
    "smollm3": {"pad_token_id": 0, "head_dim": None},
    "starcoder2": {"head_dim": None},
}
_GPT2 = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def families() -> dict[str, Case]:
    """Return two steps of each family of `FAMILIES`: values recomputed, and all values kept."""
    kinds: dict[str, Case] = {"": SMALL_HEAD, ", all kept": {**SMALL_HEAD, "remat": ""}}
    return {
        f"{name}{kind}": {**changes, **fields, "model_type": name}
        for name, fields in FAMILIES.items()
        for kind, changes in kinds.items()
    }


def run_of(case: Case) -> RunConfig:
    """Return the run of a case."""
    own = {**BASE, **case}
    config = {k: v for k, v in own.items() if k not in SETTINGS and (v is not None or "cap" in k)}
    config["max_position_embeddings"] = max(4096, own["length"])
    config["tie_word_embeddings"] = False
    if own["model_type"] == "gpt2":
        config["n_positions"] = config.pop("max_position_embeddings")
        config = {_GPT2.get(k, k): v for k, v in config.items()}
    trainer = {
        "trainer_type": own["method"],
        "total_batch_size": own["rows"],
        "max_training_steps": 2,
        "optimizer": own["optimizer"],
        "gradient_accumulation_steps": own["accumulation"],
    }
    mixture: dict[str, Any] = {"informs": [{"type": "json", "data_files": "rows.jsonl"}]}
    if own["method"] not in ("grpo", "gspo"):
        mixture |= {"pack_tokens": True, "pack_seq_length": own["length"]}
    else:
        half = own["length"] // 2
        trainer |= {"max_prompt_length": half, "max_completion_length": half}
        trainer["reward_functions"] = ["exact"]
    if own["chunk"] is not None:
        trainer["lmhead_chunksize"] = own["chunk"]
    values: dict[str, Any] = {
        "model": {"config": config, "tokenizer": "tokenizer"},
        "loader": {"dtype": own["dtype"], "param_dtype": own["param_dtype"]},
        "sharding": {"axis_dims": own["mesh"]},
        "base_config": {"values": {"gradient_checkpointing": own["remat"]}},
        "mixture": mixture,
        "trainer": trainer,
        "actions": ["train"],
    }
    if own["lora"] is not None:
        values["lora"] = {"rank": own["lora"]}
    return normalize(Document("plan.yaml", value=values))
