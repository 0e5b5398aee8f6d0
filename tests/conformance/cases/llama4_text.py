"""Tiny configurations of llama4_text."""

from ed_models.conformance import Cases

CASES = Cases(
    {
        "chunks": {
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "head_dim": 12,
            "attention_chunk_size": 7,
        },
        "dense layers, two experts": {
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "no_rope_layer_interval": 2,
            "use_qk_norm": False,
            "head_dim": 8,
            "attention_chunk_size": 16,
        },
    }
)
