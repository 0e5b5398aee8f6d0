"""Replies with quotations, broken calls, omitted tags, typed arguments and headers."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from ed_esurge.replies.formats import ReasoningFormat, detect
from ed_esurge.replies.json_text import loads, loads_arguments
from ed_esurge.replies.parser import Calls
from ed_esurge.replies.reasoning_formats import REASONING_FORMATS
from ed_esurge.replies.scanner import Malformed
from ed_esurge.replies.tool_formats import TOOL_FORMATS
from reply_transcripts import EXAMPLES, NOW, PARIS, TOOLS, J
from test_replies_formats import BROKEN, calls_of, reply

THINK = REASONING_FORMATS["deepseek_r1"]
#: Formats whose replies consist of messages with headers. Their thoughts are separate messages.
HEADERS = {name for name, form in TOOL_FORMATS.items() if form.headers}
MARKED = [name for name, form in TOOL_FORMATS.items() if form.opens and not form.headers]


def parse(name, text, *, tools=TOOLS, inside=False, reasoning=None, cut=False):
    """Return the parsed reply of the whole text, after a comparison with splits of the text."""
    options = {"calls": Calls(TOOL_FORMATS[name], tools), "reasoning": reasoning, "inside": inside}
    whole, _ = reply(text, cut=cut, **options)
    seen = [whole.content, whole.reasoning, calls_of(whole)]
    for cuts in (range(1, len(text)), range(1, len(text), 3), range(2, len(text), 7)):
        other, _ = reply(text, cuts, cut=cut, **options)
        assert [other.content, other.reasoning, calls_of(other)] == seen, cuts
    return whole


# ---- quotations within thoughts


@pytest.mark.parametrize("name", MARKED)
def test_quoted_call_in_thoughts_is_executed_only_if_calls_end_thoughts(name):
    quoted = f"Not {EXAMPLES[name].strip()}, that is slow."
    text = f"{quoted}\n</think>\n\nDone."
    whole = parse(name, text, inside=True, reasoning=THINK)
    if TOOL_FORMATS[name].ends_thoughts:
        assert (whole.reasoning, calls_of(whole)) == ("Not", [PARIS, NOW])
        assert "</think>" not in whole.content
    else:
        assert (whole.reasoning, whole.content, whole.calls) == (quoted, "Done.", {})


@pytest.mark.parametrize("name", MARKED)
def test_call_after_a_quotation_in_thoughts_is_read(name):
    form = TOOL_FORMATS[name]
    text = f"I know {form.opens[0]} as a marker.\n</think>\n\n{EXAMPLES[name]}"
    whole = parse(name, text, inside=True, reasoning=THINK)
    assert whole.reasoning == f"I know {form.opens[0]} as a marker."
    assert (calls_of(whole), whole.content) == ([PARIS, NOW], "")


@pytest.mark.parametrize("name", sorted(set(MARKED) - {"xlam"}))
def test_marker_named_in_thoughts_or_in_the_answer_is_text(name):
    for marker in (*TOOL_FORMATS[name].opens, *TOOL_FORMATS[name].begins):
        named = f"The marker {marker} begins a section. I need none."
        whole = parse(name, f"{named}\n</think>\n\nA marker.", inside=True, reasoning=THINK)
        assert (whole.reasoning, whole.content, whole.calls) == (named, "A marker.", {})
        whole = parse(name, named)
        assert (whole.content, whole.calls) == (named, {})


def test_broken_and_unknown_calls_in_thoughts_return_to_the_thoughts():
    for name in ("qwen3_coder", "glm45", "minimax_m2", "kimi_k2", "deepseek_v32"):
        quoted = f"Like {BROKEN[name]} here."
        whole = parse(name, f"{quoted}</think>Yes.", inside=True, reasoning=THINK)
        assert (whole.reasoning, whole.content, whole.calls) == (quoted, "Yes.", {})


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS.keys() - {"gpt_oss", "openai_gptoss"}))
def test_end_of_thoughts_at_the_beginning_of_a_reply_is_no_text(name):
    form = REASONING_FORMATS[name]
    for text in (f"{form.closes[0]}Four.", f"\n<s>{form.closes[0]}\n\nFour."):
        for cuts in ((), range(1, len(text))):
            whole, _ = reply(text, cuts, reasoning=form, drops=["<s>"])
            assert (whole.reasoning, whole.content) == ("", "Four.")
    whole, _ = reply(" \nFour.", reasoning=form)
    assert whole.content == " \nFour."


def test_call_without_a_section_ends_the_thoughts_of_kimi():
    text = "Hm.<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
    whole = parse("kimi_k2", text, inside=True, reasoning=THINK)
    assert (whole.reasoning, calls_of(whole)) == ("Hm.", [NOW])


def test_reply_that_is_cut_after_the_name_of_a_call_has_the_call():
    for name, text in (
        ("hermes", '<tool_call>{"name": "now", '),
        ("cohere_command3", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", '),
    ):
        for cuts in ((), range(1, len(text))):
            whole, _ = reply(text, cuts, cut=True, calls=Calls(TOOL_FORMATS[name], TOOLS))
            assert ([call.name for call in whole.calls.values()], whole.content) == (["now"], "")
        assert parse(name, text).content == text


def test_repeated_opening_marker_is_no_thought():
    whole = parse("hermes", "<think>\nTwo.\n</think>\nFour.", inside=True, reasoning=THINK)
    assert (whole.reasoning, whole.content) == ("Two.", "Four.")


# ---- calls after a call that is not valid

M3 = "]<]minimax[>["
#: Format -> a section with an unknown or broken call, then the call of `NOW`.
AFTER_BAD = {
    "kimi_k2": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{bad}:0"
        "<|tool_call_argument_begin|>{args}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>"
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{bad}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{bad}\n```json\n{args}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "deepseek_v32": [
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{bad}">\n{args}\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="{bad}">\n{args}\n</invoke>\n<invoke name="now">\n'
        "</invoke>\n</minimax:tool_call>"
    ],
    "minimax_m3": [
        f'{M3}<tool_call>\n{M3}<invoke name="{{bad}}">{{args}}{M3}</invoke>\n'
        f'{M3}<invoke name="now">{M3}</invoke>\n{M3}</tool_call>'
    ],
    "qwen3_coder": [
        "<tool_call>\n<function={bad}>\n{args}\n</function>\n<function=now>\n</function>\n"
        "</tool_call>"
    ],
    "mistral": [
        '[TOOL_CALLS][{{"name": "{bad}", "arguments": {args}}}, {{"name": "now"}}]',
        "[TOOL_CALLS]{bad}[ARGS]{args}[TOOL_CALLS]now[ARGS]{{}}",
    ],
    "hermes": [
        '<tool_call>[{{"name": "{bad}", "arguments": {args}}}, {{"name": "now"}}]</tool_call>',
    ],
    "jamba": [
        '<tool_calls>[{{"name": "{bad}", "arguments": {args}}}, {{"name": "now"}}]</tool_calls>',
    ],
    "minimax": [
        '<tool_calls>\n{{"name": "{bad}", "arguments": {args}}}\n{{"name": "now"}}\n</tool_calls>'
    ],
    "apertus": ['<|tools_prefix|>[{{"{bad}": {args}}}, {{"now": {{}}}}]<|tools_suffix|>'],
    "phi4_mini_json": ['functools[{{"name": "{bad}", "arguments": {args}}}, {{"name": "now"}}]'],
    "llama3_json": ['{{"name": "{bad}", "parameters": {args}}}; {{"name": "now"}}'],
    "granite": ['<|tool_call|>[{{"name": "{bad}", "arguments": {args}}}, {{"name": "now"}}]'],
    "pythonic": ["[{bad}({args}), now()]"],
    "lfm2": ["<|tool_call_start|>[{bad}({args}), now()]<|tool_call_end|>"],
    "olmo3": ["<function_calls>\n{bad}({args})\nnow()\n</function_calls>"],
}  # fmt: skip


@pytest.mark.parametrize("name", AFTER_BAD)
def test_call_after_a_broken_or_unknown_call_is_read(name):
    plain = TOOL_FORMATS[name].syntax in ("python", "tagged", "elements")
    unknown = "" if plain else '{"city": "a"}'
    for form in AFTER_BAD[name]:
        for bad, arguments in (("storm", unknown), ("weather", "{oops}")):
            whole = parse(name, form.format(bad=bad, args=arguments))
            assert calls_of(whole) == [NOW], (bad, arguments)
            # Text of a section without a call is content.
            assert whole.content == "" or "[ARGS]" in form


def test_streamed_index_of_a_broken_call_is_not_used_again():
    from ed_esurge.replies.events import CallBegins
    from ed_esurge.replies.parser import ReplyParser

    parser = ReplyParser(Calls(TOOL_FORMATS["hermes"], TOOLS))
    broken = '{"name": "weather", "arguments": {"city": oops}}'
    events = parser.feed(f'<tool_call>[{broken}, {{"name": "now"}}]</tool_call>')
    assert [(event.index, event.name) for event in events if isinstance(event, CallBegins)] == [
        (0, "weather"), (1, "now")
    ]  # fmt: skip


def test_text_after_a_complete_call_of_a_section_is_content():
    whole = parse("hermes", '<tool_call>{"name": "now"} and more')
    assert (calls_of(whole), whole.content) == ([NOW], "and more")
    whole = parse("olmo3", "<function_calls>now()\nThat is (all).")
    assert (calls_of(whole), whole.content) == ([NOW], "That is (all).")


def test_parsing_time_is_linear_in_the_number_of_unclosed_markers():
    import time

    start = time.perf_counter()
    for name, text in {
        "glm45": "<tool_call>now<arg_key>a</arg_key><arg_value>",
        "hermes": '<tool_call>{"',
        "qwen3_coder": "<tool_call><function=now><parameter=a>",
        "kimi_k2": "<|tool_call_begin|>now:0<|tool_call_argument_begin|>",
        "minimax_m3": f'{M3}<invoke name="now">{M3}<a></a> ',
        "pythonic": "[now(a=",
        "gpt_oss": "<|channel|>commentary to=functions.now<|message|>{",
    }.items():
        for piece in (64, 100_000):
            many = text * 2000
            cuts = range(piece, len(many), piece)
            reply(many, cuts, calls=Calls(TOOL_FORMATS[name], TOOLS), reasoning=THINK)
    assert time.perf_counter() - start < 60


# ---- omitted tags


def book(form, text):
    properties = {"city": {"type": "string"}, "day": {"type": "string"}}
    tools = {"book": {"type": "object", "properties": properties}, "now": {}}
    return parse(form, text, tools=tools)


BOOKED = [("book", {"city": "Oslo", "day": "Mon"})]
OMITTED = [
    ("qwen3_coder", "<function=book>\n<parameter=city>\nOslo\n</parameter>\n<parameter=day>\nMon\n"
     "</parameter>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<function=book>\n<parameter=city>\nOslo\n</parameter>\n<parameter=day>\nMon\n"
     "</parameter>\n</function>"),
    ("qwen3_coder", "<tool_call>\n<function=book>\n<parameter=city>\nOslo\n<parameter=day>\nMon\n"
     "</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=book>\n<parameter=city>\nOslo\n</parameter>\n"
     "<parameter=day>\nMon\n</parameter>\n</tool_call>"),
    ("seed_oss", "<function=book><parameter=city>Oslo<parameter=day>Mon</parameter></function>"),
    ("minimax_m2", '<minimax:tool_call><invoke name="book"><parameter name="city">Oslo'
     '<parameter name="day">Mon</invoke></minimax:tool_call>'),
    ("minimax_m2", '<invoke name="book"><parameter name="city">Oslo</parameter>'
     '<parameter name="day">Mon</parameter></invoke>'),
    ("minimax_m3", f'{M3}<tool_call>{M3}<invoke name="book">{M3}<city>Oslo</city>{M3}<day>Mon'
     f"{M3}</invoke>{M3}</tool_call>"),
    ("minimax_m3", f'{M3}<invoke name="book">{M3}<city>Oslo{M3}<day>Mon{M3}</day>{M3}</invoke>'),
    ("glm45", "<tool_call>book<arg_key>city</arg_key><arg_value>Oslo<arg_key>day</arg_key>"
     "<arg_value>Mon</tool_call>"),
    ("deepseek_v32", '<｜DSML｜invoke name="book"><｜DSML｜parameter name="city" string="true">Oslo'
     '<｜DSML｜parameter name="day" string="true">Mon</｜DSML｜parameter></｜DSML｜invoke>'),
    ("step3", '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>'
     '<steptml:invoke name="book"><steptml:parameter name="city">Oslo'
     '<steptml:parameter name="day">Mon</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
     "<｜tool_calls_end｜>"),
    ("kimi_k2", "<|tool_call_begin|>functions.book:0<|tool_call_argument_begin|>"
     '{"city": "Oslo", "day": "Mon"}<|tool_call_end|>'),
    ("deepseek_v31", '<｜tool▁call▁begin｜>book<｜tool▁sep｜>{"city": "Oslo", "day": "Mon"}'
     "<｜tool▁call▁end｜>"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), OMITTED)
def test_omitted_markers_of_a_call_are_recovered(form, text):
    whole = book(form, text)
    assert (calls_of(whole), whole.content.replace("</tool_call>", "")) == (BOOKED, "")


def test_value_may_contain_the_tags_of_its_format():
    city = "<parameter=x>\n<parameter=city>\nf</function> and </tool_call>"
    text = f"<tool_call>\n<function=book>\n<parameter=city>\n{city}\n</parameter>\n</function>"
    assert calls_of(book("qwen3_coder", text)) == [("book", {"city": city})]


@pytest.mark.parametrize(("before", "after"), [("\n", "\n"), ("", ""), (" ", " "), ("\n\n", "")])
def test_texts_around_a_call_are_separated(before, after):
    whole = parse(
        "hermes", f'I book.{before}<tool_call>{{"name": "now"}}</tool_call>{after}Booked.'
    )
    assert whole.content == "I book.\nBooked."
    text = f"<think>One.</think>A.{before}<think>Two.</think>{after}B."
    whole = parse("hermes", text, reasoning=THINK)
    assert (whole.content, whole.reasoning) == ("A.\nB.", "One.\nTwo.")


# ---- types of arguments

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TYPED = [
    (OPTIONAL, "1.10", "1.10"),
    (OPTIONAL, "null", None),
    ({"type": ["string", "null"]}, "false", "false"),
    ({"type": "string", "nullable": True}, "90210", "90210"),
    ({"$ref": "#/$defs/Zip"}, "90210", "90210"),
    ({"$ref": "#/$defs/Loop"}, "5", 5),
    ({"allOf": [{"$ref": "#/$defs/Zip"}, {"description": "a code"}]}, "01", "01"),
    ({"$ref": "#/$defs/a~1b%20c"}, "7", "7"),
    ({"const": "1"}, "1", "1"),
    ({"const": 1}, "1", 1),
    ({"enum": ["1", "2", None]}, "1", "1"),
    ({"enum": ["auto", 1, 2]}, "2", 2),
    ({"enum": ["auto", 1, 2]}, "auto", "auto"),
    ({"enum": ["1", 2]}, "1", "1"),
    ({"oneOf": [{"const": "1"}, {"const": "2"}]}, "2", "2"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1.5", "1.5"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "true", "true"),
    ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}, '["1"]', ["1"]),
    ({"type": "array"}, "['a', 'b']", ["a", "b"]),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "yes", "yes"),
    ({"type": "integer"}, '"5"', 5),
    ({"type": "integer"}, "007", 7),
    ({"type": "integer"}, "-007", -7),
    ({"type": "number"}, "+1.50", 1.5),
    ({"type": "number"}, "1e400", "1e400"),
    ({"type": "number"}, "-2e999", "-2e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "object"}, '{"a": 1}', {"a": 1}),
    ({}, "5", 5),
    (True, "x", "x"),
]
DEFS = {
    "Zip": {"type": "string"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "integer"}]},
    "a/b c": {"type": "string"},
}
TAGS = {
    "glm45": "<tool_call>f<arg_key>x</arg_key><arg_value>{v}</arg_value></tool_call>",
    "qwen3_coder": "<tool_call><function=f><parameter=x>\n{v}\n</parameter></function></tool_call>",
    "seed_oss": "<seed:tool_call><function=f><parameter=x>{v}</parameter></function>"
    "</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="x">{v}</parameter></invoke>'
    "</minimax:tool_call>",
    "step3": "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
    '<steptml:invoke name="f"><steptml:parameter name="x">{v}</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    "minimax_m3": f'{M3}<tool_call>{M3}<invoke name="f">{M3}<x>{{v}}{M3}</x>{M3}</invoke>'
    f"{M3}</tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="f">'
    '<｜DSML｜parameter name="x">{v}'
    "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
}


@pytest.mark.parametrize(("schema", "text", "value"), TYPED)
def test_whole_schema_decides_the_type_of_a_tagged_argument(schema, text, value):
    tools = {"f": {"type": "object", "properties": {"x": schema}, "$defs": DEFS}}
    for name, form in TAGS.items():
        whole = parse(name, form.replace("{v}", text), tools=tools)
        assert calls_of(whole) == [("f", {"x": value})], name
        assert type(calls_of(whole)[0][1]["x"]) is type(value)
        assert "Infinity" not in whole.calls[0].arguments


def make_elements(value):
    """Return a value as the template of MiniMax M3 writes it."""
    if isinstance(value, dict):
        return "".join(f"{M3}<{k}>{make_elements(v)}{M3}</{k}>" for k, v in value.items())
    if isinstance(value, list):
        return "".join(f"{M3}<item>{make_elements(v)}{M3}</item>" for v in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


LINES = {"type": "array", "items": {"type": "object", "properties": {"zip": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (LINES, [{"zip": "01", "n": 1}, {"zip": "</zip> <b> & \n"}]),
        ({"type": "array", "items": {"type": "string"}}, ["1", "", "item"]),
        ({"type": "array"}, []),
        ({"type": "object"}, {}),
        ({"type": "object"}, {"item": {"n": 2}, "a": {"b": [True, 1.5]}}),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}, [1, 2]),
        ({"properties": {"item": {"type": "string"}}, "type": "object"}, {"item": "7"}),
        ({}, [[1], [2, 3]]),
        ({"type": "string"}, f"{M3} and {M3}<b>\n"),
        ({"type": "string"}, "<x>1</x>"),
        ({"type": ["string", "null"]}, f"{M3}<b>c{M3}</b>"),
        ({"type": "object"}, {"a": "<a>b</a>"}),
    ],
)
def test_nested_elements_are_the_value_that_the_template_wrote(schema, value):
    tools = {"f": {"type": "object", "properties": {"x": schema}}}
    text = TAGS["minimax_m3"].replace("{v}", make_elements(value))
    assert calls_of(parse("minimax_m3", text, tools=tools)) == [("f", {"x": value})]


@pytest.mark.parametrize("inner", [f"a{M3}<b>c{M3}</b>", f"{M3}<b>c{M3}</x>", f"{M3}<b>" * 70])
def test_elements_that_do_not_nest_are_text(inner):
    text = TAGS["minimax_m3"].replace("{v}", inner)
    whole = parse("minimax_m3", text, tools={"f": {"properties": {"x": {"type": "object"}}}})
    assert (whole.content, whole.calls) == (text, {})


def test_schema_of_an_argument_behind_references_is_read():
    root = {"$ref": "#/$defs/Arguments", "$defs": {"Arguments": {"properties": {"x": OPTIONAL}}}}
    union = {"anyOf": [{"properties": {"x": {"type": "string"}}}, {"properties": {"y": {}}}]}
    others = {"type": "object", "additionalProperties": {"type": "string"}}
    for tools in ({"f": root}, {"f": union}, {"f": others}):
        whole = parse("glm45", TAGS["glm45"].replace("{v}", "1.10"), tools=tools)
        assert calls_of(whole) == [("f", {"x": "1.10"})]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [(OPTIONAL, "90210", "90210"), ({"type": "integer"}, "5", 5),
     ({"type": "number"}, "1e400", "1e400"),
     ({"type": "array", "items": {"type": "string"}}, "[1,2]", ["1", "2"]),
     ({"properties": {"zip": {"type": "string"}}}, "{zip:90210,n:1}", {"zip": "90210", "n": 1})],
)  # fmt: skip
def test_bare_values_of_braces_follow_the_schema(schema, text, value):
    tools = {"f": {"properties": {"x": schema}}}
    whole = parse("gemma4", f"<|tool_call>call:f{{x:{text}}}<tool_call|>", tools=tools)
    assert calls_of(whole) == [("f", {"x": value})]


def test_schema_with_exponentially_many_paths_is_read_in_linear_time():
    levels = {f"A{n}": {"anyOf": [{"$ref": f"#/$defs/A{n + 1}"}] * 2} for n in range(60)}
    tools = {
        "f": {"properties": {"x": {"$ref": "#/$defs/A0"}}, "$defs": {**levels, "A60": OPTIONAL}}
    }
    whole = parse("glm45", TAGS["glm45"].replace("{v}", "1.10"), tools=tools)
    assert calls_of(whole) == [("f", {"x": "1.10"})]


def test_line_breaks_in_arguments_of_seed_oss_are_data():
    tools = {"f": {"properties": {"x": {"type": "string"}}}}
    for value in ("a\n", "\na\n\n", "\n", ""):
        whole = parse("seed_oss", TAGS["seed_oss"].replace("{v}", value), tools=tools)
        assert calls_of(whole) == [("f", {"x": value})]


# ---- text that UTF-8 or JSON cannot express


@pytest.mark.parametrize(
    ("escaped", "value"),
    [("\\ud83d\\ude00", "😀"), ("\\ud83d", "\ufffd"), ("\\ude00", "\ufffd"),
     ("\\ud83dx", "\ufffdx"), ("\\ud83d\\n", "\ufffd\n"), ("\\ud83d\\u0041", "\ufffdA"),
     ("\\ud83d\\ud83d\\ude00", "\ufffd😀")],
)  # fmt: skip
def test_halves_of_utf16_pairs_are_replaced_in_every_syntax(escaped, value):
    tools = {"f": {"properties": {"x": {}}}, escaped: {}}
    forms = {**TAGS, "hermes": '<tool_call>{"name": "f", "arguments": {"x": {v}}}</tool_call>'}
    forms["gemma4"] = "<|tool_call>call:f{x:{v}}<tool_call|>"
    forms["apertus"] = '<|tools_prefix|>[{"f": {"x": {v}}}]<|tools_suffix|>'
    forms["pythonic"] = "[f(x={v})]"
    for name, form in forms.items():
        whole = parse(name, form.replace("{v}", f'"{escaped}"'), tools=tools)
        for call in whole.calls.values():
            call.arguments.encode()
        whole.content.encode()
        if name != "gemma4":
            assert calls_of(whole) == [("f", {"x": value})], name
    assert loads_arguments(f'{{"x": "{escaped}"}}') == {"x": value}


def test_numbers_beyond_the_double_range_stay_text():
    for name, form in {
        "llama3_json": '{"name": "now", "parameters": {"a": [1e400, -1E999, 1e3]}}',
        "pythonic": "[now(a=[1e400, -1E999, 1e3])]",
    }.items():
        whole = parse(name, form)
        assert calls_of(whole) == [("now", {"a": ["1e400", "-1E999", 1000.0]})], name
    assert loads_arguments('{"a": 1e400}') == {"a": "1e400"}
    assert loads_arguments('{"a": ') == {}
    with pytest.raises(Malformed):
        loads("1e400")


# ---- detection


@pytest.mark.parametrize("table", [TOOL_FORMATS, REASONING_FORMATS], ids=["tools", "thoughts"])
def test_every_format_can_be_chosen_by_its_signs(table):
    for name, form in table.items():
        assert form.signs, f"{name} has no signs"
        chosen = set()
        for sign in form.signs:
            chosen.add(detect(table, " ".join((sign,) if isinstance(sign, str) else sign)))
        formats = [table[one] for one in chosen if one is not None]
        if isinstance(form, ReasoningFormat):  # `always` is for formats that are chosen by name
            formats = [replace(one, always=form.always) for one in formats]
        assert form in formats, name


def test_templates_of_published_models_select_their_format():
    for template, name in {
        "{%- set dsml = '｜DSML｜' %}{{ '<' + dsml + 'tool_calls>' }}": "deepseek_v4",
        "<｜DSML｜function_calls> {{ message.tool_calls }}": "deepseek_v32",
        "{%- set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }}": "deepseek_v32",
        "<function=NAME>{ARGUMENTS}</function>": "functionary_v31",
        "<tool_call> <function=f> <parameter=x>": "qwen3_coder",
        "<|python_tag|> <function=NAME>{ARGUMENTS}</function>": "functionary_v31",
        "List of tools: <|tool_list_start|>[": "lfm2",
        "]<]minimax[>[<tool_call> <response>": "minimax_m3",
        "{%- set ns = ']<]minimax[>[' %}{{ ns ~ '<tool_call>' }}<invoke name=": "minimax_m3",
        "make calls in a single JSON array": "xlam",
    }.items():
        assert detect(TOOL_FORMATS, template) == name, template


# ---- headers of gpt-oss

HEADERS_OF_CALLS = [
    " to=functions.weather<|channel|>commentary json",
    "<|channel|>commentary to=functions.weather <|constrain|>json",
    "<|channel|>commentary to=functions.weather json",
    "<|channel|>commentary to=functions.weather",
    "<|channel|>analysis to=functions.weather <|constrain|>json",
    "<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json",
    "<|start|>assistant<|channel|>commentary to=functions.weather",
    " to=weather<|channel|>commentary",
    "<|channel|>commentary to=assistant<|channel|>commentary to=functions.weather json",
]


@pytest.mark.parametrize("header", HEADERS_OF_CALLS)
def test_every_header_of_a_call_is_read(header):
    form = REASONING_FORMATS["gpt_oss"]
    for before in ("", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"):
        if before and header.startswith("<|start|>"):
            before = before.removesuffix("<|start|>assistant")
        whole = parse("gpt_oss", f"{before}{header}<|message|>{J}<|call|>", reasoning=form)
        assert (calls_of(whole), whole.content) == ([PARIS], "")
        assert whole.reasoning == ("Hm." if before else "")


@pytest.mark.parametrize(
    ("text", "content", "thoughts"),
    [("<|channel|>final <|constrain|>json<|message|>{\"n\": 4}<|return|>", '{"n": 4}', ""),
     ("<|channel|>final json<|message|>{}<|return|>", "{}", ""),
     ("<|channel|>commentary to=assistant<|message|>I look.<|end|>", "I look.", ""),
     (" to=python<|channel|>analysis code<|message|>print(1)<|call|>", "", "print(1)"),
     ("<|channel|>commentary to=browser.search<|message|>{}<|call|>", "", "{}"),
     ("<|channel|>commentary<|message|>A.<|end|><|start|>assistant<|channel|>final<|message|>B.",
      "A.\nB.", ""),
     ("<|channel|>analysis<|message|>A.<|end|><|channel|>analysis<|message|>B.<|end|>", "",
      "A.\nB."),
     ("Plain text.", "Plain text.", ""),
     ("  to be", "  to be", "")],
)  # fmt: skip
def test_every_header_of_a_text_is_read(text, content, thoughts):
    whole = parse("gpt_oss", text, reasoning=REASONING_FORMATS["gpt_oss"])
    assert (whole.content, whole.reasoning, whole.calls) == (content, thoughts, {})


def test_call_of_gpt_oss_with_a_broken_text_is_content_and_the_next_is_read():
    bad = "<|channel|>commentary to=functions.weather<|message|>{oops}<|call|>"
    good = "<|start|>assistant<|channel|>commentary to=functions.now<|message|><|call|>"
    whole = parse("gpt_oss", bad + good)
    assert (calls_of(whole), whole.content) == ([NOW], bad)
    text = good + "<|start|>assistant to=functions.weather<|message|>{"
    calls = Calls(TOOL_FORMATS["gpt_oss"], TOOLS)
    for cuts in ((), range(1, len(text))):
        whole, _ = reply(text, cuts, cut=True, calls=calls)
        assert [call.name for call in whole.calls.values()] == ["now", "weather"]


def test_unknown_template_is_named_in_a_warning(caplog):
    from ed_esurge.server.generation.reply_formats import ReplyFormats
    from ed_esurge.testing import byte_tokenizer

    template = "{% for tool in tools %}[[{{ tool }}]]{% endfor %}{{ message.reasoning_content }}"
    with caplog.at_level(logging.WARNING, "ed_esurge"):
        ReplyFormats(byte_tokenizer(template), template)
    assert "tool_parser_name" in caplog.text
    assert "reasoning_parser" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "ed_esurge"):
        ReplyFormats(byte_tokenizer("plain"), "plain")
        known = template + "<tool_call><think>"
        ReplyFormats(byte_tokenizer(known), known)
    assert not caplog.text
