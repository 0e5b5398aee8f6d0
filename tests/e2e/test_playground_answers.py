"""Errors, edited answers, presets, grammars and comparisons on the playground."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from ed_esurge.server.launch import background
from playwright.sync_api import Page

from tests.playground import (
    ask,
    button,
    failures,
    needs_chromium,
    said,
    set_value,
    small_engine,
    until,
)

pytestmark = [pytest.mark.nightly, needs_chromium]  # engines and a browser start
TURNS = "document.querySelectorAll('.turn').length"
FAILED = "document.querySelector('.turn:last-of-type .failed')"
# Keep the bodies of requests, which the page still sends to the server.
RECORD = """(() => { const real = window.fetch; window.sent = [];
  window.fetch = (path, options) => {
    if (options?.body && String(path).includes('completions')) sent.push(JSON.parse(options.body));
    return real(path, options); }; })()"""


@pytest.fixture(scope="module")
def engines() -> dict[str, Any]:
    return {"first": small_engine("first", seed=1), "second": small_engine("second", seed=2)}


@pytest.fixture(scope="module")
def root(engines: dict[str, Any]) -> Iterator[str]:
    with background(engines) as url:
        yield url.removesuffix("v1")


@pytest.fixture
def tab(open_tab, root: str) -> Page:
    tab = open_tab(root)
    until(tab, "document.querySelector('#model').value")
    tab.evaluate("document.querySelectorAll('.group').forEach((one) => { one.open = true; })")
    set_value(tab, "#set-max_tokens", 12)
    tab.evaluate(RECORD)
    return tab


def sent(tab: Page) -> dict[str, Any]:
    return tab.evaluate("sent.at(-1)")


def test_failed_answer_is_retried_and_left_out_of_the_context(tab: Page) -> None:
    ask(tab, "too long" * 200, wait=False)
    until(tab, FAILED)
    assert "context length" in tab.evaluate(f"{FAILED}.innerText")
    assert "reduce the maximum tokens" in tab.evaluate(f"{FAILED}.innerText")
    ask(tab, "next")
    assert [one["content"] for one in sent(tab)["messages"]] == ["next"]
    # Back at the failed turn, another attempt replaces it.
    tab.click("#new")
    set_value(tab, "#set-form", "regex", "change")
    set_value(tab, "#set-schema", "(")
    ask(tab, "again", wait=False)
    until(tab, FAILED)
    assert "Change the setting" in tab.evaluate(f"{FAILED}.innerText")
    set_value(tab, "#set-form", "text", "change")
    tab.click(".failed .strong")
    until(tab, "document.querySelector('.turn:last-of-type .figures')")
    assert tab.evaluate(f"{TURNS}") == 2
    assert tab.evaluate("document.querySelector('.branch')") is None
    assert said(tab)


def test_stopped_answer_is_continued_after_a_reload(tab: Page) -> None:
    set_value(tab, "#set-max_tokens", 900)
    set_value(tab, "#set-temperature", 0)  # samples of a random model can end early
    ask(tab, "long", wait=False)
    until(tab, "document.querySelector('.turn.assistant .said')?.innerText.length > 20")
    tab.keyboard.press("Escape")
    until(tab, "document.querySelector('#send').ariaLabel === 'Send'")
    until(tab, "document.querySelectorAll('#conversations .open').length === 1")
    tab.reload()
    until(tab, f"{TURNS} === 2 && document.querySelector('#model').value")
    text = tab.evaluate("document.querySelector('.turn.assistant .said').textContent")
    set_value(tab, "#set-max_tokens", 8)
    tab.evaluate(RECORD)
    button(tab, "Continue")
    until(tab, "document.querySelector('.branch')?.innerText.includes('2 / 2')")
    until(tab, "document.querySelector('.turn:last-of-type .figures')")
    assert sent(tab)["continue_final_message"] is True
    assert text[:10] in sent(tab)["messages"][-1]["content"]


def test_banner_appears_while_the_server_is_down(open_tab) -> None:
    engine = small_engine("first")
    with ExitStack() as first:
        url = first.enter_context(background(engine, drain_seconds=0))
        tab = open_tab(url.removesuffix("v1"))
        set_value(tab, "#set-max_tokens", 8)
        ask(tab, "before")
    until(tab, "!document.querySelector('#banner').hidden")
    assert "Next attempt in" in tab.evaluate("document.querySelector('#banner').innerText")
    ask(tab, "while the server is down", wait=False)
    until(tab, FAILED)
    assert "connection" in tab.evaluate(f"{FAILED}.innerText")
    port = int(url.split(":")[2].split("/")[0])
    with background(engine, port=port):
        tab.click("#reconnect-now")
        until(tab, "document.querySelector('#banner').hidden")
        tab.click(".turn:last-of-type .failed .strong")
        until(tab, "document.querySelector('.turn:last-of-type .figures')")
        assert said(tab)


def test_edited_answer_is_a_version_that_later_requests_contain(tab: Page) -> None:
    ask(tab, "question")
    button(tab, "Edit")
    until(tab, "document.activeElement.matches('.edit textarea')")
    set_value(tab, ".edit textarea", "My **own** answer")
    tab.click(".edit .solid")
    until(tab, "document.querySelector('.turn.assistant strong')?.innerText === 'own'")
    assert "2 / 2" in tab.evaluate("document.querySelector('.branch').innerText")
    assert "edited" in tab.evaluate("document.querySelector('.turn.assistant .who').innerText")
    ask(tab, "next")
    messages = [(one["role"], one["content"]) for one in sent(tab)["messages"]]
    assert messages == [
        ("user", "question"),
        ("assistant", "My **own** answer"),
        ("user", "next"),
    ]


def test_presets_restore_all_settings(tab: Page) -> None:
    set_value(tab, "#set-temperature", 0.25)
    set_value(tab, "#set-system", "Be short.")
    tab.click("#group-presets button:last-of-type")
    assert "name" in tab.evaluate("document.querySelector('#preset-wrong').textContent")
    set_value(tab, "#preset-name", "short")
    tab.click("#group-presets button:last-of-type")
    until(tab, "document.querySelector('#preset').value === 'short'")
    tab.click("#defaults")
    assert tab.evaluate("document.querySelector('#set-temperature-number').value") == "0.7"
    tab.reload()
    until(tab, "document.querySelector('#model')?.value")
    tab.evaluate("document.querySelectorAll('.group').forEach((one) => { one.open = true; })")
    tab.evaluate(RECORD)
    set_value(tab, "#preset", "short", "change")
    ask(tab, "hello")
    body = sent(tab)
    assert body["temperature"] == 0.25 and body["max_tokens"] == 12
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    tab.click('#group-presets [aria-label="Delete the preset"]')
    assert tab.evaluate("document.querySelector('#preset').options.length") == 1


def test_empty_field_shows_the_number_that_is_sent(tab: Page) -> None:
    set_value(tab, "#set-max_tokens", "")
    shown = until(tab, "document.querySelector('#set-max_tokens').placeholder")
    ask(tab, "hello", wait=False)
    until(tab, "sent.length")
    assert sent(tab)["max_tokens"] == int(shown) == 512
    assert "seed" not in sent(tab)
    assert tab.evaluate("document.querySelector('#set-seed').placeholder") == "random"
    tab.keyboard.press("Escape")


def test_answer_follows_the_grammar(tab: Page) -> None:
    set_value(tab, "#set-schema", 'start: "yes" | "no"')
    set_value(tab, "#set-form", "grammar", "change")
    ask(tab, "hello")
    assert said(tab) in ("yes", "no")
    assert tab.evaluate("document.querySelector('#group-form .set').textContent") == "grammar"


def test_copying_shows_its_result_without_the_clipboard_interface(tab: Page) -> None:
    ask(tab, "hello")
    tab.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    tab.evaluate(
        "document.addEventListener('copy', () => { window.copied = getSelection().toString() "
        "|| document.activeElement.value; })"
    )
    button(tab, "Copy")
    until(tab, "document.querySelector('.tip')?.textContent === 'Copied'")
    until(tab, "document.querySelector('#spoken').textContent === 'Copied'")
    assert tab.evaluate("window.copied.length") > 0
    until(tab, "!document.querySelector('.tip')")
    assert failures(tab) == []


def test_two_models_answer_side_by_side(tab: Page) -> None:
    set_value(tab, "#set-temperature", 0)
    tab.click("#compare")
    set_value(tab, "#compare-model", "second", "change")
    ask(tab, "compare")
    until(tab, "document.querySelectorAll('.side .figures').length === 2")
    names = "[...document.querySelectorAll('.side .who')].map((one) => one.innerText)"
    assert [name.split(" · ")[0] for name in tab.evaluate(names)] == ["first", "second"]
    answers = tab.evaluate(
        "[...document.querySelectorAll('.side .said')].map((one) => one.innerText)"
    )
    left, right = (
        tab.evaluate(f"document.querySelectorAll('.side')[{place}].getBoundingClientRect().left")
        for place in (0, 1)
    )
    assert right > left + 100
    assert answers[0] != answers[1]
    models = tab.evaluate("sent.map((one) => one.model)")
    assert sorted(models) == ["first", "second"]
    # The conversation continues with the chosen answer, also after a reload.
    tab.evaluate("document.querySelectorAll('.choose')[1].click()")
    until(tab, "document.querySelectorAll('.choose')[1]?.ariaPressed === 'true'")
    tab.reload()
    until(tab, "document.querySelectorAll('.choose')[1]?.ariaPressed === 'true'")
    until(tab, "document.querySelector('#model').value")
    tab.evaluate(RECORD)
    tab.click("#compare")
    ask(tab, "next", wait=False)
    until(tab, f"{TURNS} === 4 && document.querySelector('.turn:last-of-type .figures')")
    nodes = json.dumps([one["role"] for one in sent(tab)["messages"]])
    assert nodes == '["user", "assistant", "user"]'
    assert failures(tab) == []


def test_two_settings_answer_side_by_side(tab: Page) -> None:
    set_value(tab, "#set-temperature", 2)
    set_value(tab, "#preset-name", "hot")
    tab.click("#group-presets button:last-of-type")
    set_value(tab, "#set-temperature", 0)
    tab.click("#compare")
    set_value(tab, "#compare-preset", "hot", "change")
    ask(tab, "compare")
    until(tab, "document.querySelectorAll('.side .figures').length === 2")
    assert sorted(tab.evaluate("sent.map((one) => one.temperature)")) == [0, 2]
    assert "hot" in tab.evaluate("document.querySelectorAll('.side .who')[1].innerText")
