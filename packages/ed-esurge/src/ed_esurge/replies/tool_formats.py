"""Table of the formats of tool calls.

Each format is one entry. Names are those of vLLM's parsers where vLLM has one.
`tests/test_replies_formats.py` tests each entry with an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ed_esurge.replies.formats import ToolFormat

HARMONY = (
    "<|channel|>final<|message|>",
    "<|channel|>commentary<|message|>",
    "<|start|>assistant",
    "<|end|>",
    "<|return|>",
)
_GPT_OSS = ToolFormat(
    opens=("<|channel|>commentary to=", "<|channel|>analysis to=", "<|start|>assistant to="),
    syntax="headed",
    name_ends=("<|message|>",),
    name=r"(?:functions\.)?(?P<name>[\w.-]+)\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\w*\s*",
    ends=("<|call|>", "<|end|>"),
    drops=HARMONY,
    signs=("<|channel|>",),
    headers=True,
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
    signs=(("<tool_call>", "<function="), ("<function=", "<parameter=")),
    ends_thoughts=True,
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
_DSML = ToolFormat(
    opens=("<｜DSML｜function_calls>",),
    closes=("</｜DSML｜function_calls>",),
    begins=('<｜DSML｜invoke name="',),
    syntax="tagged",
    name_ends=('">',),
    ends=("</｜DSML｜invoke>",),
    key_open='<｜DSML｜parameter name="',
    key_close='">',
    key=r'(?P<key>[^"]*)(?:"\s+string="(?P<string>true|false))?',
    value_close="</｜DSML｜parameter>",
    signs=("<｜DSML｜function_calls>", "｜DSML｜"),
    ends_thoughts=True,
)
_GLM = ToolFormat(
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
    ends_thoughts=True,
)
_LLAMA3 = ToolFormat(opens=("<|python_tag|>",), starts=("{",), signs=("<|python_tag|>",))
_HERMES = ToolFormat(opens=("<tool_call>",), closes=("</tool_call>",), signs=("<tool_call>",))
_TOOL_CALLS = ToolFormat(
    opens=("<tool_calls>",), closes=("</tool_calls>",), signs=("<tool_calls>",)
)
_GRANITE = ToolFormat(
    opens=("<|tool_call|>", "<tool_call>"),
    closes=("</tool_call>",),
    signs=("<|start_of_role|>",),
)

# In the order of detection: the most specific signs first.
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "gpt_oss": _GPT_OSS,
    "openai": _GPT_OSS,
    "kimi_k2": ToolFormat(
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        closes=("<|tool_calls_section_end|>",),
        begins=("<|tool_call_begin|>",),
        syntax="headed",
        name_ends=("<|tool_call_argument_begin|>",),
        name=r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+)\s*",
        ends=("<|tool_call_end|>",),
        signs=("<|tool_calls_section_begin|>",),
        ends_thoughts=True,
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
    "deepseek_v4": replace(
        _DSML,
        opens=("<｜DSML｜tool_calls>",),
        closes=("</｜DSML｜tool_calls>",),
        # A template may put the texts together: '<' + dsml_token + 'tool_calls>'.
        signs=("<｜DSML｜tool_calls>", ("｜DSML｜", "tool_calls>")),
    ),
    "deepseek_v32": _DSML,
    "minimax_m3": ToolFormat(
        opens=("]<]minimax[>[<tool_call>",),
        closes=("]<]minimax[>[</tool_call>",),
        begins=(']<]minimax[>[<invoke name="',),
        syntax="elements",
        name_ends=('">',),
        ends=("]<]minimax[>[</invoke>",),
        key_open="]<]minimax[>[<",
        key_close=">",
        value_close="]<]minimax[>[</",
        signs=("]<]minimax[>[",),
        ends_thoughts=True,
    ),
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
        ends_thoughts=True,
    ),
    "seed_oss": replace(
        _FUNCTION_TAGS,
        opens=("<seed:tool_call>",),
        closes=("</seed:tool_call>",),
        padding="",
        signs=("<seed:tool_call>",),
    ),
    "step3": ToolFormat(
        opens=("<｜tool_calls_begin｜>",),
        closes=("<｜tool_calls_end｜>",),
        begins=('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',),
        syntax="tagged",
        name_ends=('">',),
        ends=("</steptml:invoke><｜tool_call_end｜>",),
        key_open='<steptml:parameter name="',
        key_close='">',
        value_close="</steptml:parameter>",
        signs=("<steptml:invoke", "<｜tool_calls_begin｜>"),
    ),
    "qwen3_coder": _FUNCTION_TAGS,
    "qwen3_xml": _FUNCTION_TAGS,
    "step3p5": _FUNCTION_TAGS,
    "glm45": _GLM,
    "glm47": _GLM,
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
    "gemma4": ToolFormat(
        opens=("<|tool_call>",),
        closes=("<tool_call|>",),
        syntax="braces",
        name_ends=("{",),
        name=r"\s*(?:call)?:\s*(?P<name>[^\s{]+)\s*",
        value_open='<|"|>',
        value_close='<|"|>',
        signs=("<|tool_call>",),
    ),
    "apertus": ToolFormat(
        opens=("<|tools_prefix|>",),
        closes=("<|tools_suffix|>",),
        syntax="keyed",
        signs=("<|tools_prefix|>",),
    ),
    "lfm2": ToolFormat(
        opens=("<|tool_call_start|>",),
        closes=("<|tool_call_end|>",),
        syntax="python",
        signs=("<|tool_call_start|>", "<|tool_list_start|>"),
    ),
    "longcat": ToolFormat(
        opens=("<longcat_tool_call>",),
        closes=("</longcat_tool_call>",),
        signs=("<longcat_tool_call>",),
    ),
    "cohere_command3": ToolFormat(
        opens=("<|START_ACTION|>",),
        closes=("<|END_ACTION|>",),
        name_keys=("tool_name",),
        drops=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        signs=("<|START_ACTION|>",),
    ),
    "cohere_command_r": ToolFormat(
        opens=("Action: ```json", "Action:```json"),
        closes=("```",),
        name_keys=("tool_name",),
        signs=("Action: ```json", "'Action:'"),
    ),
    "gigachat3": ToolFormat(
        opens=("<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n"),
        drops=("<|message_sep|>",),
        signs=("<|function_call|>", "function call<|role_sep|>"),
    ),
    "nemotron_json": ToolFormat(
        opens=("<TOOLCALL>",), closes=("</TOOLCALL>",), signs=("<TOOLCALL>",)
    ),
    "olmo3": ToolFormat(
        opens=("<function_calls>",),
        closes=("</function_calls>",),
        syntax="python",
        signs=("<function_calls>",),
    ),
    "hunyuan_a13b": replace(_TOOL_CALLS, signs=("<|hy_Assistant|>", ("<tool_calls>", "<answer>"))),
    "jamba": _TOOL_CALLS,
    "minimax": _TOOL_CALLS,
    "phi4_mini_json": ToolFormat(
        opens=("functools",), signs=("functools", "<|/tool|>")
    ),
    "internlm": ToolFormat(
        opens=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        closes=("<|action_end|>",),
        signs=("<|action_start|>",),
    ),
    "granite": _GRANITE,
    "granite4": _GRANITE,
    "granite-20b-fc": ToolFormat(
        opens=("<function_call>",), signs=("<function_call>", "<|function_call_library|>")
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
    "functionary_v31": ToolFormat(
        opens=("<function=",),
        syntax="headed",
        name_ends=(">",),
        ends=("</function>",),
        signs=("<function=",),
    ),
    "llama3_json": _LLAMA3,
    "llama4_json": _LLAMA3,
    "ernie45": replace(
        _HERMES, drops=("<response>", "</response>"), signs=(("<tool_call>", "<response>"),)
    ),
    "xlam": ToolFormat(
        opens=("```json", "```", "[TOOL_CALLS]", "<tool_call>"),
        starts=("[",),
        closes=("```", "</tool_call>"),
        signs=("make calls in a single JSON array",),
    ),
    "hermes": _HERMES,
}  # fmt: skip
