"""Describe everything in one dictionary with enums, and build its parts."""

import easydel as ed

elm = ed.eLargeModel(
    {
        "model": {"name_or_path": "model", "tokenizer": "model", "task": "auto-bind"},
        "loader": {"dtype": "fp32", "param_dtype": "fp32", "precision": "default"},
        "sharding": {
            "axis_dims": (1, 1, 1, 1, 1),
            "axis_names": ("dp", "fsdp", "ep", "tp", "sp"),
            "auto_shard_model": True,
        },
        "base_config": {
            "values": {
                "freq_max_position_embeddings": 64,
                "mask_max_position_embeddings": 64,
                "attn_mechanism": ed.AttentionMechanisms.AUTO,
                "attn_dtype": "fp32",
                "gradient_checkpointing": ed.EasyDeLGradientCheckPointers.NONE,
                "moe_method": ed.MoEMethods.STANDARD_MOE,
            }
        },
        "esurge": {"max_model_len": 64, "max_num_seqs": 2, "page_size": 16},
        "quantization": {
            "model": {"dtype": "nf4", "group_size": 16},
            "apply_quantization": True,
        },
    }
)
print(elm)
assert elm.build_model().is_quantized
assert elm.build_tokenizer() is not None
engine = elm.build_esurge()
print(engine.generate("the", ed.SamplingParams(max_tokens=2))[0].get_text())
