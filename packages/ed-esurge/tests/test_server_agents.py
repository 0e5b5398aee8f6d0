"""What coding agents send: the fields, blocks, items and tools of the official types."""

from __future__ import annotations

import base64
import io
import typing

import httpx
import pytest
from ed_esurge.server.launch import background
from ed_esurge.server.messages.blocks import CHANGING_BLOCKS
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from ed_infra.errors import ConfigError

TEMPLATE = (
    "{% for t in tools or [] %}[tool {{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}[assistant]"
)
PARAMETERS = {"type": "object", "properties": {}}


class Recorder(ScriptedEngine):
    """Answers with a fixed text and records the prompt."""

    def __init__(self, template: str = TEMPLATE, answer: str = "Done.") -> None:
        self.prompt, self.text = "", answer
        tokenizer = byte_tokenizer(template)

        def reply(ids: list[int], choice: int) -> str:
            self.prompt = tokenizer.decode(ids)
            return self.text

        super().__init__(reply, tokenizer=tokenizer, max_model_len=2**16)


@pytest.fixture(scope="module")
def engine():
    return Recorder()


@pytest.fixture(scope="module")
def http(engine):
    with background(engine, unknown_fields="refuse") as url, httpx.Client(base_url=url) as client:
        yield client


def send_message(http, **fields):
    body = {"model": "scripted", "max_tokens": 2000, "messages": [{"role": "user", "content": "a"}]}
    return http.post("/messages", json={**body, **fields})


def send_response(http, **fields):
    return http.post("/responses", json={"model": "scripted", "input": "a", **fields})


def union_members(union, hint="type"):
    """Yield the values of `type` of the members of a union of the official types."""
    for member in typing.get_args(union):
        if not hasattr(member, "__annotations__"):
            continue
        kind = typing.get_type_hints(member)[hint]
        while typing.get_origin(kind) is not typing.Literal:
            (kind, *_) = typing.get_args(kind)
        yield from typing.get_args(kind)


def anthropic_blocks():
    from anthropic.types.beta import BetaContentBlockParam

    return sorted(set(union_members(BetaContentBlockParam)))


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
#: Fields that a block requires.
BLOCK_FIELDS = {
    "text": {"text": "b"},
    "image": IMAGE,
    "document": {"source": {"type": "text", "media_type": "text/plain", "data": "leaks"}},
    "search_result": {"title": "t", "source": "s", "content": [{"type": "text", "text": "found"}]},
    "thinking": {"thinking": "hm", "signature": "s"},
    "redacted_thinking": {"data": "RWJj"},
    "tool_use": {"id": "t1", "name": "f", "input": {}},
    "mcp_tool_use": {"id": "t1", "name": "f", "input": {}, "server_name": "s"},
    "tool_result": {"tool_use_id": "t1", "content": "r"},
    "mcp_tool_result": {"tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
    "compaction": {"content": "earlier"},
}


@pytest.mark.parametrize("kind", anthropic_blocks())
def test_every_block_of_the_official_types_is_accepted_in_a_conversation(http, engine, kind):
    if kind == "mid_conv_system":
        pytest.skip("a message of the role system")
    block = {
        "type": kind,
        "id": "x",
        "name": "n",
        "tool_use_id": "t1",
        **BLOCK_FIELDS.get(kind, {}),
    }
    role = "user" if kind.endswith(("result", "image", "document", "upload")) else "assistant"
    turn = {"role": role, "content": [block, {"type": "text", "text": "and text"}]}
    messages = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "go on"}]
    answer = send_message(http, messages=messages)
    if kind == "image":  # this model reads text only
        assert answer.status_code == 400 and "does not accept images" in answer.text
        return
    assert answer.status_code == 200, answer.text
    assert "and text" in engine.prompt and "RWJj" not in engine.prompt
    for text in ("leaks", "found", "earlier"):
        assert (text in engine.prompt) == (text in str(block))


