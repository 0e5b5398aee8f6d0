"""Pictures of states of the playground: texts are legible, and nothing is cut or covered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ed_esurge.server.launch import background

from tests import playground_pictures as states
from tests.e2e.test_playground_looks import CONTRASTS
from tests.playground import failures, import_answer, needs_chromium, small_engine, until

pytestmark = [pytest.mark.nightly, needs_chromium]
OVERFLOW = """(() => [...document.querySelectorAll('main *')].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 1 || box.left < -1)
    && !one.closest('pre, table, .sr, math, svg, .wide'); })
  .map((one) => one.outerHTML.slice(0, 80)))()"""


@pytest.fixture(scope="module")
def engine() -> Any:
    return small_engine("quickstart")


@pytest.mark.parametrize("size", [states.WIDE, states.PHONE], ids=["wide", "phone"])
def test_states_are_legible_and_fit_the_screen(
    open_tab: Any, engine: Any, size: dict[str, int], tmp_path: Path
) -> None:
    with background({"quickstart": engine}) as url:
        tab = states.opened(open_tab, url.removesuffix("v1"), size)
        states.failed_answer(tab, tmp_path, "state.png")
        for shown in ("error", "markdown"):
            if shown == "markdown":
                import_answer(tab, tmp_path, states.DOCUMENT)
                until(tab, "document.querySelector('main table')")
                states.still(tab)
            assert tab.evaluate(OVERFLOW) == []
            assert not [one for one in tab.evaluate(CONTRASTS) if one[0] < 4.5]
            errors = [one for one in failures(tab) if "status of 400" not in one]
            assert errors == []
        assert (
            tab.evaluate("document.querySelectorAll('main table, main pre, main math').length") == 3
        )


def test_notice_covers_neither_input_nor_conversation_controls(open_tab: Any, engine: Any) -> None:
    with background({"quickstart": engine}) as url:
        tab = states.opened(open_tab, url.removesuffix("v1"), states.PHONE)
        tab.evaluate(
            "(() => { const files = new DataTransfer(); files.items.add(new File(['x'], 'a.zip'));"
            "document.querySelector('main').dispatchEvent("
            "new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true})); })()"
        )
        until(tab, "document.querySelector('.notice')")
        box = "document.querySelector('{}').getBoundingClientRect()"
        bottom, top = box.format(".notice") + ".bottom", box.format("#composer") + ".top"
        assert tab.evaluate(f"{bottom} <= {top}")
        assert tab.evaluate(
            f"{box.format('.notice')}.left >= 0 && {box.format('.notice')}.right <= 390"
        )


def test_banner_and_list_of_conversations_are_pictured(
    open_tab: Any, engine: Any, tmp_path: Path
) -> None:
    with background({"quickstart": engine}) as url:
        root = url.removesuffix("v1")
        states.conversations(states.opened(open_tab, root), tmp_path)
        states.editing(states.opened(open_tab, root), tmp_path)
        states.shared(states.opened(open_tab, root), open_tab, tmp_path)
    states.banner(open_tab, {"quickstart": engine}, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "playground-conversations.png",
        "playground-banner.png",
        "playground-editing.png",
        "playground-shared.png",
    }
