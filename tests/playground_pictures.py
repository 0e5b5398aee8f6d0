"""Take the pictures of the playground in `docs/` with a model on the real engine.

    python -m tests.playground_pictures [--model SOURCE] [--vision DIR] [--folder docs]

The pictures show the answers and the measurements of this machine. Other clients send requests at
the same time, so that the curves move. A grammar makes the model write the Markdown document, so
the probabilities of its tokens are those of the model.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from ed_esurge import AsyncEngine, eSurge
from ed_esurge.command.load import parse_model_arguments, served_engine
from ed_esurge.server.launch import background
from PIL import Image
from playwright.sync_api import Page

from tests.parity.test_real_weights import SMOLLM2
from tests.playground import browser, download, save_picture, until
from tools.bench.measure import command_line
from tools.workspace import ROOT

QUESTION = "Describe the sea in three sentences."
OTHER_QUESTIONS = ("What is a rainbow?", "Describe a forest.", "What is a list in Python?")
MAX_TOKENS = 120
TEMPERATURE, OTHER_TEMPERATURE = 0.0, 1.2
SECONDS_OF_CURVES = 30
WAIT = "new Promise((done) => setTimeout(done, 300))"
Open = Callable[..., Page]
WIDE = {"width": 1360, "height": 860}
PHONE = {"width": 390, "height": 780, "scale": 2}
DOCUMENT = """## Distances

The distance of two points is $d = \\sqrt{(x_2 - x_1)^2 + (y_2 - y_1)^2}$.

| points | distance |
|:-------|---------:|
| (0, 0) and (3, 4) | 5 |
| (1, 1) and (2, 2) | 1.414 |

```python
def distance(a, b):  # two points
    return sum((p - q) ** 2 for p, q in zip(a, b)) ** 0.5
```

