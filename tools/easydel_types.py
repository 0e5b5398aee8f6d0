"""The model types of EasyDeL 0.3 and their places here, for the page about moving from EasyDeL.

`ELSEWHERE` has the types that no family of this project registers. The other types of EasyDeL are
names of `ed_elarge.config.architectures.list_architectures()`. A nightly test compares both with
the registry of an installed EasyDeL.
"""

from __future__ import annotations

from importlib import metadata

from tools.pages import heading, row

#: Types of EasyDeL that this project registers under the same name.
_SAME = """
arctic aya_vision clip clip_text_model clip_vision_model cohere cohere2 dbrx deepseek_v2
deepseek_v3 exaone exaone4 falcon falcon_h1 falcon_mamba gemma gemma2 gemma3 gemma3_text gemma4
gemma4_text glm glm46v glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm4v_moe_text glm4v_text
glm_moe_dsa gpt2 gpt_neox gpt_oss gptj grok-1 internlm2 kimi_linear llama llama4 llama4_text llava
mamba mamba2 minimax mistral mistral3 mixtral mpt olmo olmo2 olmo3 openelm opt phi phi3 phimoe
pixtral qwen2 qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text
qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text roberta
rwkv seed_oss siglip siglip_text_model siglip_vision_model smollm3 stablelm whisper
"""
SAME_TYPES = tuple(_SAME.split())

_OMNI = (
    "talker talker_code_predictor talker_text text thinker vision_encoder audio_encoder code2wav"
)
_SPEECH = "not here: use `qwen2_audio` or `voxtral` for recordings, and `qwen3_vl_moe` for images"
#: What to use instead -> types of EasyDeL.
_INSTEAD = {
    "`{}`, which contains it: the vision tower is no model of its own here": {
        "gemma4_vision": "gemma4",
        "glm4v_moe_vision": "glm4v_moe",
        "glm4v_vision": "glm4v",
        "llama4_vision_model": "llama4",
        "qwen2_vl_vision": "qwen2_vl",
        "qwen3_5_vision": "qwen3_5",
        "qwen3_5_moe_vision": "qwen3_5_moe",
        "qwen3_vl_vision": "qwen3_vl",
        "qwen3_vl_moe_vision": "qwen3_vl_moe",
    },
    "`{}`: use the checkpoint `MiniMax-Text-01-hf`, which has this type": {
        "MiniMaxText01": "minimax",
        "minimax_text_01": "minimax",
    },
    "not here: use `{}`": {
        "kimi_vl": "kimi_k25",
        "moonvit": "kimi_k25",
    },
}

#: Type of EasyDeL without a family of this name -> what to use instead.
ELSEWHERE: dict[str, str] = {
    **{name: text.format(here) for text, pairs in _INSTEAD.items() for name, here in pairs.items()},
    "qwen3_omni_moe": _SPEECH,
    **{f"qwen3_omni_moe_{part}": _SPEECH for part in _OMNI.split()},
    "gidd": "not here: language models that denoise text are not implemented",
    "xerxes": "not here: no weights are published; use `llama` for a new model",
    "xerxes2": "not here: no weights are published; use `llama` for a new model",
}


def families() -> dict[str, str]:
    """Return type -> module of the family, of all types of this project."""
    points = metadata.entry_points(group="easydel.models")
    return {point.name: point.value.rpartition(".")[2] for point in points}


def type_table() -> list[str]:
    """Return the lines of the table of all types of EasyDeL."""
    modules = families()
    by_family: dict[str, list[str]] = {}
    for name in SAME_TYPES:
        by_family.setdefault(modules[name], []).append(name)
    lines = heading("model type of EasyDeL", "here")
    for family, names in sorted(by_family.items()):
        shown = ", ".join(f"`{name}`" for name in names)
        lines.append(row(shown, f"the same; family `ed_models.families.{family}`"))
    by_text: dict[str, list[str]] = {}
    for name, text in ELSEWHERE.items():
        by_text.setdefault(text, []).append(name)
    for text, names in by_text.items():
        lines.append(row(", ".join(f"`{name}`" for name in names), text))
    return lines
