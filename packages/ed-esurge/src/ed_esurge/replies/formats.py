"""Tables of the formats of tool calls and reasoning.

Each format is one table entry. `tests/test_replies_formats.py` tests each entry with an example.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from ed_infra.errors import ConfigError, did_you_mean

Syntax = Literal["json", "headed", "tagged", "python", "braces"]


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls.

    Attributes:
        opens: markers that begin a section of calls.
        starts: beginnings of a reply that is a section without a marker.
        closes: markers that may end a section.
        begins: marker that begins each call within a section, if any.
        separators: texts that may separate two calls.
        syntax: `json`: objects with a name and arguments, one or a list. `headed`: a name, then the
            arguments as JSON. `tagged`: a name, then each argument between tags. `python`:
            `f(a=1)`. `braces`: `f{a:1}`.
        name_ends: texts that end the name of a `headed` or `tagged` call. The beginning of the
            arguments (`{`, or `key_open`) is not consumed.
        name: pattern of the head, with the group `name` and an optional group `id`.
        ends: texts that end a call.
        key_open, key_close, value_open, value_close: tags around an argument.
        padding: white space that belongs to the tags and not to the value.
        id_length: number of letters and digits of a call's id, if the template requires a length.
        drops: markers without a meaning for the user.
        signs: texts in a chat template or vocabulary, any of which identifies the format.
    """

    opens: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    separators: tuple[str, ...] = (",", ";")
    syntax: Syntax = "json"
    name_ends: tuple[str, ...] = ()
    name: str = r"(?P<name>[^\s<>\[\]{}()\"]+)"
    ends: tuple[str, ...] = ()
    key_open: str = ""
    key_close: str = ""
    value_open: str = ""
    value_close: str = ""
    padding: str = ""
    id_length: int = 0
    drops: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text that has a meaning in this format."""
        return tuple(
            filter(
                None,
                (
                    *(*self.opens, *self.closes, *self.begins, *self.name_ends, *self.ends),
                    *(self.key_open, self.key_close, self.value_open, self.value_close),
                    *self.drops,
                ),
            )
        )


_HARMONY = (
    "<|channel|>final<|message|>",
    "<|channel|>commentary<|message|>",
    "<|start|>assistant",
    "<|end|>",
    "<|return|>",
)
_FUNCTION_TAGS = ToolFormat(
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    begins=("<function=",),
    syntax="tagged",
    name_ends=(">",),
    ends=("</function>",),
    key_open="<parameter=",
    key_close=">",
    value_close="</parameter>",
    padding="\n",
    signs=("<function=",),
)
_LLAMA4 = ToolFormat(
    opens=("<|python_start|>",),
    starts=("[",),
    closes=("<|python_end|>",),
    syntax="python",
    signs=("<|python_start|>",),
)
_DEEPSEEK = ToolFormat(
    opens=("<｜tool▁calls▁begin｜>",),
    closes=("<｜tool▁calls▁end｜>",),
    begins=("<｜tool▁call▁begin｜>",),
    syntax="headed",
    name_ends=("{",),
    name=r"\s*(?P<name>[^\s<{]+)<｜tool▁sep｜>\s*",
    ends=("<｜tool▁call▁end｜>",),
    signs=("<｜tool▁sep｜>",),
)

# In the order of detection: the most specific signs first.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "gpt_oss": ToolFormat(
        opens=("<|channel|>commentary to=", "<|channel|>analysis to=", "<|start|>assistant to="),
        syntax="headed",
        name_ends=("<|message|>",),
        name=r"(?:functions\.)?(?P<name>[\w.-]+)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*\s*",
        ends=("<|call|>", "<|end|>"),
        drops=_HARMONY,
        signs=("<|channel|>",),
    ),
    "kimi_k2": ToolFormat(
        opens=("<|tool_calls_section_begin|>",),
        closes=("<|tool_calls_section_end|>",),
        begins=("<|tool_call_begin|>",),
        syntax="headed",
        name_ends=("<|tool_call_argument_begin|>",),
        name=r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*",
        ends=("<|tool_call_end|>",),
        signs=("<|tool_calls_section_begin|>",),
    ),
    "deepseek_v3": ToolFormat(
        opens=_DEEPSEEK.opens,
        closes=_DEEPSEEK.closes,
        begins=_DEEPSEEK.begins,
        syntax="headed",
        name_ends=("{",),
        name=r"\s*\w*<｜tool▁sep｜>(?P<name>[^\s<{]+)\s*```(?:json)?\s*",
        ends=("```<｜tool▁call▁end｜>", "```\n<｜tool▁call▁end｜>"),
        signs=("function<｜tool▁sep｜>", "\\n' + '```json"),
    ),
    "deepseek_v31": _DEEPSEEK,
    "minimax_m2": ToolFormat(
        opens=("<minimax:tool_call>",),
        closes=("</minimax:tool_call>",),
        begins=('<invoke name="',),
        syntax="tagged",
        name_ends=('">',),
        ends=("</invoke>",),
        key_open='<parameter name="',
        key_close='">',
        value_close="</parameter>",
        signs=("<minimax:tool_call>",),
    ),
    "qwen3_coder": _FUNCTION_TAGS,
    "qwen3_xml": _FUNCTION_TAGS,
    "glm45": ToolFormat(
        opens=("<tool_call>",),
        syntax="tagged",
        name_ends=("<arg_key>", "</tool_call>"),
        name=r"\s*(?P<name>[^\s<]+)\s*",
        ends=("</tool_call>",),
        key_open="<arg_key>",
        key_close="</arg_key>",
        value_open="<arg_value>",
        value_close="</arg_value>",
        signs=("<arg_key>",),
    ),
    "functiongemma": ToolFormat(
        opens=("<start_function_call>",),
        closes=("<end_function_call>",),
        syntax="braces",
        name_ends=("{",),
        name=r"\s*call:\s*(?P<name>[^\s{]+)\s*",
        value_open="<escape>",
        value_close="<escape>",
        signs=("<start_function_call>",),
    ),
    "olmo3": ToolFormat(
        opens=("<function_calls>",),
        closes=("</function_calls>",),
        syntax="python",
        signs=("<function_calls>",),
    ),
    "jamba": ToolFormat(
        opens=("<tool_calls>",), closes=("</tool_calls>",), signs=("<tool_calls>",)
    ),
    "phi4_mini_json": ToolFormat(
        opens=("functools",), signs=("functools", "<|/tool|>")
    ),
    "internlm": ToolFormat(
        opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        closes=("<|action_end|>",),
        signs=("<|action_start|>",),
    ),
    "granite": ToolFormat(
        opens=("<|tool_call|>", "<tool_call>"),
        closes=("</tool_call>",),
        signs=("<|start_of_role|>",),
    ),
    "mistral": ToolFormat(
        opens=("[TOOL_CALLS]",),
        syntax="headed",
        name_ends=("[ARGS]", "{"),
        name=r"\s*(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>\w+))?\s*",
        id_length=9,
        signs=("[TOOL_CALLS]",),
    ),
    "llama4_pythonic": _LLAMA4,
    "pythonic": _LLAMA4,
    "llama3_json": ToolFormat(
        opens=("<|python_tag|>",), starts=("{",), signs=("<|python_tag|>",)
    ),
    "hermes": ToolFormat(
        opens=("<tool_call>",), closes=("</tool_call>",), signs=("<tool_call>",)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ReasoningFormat:
    """Format of reasoning.

    Attributes:
        opens, closes: markers around the reasoning. A reply begins with reasoning if its prompt
            ends with the first of `opens`.
        drops: markers without a meaning for the user.
        signs: see `ToolFormat`.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    drops: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text that has a meaning in this format."""
        return (*self.opens, *self.closes, *self.drops)


_THINK = ReasoningFormat(("<think>",), ("</think>",), signs=("<think>", "</think>"))

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "gpt_oss": ReasoningFormat(
        ("<|channel|>analysis<|message|>",),
        ("<|end|>",),
        drops=_HARMONY,
        signs=("<|channel|>",),
    ),
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
        ("<think>",), ("</think>",), drops=("<answer>", "</answer>"), signs=("<answer>",)
    ),
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "minimax_m2": _THINK,
    "kimi_k2": ReasoningFormat(
        ("<think>", "◁think▷"), ("</think>", "◁/think▷"), signs=("◁think▷",)
    ),
    "olmo3": _THINK,
    "ernie45": _THINK,
    "step3": _THINK,
}  # fmt: skip


FormatT = TypeVar("FormatT", ToolFormat, ReasoningFormat)


def by_name(table: Mapping[str, FormatT], name: str, option: str) -> FormatT:
    """Return an entry of a table.

    Raises:
        ConfigError: the table has no such entry; the message lists the names.
    """
    if name not in table:
        raise ConfigError(
            f"{option} {name!r} is not known{did_you_mean(name, tuple(table)) or ''}; there are "
            f"{', '.join(sorted(table))}, `auto` looks at the chat template, and `none` reads none"
        )
    return table[name]


def detect(
    table: Mapping[str, FormatT],
    template: str,
    vocabulary: Collection[str] = (),
) -> str | None:
    """Return the first format with signs in a chat template, or else in a vocabulary."""
    for text in (template, vocabulary):
        for name, entry in table.items():
            if any(sign in text for sign in entry.signs):
                return name
    return None
