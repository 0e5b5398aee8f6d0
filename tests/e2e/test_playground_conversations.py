"""Conversations of the playground persist in the browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ed_esurge.server.launch import background
from playwright.sync_api import Page

from tests.playground import (
    ask,
    button,
    download,
    failures,
    needs_chromium,
    said,
    small_engine,
    until,
)

pytestmark = [pytest.mark.nightly, needs_chromium]  # an engine and a browser start
TITLES = "[...document.querySelectorAll('#conversations .open')].map((one) => one.textContent)"


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    with background(small_engine()) as url:
        yield url.removesuffix("v1")


@pytest.fixture
def tab(open_tab, root: str) -> Page:
    tab = open_tab(root)
    until(tab, "document.querySelector('#model').value")
    tab.evaluate("document.querySelector('#group-penalties').open = true")
    tab.evaluate("document.querySelector('#set-max_tokens').value = 12")
    tab.evaluate("document.querySelector('#set-max_tokens').dispatchEvent(new Event('input'))")
    return tab


def titles(tab: Page, *expected: str) -> None:
    text = json.dumps(expected, separators=(",", ":"))
    until(tab, f"JSON.stringify({TITLES}) === {json.dumps(text)}")


def letters(text: str) -> str:
    """Return the letters and digits of ASCII, which Markdown never moves."""
    return "".join(re.findall(r"[A-Za-z0-9]", text))


def tokens(tab: Page) -> list[Any]:
    return tab.evaluate(
        "[...document.querySelectorAll('.tok[role]')].map((one) => one.getAttribute('aria-label'))"
    )


def test_conversation_and_its_probabilities_persist_after_a_reload(tab: Page) -> None:
    ask(tab, "The first question\nwith a second line")
    tab.click("#heat")
    until(tab, "document.querySelectorAll('.tok').length >= 12")
    before, probabilities = said(tab), tokens(tab)
    assert all("%" in one for one in probabilities)
    titles(tab, "The first question")
    tab.reload()
    until(tab, "document.querySelectorAll('.tok').length >= 12")
    assert (said(tab), tokens(tab)) == (before, probabilities)
    button(tab, "Regenerate")
    until(tab, "document.querySelector('.turn.assistant .branch')?.innerText.includes('2 / 2')")
    assert failures(tab) == []


def test_conversations_are_listed_renamed_and_deleted_with_undo(tab: Page) -> None:
    ask(tab, "one")
    first = said(tab)
    tab.click("#new")
    ask(tab, "two")
    titles(tab, "two", "one")
    tab.click('#conversations [aria-label="Rename the conversation"]')
    until(tab, "document.activeElement.matches('.rename')")
    tab.evaluate("document.activeElement.select()")
    tab.keyboard.insert_text("A name")
    tab.keyboard.press("Enter")
    titles(tab, "A name", "one")
    tab.evaluate("document.querySelectorAll('#conversations .open')[1].click()")
    until(tab, "document.querySelector('.turn.user .said').innerText === 'one'")
    assert said(tab) == first
    tab.click('#conversations [aria-label="Delete the conversation"]')
    titles(tab, "A name")
    until(tab, "document.querySelector('.starters')")
    tab.click(".notice .strong")
    titles(tab, "A name", "one")
    until(tab, "document.querySelector('.turn.user .said')?.innerText === 'one'")
    tab.click('#conversations [aria-label="Delete the conversation"]')
    titles(tab, "A name")
    tab.reload()
    titles(tab, "A name")
    # The name persists after another question.
    tab.click("#conversations .open")
    until(tab, "document.querySelectorAll('.turn').length === 2")
    ask(tab, "three")
    titles(tab, "A name")
    tab.keyboard.press("Escape")
    assert failures(tab) == []


def test_export_and_import_keep_messages_and_probabilities(
    tab: Page, open_tab, root: str, tmp_path: Path
) -> None:
    ask(tab, "exported")
    button(tab, "Regenerate")
    until(tab, "document.querySelector('.turn.assistant .branch')?.innerText.includes('2 / 2')")
    answer = said(tab)
    exported = download(tab, "#export-all", tmp_path)
    (conversation,) = json.loads(exported.read_text("utf-8"))["conversations"]
    assert len(conversation["tree"]["nodes"]) == 4
    other = open_tab(root)
    until(other, "document.querySelector('#model').value")
    other.set_input_files("#import-file", exported)
    titles(other, "exported")
    until(other, "document.querySelectorAll('.turn').length === 2")
    assert said(other) == answer
    other.click("#heat")
    until(other, "document.querySelectorAll('.tok').length >= 12")
    button(other, "Previous version")
    until(other, "document.querySelector('.branch').innerText.includes('1 / 2')")
    assert failures(other) == []


def test_files_that_are_no_export_change_nothing(tab: Page, tmp_path: Path) -> None:
    user = {"role": "user", "text": "a", "kids": [], "pick": 0}

    def export(**nodes: Any) -> str:
        given = {"0": {"kids": [1], "pick": 0}, "1": user, **nodes}
        return json.dumps(
            {"format": "esurge-conversations", "conversations": [{"tree": {"nodes": given}}]}
        )

    wrong = {
        "not JSON": "no",
        "format": "{}",
        "two parents": export(**{"1": {**user, "kids": [1]}}),
        "role": export(**{"1": {**user, "role": "system"}}),
        "another type": export(**{"1": {**user, "text": {}}}),
        "images": export(**{"1": {**user, "images": ["https://evil.example/a.png"]}}),
    }
    for number, (reason, content) in enumerate(wrong.items()):
        path = tmp_path / f"{number}.json"
        path.write_text(content)
        tab.evaluate("document.querySelector('#notices').replaceChildren()")
        tab.set_input_files("#import-file", path)
        notice = until(tab, "document.querySelector('.notice span')?.textContent")
        assert "Nothing is imported" in notice and reason in notice
    assert tab.evaluate(TITLES) == []


def test_shared_page_shows_the_conversation_without_a_server(
    tab: Page, open_tab, tmp_path: Path
) -> None:
    ask(tab, "a question to share")
    answer = said(tab)
    tab.click("#heat")
    until(tab, "document.querySelectorAll('.tok').length >= 12")
    count = len(tokens(tab))
    path = download(tab, '#conversations [aria-label="Save as a page to share"]', tmp_path)
    page = path.read_text("utf-8")
    assert "<script" not in page and "http:" not in page.replace("http://www.w3.org", "")
    assert "<button" not in page and "default-src 'none'" in page
    shared = open_tab(path.as_uri())
    until(shared, "document.querySelectorAll('.turn').length === 2")
    assert shared.evaluate("document.title") == "a question to share"
    assert shared.evaluate("document.querySelectorAll('.tok[title]').length") >= count
    until(shared, "getComputedStyle(document.querySelector('.tok[title]')).backgroundColor")
    shown = "[...document.querySelectorAll('.tok:not(.mark-only)')].map((one) => one.textContent)"
    assert letters("".join(shared.evaluate(shown)).removesuffix("</s>")) == letters(answer)
    assert failures(shared) == []
