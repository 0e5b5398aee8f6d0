"""Actions of a user on the playground, and a small random model on the real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.chromium import Tab, installed

needs_chromium = pytest.mark.skipif(not installed(), reason="chromium is not installed")
ENTER, ESCAPE = 13, 27


def said(tab: Tab) -> str:
    """Return the text of the last answer."""
    return tab.js("document.querySelector('.turn.assistant:last-of-type .said')?.innerText ?? ''")


def ask(tab: Tab, text: str, *, wait: bool = True) -> None:
    """Send a message, and wait for the end of the answer."""
    tab.until("document.querySelector('#model').value")
    turns = tab.js("document.querySelectorAll('.turn').length")
    tab.click("#prompt")
    tab.type(text)
    tab.press("Enter", ENTER)
    if wait:
        tab.until(f"document.querySelectorAll('.turn').length === {turns + 2}")
        tab.until("document.querySelector('.turn:last-of-type .figures')", 90)


def button(tab: Tab, label: str) -> None:
    """Press a button of the last turn."""
    tab.click(f'.turn:last-of-type [aria-label="{label}"]')


def set_value(tab: Tab, selector: str, value: object, event: str = "input") -> None:
    """Write a value into a field, as a user does."""
    tab.js(
        f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
        f"one.value = {json.dumps(value)};"
        f"one.dispatchEvent(new Event({json.dumps(event)}, {{bubbles: true}})); }})()"
    )


def import_answer(tab: Tab, folder: Path, text: str, **fields: Any) -> None:
    """Open a conversation with one question and one answer from an exported file."""
    nodes = {
        0: {"kids": [1], "pick": 0},
        1: {"role": "user", "text": "question", "kids": [2], "pick": 0},
        2: {"role": "assistant", "text": text, "kids": [], "pick": 0, **fields},
    }
    file = {"format": "esurge-conversations", "conversations": [{"tree": {"nodes": nodes}}]}
    path = folder / "conversations.json"
    path.write_text(json.dumps(file))
    tab.upload("#import-file", path)


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