def test_images_in_results_are_a_note_for_a_model_without_vision(http, engine):
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE]}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    assert send_message(http, messages=messages).status_code == 200
    assert "reads only text" in engine.prompt and PNG not in engine.prompt
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [picture]},
    ]
    answer = send_response(http, input=items)
    assert answer.status_code == 200, answer.text
    assert "reads only text" in engine.prompt
    again = send_response(http, previous_response_id=answer.json()["id"])
    assert again.status_code == 200, again.text
    assert PNG not in engine.prompt


def test_changing_system_blocks_are_not_part_of_the_prompt(http, engine):
    line = "x-anthropic-billing-header: cc_version=2.1; cch={};"
    prompts = set()
    for number in range(2):
        blocks = [line.format(number), "You write code."]
        send_message(http, system=[{"type": "text", "text": text} for text in blocks])
        prompts.add(engine.prompt)
    assert len(prompts) == 1 and "You write code." in engine.prompt
    CHANGING_BLOCKS.append("session:")
    try:
        send_message(http, system=[{"type": "text", "text": "session: 1"}])
        assert "session" not in engine.prompt
    finally:
        CHANGING_BLOCKS.remove("session:")


KEEP = {"type": "clear_thinking_20251015"}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"context_management": {"edits": []}}, 200),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
            200,
        ),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, 400),
        ({"output_config": {"effort": "max"}}, 200),
        ({"output_config": {"effort": "most"}}, 400),
        ({"thinking": {"type": "between_tools"}}, 200),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, 200),
        ({"thinking": {"type": "sometimes"}}, 400),
        ({"speed": "fast"}, 200),
    ],
)
def test_options_without_effect_are_accepted_and_others_refused(http, fields, status):
    assert send_message(http, **fields).status_code == status


def anthropic_tools():
    from anthropic.types.beta import BetaToolUnionParam

    return sorted(set(union_members(BetaToolUnionParam)) - {"custom"})


@pytest.mark.parametrize("kind", anthropic_tools())
def test_tools_of_anthropics_servers_are_omitted_and_named_in_a_header(http, engine, kind):
    function = {"name": "list_tasks", "input_schema": PARAMETERS}
    answer = send_message(http, tools=[function, {"type": kind, "name": "x", "max_uses": 2}])
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Omitted-Tools"] == kind
    assert "[tool list_tasks]" in engine.prompt and "[tool x]" not in engine.prompt


def openai_tools():
    from openai.types.responses.tool_param import ToolParam

    known = {"function", "custom", "mcp", "namespace"}
    return sorted(set(union_members(ToolParam)) - known)


FUNCTION = {"type": "function", "name": "list_tasks", "parameters": PARAMETERS}


@pytest.mark.parametrize("kind", openai_tools())
def test_tools_of_openais_servers_are_omitted_and_named_in_a_header(http, engine, kind):
    answer = send_response(http, tools=[FUNCTION, {"type": kind}])
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Omitted-Tools"] == kind
    assert "[tool list_tasks]" in engine.prompt
    listed = [tool["type"] for tool in answer.json()["tools"]]
    assert listed == ["function", kind]


def test_tools_of_a_namespace_are_offered_and_called_with_their_namespace(http, engine):
    space = {"type": "namespace", "name": "crm", "tools": [{**FUNCTION, "name": "close"}, FUNCTION]}
    engine.text = '<tool_call>\n{"name": "close", "arguments": {}}\n</tool_call>'
    answer = send_response(http, tools=[FUNCTION, space])
    engine.text = "Done."
    assert answer.status_code == 200, answer.text
    for name in ("list_tasks", "close", "crm__list_tasks"):
        assert f"[tool {name}]" in engine.prompt
    (call,) = answer.json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "crm", "close")
    history = [
        {"role": "user", "content": "a"},
        {**call, "name": "list_tasks"},
        {"type": "function_call_output", "call_id": call["call_id"], "output": "b"},
    ]
    assert send_response(http, tools=[FUNCTION, space], input=history).status_code == 200
    assert "<tool_call>crm__list_tasks" in engine.prompt
    twice = send_response(http, tools=[FUNCTION, FUNCTION])
    assert twice.status_code == 400 and "list_tasks" in twice.text


