"""`ConversationFormat` converts conversations to the shapes that a chat template accepts."""

from __future__ import annotations

import json

import jinja2.sandbox
import pytest
from ed_infra.conversation import (
    ConversationFormat,
    _merge,
    normalize_message,
    read_arguments,
)

#: Accepts every order of roles.
ANY = (
    "{% if tools %}[tools]{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }})"
    "{% endfor %}{% endfor %}"
)
#: Accepts one system message, as the first message.
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('only first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
#: Renders the first system message and drops all others without an error.
DROPS = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)
#: Accepts no system message at all.
NONE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
#: User and assistant take turns.
TURNS = (
    "{% for m in messages %}{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('turns') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
#: Concatenates the arguments of a call.
TEXT = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '(' + c.function.arguments + ')' }}{% endfor %}{% endfor %}{{ tools }}"
)
#: Prints the arguments without a filter: an object would be a Python repr.
REPR = TEXT.replace("'(' + c.function.arguments + ')'", "c.function.arguments")
#: Accepts text as well as objects.
BOTH = ANY.replace(
    "{{ c.function.arguments | tojson }}",
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}",
)
#: Requires content as a list of parts.
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p['text'] }}{% endfor %}"
    "{% endfor %}"
)
#: Rejects a message of the user after the result of a call.
ASSISTANT_AFTER_RESULT = (
    "{{ tools }}{% for m in messages %}{% if m.role == 'user' and loop.index0 and "
    "messages[loop.index0 - 1].role == 'tool' %}{{ raise_exception('answer') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def conversation(template: str) -> ConversationFormat:
    """Return the format of a template that Jinja's sandbox renders."""

    def fail(message: str) -> str:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    environment.globals["raise_exception"] = fail
    environment.filters["tojson"] = json.dumps
    compiled = environment.from_string(template)
    return ConversationFormat(
        template, lambda messages, **options: compiled.render(messages=messages, **options)
    )


def rendered(template: str, messages: list, tools: tuple = ()) -> str:
    form = conversation(template)
    prepared, offered = form.prepare(messages, tools)
    return form._render(prepared, tools=offered)


def chat(*pairs: tuple[str, object]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in pairs]


SYSTEMS = chat(("system", "A"), ("system", [{"type": "text", "text": "B"}]), ("user", "C"))
LATE = chat(("user", "A"), ("assistant", "B"), ("system", "C"), ("user", "D"))
USERS = chat(("user", "A"), ("user", "B"), ("assistant", "C"), ("assistant", "D"), ("user", "E"))


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (ANY, SYSTEMS, "[system]A[system]B[user]C"),
        (FIRST, SYSTEMS, "[system]A\n\nB[user]C"),
        (DROPS, SYSTEMS, "[system]A\n\nB[user]C"),
        (NONE, SYSTEMS, "[user]A\n\nB\n\nC"),
        (NONE, SYSTEMS[:2], "[user]A\n\nB"),
        (ANY, LATE, "[user]A[assistant]B[system]C[user]D"),
        (FIRST, LATE, "[user]A[assistant]B[user]C[user]D"),
        (DROPS, LATE, "[user]A[assistant]B[user]C[user]D"),
        (NONE, LATE, "[user]A[assistant]B[user]C[user]D"),
        (TURNS, USERS, "[user]A\n\nB[assistant]C\n\nD[user]E"),
        (ANY, USERS, "[user]A[user]B[assistant]C[assistant]D[user]E"),
        (ANY, chat(("developer", "A"), ("user", "B")), "[system]A[user]B"),
        (ANY, chat(("user", ["A", {"type": "input_text", "text": "B"}])), "[user]AB"),
        (ANY, [{"role": "assistant", "content": None}], "[assistant]"),
        (PARTS, LATE, "[user]A[assistant]B[system]C[user]D"),
    ],
)
def test_messages_have_a_shape_that_the_template_accepts(template, messages, text):
    assert rendered(template, messages) == text


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
TOOLS = ({"type": "function", "function": {"name": "f", "description": "", "parameters": {}}},)


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (ANY, '(f {"a": "\\u00e9"})'),
        (TEXT, '({"a": "é"})'),
        (REPR, '{"a": "é"}'),
        (BOTH, '{"a": "\\u00e9"}'),
    ],
)
@pytest.mark.parametrize("as_object", [False, True])
def test_arguments_have_the_form_that_the_template_reads(template, shown, as_object):
    arguments = {"a": "é"} if as_object else '{"a": "é"}'
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    messages = [*chat(("user", "A")), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert shown in rendered(template, messages, TOOLS)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"city": "Os', {"city": "Os"}),
        ('{"city": "Oslo", "days": [1, ', {"city": "Oslo", "days": [1]}),
        ("{", {}),
        ("", {}),
        (None, {}),
        ("rain", {"arguments": "rain"}),
        ("[1]", {"arguments": [1]}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_incomplete_arguments_are_read_as_far_as_they_go(arguments, value):
    assert read_arguments(arguments) == value


def test_calls_of_older_formats_become_tool_calls():
    old = normalize_message(
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    )
    new = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert old == {"role": "assistant", "content": "", "tool_calls": [new]}
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]}
    assert normalize_message(flat)["tool_calls"] == [new]
    assert normalize_message({"role": "function", "content": "a"})["role"] == "tool"
    assert normalize_message({"role": "assistant", "reasoning": "a"})["reasoning_content"] == "a"


def test_a_message_after_a_result_is_merged_if_the_template_rejects_it():
    messages = [
        *chat(("user", "A")),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "B"},
        *chat(("user", "C")),
    ]
    assert rendered(ASSISTANT_AFTER_RESULT, messages).endswith("[user]A[assistant][tool]B\n\nC")
    assert "[tool]B[user]C" in rendered(ANY, messages)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_many_messages_of_one_role_are_merged_in_linear_time(role):
    """A copy of the merged text for each message would take minutes."""
    text, count = "a" * 2**11, 2**15
    messages = [*chat(("user", "b")), *chat(*[(role, text)] * count), *chat(("user", "c"))]
    prepared, _ = conversation(TURNS).prepare(messages if role != "system" else messages[1:])
    sizes = [message["content"].count("a") for message in prepared]
    assert sum(sizes) == max(sizes) == len(text) * count


def test_contents_of_texts_and_parts_are_concatenated_in_order():
    part = {"type": "image", "image": "x"}
    pairs = [("user", "A"), ("user", ""), ("user", "B"), ("user", [part]), ("user", "C")]
    merged = _merge(chat(*pairs, ("user", [])))
    texts = ["A\n\nB", "\n\n", None, "\n\n", "C"]
    assert [one.get("text") for one in merged["content"]] == texts
    assert _merge(chat(("user", ""), ("user", [])))["content"] == ""
    reasons = [{"role": "assistant", "content": "", "reasoning_content": each} for each in "A B"]
    assert _merge(reasons)["reasoning_content"] == "A\n\n \n\nB"


def test_the_callers_messages_do_not_change():
    messages = [*SYSTEMS, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    before = json.dumps(messages)
    for template in (ANY, FIRST, NONE, TURNS, TEXT, PARTS):
        conversation(template).prepare(messages, TOOLS)
    assert json.dumps(messages) == before
