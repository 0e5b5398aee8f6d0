"""Common slips of models in calls and thoughts are recovered."""

from __future__ import annotations

import pytest
from ed_esurge.replies.reasoning_formats import REASONING_FORMATS
from reply_transcripts import NOW
from test_replies_edges import THINK, book, parse
from test_replies_formats import calls_of, reply


def test_special_tokens_in_thoughts_are_dropped():
    for cuts in ((), range(1, 30)):
        whole, _ = reply(
            "<think>Tw<s>o.</s></think>Fo<s>ur.", cuts, reasoning=THINK, drops=["<s>", "</s>"]
        )
        assert (whole.reasoning, whole.content) == ("Two.", "Four.")


def test_other_spellings_of_thoughts_of_gemma_are_read():
    form = REASONING_FORMATS["gemma4"]
    for text in (
        "<|channel>Two.<channel|>Four.",
        "<|channel><|channel>thought\nTwo.<channel|>Four.",
        "<|channel>thought\nTwo.<channel|>Four.<channel|>",
        "<|channel>thought\nTwo.<channel|>Four.<|channel>thought\n<channel|>",
    ):
        for cuts in ((), range(1, len(text))):
            whole, _ = reply(text, cuts, reasoning=form)
            assert (whole.reasoning, whole.content) == ("Two.", "Four.")


PYTHON_SLIPS = [
    ("{'a', 'b'}", ["a", "b"]),
    ("07", 7),
    ("[007, 0, 0.5, 10, 'a 07']", [7, 0, 0.5, 10, "a 07"]),
    ("'a\0b'", "a\0b"),
    ("'sed -n '1,5p' x.py'", "sed -n '1,5p' x.py"),
    ("'f('x', 'y')'", "f('x', 'y')"),
    ('"say "no""', 'say "no"'),
    ("'a' 'b'", "ab"),
    ("['it', 'is']", ["it", "is"]),
]


@pytest.mark.parametrize(("text", "value"), PYTHON_SLIPS)
@pytest.mark.parametrize("more", ["", ", day='Mon'"])
def test_common_slips_in_python_literals_are_recovered(text, value, more):
    expected = {"city": value, **({"day": "Mon"} if more else {})}
    whole = book("lfm2", f"<|tool_call_start|>[book(city={text}{more}), now()]<|tool_call_end|>")
    assert (calls_of(whole), whole.content) == ([("book", expected), NOW], "")


@pytest.mark.parametrize("head", ["call:book", ":book"])
def test_quoted_keys_and_bare_names_of_braces_are_read(head):
    text = f'<|tool_call>{head}{{<|"|>city<|"|>:<|"|>Oslo<|"|>,o:{{<|"|>a: b<|"|>:1}}}}<tool_call|>'
    assert calls_of(book("gemma4", text)) == [("book", {"city": "Oslo", "o": {"a: b": 1}})]


WRAPPED = [
    ("arguments", '{"city": "Oslo", "day": "Mon"}', {"city": "Oslo", "day": "Mon"}),
    ("input", '{"city": "Oslo"}', {"city": "Oslo"}),
    ("parameters", "{}", {}),
    ("arguments", '{"town": "Oslo"}', {"arguments": {"town": "Oslo"}}),
    ("arguments", "Oslo", {"arguments": "Oslo"}),
    ("other", '{"city": "Oslo"}', {"other": {"city": "Oslo"}}),
]


@pytest.mark.parametrize(("key", "text", "arguments"), WRAPPED)
def test_arguments_in_one_object_are_unwrapped(key, text, arguments):
    dsml = (
        '<｜DSML｜function_calls><｜DSML｜invoke name="book">'
        f'<｜DSML｜parameter name="{key}">{text}'
        "</｜DSML｜parameter>{more}</｜DSML｜invoke></｜DSML｜function_calls>"
    )
    assert calls_of(book("deepseek_v32", dsml.replace("{more}", ""))) == [("book", arguments)]
    glm = f"<tool_call>book<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert calls_of(book("glm45", glm)) == [("book", arguments)]
    more = '<｜DSML｜parameter name="day">Mon</｜DSML｜parameter>'
    whole = book("deepseek_v32", dsml.replace("{more}", more))
    assert calls_of(whole)[0][1].keys() == {key, "day"}


@pytest.mark.parametrize("mark", ["true", "false"])
def test_schema_outweighs_a_mark_that_a_value_is_text(mark):
    for schema, text, value in (
        ({"type": "integer"}, "42", 42),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "boolean"}, "true", True),
    ):
        text = (
            '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" '
            f'string="{mark}">{text}</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>'
        )
        tools = {"f": {"properties": {"x": schema}}}
        assert calls_of(parse("deepseek_v32", text, tools=tools)) == [("f", {"x": value})]
