"""Hostile chat templates of requests, and hostile variables, end within limits."""

from __future__ import annotations

import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from ed_esurge import render_time, untrusted_template
from ed_esurge.server.generation.rendering import MAX_REPEATED
from ed_esurge.server.http.errors import MAX_MESSAGE
from ed_esurge.server.launch import background
from ed_esurge.template import ChatTemplate
from ed_esurge.testing import CHAT_TEMPLATE, ScriptedEngine, byte_tokenizer
from ed_esurge.untrusted_template import UntrustedTemplateError, UntrustedTemplates

USER = {"role": "user", "content": "hi <s> \ufdd00."}
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

HOSTILE = {
    "nested loops": LOOP,
    "a range beyond the sandbox": "{% for a in range(10**9) %}{% endfor %}",
    "a string of a gigabyte": "{{ 'a' * 10**9 }}",
    "a string of 10 gigabytes in an expression": "{{ ('a' * 10**10) | length }}",
    "a doubled text": "{% set n = namespace(x='a') %}{% for i in range(99) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "centered": "{{ 'a' | center(10**9) }}",
    "a format with a width": "{{ '%999999999s' | format('a') }}",
    "a method with a width": "{{ '{:>999999999}'.format('a') }}",
    "an indentation": "{{ ('a\n' * 9999) | indent(10**6) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "digits": "{{ (10 ** 5000000) }}",
    "a list of a gigabyte": "{{ ([0] * 10**9) | length }}",
    "mappings": "{% set n = namespace(x={}) %}{% for i in range(60) %}"
    "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x | tojson }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "nested parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "nested blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a long error": "{{ raise_exception('a' * 10**6) }}",
    "a long expression": "{{ " + "1+" * 50_000 + "1 }}",
    "a group of words": "{{ 'a'|wordwrap(1)|urlize * 9**8 }}",
    "lorem": "{{ lipsum(n=10**6) }}",
    "escape": "{{ ''.__class__.__mro__ }}",
    "not closed": "{% for",
}


def ask(url: str, template: str, **fields: Any) -> httpx.Response:
    body = {"messages": [USER], "max_tokens": 1, "chat_template": template, **fields}
    return httpx.post(f"{url}/chat/completions", json=body, timeout=90)


@pytest.fixture(scope="module")
def url():
    with background(ScriptedEngine(), trust_request_chat_template=True) as url:
        yield url


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_return_short_errors(url, name, monkeypatch):
    monkeypatch.setattr(untrusted_template, "CPU_SECONDS", 0.7)
    answer = ask(url, HOSTILE[name])
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 2 * MAX_MESSAGE
    assert answer.json()["error"]["param"] in ("messages", "chat_template")


@pytest.mark.nightly
def test_server_answers_while_templates_run(url):
    """Only the limit of a child ends the template, and the server's other prompts have threads."""
    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(ask, url, LOOP) for _ in range(4)]
        time.sleep(0.3)
        root = url.removesuffix("/v1")
        answer = httpx.post(f"{root}/tokenize", json={"messages": [USER]}, timeout=60)
        assert answer.status_code == 200
        assert not all(job.done() for job in jobs)
        assert {job.result().status_code for job in jobs} == {400}


HONEST = {
    "of the tests": CHAT_TEMPLATE,
    "with special tokens": "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{{ eos_token }}{% endfor %}{{ extra | default('') }}",
    "with tools": "{{ tools | tojson }}{% for m in messages %}{{ m.content | trim }}{% endfor %}",
    "of parts": "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endfor %}",
    "with a date": "{{ strftime_now('%Y') }}{{ messages[-1].content }}",
}  # fmt: skip


@pytest.mark.daily("with a date")
@pytest.mark.parametrize("name", HONEST)
def test_text_of_a_child_equals_that_of_this_process(name):
    tokenizer = byte_tokenizer()
    children = UntrustedTemplates(tokenizer)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for messages, options in (
        ([USER], {"add_generation_prompt": True}),
        ([USER, {"role": "assistant", "content": "a </s>"}, USER], {"extra": "<s>x\ud800"}),
        ([USER, {"role": "assistant", "content": "begun"}], {"continue_final_message": True,
                                                             "add_generation_prompt": False}),
        ([{"role": "system", "content": "s"}, USER], {"tools": [tool]}),
    ):  # fmt: skip
        template = ChatTemplate(tokenizer, HONEST[name])
        try:
            text, marks = template.render(messages, **options)
        except Exception as failure:
            error = re.escape(str(failure)[:500])
            with pytest.raises(UntrustedTemplateError, match=f"^{error}$"):
                children.render(HONEST[name], messages, options, 2**20)
            continue
        apart, same = children.render(HONEST[name], messages, options, 2**20)
        assert apart == text
        assert same.pattern == marks.pattern


