"""Replies of models with two function calls, in the published spelling of every format."""

from __future__ import annotations

import json

TEXT = {"type": "string"}
TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": TEXT, "days": {"type": "integer"}, "tags": {"type": "array"}},
    },
    "now": {"type": "object", "properties": {}},
}
CITY = 'Zürich "old" {town}'
PARIS = ("weather", {"city": CITY, "days": 3})
NOW = ("now", {})
BOTH = [PARIS, NOW]
J = json.dumps({"city": CITY, "days": 3}, ensure_ascii=False)
TAGGED = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n{c}\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
).replace("{c}", CITY)
SEED = (
    "<seed:tool_call>\n<function=weather>\n<parameter=city>{c}</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
).replace("{c}", CITY)
PYTHON = f"weather(city={CITY!r}, days=3)"
GLM = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>{c}</arg_value><arg_key>days</arg_key>"
    "<arg_value>3</arg_value></tool_call><tool_call>now</tool_call>"
).replace("{c}", CITY)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">{c}</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
).replace("{c}", CITY)
M3 = (
    (
        '{n}<tool_call>\n{n}<invoke name="weather">{n}<city>{c}{n}</city>{n}<days>3{n}</days>'
        '{n}</invoke>\n{n}<invoke name="now">{n}</invoke>\n{n}</tool_call>'
    )
    .replace("{n}", "]<]minimax[>[")
    .replace("{c}", CITY)
)
GPT_OSS = (
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{J}<|call|>"
    "<|start|>assistant<|channel|>commentary to=functions.now json<|message|>{}<|call|>"
)
LISTED = f'[{{"name": "weather", "arguments": {J}}}, {{"name": "now", "arguments": {{}}}}]'
COHERE = (
    f'[\n    {{"tool_call_id": "0", "tool_name": "weather", "parameters": {J}}},\n'
    '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]'
)

# Format -> a reply with the calls `BOTH`.
EXAMPLES = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {J}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {J}}}; '
    '{"name": "now", "parameters": {}}',
    "llama4_pythonic": f"<|python_start|>[{PYTHON}, now()]<|python_end|>",
    "pythonic": f"[{PYTHON}, now()]",
    "mistral": f"[TOOL_CALLS]weather[ARGS]{J}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}",
    "qwen3_coder": TAGGED,
    "qwen3_xml": TAGGED,
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    f"```json\n{J}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{J}"
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm45": f"<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{J}<|tool_call_end|><|tool_call_begin|>functions.now:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">'
    f'{CITY}</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n'
    "</invoke>\n</minimax:tool_call>",
    "minimax_m3": M3,
    "gpt_oss": GPT_OSS,
    "openai": f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{J}"
    "<|call|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {J}}}, {{"arguments": {{}}, '
    '"name": "now"}]',
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {J}}}'
    '<|action_end|><|action_start|><|plugin|>{"name": "now", "parameters": {}}<|action_end|>',
    "jamba": f'<tool_calls>[\n{{"name": "weather", "arguments": {J}}},\n{{"name": "now"}}\n]'
    "</tool_calls>",
    "phi4_mini_json": f'functools[{{"name": "weather", "arguments": {J}}}, {{"name": "now"}}]',
    "olmo3": f"<function_calls>\n{PYTHON}\nnow()\n</function_calls>",
    "functiongemma": f"<start_function_call>call:weather{{city:<escape>{CITY}<escape>,days:3}}"
    "<end_function_call><start_function_call>call:now{}<end_function_call>",
    "deepseek_v32": DSML,
    "deepseek_v4": DSML.replace("function_calls", "tool_calls"),
    "seed_oss": SEED,
    "step3": "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
    f'<steptml:invoke name="weather">\n<steptml:parameter name="city">{CITY}</steptml:parameter>\n'
    '<steptml:parameter name="days">3</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">\n</steptml:invoke>'
    "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
    "step3p5": TAGGED,
    "glm47": GLM,
    "gemma4": f'<|tool_call>call:weather{{city:<|"|>{CITY}<|"|>,days:3}}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    "apertus": f'<|tools_prefix|>[{{"weather": {J}}}, {{"now": {{}}}}]<|tools_suffix|>',
    "lfm2": f"<|tool_call_start|>[{PYTHON}, now()]<|tool_call_end|>",
    "longcat": f'<longcat_tool_call>\n{{"name": "weather", "arguments": {J}}}\n'
    '</longcat_tool_call>\n<longcat_tool_call>\n{"name": "now", "arguments": {}}\n'
    "</longcat_tool_call>",
    "cohere_command3": f"<|START_ACTION|>{COHERE}<|END_ACTION|>",
    "cohere_command_r": f"Action: ```json\n{COHERE}\n```",
    "gigachat3": f'<|function_call|>{{"name": "weather", "arguments": {J}}}'
    '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "now", "arguments": {}}',
    "nemotron_json": f"<TOOLCALL>{LISTED}</TOOLCALL>",
    "hunyuan_a13b": f"<tool_calls>{LISTED}</tool_calls>",
    "minimax": f'<tool_calls>\n{{"name": "weather", "arguments": {J}}}\n'
    '{"name": "now", "arguments": {}}\n</tool_calls>',
    "granite4": f'<tool_call>\n{{"name": "weather", "arguments": {J}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "granite-20b-fc": f'<function_call> {{"name": "weather", "arguments": {J}}}\n'
    '<function_call> {"name": "now", "arguments": {}}',
    "llama4_json": f'<|python_tag|>{{"name": "weather", "parameters": {J}}}; '
    '{"name": "now", "parameters": {}}',
    "functionary_v31": f"<function=weather>{J}</function>\n<function=now>{{}}</function>",
    "ernie45": f'<tool_call>\n{{"name": "weather", "arguments": {J}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
    "xlam": f"```json\n{LISTED}\n```",
}
# Further published spellings: (format, reply).
SPELLINGS = [
    ("mistral", f"[TOOL_CALLS] {LISTED}"),  # v3 and v7
    ("mistral", f"[TOOL_CALLS]weather{J}[TOOL_CALLS]now{{}}"),  # v11
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]ABCDEFGHI[ARGS]{J}[TOOL_CALLS]now[ARGS]{{}}"),  # v13
    ("xlam", LISTED),
    ("xlam", f"[TOOL_CALLS]{LISTED}"),
    ("xlam", f"<tool_call>{LISTED}</tool_call>"),
    ("llama3_json", EXAMPLES["llama4_json"]),
    ("llama4_json", EXAMPLES["llama3_json"]),
    ("glm45", GLM),
    ("glm47", EXAMPLES["glm45"]),
    ("hermes", f"<tool_call>{LISTED}</tool_call>"),
    ("gpt_oss", EXAMPLES["openai"]),
    ("openai", GPT_OSS),
    ("granite", EXAMPLES["granite4"]),
]
