"""Write folders of tiny models with the original EasyDeL, from weights of torch.

This program runs in the environment of the original (`easydel`, `torch`), not in that of this
project:

    $EASYDEL_PYTHON tools/easydel/save_folders.py OUT
    $EASYDEL_PYTHON tools/easydel/save_folders.py OUT llama gpt2

Each family has a folder `OUT/FAMILY` with three entries: `source` is the folder that transformers
saved, `saved` is the folder that EasyDeL saved, `logits.npz` contains token ids, images and the
logits of torch. With `XLA_FLAGS=--xla_force_host_platform_device_count=8` the arrays have several
chunks.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 48,
}
_TIED = {"tie_word_embeddings": True}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER}
#: Token of each of the four features of an image.
IMAGE_TOKEN = 95

#: Family -> fields of its tiny configuration.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {**_TEXT},
    "mistral": {**_TEXT, "sliding_window": 8},
    "qwen2": {**_TEXT, **_TIED},
    "qwen3": {**_TEXT, "head_dim": 8},
    "gemma2": {**_TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {**_TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "phi3": {**_TEXT, **_IDS},
    "mixtral": {**_TEXT, **_EXPERTS, "sliding_window": None},
    "qwen3_moe": {**_TEXT, **_EXPERTS, "head_dim": 8, "decoder_sparse_step": 1},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_IDS},
    "gpt_neox": {**_TEXT, "num_key_value_heads": 4},
    "gptj": {
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "rotary_dim": 4,
        **_IDS,
        "tie_word_embeddings": False,
    },
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **_IDS},
    "mamba2": {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "expand": 2,
        "n_groups": 1,
        **_IDS,
    },
    "gpt_oss": {**_TEXT, **_EXPERTS, "head_dim": 8, "sliding_window": 8, **_IDS},
    "olmo2": {**_TEXT, **_IDS},
    "falcon": {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        **_IDS,
    },
    "opt": {
        "vocab_size": 96,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        **_IDS,
    },
    "qwen3_next": {
        **_TEXT,
        **_EXPERTS,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1,
    },
    "whisper": {
        "vocab_size": 96,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 32,
        "max_target_positions": 32,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        **_IDS,
    },
    "deepseek_v3": {
        **_TEXT,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 48,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        **_IDS,
    },
    "llava": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 8,
            "projection_dim": 32,
        },
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -1,
    },
    "gemma3": {
        "text_config": {**_TEXT, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE_TOKEN,
        "boi_token_index": 94,
        "eoi_token_index": 93,
    },
    "aya_vision": {
        "text_config": {"model_type": "cohere2", **_TEXT, "sliding_window": 8, **_IDS},
        "vision_config": _SIGLIP,
        "image_token_index": IMAGE_TOKEN,
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **_TOWER, "head_dim": 8},
        "image_token_index": IMAGE_TOKEN,
        "spatial_merge_size": 2,
    },
    "clip": {
        "text_config": {**_TEXT, "num_key_value_heads": 4, **_IDS},
        "vision_config": _TOWER,
        "projection_dim": 32,
    },
}
#: Families whose logits are those of texts with images.
IMAGE_FAMILIES = ("gemma3", "aya_vision", "mistral3", "clip")

#: Auto classes of families that are no causal language models: of transformers and of EasyDeL.
_CLASSES = {
    "whisper": ("AutoModelForSpeechSeq2Seq", "AutoEasyDeLModelForSpeechSeq2Seq"),
    **dict.fromkeys(
        ("llava", "gemma3", "aya_vision", "mistral3"),
        ("AutoModelForImageTextToText", "AutoEasyDeLModelForImageTextToText"),
    ),
    "clip": (
        "AutoModelForZeroShotImageClassification",
        "AutoEasyDeLModelForZeroShotImageClassification",
    ),
}
_CAUSAL = ("AutoModelForCausalLM", "AutoEasyDeLModelForCausalLM")


def _import_easydel() -> Any:
    """Return the module of the original, whose names differ from those of this project."""
    import easydel

    return easydel


def create_source(family: str, folder: Path) -> None:
    """Write the folder of transformers with random weights, and the logits of torch."""
    import numpy as np
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    name = _CLASSES.get(family, _CAUSAL)[0]
    model = getattr(transformers, name).from_config(config).float().eval()
    with torch.no_grad():  # norms of ones and biases of zeros would hide an exchange
        for key, value in model.named_parameters():
            if value.ndim == 1 and key != "lm_head.bias" and "A_log" not in key:
                value.add_(torch.randn_like(value) * 0.05)
            elif value.ndim > 1:
                value.copy_(torch.randn_like(value) * 0.08)
    model.save_pretrained(folder / "source")
    ids = np.random.default_rng(0).integers(3, 90, (2, 16))
    inputs = {"input_ids": torch.tensor(ids)}
    if family == "whisper":
        features = np.random.default_rng(1).normal(size=(2, 16, 64)).astype(np.float32)
        inputs = {"input_features": torch.tensor(features), "decoder_input_ids": torch.tensor(ids)}
        np.save(folder / "features.npy", features)
    images = create_images(family) if family in IMAGE_FAMILIES else {}
    if images and family != "clip":
        ids[:, 4:8] = IMAGE_TOKEN
        inputs = {"input_ids": torch.tensor(ids)}
    if family == "gemma3":  # the tokens of an image attend to each other
        inputs["token_type_ids"] = torch.tensor(ids == IMAGE_TOKEN).long()
    inputs |= {name: torch.tensor(array) for name, array in images.items()}
    with torch.no_grad():
        if family == "clip":
            logits = model(**inputs).logits_per_image.numpy()
        else:
            logits = model(**inputs, use_cache=False).logits.numpy()
    np.savez(folder / "logits.npz", input_ids=ids, logits=logits, **images)


def create_images(family: str) -> dict[str, Any]:
    """Return the arrays of two images."""
    import numpy as np

    pixels = np.random.default_rng(1).normal(size=(2, 3, 16, 16)).astype(np.float32)
    sizes = {"image_sizes": np.array([[16, 16], [16, 16]])} if family == "mistral3" else {}
    return {"pixel_values": pixels, **sizes}


def save_model(family: str, folder: Path) -> None:
    """Load the folder of transformers with EasyDeL in float32, and save it."""
    import jax
    import jax.numpy as jnp
    import torch

    ed = _import_easydel()
    auto = getattr(ed, _CLASSES.get(family, _CAUSAL)[1])
    model = auto.from_pretrained(
        str(folder / "source"),
        from_torch=True,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        torch_dtype=torch.float32,
        sharding_axis_dims=(1, len(jax.devices()), 1, 1, 1),
    )
    model.save_pretrained(str(folder / "saved"))


def main() -> int:
    """Write the folders, print one line per family, and return the number of failures."""
    out, *names = sys.argv[1:]
    failures = 0
    for family in names or FAMILIES:
        folder = Path(out) / family
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if not (folder / "source").is_dir():
                create_source(family, folder)
            save_model(family, folder)
            print(family, "saved", flush=True)
        except Exception as error:
            traceback.print_exc()
            print(family, f"failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            failures += 1
    return failures


if __name__ == "__main__":
    sys.exit(main())
