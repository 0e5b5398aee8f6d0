"""Conversations of the playground persist in the browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ed_esurge.server.launch import background

from tests.playground import ENTER, ESCAPE, ask, button, needs_chromium, said, small_engine
from tools.chromium import Tab

pytestmark = [pytest.mark.nightly, needs_chromium]  # an engine and a browser start
TITLES = "[...document.querySelectorAll('#conversations .open')].map((one) => one.textContent)"


@pytest.fixture(scope="module")
def root() -> Iterator[str]:
    with background(small_engine()) as url:
        yield url.removesuffix("v1")


@pytest.fixture
def tab(open_tab, root: str) -> Tab:
    tab = open_tab(root)
    tab.until("document.querySelector('#model').value")
    tab.js("document.querySelector('#group-penalties').open = true")
    tab.js("document.querySelector('#set-max_tokens').value = 12")
    tab.js("document.querySelector('#set-max_tokens').dispatchEvent(new Event('input'))")
    return tab


def titles(tab: Tab, *expected: str) -> None:
    text = json.dumps(expected, separators=(",", ":"))
    tab.until(f"JSON.stringify({TITLES}) === {json.dumps(text)}")


def downloaded(folder: Path, ending: str) -> str:
    end = time.monotonic() + 10
    while not (found := [*folder.glob(f"*.{ending}")]):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.2)
    return found[0].read_text("utf-8")


def letters(text: str) -> str:
    """Return the letters and digits of ASCII, which Markdown never moves."""
    return "".join(re.findall(r"[A-Za-z0-9]", text))


def tokens(tab: Tab) -> list[Any]:
    return tab.js(
        "[...document.querySelectorAll('.tok[role]')].map((one) => one.getAttribute('aria-label'))"
    )


def test_conversation_and_its_probabilities_persist_after_a_reload(tab: Tab) -> None:
    ask(tab, "The first question\nwith a second line")
    tab.click("#heat")
    tab.until("document.querySelectorAll('.tok').length >= 12")
    before, probabilities = said(tab), tokens(tab)
    assert all("%" in one for one in probabilities)
    titles(tab, "The first question")
    tab.do("Page.reload")
    tab.until("document.querySelectorAll('.tok').length >= 12")
    assert (said(tab), tokens(tab)) == (before, probabilities)
    button(tab, "Regenerate")
    tab.until("document.querySelector('.turn.assistant .branch')?.innerText.includes('2 / 2')")
    assert tab.failures() == []


def test_conversations_are_listed_renamed_and_deleted_with_undo(tab: Tab) -> None:
    ask(tab, "one")
    first = said(tab)
    tab.click("#new")
    ask(tab, "two")
    titles(tab, "two", "one")
    tab.click('#conversations [aria-label="Rename the conversation"]')
    tab.until("document.activeElement.matches('.rename')")
    tab.js("document.activeElement.select()")
    tab.type("A name")
    tab.press("Enter", ENTER)
    titles(tab, "A name", "one")
    tab.js("document.querySelectorAll('#conversations .open')[1].click()")
    tab.until("document.querySelector('.turn.user .said').innerText === 'one'")
    assert said(tab) == first
    tab.click('#conversations [aria-label="Delete the conversation"]')
    titles(tab, "A name")
    tab.until("document.querySelector('.starters')")
    tab.click(".notice .strong")
    titles(tab, "A name", "one")
    tab.until("document.querySelector('.turn.user .said')?.innerText === 'one'")
    tab.click('#conversations [aria-label="Delete the conversation"]')
    titles(tab, "A name")
    tab.do("Page.reload")
    titles(tab, "A name")
    # The name persists after another question.
    tab.click("#conversations .open")
    tab.until("document.querySelectorAll('.turn').length === 2")
    ask(tab, "three")
    titles(tab, "A name")
    tab.press("Escape", ESCAPE)
    assert tab.failures() == []


def test_export_and_import_keep_messages_and_probabilities(
    tab: Tab, open_tab, root: str, tmp_path: Path
) -> None:
    ask(tab, "exported")
    button(tab, "Regenerate")
    tab.until("document.querySelector('.turn.assistant .branch')?.innerText.includes('2 / 2')")
    answer = said(tab)
    tab.downloads_to(tmp_path)
    tab.click("#export-all")
    text = downloaded(tmp_path, "json")
    (conversation,) = json.loads(text)["conversations"]
    assert len(conversation["tree"]["nodes"]) == 4
    other = open_tab(root)
    other.until("document.querySelector('#model').value")
    other.upload("#import-file", next(tmp_path.glob("*.json")))
    titles(other, "exported")
    other.until("document.querySelectorAll('.turn').length === 2")
    assert said(other) == answer
    other.click("#heat")
    other.until("document.querySelectorAll('.tok').length >= 12")
    button(other, "Previous version")
    other.until("document.querySelector('.branch').innerText.includes('1 / 2')")
    assert other.failures() == []


def test_files_that_are_no_export_change_nothing(tab: Tab, tmp_path: Path) -> None:
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
        tab.js("document.querySelector('#notices').replaceChildren()")
        tab.upload("#import-file", path)
        notice = tab.until("document.querySelector('.notice span')?.textContent")
        assert "Nothing is imported" in notice and reason in notice
    assert tab.js(TITLES) == []


def test_shared_page_shows_the_conversation_without_a_server(
    tab: Tab, open_tab, tmp_path: Path
) -> None:
    ask(tab, "a question to share")
    answer = said(tab)
    tab.click("#heat")
    tab.until("document.querySelectorAll('.tok').length >= 12")
    count = len(tokens(tab))
    tab.downloads_to(tmp_path)
    tab.click('#conversations [aria-label="Save as a page to share"]')
    page = downloaded(tmp_path, "html")
    assert "<script" not in page and "http:" not in page.replace("http://www.w3.org", "")
    assert "<button" not in page and "default-src 'none'" in page
    shared = open_tab(next(tmp_path.glob("*.html")).as_uri())
    shared.until("document.querySelectorAll('.turn').length === 2")
    assert shared.js("document.title") == "a question to share"
    assert shared.js("document.querySelectorAll('.tok[title]').length") >= count
    shared.until("getComputedStyle(document.querySelector('.tok[title]')).backgroundColor")
    shown = "[...document.querySelectorAll('.tok:not(.mark-only)')].map((one) => one.textContent)"
    assert letters("".join(shared.js(shown)).removesuffix("</s>")) == letters(answer)
    assert shared.failures() == []