> **Note:** `math.dist` computes the same.
"""
FAILED = "document.querySelector('.turn:last-of-type .failed')"
FINISHED = "document.querySelector('.turn:last-of-type .figures')"
PASTE = """((data) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], 'picture.png', {type: 'image/png'}));
  document.querySelector('#prompt').dispatchEvent(
    new ClipboardEvent('paste', {clipboardData: files, bubbles: true, cancelable: true}));
})"""


def load_engine(model: str, *flags: str) -> AsyncEngine:
    """Load a model as `esurge serve` does, and start its engine."""
    engine = served_engine(parse_model_arguments([model, *flags]))
    assert isinstance(engine, eSurge), "a model that generates text"
    return AsyncEngine(engine)


def send_requests(url: str, stop: threading.Event, client: int) -> None:
    """Send one chat request after another until `stop` is set."""
    number = client
    while not stop.wait(0.5):
        number += 1
        question = OTHER_QUESTIONS[number % len(OTHER_QUESTIONS)]
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS}
        httpx.post(f"{url}/chat/completions", json=body, timeout=60)


def write(tab: Page, selector: str, value: float | str) -> None:
    """Write a value into a field of the page, as a user does."""
    tab.evaluate(
        f"(() => {{ const field = document.querySelector({selector!r});"
        f"field.value = {value!r};"
        "field.dispatchEvent(new Event('input', {bubbles: true}));"
        "field.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def ask(tab: Page, answers: int = 1) -> None:
    """Send the question from the page, and wait for the end of the answers."""
    until(tab, "document.querySelector('.starters') && document.querySelector('#model').value")
    write(tab, "#set-temperature", TEMPERATURE)
    tab.click("#prompt")
    tab.keyboard.insert_text(QUESTION)
    tab.keyboard.press("Enter")
    figures = "document.querySelectorAll('.turn.assistant .figures').length"
    until(tab, f"{figures} === {answers}", seconds=120)


def compare(tab: Page) -> None:
    """Answer the question twice: with the settings, and with a preset of a higher temperature."""
    tab.evaluate("document.querySelector('#group-presets').open = true")
    write(tab, "#set-temperature", OTHER_TEMPERATURE)
    write(tab, "#preset-name", f"temperature {OTHER_TEMPERATURE}")
    tab.click("#group-presets button:last-of-type")
    tab.click("#new")
    tab.click("#compare")
    write(tab, "#compare-preset", f"temperature {OTHER_TEMPERATURE}")
    ask(tab, answers=2)


def scroll_up(tab: Page) -> None:
    """Scroll to the start of the conversation."""
    tab.evaluate("document.getElementById('log').scrollTop = 0")
    tab.evaluate(WAIT)


def picture_answers(open_tab: Open, url: str, folder: Path) -> None:
    """Take one picture of each theme, one of a comparison, and one of a phone."""
    tab = open_tab(url, width=1360, height=860)
    tab.emulate_media(color_scheme="light")
    for _ in range(int(SECONDS_OF_CURVES / 0.3)):
        tab.evaluate(WAIT)
    ask(tab)
    scroll_up(tab)
    save_picture(tab, folder / "playground-light.png")
    tab.emulate_media(color_scheme="dark")
    tab.click("#heat")
    until(tab, "document.querySelector('.tok')")
    scroll_up(tab)
    place = tab.evaluate(
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
    tab.mouse.move(*place)
    until(tab, "!document.getElementById('popover').hidden")
    save_picture(tab, folder / "playground-dark.png")
    tab.click("#heat")
    compare(tab)
    scroll_up(tab)
    save_picture(tab, folder / "playground-compare.png")
    phone = open_tab(url, width=390, height=780, scale=2)
    phone.emulate_media(color_scheme="light")
    ask(phone)
    scroll_up(phone)
    save_picture(phone, folder / "playground-phone.png")


def opened(open_tab: Open, url: str, size: Mapping[str, int] = WIDE) -> Page:
    """Open the page in a theme of light colors, with all groups of settings."""
    tab = open_tab(url, **size)
    tab.emulate_media(color_scheme="light")
    until(tab, "document.querySelector('#model').value")
    tab.evaluate("document.querySelectorAll('.group').forEach((one) => { one.open = true; })")
    return tab


def say(tab: Page, text: str, end: str = FINISHED) -> None:
    """Send a message, and wait for an expression."""
    turns = tab.evaluate("document.querySelectorAll('.turn').length")
    tab.click("#prompt")
    tab.keyboard.insert_text(text)
    tab.keyboard.press("Enter")
    until(tab, f"document.querySelectorAll('.turn').length === {turns + 2}")
    until(tab, end, seconds=120)


def still(tab: Page) -> None:
    """Wait for the end of the animations."""
    tab.evaluate(
        "Promise.all(document.getAnimations().filter((one) =>"
        " one.effect.getComputedTiming().endTime < 5000).map((one) => one.finished))"
    )


def form(tab: Page, kind: str, text: str) -> None:
    """Select a form of the answer."""
    write(tab, "#set-form", kind)
    write(tab, "#set-schema", text)


def failed_answer(tab: Page, folder: Path, name: str) -> None:
    """A stopped answer can be continued, and a failed answer retried."""
    write(tab, "#set-max_tokens", 900)
    write(tab, "#set-temperature", 0.3)
    write(tab, "#set-seed", 3)
    say(tab, QUESTION, "document.querySelector('.turn.assistant .said')?.innerText.length > 40")
    tab.keyboard.press("Escape")
    until(tab, "document.querySelector('#send').ariaLabel === 'Send'")
    form(tab, "regex", "(an open parenthesis")
    say(tab, "Answer with a pattern.", FAILED)
    still(tab)
    save_picture(tab, folder / name)


def markdown(tab: Page, folder: Path, name: str) -> None:
    """An answer with a table, a formula and code."""
    write(tab, "#set-max_tokens", 900)
    form(tab, "grammar", f"start: {json.dumps(DOCUMENT)}")
    say(tab, "How is a distance computed?")
    until(tab, "document.querySelector('.turn.assistant pre')")
    scroll_up(tab)
    still(tab)
    save_picture(tab, folder / name)


def conversations(tab: Page, folder: Path) -> None:
    """The list of conversations, and a deletion that can be undone."""
    write(tab, "#set-max_tokens", 40)
    for question in (QUESTION, "What is a generator?", "Describe the assert statement."):
        tab.click("#new")
        say(tab, question)
        until(tab, "document.querySelector('#conversations .open')")
    tab.evaluate("document.querySelector('#conversations [aria-label^=\"Delete\"]').click()")
    until(tab, "document.querySelector('.notice')")
    still(tab)
    save_picture(tab, folder / "playground-conversations.png")


def editing(tab: Page, folder: Path) -> None:
    """An answer that is edited, a stored preset, a grammar, a copied text, and a hidden column."""
    write(tab, "#set-max_tokens", 60)
    say(tab, QUESTION)
    form(tab, "grammar", 'start: "yes" | "no"')
    write(tab, "#preset-name", "yes or no")
    tab.click("#group-presets button:last-of-type")
    until(tab, "document.querySelector('#preset').value")
    tab.evaluate(
        "document.querySelectorAll('.group').forEach((one) => {"
        " one.open = ['group-presets', 'group-form'].includes(one.id); })"
    )
    tab.click("#open-engine")
    tab.click('.turn.assistant [aria-label="Edit"]')
    until(tab, "document.activeElement.matches('.edit textarea')")
    tab.click('.turn.user [aria-label="Copy"]')
    until(tab, "document.querySelector('.turn.user .tip')")
    save_picture(tab, folder / "playground-editing.png")


def shared(tab: Page, open_tab: Open, folder: Path) -> None:
    """A conversation as a page without a server and without scripts."""
    write(tab, "#set-max_tokens", 120)
    say(tab, QUESTION)
    tab.click("#heat")
    until(tab, "document.querySelectorAll('.tok').length > 20")
    with tempfile.TemporaryDirectory() as place:
        label = '#conversations [aria-label="Save as a page to share"]'
        page = open_tab(download(tab, label, Path(place)).as_uri(), **WIDE)
        page.emulate_media(color_scheme="light")
        until(page, "document.querySelectorAll('.turn').length === 2")
        save_picture(page, folder / "playground-shared.png")


def attachments(tab: Page, folder: Path) -> None:
    """Pasted images before they are sent, and the notice for another file."""
    until(tab, "!document.querySelector('#attach').hidden")
    for color in ((200, 60, 40), (40, 90, 200)):
        image = Image.linear_gradient("L").resize((280, 280))
        image = Image.merge("RGB", [image.point([x * c // 255 for x in range(256)]) for c in color])
        data = io.BytesIO()
        image.save(data, "PNG")
        tab.evaluate(f"{PASTE}({base64.b64encode(data.getvalue()).decode()!r})")
    until(tab, "document.querySelectorAll('.attachment').length === 2")
    tab.evaluate(
        "(() => { const files = new DataTransfer(); files.items.add(new File(['x'], 'notes.zip'));"
        "document.querySelector('main').dispatchEvent("
        "new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true})); })()"
    )
    until(tab, "document.querySelector('.notice')")
    tab.click("#prompt")
    tab.keyboard.insert_text("Which picture is warmer?")
    still(tab)
    save_picture(tab, folder / "playground-attachments.png")


def banner(open_tab: Open, engines: Mapping[str, Any], folder: Path) -> None:
    """The server stops: the banner counts down, and the failed answer can be retried."""
    with ExitStack() as server:
        url = server.enter_context(background({**engines}, drain_seconds=0))
        tab = opened(open_tab, url.removesuffix("v1"))
        write(tab, "#set-max_tokens", 60)
        say(tab, QUESTION)
    until(tab, "!document.querySelector('#banner').hidden")
    say(tab, "What is a generator?", FAILED)
    still(tab)
    save_picture(tab, folder / "playground-banner.png")


def picture_states(open_tab: Open, engines: Mapping[str, Any], vision: Any, folder: Path) -> None:
    """Take the pictures.

    Args:
        open_tab: opens a tab of a browser.
        engines: the model of the answers, by name.
        vision: a model that accepts images; None = no picture of attachments.
        folder: folder of the pictures.
    """
    with background({**engines}) as url:
        root = url.removesuffix("v1")
        failed_answer(opened(open_tab, root), folder, "playground-failed.png")
        markdown(opened(open_tab, root), folder, "playground-markdown.png")
        markdown(opened(open_tab, root, PHONE), folder, "playground-markdown-phone.png")
        failed_answer(opened(open_tab, root, PHONE), folder, "playground-failed-phone.png")
        conversations(opened(open_tab, root), folder)
        editing(opened(open_tab, root), folder)
        shared(opened(open_tab, root), open_tab, folder)
    if vision is not None:
        with background({"vision": vision}) as url:
            attachments(opened(open_tab, url.removesuffix("v1")), folder)
    banner(open_tab, engines, folder)


@contextmanager
def clients(url: str, count: int) -> Iterator[None]:
    """Send requests of other clients during the block."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=send_requests, args=(url, stop, number), daemon=True)
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def main() -> None:
    """Load the models and take the pictures."""
    parser = command_line("tests.playground_pictures", __doc__)
    parser.add_argument("--model", default=SMOLLM2, help="what `esurge serve` accepts")
    parser.add_argument("--vision", type=Path, help="checkpoint of a vision-language model")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    parser.add_argument("--clients", type=int, default=6)
    values = parser.parse_args()
    vision = None
    if values.vision is not None:
        vision = load_engine(str(values.vision), "--no-compile-runner")
    flags = ("--max-model-len", "1024", "--max-num-seqs", "16", "--page-size", "16")
    engines = {"smollm2": load_engine(values.model, *flags)}
    with browser() as open_tab:
        with background({**engines}) as url, clients(url, values.clients):
            picture_answers(open_tab, url.removesuffix("v1"), values.folder)
        picture_states(open_tab, engines, vision, values.folder)


if __name__ == "__main__":
    main()
