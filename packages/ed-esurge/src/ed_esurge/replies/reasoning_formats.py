"""Table of the formats of reasoning. Each format is one entry.

Names are those of vLLM's parsers where vLLM has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ed_esurge.replies.formats import ReasoningFormat
from ed_esurge.replies.tool_formats import HARMONY

_THINK = ReasoningFormat(("<think>",), ("</think>",), signs=("<think>", "</think>"))
_ALWAYS_THINK = replace(_THINK, always=True)
_GPT_OSS = ReasoningFormat(
    ("<|channel|>analysis<|message|>",),
    ("<|end|>",),
    drops=HARMONY,
    signs=("<|channel|>",),
    headers=True,
)

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "gpt_oss": _GPT_OSS,
    "openai_gptoss": _GPT_OSS,
    "seed_oss": ReasoningFormat(
        ("<seed:think>",), ("</seed:think>",), signs=("<seed:think>",)
    ),
    "mistral": ReasoningFormat(("[THINK]",), ("[/THINK]",), signs=("[THINK]",)),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        signs=("Here is my thought process:",),
    ),
    "hunyuan_a13b": ReasoningFormat(
        ("<think>",), ("</think>",), drops=("<answer>", "</answer>"),
        signs=(("<think>", "<answer>"),),
    ),
    "cohere_command3": ReasoningFormat(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        drops=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        signs=("<|START_THINKING|>",),
    ),
    "gemma4": ReasoningFormat(
        ("<|channel>thought\n", "<|channel>thought", "<|channel>"), ("<channel|>",),
        drops=("<channel|>",), signs=("<|channel>",),
    ),
    "apertus": ReasoningFormat(
        ("<|inner_prefix|>",), ("<|inner_suffix|>",), signs=("<|inner_prefix|>",)
    ),
    "longcat": ReasoningFormat(
        ("<longcat_think>",), ("</longcat_think>",), signs=("<longcat_think>",)
    ),
    "ernie45": ReasoningFormat(
        ("<think>",), ("</think>",), drops=("<response>", "</response>"),
        signs=(("<think>", "<response>"),),
    ),
    "minimax_m3": ReasoningFormat(
        ("<mm:think>",), ("</mm:think>",), signs=("<mm:think>",)
    ),
    "deepseek_r1": _ALWAYS_THINK,
    "deepseek_v3": _THINK,
    "qwen3": _ALWAYS_THINK,
    "glm45": _THINK,
    "minimax_m2": _ALWAYS_THINK,
    "kimi_k2": ReasoningFormat(
        ("<think>", "◁think▷"), ("</think>", "◁/think▷"), signs=("◁think▷",)
    ),
    "olmo3": _THINK,
    "step3": _ALWAYS_THINK,
    "step3p5": _ALWAYS_THINK,
    "nemotron_v3": _ALWAYS_THINK,
    "exaone4": _THINK,
    "smollm3": _THINK,
}  # fmt: skip