def openai_items():
    from openai.types.responses.response_input_item_param import ResponseInputItemParam

    return sorted(set(union_members(ResponseInputItemParam)))


ITEM_FIELDS = {
    "message": {"role": "user", "content": "b"},
    "function_call": {"call_id": "c", "name": "f", "arguments": "{}"},
    "function_call_output": {"call_id": "c", "output": "r"},
    "custom_tool_call": {"call_id": "c", "name": "f", "input": "x"},
    "custom_tool_call_output": {"call_id": "c", "output": "r"},
    "reasoning": {"summary": [], "encrypted_content": "Z0FB"},
    "compaction": {"encrypted_content": "Z0FB"},
    "local_shell_call": {"call_id": "c", "action": {"type": "exec", "command": ["pwd"]}},
    "local_shell_call_output": {"output": "/srv"},
    "shell_call": {"call_id": "c", "action": {"commands": ["pwd"]}},
    "shell_call_output": {"call_id": "c", "output": [{"stdout": "/srv"}]},
    "apply_patch_call": {"call_id": "c", "operation": {"type": "create_file", "path": "a"}},
    "apply_patch_call_output": {"call_id": "c", "output": None, "status": "completed"},
    "mcp_list_tools": {"server_label": "s", "tools": []},
    "mcp_call": {"server_label": "s", "name": "f", "arguments": "{}", "output": "r"},
    "mcp_approval_request": {"server_label": "s", "name": "f", "arguments": "{}"},
}


@pytest.mark.parametrize("kind", [kind for kind in openai_items() if "approval" not in kind])
def test_every_item_of_the_official_types_is_accepted_in_a_conversation(http, engine, kind):
    item = {"type": kind, "id": "i", **ITEM_FIELDS.get(kind, {})}
    user = {"type": "message", "role": "user", "content": "and text"}
    answer = send_response(http, input=[user, item, user])
    assert answer.status_code == 200, answer.text
    assert engine.prompt.count("and text") == 2 and "Z0FB" not in engine.prompt
    assert ("pwd" in engine.prompt) == ("pwd" in str(item))


def test_a_conversation_of_items_without_text_is_an_error(http):
    answer = send_response(http, input=[{"type": "item_reference", "id": "a"}])
    assert answer.status_code == 400 and "item_reference" in answer.text
    answer = send_response(http, input=[{"id": "a"}, {"role": "user", "content": "b"}])
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("data:text/plain;base64," + base64.b64encode("Köln".encode()).decode(), "Köln"),
        (base64.b64encode(b"plain").decode(), "plain"),
        ("data:text/plain,a%20b", "a b"),
        ("data:application/pdf;base64," + base64.b64encode(b"\xff\xfe%PDF").decode(), None),
        ("data:text/plain;base64,***", None),
        ("", None),
    ],
)
def test_files_of_text_are_text_and_others_an_error(http, engine, data, text):
    part = {"type": "input_file", "filename": "note.txt", "file_data": data}
    answer = send_response(http, input=[{"role": "user", "content": [part]}])
    assert answer.status_code == (400 if text is None else 200), answer.text
    assert text is None or text in engine.prompt


def includable():
    from openai.types.responses.response_includable import ResponseIncludable

    return typing.get_args(ResponseIncludable)


