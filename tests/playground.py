"""A browser, actions of a user on the playground, and a small random model on the real engine."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
#: Colors of a saved picture.
COLORS = 160
FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--force-color-profile=srgb")


@contextmanager
def browser() -> Iterator[Callable[..., Page]]:
    """Run Debian's Chromium, and yield a function that opens a page with a state of its own."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS])

        def open_tab(url: str, *, width: int = 1280, height: int = 800, scale: int = 1) -> Page:
            context = chromium.new_context(
                viewport={"width": width, "height": height},
                device_scale_factor=scale,
                is_mobile=width < 600,
            )
            context.set_default_timeout(15_000)
            tab = context.new_page()
            tab.goto(url)
            return tab

        try:
            yield open_tab
        finally:
            chromium.close()


def until(tab: Page, expression: str, seconds: float = 60) -> Any:
    """Wait until an expression is true, and return its value.

    `Page.wait_for_function` evaluates text in the page, which the page's policy does not permit.
    """
    end = time.monotonic() + seconds
    while not (value := tab.evaluate(expression)):
        if time.monotonic() > end:
            text = tab.evaluate("document.body.innerText")
            raise AssertionError(f"never true: {expression}\n{text}\n{failures(tab)}")
        tab.wait_for_timeout(30)
    return value


def failures(tab: Page) -> list[str]:
    """Return exceptions, errors and policy violations of the page."""
    entries = [entry for entry in tab.console_messages() if entry.type == "error"]
    errors = [f"{entry.text} {entry.location.get('url', '')}" for entry in entries]
    return [*map(str, tab.page_errors()), *errors]


def save_picture(shown: Page | Locator, path: Path) -> None:
    """Write a picture of a page, or of a part of it, as a PNG file with few colors."""
    from PIL import Image

    picture = Image.open(io.BytesIO(shown.screenshot())).convert("RGB")
    # The method keeps rare colors, such as that of a thin line.
    method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
    picture.quantize(COLORS, method, dither=dither).save(path, optimize=True)


def download(tab: Page, selector: str, folder: Path) -> Path:
    """Click on an element, and return the path of the file that the page saves."""
    with tab.expect_download() as event:
        tab.click(selector)
    path = folder / event.value.suggested_filename
    event.value.save_as(path)
    return path


def said(tab: Page) -> str:
    """Return the text of the last answer."""
    return tab.evaluate(
        "document.querySelector('.turn.assistant:last-of-type .said')?.innerText ?? ''"
    )


def ask(tab: Page, text: str, *, wait: bool = True) -> None:
    """Send a message, and wait for the end of the answer."""
    until(tab, "document.querySelector('#model').value")
    turns = tab.evaluate("document.querySelectorAll('.turn').length")
    tab.click("#prompt")
    tab.keyboard.insert_text(text)
    tab.keyboard.press("Enter")
    if wait:
        until(tab, f"document.querySelectorAll('.turn').length === {turns + 2}")
        until(tab, "document.querySelector('.turn:last-of-type .figures')", seconds=90)


def button(tab: Page, label: str) -> None:
    """Press a button of the last turn."""
    tab.click(f'.turn:last-of-type [aria-label="{label}"]')


def set_value(tab: Page, selector: str, value: object, event: str = "input") -> None:
    """Write a value into a field, as a user does."""
    tab.evaluate(
        f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
        f"one.value = {json.dumps(value)};"
        f"one.dispatchEvent(new Event({json.dumps(event)}, {{bubbles: true}})); }})()"
    )


def import_answer(tab: Page, folder: Path, text: str, **fields: Any) -> None:
    """Open a conversation with one question and one answer from an exported file."""
    nodes = {
        0: {"kids": [1], "pick": 0},
        1: {"role": "user", "text": "question", "kids": [2], "pick": 0},
        2: {"role": "assistant", "text": text, "kids": [], "pick": 0, **fields},
    }
    file = {"format": "esurge-conversations", "conversations": [{"tree": {"nodes": nodes}}]}
    path = folder / "conversations.json"
    path.write_text(json.dumps(file))
    tab.set_input_files("#import-file", path)


def small_engine(name: str = "tiny", seed: int = 0) -> Any:
    """Return an engine for a random model with bytes as tokens."""
    from ed_esurge import eSurge
    from ed_esurge.testing import byte_tokenizer
    from ed_infra import registry
    from ed_infra.testing import tiny_llama

    fields = tiny_llama(vocab_size=260, num_hidden_layers=2, initializer_range=0.2)
    fields = {**fields, "max_position_embeddings": 1024, "sharding_axis_dims": (1, 1, 1, 1, 1)}
    config = registry.get_config(fields.pop("model_type"))(**fields)
    model = registry.get_module("causal-language-model", "llama").create(config, seed=seed)
    return eSurge(
        model,
        byte_tokenizer(),
        model_name=name,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_seq_buckets=(4,),
        page_size=16,
        compile_runner=False,
        silent_mode=True,
    )
