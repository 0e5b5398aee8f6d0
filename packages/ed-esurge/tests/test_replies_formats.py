"""Replies in every format of calls and thoughts parse equally for any split into pieces."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from ed_esurge.replies.events import CallArguments, Reply
from ed_esurge.replies.formats import detect, get_format
from ed_esurge.replies.parser import Calls, ReplyParser
from ed_esurge.replies.reasoning_formats import REASONING_FORMATS
from ed_esurge.replies.tool_formats import TOOL_FORMATS
from ed_infra.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st
from reply_transcripts import BOTH, EXAMPLES, PARIS, SPELLINGS, TOOLS, J

# Replies without complete calls: the whole text is content.
BROKEN = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": oops}}\n</tool_call>',
    "llama3_json": '{"name": "Paris", "parameters": {}}',
    "llama4_pythonic": "[1] according to weather(city=1)",
    "pythonic": '[weather("Paris")] is what I would do',
    "mistral": "[TOOL_CALLS]weather of today",
    "qwen3_coder": "<tool_call>\n<function=storm>\n</function>\n</tool_call>",
    "qwen3_xml": "<tool_call>weather</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>weather",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{city}",
    "glm45": "<tool_call>weather<arg_key>a</arg_key>b</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>weather<|tool_call_end|>",
    "minimax_m2": "<minimax:tool_call>weather</minimax:tool_call>",
    "minimax_m3": "]<]minimax[>[<tool_call>weather]<]minimax[>[</tool_call>",
    "gpt_oss": "<|channel|>commentary to=functions.storm<|message|>{}<|call|>",
    "granite": "<|tool_call|>[]",
    "internlm": "<|action_start|><|plugin|>{}",
    "jamba": '<tool_calls>[{"name": "now", "name": "now"}]</tool_calls>',
    "phi4_mini_json": 'functools[{"name": "now", "arguments": []}]',
    "olmo3": "<function_calls>\nweather(city=open(1))\n</function_calls>",
    "functiongemma": "<start_function_call>call:weather{city}<end_function_call>",
    "openai": "<|start|>assistant to=functions.now<|message|>[]<|call|>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="storm">',
    "deepseek_v4": "<｜DSML｜tool_calls>now</｜DSML｜tool_calls>",
    "seed_oss": "<seed:tool_call>now</seed:tool_call>",
    "step3": "<｜tool_calls_begin｜>now<｜tool_calls_end｜>",
    "step3p5": "<tool_call>\n<function=now>\nsoon</function>\n</tool_call>",
    "glm47": "<tool_call>storm</tool_call>",
    "gemma4": "<|tool_call>call:storm{}<tool_call|>",
    "apertus": '<|tools_prefix|>[{"now": {}, "weather": {}}]<|tools_suffix|>',
    "lfm2": "<|tool_call_start|>[now(1)]<|tool_call_end|>",
    "longcat": "<longcat_tool_call>now</longcat_tool_call>",
    "cohere_command3": '<|START_ACTION|>[{"name": "now", "parameters": {}}]<|END_ACTION|>',
    "cohere_command_r": 'Action: ```json\n[{"tool_name": "directly-answer"}]\n```',
    "gigachat3": '<|function_call|>{"name": "storm", "arguments": {}}',
    "nemotron_json": "<TOOLCALL>[]</TOOLCALL>",
    "hunyuan_a13b": '<tool_calls>[{"name": "storm"}]</tool_calls>',
    "minimax": "<tool_calls>\nnow\n</tool_calls>",
    "granite4": "<tool_call>now</tool_call>",
    "granite-20b-fc": '<function_call> {"name": "no_function", "arguments": {}}',
    "llama4_json": '{"name": 1}',
    "functionary_v31": "<function=storm>{}</function>",
    "ernie45": "<tool_call>\n{}\n</tool_call>",
    "xlam": '```json\n{\n  "city": 1\n}\n```',
}


def reply(text, cuts=(), *, cut=False, **options):
    """Return the parsed reply of a text in pieces, and the number of pieces of its arguments."""
    parser = ReplyParser(**options)
    whole, edges, events = Reply(), [0, *sorted(cuts), len(text)], []
    for start, stop in itertools.pairwise(edges):
        events += parser.feed(text[start:stop])
    events += parser.close(cut=cut)
    whole.add(events)
    return whole, sum(isinstance(event, CallArguments) for event in events)


def calls_of(whole):
    return [(call.name, json.loads(call.arguments)) for call in whole.calls.values()]


def test_every_format_has_examples():
    assert EXAMPLES.keys() == BROKEN.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_tool_calls_parse_from_every_format_at_any_chunking(name):
    text, calls = EXAMPLES[name], Calls(TOOL_FORMATS[name], TOOLS)
    whole, _ = reply(text, calls=calls)
    assert calls_of(whole) == BOTH
    assert whole.content == ""
    each = range(1, len(text))
    letters, pieces = reply(text, each, calls=calls)
    assert calls_of(letters) == BOTH
    assert letters.content == ""
    assert pieces > 3  # arguments arrive while the model writes them
    if not TOOL_FORMATS[name].starts:
        spoken, _ = reply(f"I look.\n\n{text}\n", each, calls=calls)
        assert (calls_of(spoken), spoken.content) == (BOTH, "I look.")
    one, _ = reply(text, each, calls=Calls(TOOL_FORMATS[name], TOOLS, most=1))
    assert (calls_of(one), one.content) == ([PARIS], "")


@pytest.mark.daily("hermes-*")
@pytest.mark.parametrize(("name", "text"), [*EXAMPLES.items(), *SPELLINGS])
def test_every_split_of_a_published_transcript_parses_as_the_whole(name, text):
    calls = Calls(TOOL_FORMATS[name], TOOLS)
    for cut in range(1, len(text)):
        whole, _ = reply(text, (cut,), calls=calls)
        assert (calls_of(whole), whole.content) == (BOTH, ""), cut


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_tool_call_is_returned_as_content(name):
    calls = Calls(TOOL_FORMATS[name], TOOLS)
    for text in (BROKEN[name], BROKEN[name] + " and more", "First: " + BROKEN[name]):
        for cuts in ((), range(1, len(text))):
            whole, _ = reply(text, cuts, calls=calls)
            assert (whole.content, whole.calls) == (text, {})
    plain = "Nothing [is] {called} <here>, f(x) = 1.\n"
    whole, _ = reply(plain, calls=calls)
    assert (whole.content, whole.calls) == (plain, {})


@pytest.mark.parametrize("name", EXAMPLES)
def test_any_split_of_a_reply_produces_the_same_result(name):
    rng, calls = random.Random(0), Calls(TOOL_FORMATS[name], TOOLS)
    sources = [EXAMPLES[name], BROKEN[name], "a " + EXAMPLES[name] + BROKEN[name] + EXAMPLES[name]]
    for _ in range(60):
        text = rng.choice(sources)
        for _ in range(rng.randrange(3)):  # a letter changes
            place = rng.randrange(len(text))
            text = text[:place] + rng.choice(['"', "<", "}", "x", "", " "]) + text[place + 1 :]
        text = text[: rng.randrange(len(text) // 2, len(text)) + 1]
        cut = rng.random() < 0.5
        expected, _ = reply(text, calls=calls, cut=cut)
        cuts = rng.sample(range(1, len(text)), min(len(text) - 1, rng.randrange(1, 30)))
        got, _ = reply(text, cuts, calls=calls, cut=cut)
        assert _plain(got) == _plain(expected), (text, cuts)
        if not cut:
            calls_of(got)  # arguments are always JSON


def _plain(whole):
    return whole.content, whole.reasoning, [(c.name, c.arguments) for c in whole.calls.values()]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.lists(st.integers(1, 400), max_size=12), st.booleans())
def test_json_arguments_are_returned_unchanged(value, cuts, ascii_):
    arguments = json.dumps({"tags": value}, ensure_ascii=ascii_)
    text = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    calls = Calls(TOOL_FORMATS["hermes"], TOOLS)
    whole, _ = reply(text, [cut for cut in set(cuts) if cut < len(text)], calls=calls)
    assert calls_of(whole) == [("weather", {"tags": value})]
    assert whole.calls[0].arguments == arguments


def test_truncated_reply_keeps_partial_tool_call():
    text = EXAMPLES["hermes"][:60]
    calls = Calls(TOOL_FORMATS["hermes"], TOOLS)
    whole, _ = reply(text, cut=True, calls=calls)
    assert J.startswith(whole.calls[0].arguments)
    assert whole.content == ""
    ended, _ = reply(text, calls=calls)
    assert (ended.content, ended.calls) == (text, {})


THOUGHTS = {name: (form.opens[0], form.closes[0]) for name, form in REASONING_FORMATS.items()}


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_parses_from_every_format_at_any_chunking(name):
    form, (open_, close) = REASONING_FORMATS[name], THOUGHTS[name]
    rest = "\n\nIt is 4 < 5.\n"
    for text, inside in (
        (f"{open_}\nTwo <b>\nlines\n{close}{rest}", False),
        (f"Two <b>\nlines{close}{rest}", True),
    ):
        for cuts in ((), range(1, len(text))):
            whole, _ = reply(text, cuts, reasoning=form, inside=inside)
            assert whole.reasoning == "Two <b>\nlines"
            assert whole.content == "It is 4 < 5.\n"
    whole, _ = reply("No thought.", reasoning=form)
    assert (whole.content, whole.reasoning) == ("No thought.", "")
    whole, _ = reply("never ends", reasoning=form, inside=True, cut=True)
    assert (whole.content, whole.reasoning) == ("", "never ends")


@pytest.mark.parametrize(
    ("thoughts", "tools"),
    [("qwen3", "hermes"), ("gpt_oss", "gpt_oss"), ("kimi_k2", "kimi_k2"), ("mistral", "mistral"),
     ("glm45", "glm45"), ("minimax_m2", "minimax_m2"), ("granite", "granite"), ("olmo3", "olmo3"),
     ("deepseek_r1", "llama3_json"), ("qwen3", "pythonic"), ("cohere_command3", "cohere_command3"),
     ("seed_oss", "seed_oss"), ("gemma4", "gemma4"), ("hunyuan_a13b", "hunyuan_a13b"),
     ("ernie45", "ernie45"), ("step3", "step3"), ("longcat", "longcat"), ("apertus", "apertus"),
     ("deepseek_v3", "deepseek_v32"), ("deepseek_r1", "xlam")],
)  # fmt: skip
def test_reasoning_before_tool_calls_is_separated(thoughts, tools):
    open_, close = THOUGHTS[thoughts]
    text = f"{open_}I look it up: now().{close}\n{EXAMPLES[tools]}"
    options = {"reasoning": REASONING_FORMATS[thoughts], "calls": Calls(TOOL_FORMATS[tools], TOOLS)}
    for cuts in ((), range(1, len(text))):
        whole, _ = reply(text, cuts, **options)
        assert (whole.reasoning, whole.content) == ("I look it up: now().", "")
        assert calls_of(whole) == BOTH
    if REASONING_FORMATS[thoughts].headers:
        return
    # A call ends open thoughts, or it is a quotation within them, as the format says.
    text = f"Hm.{EXAMPLES[tools]}"
    for cuts in ((), range(1, len(text))):
        whole, _ = reply(text, cuts, inside=True, **options)
        if TOOL_FORMATS[tools].ends_thoughts:
            assert (whole.reasoning, calls_of(whole)) == ("Hm.", BOTH)
        else:
            assert (whole.reasoning, whole.calls) == (text.rstrip(), {})


def test_harmony_channels_separate_reasoning_and_content():
    text = (
        "<|channel|>analysis<|message|>I greet.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Hello!<|return|>"
    )
    whole, _ = reply(text, range(1, len(text)), reasoning=REASONING_FORMATS["gpt_oss"])
    assert (whole.reasoning, whole.content) == ("I greet.", "Hello!")


def test_formats_are_found_by_name_and_detected_from_templates():
    assert get_format(TOOL_FORMATS, "glm45", "tool_parser_name") is TOOL_FORMATS["glm45"]
    with pytest.raises(ConfigError, match=r"hermez.*did you mean 'hermes'"):
        get_format(TOOL_FORMATS, "hermez", "tool_parser_name")
    for template, name in {
        "{{ '<tool_call>' }}": "hermes",
        "<tool_call> <function=f> </tool_call>": "qwen3_coder",
        "<tool_call>{name}<arg_key>": "glm45",
        "'<｜tool▁call▁begin｜>function<｜tool▁sep｜>'": "deepseek_v3",
        "'<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'": "deepseek_v31",
        "[AVAILABLE_TOOLS] [TOOL_CALLS]": "mistral",
        "<seed:tool_call> <function=f>": "seed_oss",
        "<|START_ACTION|>": "cohere_command3",
        "<|tool_call>": "gemma4",
        "<tool_call> <response>": "ernie45",
        "<tool_calls> <answer>": "hunyuan_a13b",
        "<|start_of_role|> <tool_call>": "granite",
        "plain": None,
    }.items():
        assert detect(TOOL_FORMATS, template) == name
    assert detect(TOOL_FORMATS, "plain", {"<|python_tag|>"}) == "llama3_json"
    assert detect(REASONING_FORMATS, "a <think> b") == "deepseek_r1"


def test_parsing_time_is_proportional_to_the_call_length():
    import time

    def seconds(size):
        text = '<tool_call>{"name": "now", "arguments": {"a": "' + "x" * size + '"}}</tool_call>'
        start = time.perf_counter()
        whole, _ = reply(text, range(4, len(text), 4), calls=Calls(TOOL_FORMATS["hermes"], TOOLS))
        assert len(whole.calls[0].arguments) > size
        return time.perf_counter() - start

    seconds(1000)
    assert seconds(80_000) < 4.0
