"""Take the pictures of the playground in `docs/` with a model on the real engine.

    uv run elarge examples/quickstart.yaml
    python -m tools.playground_pictures [--model runs/quickstart/model] [--folder docs]

The pictures show the answers and the measurements of this machine. Other clients send requests at
the same time, so that the curves move.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import httpx
from ed_esurge import AsyncEngine, EngineConfig, eSurge
from ed_esurge.server.launch import background
from ed_models.auto import AutoEasyDeLModelForCausalLM
from transformers import AutoTokenizer

from tools.chromium import Tab, browser
from tools.workspace import ROOT

QUESTION = "What is an expression statement?"
OTHER_QUESTIONS = ("What is a generator?", "Describe the assert statement.", "What is a list?")
MAX_TOKENS = 120
TEMPERATURE, OTHER_TEMPERATURE = 0.3, 1.2
SECONDS_OF_CURVES = 30
WAIT = "new Promise((done) => setTimeout(done, 300))"


def engine_of(model: Path) -> AsyncEngine:
    """Load a model directory and start its engine."""
    loaded = AutoEasyDeLModelForCausalLM.from_pretrained(model)
    config = EngineConfig(max_model_len=1024, max_num_seqs=16, page_size=16)
    return AsyncEngine(eSurge(loaded, AutoTokenizer.from_pretrained(model), config))


def send_requests(url: str, stop: threading.Event, client: int) -> None:
    """Send one chat request after another until `stop` is set."""
    number = client
    while not stop.wait(0.5):
        number += 1
        question = OTHER_QUESTIONS[number % len(OTHER_QUESTIONS)]
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS}
        httpx.post(f"{url}/chat/completions", json=body, timeout=60)


def write(tab: Tab, selector: str, value: float | str) -> None:
    """Write a value into a field of the page, as a user does."""
    tab.js(
        f"(() => {{ const field = document.querySelector({selector!r});"
        f"field.value = {value!r};"
        "field.dispatchEvent(new Event('input', {bubbles: true}));"
        "field.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def ask(tab: Tab, answers: int = 1) -> None:
    """Send the question from the page, and wait for the end of the answers."""
    tab.until("document.querySelector('.starters') && document.querySelector('#model').value")
    write(tab, "#set-temperature", TEMPERATURE)
    tab.click("#prompt")
    tab.type(QUESTION)
    tab.press("Enter", 13)
    figures = "document.querySelectorAll('.turn.assistant .figures').length"
    tab.until(f"{figures} === {answers}", seconds=120)


def compare(tab: Tab) -> None:
    """Answer the question twice: with the settings, and with a preset of a higher temperature."""
    tab.js("document.querySelector('#group-presets').open = true")
    write(tab, "#set-temperature", OTHER_TEMPERATURE)
    write(tab, "#preset-name", f"temperature {OTHER_TEMPERATURE}")
    tab.click("#group-presets button:last-of-type")
    tab.click("#new")
    tab.click("#compare")
    write(tab, "#compare-preset", f"temperature {OTHER_TEMPERATURE}")
    ask(tab, answers=2)


def scroll_up(tab: Tab) -> None:
    """Scroll to the start of the conversation."""
    tab.js("document.getElementById('log').scrollTop = 0")
    tab.js(WAIT)


def take(url: str, folder: Path) -> None:
    """Take one picture of each theme, one of a comparison, and one of a phone."""
    with browser() as open_tab:
        tab = open_tab(url, width=1360, height=860)
        tab.theme("light")
        for _ in range(int(SECONDS_OF_CURVES / 0.3)):
            tab.js(WAIT)
        ask(tab)
        scroll_up(tab)
        tab.picture(folder / "playground-light.png")
        tab.theme("dark")
        tab.click("#heat")
        tab.until("document.querySelector('.tok')")
        scroll_up(tab)
        place = tab.js(
            "(() => { const heat = (one) => one.style.getPropertyValue('--l');"
            "const shown = [...document.querySelectorAll('.tok')].filter((one) => {"
            "const box = one.getBoundingClientRect();"
            "return one.innerText.trim().length > 3 && one.getClientRects().length === 1"
            " && box.top > 150 && box.bottom < 450; });"
            "const one = shown.find((one) => heat(one) > 0.3 && heat(one) < 0.7) ?? shown[0]"
            " ?? document.querySelector('.tok');"
            "const at = one.getBoundingClientRect();"
            "return [at.left + at.width / 2, at.top + at.height / 2]; })()"
        )
        tab.hover(*place)
        tab.until("!document.getElementById('popover').hidden")
        tab.picture(folder / "playground-dark.png")
        tab.click("#heat")
        compare(tab)
        scroll_up(tab)
        tab.picture(folder / "playground-compare.png")
        phone = open_tab(url, width=390, height=780, scale=2)
        phone.theme("light")
        ask(phone)
        scroll_up(phone)
        phone.picture(folder / "playground-phone.png")


def main() -> None:
    """Start the engine, the server and the clients, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "runs" / "quickstart" / "model")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    parser.add_argument("--clients", type=int, default=6)
    values = parser.parse_args()
    stop = threading.Event()
    with background({"quickstart": engine_of(values.model)}) as url:
        clients = [
            threading.Thread(target=send_requests, args=(url, stop, number), daemon=True)
            for number in range(values.clients)
        ]
        for client in clients:
            client.start()
        try:
            take(url.removesuffix("v1"), values.folder)
        finally:
            stop.set()
            for client in clients:
                client.join(60)


if __name__ == "__main__":
    main()