def test_options_of_the_official_types_are_accepted(http):
    for value in includable():
        assert send_response(http, include=[value]).status_code == 200, value
    for name, values in (
        ("summary", ("auto", "concise", "detailed")),
        ("generate_summary", ("auto", "concise", "detailed")),
        ("context", ("auto", "current_turn", "all_turns")),
        ("mode", ("standard", "pro")),
        ("effort", ("none", "minimal", "low", "medium", "high", "xhigh", "max")),
    ):
        for value in values:
            assert send_response(http, reasoning={name: value}).status_code == 200, (name, value)
    body = send_response(http).json()
    assert body["id"].startswith("resp_")
    assert body["usage"]["input_tokens_details"]["cache_write_tokens"] == 0
    assert send_message(http).json()["id"].startswith("msg_")


def test_documents_of_unreadable_sources_name_the_way_out(http):
    for source, fragment in (
        ({"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}, "send the text"),
        ({"type": "url", "url": "https://a.example/b.pdf"}, "send their text"),
        ({"type": "file", "file_id": "f"}, "send their text"),
    ):
        block = {"type": "document", "source": source}
        answer = send_message(http, messages=[{"role": "user", "content": [block]}])
        assert answer.status_code == 400 and fragment in answer.text


def test_pictures_of_this_file_are_valid():
    pillow = pytest.importorskip("PIL.Image")
    assert pillow.open(io.BytesIO(base64.b64decode(PNG))).size == (1, 1)


#: A system prompt with two lines that change with each request.
SYSTEM = "You write code.\nCurrent date: {0}\nBe brief.\n<branch>{0}</branch>"


@pytest.fixture(scope="module")
def patterns_http():
    engine = Recorder()
    with (
        background(engine, volatile_lines=["^Current date: ", "<branch>"]) as url,
        httpx.Client(base_url=url) as client,
    ):
        yield client, engine


@pytest.mark.parametrize("as_parts", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses"])
def test_volatile_lines_stand_behind_the_stable_text_in_every_api(patterns_http, route, as_parts):
    http, engine = patterns_http
    prompts = []
    for day in ("Monday", "Friday"):
        system = SYSTEM.format(day)
        turns = [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Go on."},
        ]
        body: dict = {"model": "scripted", "max_tokens": 20}
        if route == "messages":
            body["system"] = [{"type": "text", "text": system}] if as_parts else system
            body["messages"] = turns
        else:
            kind = "input_text" if route == "responses" else "text"
            content = [{"type": kind, "text": system}] if as_parts else system
            turns = [{"role": "system", "content": content}, *turns]
            body["input" if route == "responses" else "messages"] = turns
        answer = http.post(f"/{route}", json=body)
        assert answer.status_code == 200, answer.text
        prompts.append(engine.prompt)
        assert engine.prompt.count(day) == 2
    first, second = prompts
    equal = next(at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert first[:equal].endswith("Go on.\nCurrent date: ")
    assert "You write code.\nBe brief.[user]" in first[:equal]


def test_volatile_lines_move_to_the_last_message_that_the_model_does_not_write(patterns_http):
    http, engine = patterns_http
    system = {"role": "system", "content": SYSTEM.format("Monday")}
    body = {"model": "scripted", "messages": [system, {"role": "assistant", "content": "a"}]}
    assert http.post("/chat/completions", json=body).status_code == 200
    assert SYSTEM.format("Monday") in engine.prompt  # no message follows
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body["messages"] = [
        system,
        {"role": "user", "content": "Current date: 3"},  # no system message: it stays
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "result"},
    ]
    assert http.post("/chat/completions", json=body).status_code == 200
    assert "Current date: 3[assistant]" in engine.prompt
    assert "result\nCurrent date: Monday\n<branch>Monday</branch>" in engine.prompt


@pytest.mark.parametrize("pattern", ["(", "(?=a)b", r"(a)\1"])
def test_pattern_that_is_not_linear_is_refused_at_the_start(pattern):
    with pytest.raises(ConfigError, match=r"volatile_lines.*no regular expression of Rust"):
        background(ScriptedEngine(), volatile_lines=[pattern]).__enter__()
