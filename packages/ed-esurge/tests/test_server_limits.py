"""Hostile bodies return short errors, foreign pages are rejected, and memory is limited."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from ed_esurge.config import EngineConfig, ServerLimits
from ed_esurge.server.http import admission, forms
from ed_esurge.server.http.admission import Budget, Reservation
from ed_esurge.server.http.body import MAX_ITEMS, MAX_KEYS, parsed_json
from ed_esurge.server.http.errors import MAX_MESSAGE, MAX_PARAM, MAX_PROBLEMS, APIError
from ed_esurge.server.http.streaming import run_in_turns
from ed_esurge.server.launch import background
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from ed_infra.errors import did_you_mean

USER = {"role": "user", "content": "hi"}
ASKED = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "scripted", "max_tokens": 4, "messages": [USER]},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    options = {"batch_directory": folder, "cors_origins": ["https://app.example"]}
    with background(ScriptedEngine(), unknown_fields="refuse", **options) as url:
        yield url.removesuffix("/v1")


def error_of(response):
    assert response.status_code == 400, response.text[:500]
    error = response.json()["error"]
    assert len(error["message"]) <= MAX_MESSAGE + 2 * MAX_PARAM
    assert len(response.content) < 3 * MAX_MESSAGE
    return error


@pytest.mark.parametrize("path", ASKED)
def test_many_unknown_keys_return_a_short_error(root, path):
    keys = {f"temperatur{number}": 0 for number in range(40_000)}
    answer = httpx.post(f"{root}{path}", json={**ASKED[path], **keys}, timeout=60)
    assert error_of(answer)["message"].count("unknown key") == MAX_PROBLEMS


@pytest.mark.parametrize("path", ASKED)
def test_error_does_not_repeat_huge_keys_or_model_names(root, path):
    long = "k" * 4_000_000
    answer = httpx.post(f"{root}{path}", json={**ASKED[path], long: 0}, timeout=60)
    assert "kkk..." in error_of(answer)["message"]
    answer = httpx.post(f"{root}{path}", json={**ASKED[path], "model": long}, timeout=60)
    assert answer.status_code == 404
    assert len(answer.content) < 2 * MAX_MESSAGE


def test_invalid_items_are_reported_once():
    with background(ScriptedEngine()) as url:
        for path, field in [("messages", "messages"), ("chat/completions", "messages")]:
            for wrong in ({"role": 0}, {"role": "user", "content": [{"type": "text"}] * 1000}):
                body = {**ASKED[f"/v1/{path}"], field: [wrong] * 60}
                message = error_of(httpx.post(f"{url}/{path}", json=body))["message"]
                assert message.count(";") < MAX_PROBLEMS


def test_long_names_are_rejected_without_suggestions():
    assert did_you_mean("temperatur", ["temperature"])
    assert did_you_mean("temperature" * 100, ["temperature" * 100 + "s"]) == ""


def test_oversized_json_is_rejected_before_parsing():
    for raw in (b"[" + b"[]," * (MAX_KEYS + 1) + b"0]", b"[" + b"1," * (MAX_ITEMS + 1) + b"1]"):
        with pytest.raises(ValueError, match="more than"):
            parsed_json(raw)
    text = "[{:," * MAX_ITEMS + '\\"'
    assert parsed_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_template_marks_in_user_text_do_not_slow_rendering():
    template = ChatTemplate(byte_tokenizer("{{ messages[0].content }}"))
    said = "".join(f"\ufdd0{number}." for number in range(100_000))
    text, marks = template.render([{"role": "user", "content": said}])
    assert text == said
    assert "100000" in marks.pattern


# ---- web pages of other sites


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({}, 200),
    ],
)
def test_requests_of_foreign_web_pages_return_403(root, headers, status):
    answer = httpx.post(f"{root}/v1/completions", json={"prompt": "a"}, headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "origin_not_allowed"
        form = {"purpose": "batch"}
        files = {"file": ("a.jsonl", b"{}")}
        upload = httpx.post(f"{root}/v1/files", data=form, files=files, headers=headers)
        assert upload.status_code == 403
        for path in ("/sleep", "/reset_prefix_cache", "/v1/batches/b/cancel"):
            assert httpx.post(f"{root}{path}", headers=headers).status_code == 403
        assert httpx.delete(f"{root}/v1/files/f", headers=headers).status_code == 403
    assert httpx.get(f"{root}/health", headers=headers).status_code == 200


def test_requests_of_the_playground_are_accepted(root):
    headers = {"Origin": root}
    answer = httpx.post(f"{root}/v1/completions", json={"prompt": "a"}, headers=headers)
    assert answer.status_code == 200


def test_simple_content_types_are_rejected(root):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"Content-Type": kind}
        answer = httpx.post(f"{root}/v1/completions", content=b'{"prompt":"a"}', headers=headers)
        assert answer.status_code == 400


# ---- uploads


def form(*parts, boundary=b"b"):
    body = b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts)
    return body + b"--" + boundary + b"--\r\n"


PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
FILE = b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\n'
MULTIPART = {"Content-Type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("body", "fragment"),
    [
        (form(b"X: " + b"a" * 10**6 + b"\r\n" + FILE), "header size"),
        (form(b"X: a\r\n" * 10**5 + FILE), "header count"),
        (form(*[PURPOSE] * (forms.MAX_PARTS + 1), FILE), "parts"),
        (form(PURPOSE + b"x" * 2000, FILE), "bytes"),
        (form(PURPOSE, FILE, FILE), "one part"),
        (form(PURPOSE, FILE)[:-6], "last boundary"),
        (form(PURPOSE), "purpose and file"),
        (b"", "last boundary"),
    ],
    ids=["header", "headers", "parts", "field", "files", "cut", "missing", "empty"],
)
def test_forms_beyond_the_limits_are_rejected(root, body, fragment):
    answer = httpx.post(f"{root}/v1/files", content=body, headers=MULTIPART, timeout=60)
    assert fragment in error_of(answer)["message"].lower()
    assert httpx.get(f"{root}/v1/files").json()["data"] == []


def test_uploaded_file_is_stored_unchanged(root):
    lines = b'{"a": "\r\n--b"}\r\n--bx\r' * 50_000
    head = b'Content-Disposition: form-data; name="file"; filename="\xc3\xa9.jsonl"\r\n\r\n'
    body = form(PURPOSE, head + lines)

    def pieces():
        yield from (body[at : at + 9_999] for at in range(0, len(body), 9_999))

    kept = httpx.post(f"{root}/v1/files", content=pieces(), headers=MULTIPART).json()
    assert (kept["bytes"], kept["filename"]) == (len(lines), "é.jsonl")
    assert httpx.get(f"{root}/v1/files/{kept['id']}/content").content == lines
    httpx.delete(f"{root}/v1/files/{kept['id']}")


# ---- memory


def test_one_client_gets_at_most_half_of_the_byte_budget():
    budget = Budget(100)

    def of(client):
        return Reservation(budget), {"client": (client, 1)}

    one, scope = of("one")
    one.grow(scope, 90)  # a single request may use more than half
    with pytest.raises(APIError, match="max_bytes_in_flight"):
        of("two")[0].grow({"client": ("two", 1)}, 20)
    one.close()
    first, second, other = of("one"), of("one"), of("two")
    first[0].grow(first[1], 40)
    with pytest.raises(APIError) as refused:
        second[0].grow(second[1], 20)
    assert refused.value.status == 503
    assert refused.value.response().headers["retry-after"]
    other[0].grow(other[1], 50)
    for reservation, _ in (first, second, other):
        reservation.close()
    assert budget.used == 0
    assert not budget.by_client


@pytest.mark.nightly
def test_bodies_beyond_the_byte_budget_are_rejected_until_others_end():
    limits = ServerLimits(
        max_body_bytes=4096, max_file_bytes=4096, max_audio_bytes=4096, max_bytes_in_flight=4096
    )
    engine = ScriptedEngine(lambda prompt, choice: "x" * 99, delay=0.02)
    long = {"prompt": "a", "max_tokens": 99, "stream": True, "user": "u" * 3000}
    with background(engine, limits=limits) as url:
        with httpx.stream("POST", f"{url}/completions", json=long) as first:
            lines = first.iter_lines()
            next(lines)
            answer = httpx.post(f"{url}/completions", json=long)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "server_overloaded"
            assert answer.headers["retry-after"]
            assert httpx.get(f"{url}/models").status_code == 200
            assert [*lines][-2] == "data: [DONE]"
        assert httpx.post(f"{url}/completions", json={**long, "n": 1}).status_code == 200


def test_free_memory_is_returned_soon_after_the_last_request(monkeypatch):
    """It is returned once after several short requests, and at once after a long one."""
    returns = []
    monkeypatch.setattr(admission, "RETURN_SECONDS", 0.02)
    monkeypatch.setattr(admission, "return_free_memory", lambda: returns.append(1))
    budget = Budget(2**30)

    async def app(scope, receive, send):
        scope[admission.RESERVATION].grow(scope, scope["size"])

    def scope(size):
        head = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
        return {**head, "size": size}

    async def send_requests():
        gate = admission.Admission(app, None, (), 8, budget)
        for size in (10, 20, 30):
            await gate(scope(size), None, None)
        counts = [len(returns)]
        await asyncio.sleep(0.1)
        counts.append(len(returns))
        await gate(scope(admission.RETURNED_BYTES), None, None)
        await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        return [*counts, len(returns)]

    assert asyncio.run(send_requests()) == [0, 1, 2]
    assert budget.used == budget.released == 0


@pytest.mark.parametrize("count", [1, 31, 32, 100])
def test_other_requests_run_between_the_prompts_of_one(count):
    """Results have the order of the prompts, and the first error cancels the others."""
    turns = 0

    async def count_turns():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def square(number):
        if number < 0:
            raise ValueError("negative")
        return number**2

    async def work():
        other = asyncio.ensure_future(count_turns())
        assert await run_in_turns(map(square, range(count))) == [n**2 for n in range(count)]
        other.cancel()
        with pytest.raises(ValueError, match="negative"):
            await run_in_turns(map(square, range(count - 1, -2, -1)))

    asyncio.run(work())
    assert turns >= count // 32


def test_byte_budget_below_the_body_limit_raises_error():
    with pytest.raises(ValueError, match="max_bytes_in_flight"):
        ServerLimits(max_bytes_in_flight=4096)


@pytest.mark.parametrize("words", [30, 3000])
@pytest.mark.parametrize("by", ["server", "request"])
def test_prompts_of_every_length_are_truncated(by, words):
    config = EngineConfig(auto_truncate_prompt=by == "server", strict_context=by != "server")
    fields = {"truncate_prompt_tokens": 20} if by == "request" else {}
    text = "word " * words
    with background(ScriptedEngine(max_model_len=64, config=config)) as url:
        body = {"prompt": text, "max_tokens": 2, **fields}
        assert httpx.post(f"{url}/completions", json=body).status_code == 200
        if by == "server":
            chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
            assert httpx.post(f"{url}/chat/completions", json=chat).status_code == 200
