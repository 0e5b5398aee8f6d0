"""The string logic of a template works as in transformers, and users write no special tokens."""

from __future__ import annotations

import random
import re

import pytest
from ed_esurge.marked_text import MarkedText
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import byte_tokenizer

TAG = re.compile("</?t>")
OPERATIONS = [
    lambda s, t: s.split("</t>"),
    lambda s, t: s.split("<t>", 1),
    lambda s, t: s.split(),
    lambda s, t: s.rsplit(None, 1),
    lambda s, t: s.rsplit("|b|", 1),
    lambda s, t: s.strip(),
    lambda s, t: s.lstrip("\na"),
    lambda s, t: s.rstrip("b"),
    lambda s, t: s.partition("</t>"),
    lambda s, t: s.rpartition("b"),
    lambda s, t: s.replace("<t>", "X"),
    lambda s, t: s.replace("a", t),
    lambda s, t: s[1:] + s[:1],
    lambda s, t: s[::-1],
    lambda s, t: s[2:5],
    lambda s, t: s + t,
    lambda s, t: "q" + s + "r",
    lambda s, t: list(s),
    lambda s, t: s.splitlines(),
    lambda s, t: s.splitlines(True),
    lambda s, t: s.removeprefix("<t>"),
    lambda s, t: s.removesuffix("</t>"),
    lambda s, t: [str(("<t>" in s, s.find("b"), s.count("a"), len(s), s == t, bool(s)))],
]


def mark(character):
    return f"\ufdd0{ord(character):x}\ufdd1"


def unmark(text):
    return re.sub("\ufdd0([0-9a-f]+)\ufdd1", lambda hit: chr(int(hit[1], 16)), text)


def draw_text(rng):
    signs = ["<t>", "</t>", " ", "a", "b", "\n", "|b|"]
    text = "".join(rng.choice(signs) for _ in range(rng.randint(0, 9)))
    return text, MarkedText(text, [hit.start() for hit in TAG.finditer(text)], mark)


def test_operations_equal_those_of_str_and_keep_the_marks():
    rng = random.Random(0)
    for _ in range(300):
        (plain, marked), (other, marked_other) = draw_text(rng), draw_text(rng)
        for operation in OPERATIONS:
            expected, result = operation(plain, other), operation(marked, marked_other)
            if isinstance(expected, str):
                expected, result = [expected], [result]
            written = [str(one) for one in result]
            assert [unmark(one) for one in written] == [*expected]
            # The text of the user contains no special token in any order of its pieces.
            assert not TAG.search("".join(written))


LOGIC = {
    "split": "{{ c.split('</think>')[-1] }}",
    "split and strip": "{{ c.split('</think>')[-1].lstrip('\\n') }}",
    "contains": "{{ c.split('</think>')[1] | trim if '</think>' in c else c }}",
    "partition": "{{ (c.partition('</think>')[2] or c) ~ '!' }}",
    "replace": "{{ c.replace('<think>', '(').replace('</think>', ')') }}",
    "slice": "{{ c[c.find('</think>') + 8:] if '</think>' in c else c }}",
    "start": "{{ c[7:] if c.startswith('<think>') else c }}",
    "reasoning": (
        "{% set r = c.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}"
        "[{{ r.strip() }}]{{ c.split('</think>')[-1] + '<|end|>' }}"
    ),
    "json": "{{ c | tojson }}{{ c.split('</think>') | join('+') }}",
}
TEXTS = [
    "<think>\nhidden\n</think>\n\nHello.",
    "Hello <think> and </think> and <|end|> and <think>",
    "no tokens",
    "</think>",
    "</thi",
]


@pytest.mark.parametrize("name", LOGIC)
@pytest.mark.parametrize("text", TEXTS)
def test_templates_read_special_tokens_in_texts_as_in_transformers(name, text):
    body = "{% for m in messages %}{% set c = m.content %}" + LOGIC[name] + "<|end|>{% endfor %}"
    tokenizer = byte_tokenizer(body)
    special = ["<think>", "</think>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    template = ChatTemplate(tokenizer)
    messages = [{"role": "assistant", "content": text}]
    rendered, marks = template.render(messages)
    plain = template.remove_marks(rendered, marks)
    if name != "json":  # the text of a filter keeps the marks, so its logic may differ
        assert plain == tokenizer.apply_chat_template(messages, tokenize=False)
    ids = template.encode(rendered, marks)
    assert tokenizer.decode(ids) == plain
    written = [tokenizer.convert_tokens_to_ids("<|end|>")] * (2 if name == "reasoning" else 1)
    assert [token for token in ids if token > 257] == written
