"""Conformance cases of DeBERTa-v2 and v3."""

from ed_models.conformance import ENCODER_TASKS, TINY_ENCODER, Cases

_V3 = {
    **TINY_ENCODER,
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}

CASES = Cases(
    {
        "v3": _V3,
        "own projections, positions in the embeddings, one term": {
            **_V3,
            "share_att_key": False,
            "pos_att_type": ["c2p"],
            "position_biased_input": True,
            "type_vocab_size": 2,
            "position_buckets": -1,
            "max_relative_positions": 16,
            "norm_rel_ebd": "none",
        },
        "a convolution in groups (v2-xlarge)": {
            **_V3,
            "conv_kernel_size": 3,
            "conv_act": "gelu",
            "conv_groups": 2,
        },
        "small embeddings": {**_V3, "embedding_size": 20, "type_vocab_size": 2},
        "no relative positions": {
            **_V3,
            "relative_attention": False,
            "position_biased_input": True,
        },
    },
    tasks=ENCODER_TASKS,
    tiny=False,
)