@pytest.mark.nightly
def test_template_ends_when_the_client_leaves(monkeypatch):
    monkeypatch.setattr(untrusted_template, "CPU_SECONDS", 1000.0)
    monkeypatch.setattr(untrusted_template, "WALL_SECONDS", 1000.0)
    started: list[UntrustedTemplates] = []
    create = UntrustedTemplates.__init__

    def record(templates: UntrustedTemplates, tokenizer: Any) -> None:
        started.append(templates)
        create(templates, tokenizer)

    monkeypatch.setattr(UntrustedTemplates, "__init__", record)
    with background(ScriptedEngine(), trust_request_chat_template=True) as url:
        assert ask(url, CHAT_TEMPLATE).status_code == 200
        (templates,) = started
        for route in ("/v1/chat/completions", "/apply-template"):
            body = {"messages": [USER], "chat_template": LOOP}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url.removesuffix("/v1") + route, json=body, timeout=1)
            deadline = time.monotonic() + 30
            while children_of(templates.pid):
                assert time.monotonic() < deadline
                time.sleep(0.01)


def children_of(pid: int | None) -> list[bytes]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True)
    return listed.stdout.split()


def test_variables_that_a_template_repeats_are_limited():
    """The template of the model writes the variable once for each message."""
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    engine = ScriptedEngine(tokenizer=byte_tokenizer(template), max_model_len=2**14)
    with background(engine) as url:

        def count(messages: int, characters: int) -> httpx.Response:
            body = {
                "messages": [USER] * messages,
                "chat_template_kwargs": {"eos_token": "a" * characters},
                "max_tokens": 1,
            }
            return httpx.post(f"{url}/chat/completions", json=body, timeout=60)

        assert count(10, 100).status_code == 200
        answer = count(2000, 2**20)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template_kwargs"
        assert str(MAX_REPEATED // 2000) in answer.json()["error"]["message"]


@pytest.mark.daily("true")
@pytest.mark.parametrize("condition", ["true", "messages | length > 4"])
def test_endless_template_of_a_checkpoint_is_interrupted(monkeypatch, condition):
    """Its thread then works for other requests, and the event loop is not used again."""
    monkeypatch.setattr(render_time, "CPU_SECONDS", 0.2)
    engine = ScriptedEngine()
    long = LOOP.replace("99999", "5000")  # some seconds, so that the test also ends without limits
    template = f"{{% if {condition} %}}{long}{{% endif %}}{{{{ messages[0].content }}}}"
    engine.tokenizer = byte_tokenizer(template)
    with background(engine) as url:
        turns = [{**USER, "role": role} for role in ("user", "assistant", "user")]
        for count in (6, 6, 1):
            body = {"messages": turns[: count % 3] or turns * 2, "max_tokens": 1}
            answer = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
            if count == 1 and condition != "true":
                assert answer.status_code == 200, answer.text
                continue
            assert answer.status_code == 400
            assert "of processor time: use another template" in answer.text
        completion = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{url}/completions", json=completion).status_code == 200
    assert not render_time.RENDER_TIMER._running


def test_interrupted_rendering_leaves_no_later_exception(monkeypatch):
    monkeypatch.setattr(render_time, "CPU_SECONDS", 0.05)
    timer, caught = render_time.RenderTimer(), 0

    def catch_exceptions():
        nonlocal caught
        with timer.limit(0):
            while caught < 3:
                try:
                    sum(range(10_000))
                except render_time.TemplateTimeError:
                    caught += 1

    with pytest.raises(render_time.TemplateTimeError):
        catch_exceptions()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        sum(range(1000))
    with timer.limit(10**9):
        assert len(timer._running) == 1
