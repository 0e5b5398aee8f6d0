"""Take pictures of states of the playground in `docs/`: errors, Markdown, attachments, the list.

    uv run elarge examples/quickstart.yaml
    python -m tools.playground_states [--model runs/quickstart/model] [--vision DIR] [--folder docs]

Every answer comes from the real engine. A grammar makes the model write the Markdown document, so
the probabilities of its tokens are those of the model.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ed_esurge.server.launch import background

from tools.chromium import Tab, browser
from tools.playground_pictures import QUESTION, engine_of, scroll_up, write
from tools.workspace import ROOT

Open = Callable[..., Tab]
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


def opened(open_tab: Open, url: str, size: Mapping[str, int] = WIDE) -> Tab:
    """Open the page in a theme of light colors, with all groups of settings."""
    tab = open_tab(url, **size)
    tab.theme("light")
    tab.until("document.querySelector('#model').value")
    tab.js("document.querySelectorAll('.group').forEach((one) => { one.open = true; })")
    return tab


def say(tab: Tab, text: str, end: str = FINISHED) -> None:
    """Send a message, and wait for an expression."""
    turns = tab.js("document.querySelectorAll('.turn').length")
    tab.click("#prompt")
    tab.type(text)
    tab.press("Enter", 13)
    tab.until(f"document.querySelectorAll('.turn').length === {turns + 2}")
    tab.until(end, seconds=120)


def still(tab: Tab) -> None:
    """Wait for the end of the animations."""
    tab.js(
        "Promise.all(document.getAnimations().filter((one) =>"
        " one.effect.getComputedTiming().endTime < 5000).map((one) => one.finished))"
    )


def form(tab: Tab, kind: str, text: str) -> None:
    """Select a form of the answer."""
    write(tab, "#set-form", kind)
    write(tab, "#set-schema", text)


def failed_answer(tab: Tab, folder: Path, name: str) -> None:
    """A stopped answer can be continued, and a failed answer retried."""
    write(tab, "#set-max_tokens", 900)
    write(tab, "#set-temperature", 0.3)
    write(tab, "#set-seed", 3)
    say(tab, QUESTION, "document.querySelector('.turn.assistant .said')?.innerText.length > 40")
    tab.press("Escape", 27)
    tab.until("document.querySelector('#send').ariaLabel === 'Send'")
    form(tab, "regex", "(an open parenthesis")
    say(tab, "Answer with a pattern.", FAILED)
    still(tab)
    tab.picture(folder / name)


def markdown(tab: Tab, folder: Path, name: str) -> None:
    """An answer with a table, a formula and code."""
    write(tab, "#set-max_tokens", 900)
    form(tab, "grammar", f"start: {json.dumps(DOCUMENT)}")
    say(tab, "How is a distance computed?")
    tab.until("document.querySelector('.turn.assistant pre')")
    scroll_up(tab)
    still(tab)
    tab.picture(folder / name)


def conversations(tab: Tab, folder: Path) -> None:
    """The list of conversations, and a deletion that can be undone."""
    write(tab, "#set-max_tokens", 40)
    for question in (QUESTION, "What is a generator?", "Describe the assert statement."):
        tab.click("#new")
        say(tab, question)
        tab.until("document.querySelector('#conversations .open')")
    tab.js("document.querySelector('#conversations [aria-label^=\"Delete\"]').click()")
    tab.until("document.querySelector('.notice')")
    still(tab)
    tab.picture(folder / "playground-conversations.png")


def editing(tab: Tab, folder: Path) -> None:
    """An answer that is edited, a stored preset, a grammar, a copied text, and a hidden column."""
    write(tab, "#set-max_tokens", 60)
    say(tab, QUESTION)
    form(tab, "grammar", 'start: "yes" | "no"')
    write(tab, "#preset-name", "yes or no")
    tab.click("#group-presets button:last-of-type")
    tab.until("document.querySelector('#preset').value")
    tab.js(
        "document.querySelectorAll('.group').forEach((one) => {"
        " one.open = ['group-presets', 'group-form'].includes(one.id); })"
    )
    tab.click("#open-engine")
    tab.click('.turn.assistant [aria-label="Edit"]')
    tab.until("document.activeElement.matches('.edit textarea')")
    tab.click('.turn.user [aria-label="Copy"]')
    tab.until("document.querySelector('.turn.user .tip')")
    tab.picture(folder / "playground-editing.png")


def shared(tab: Tab, open_tab: Open, folder: Path) -> None:
    """A conversation as a page without a server and without scripts."""
    write(tab, "#set-max_tokens", 120)
    say(tab, QUESTION)
    tab.click("#heat")
    tab.until("document.querySelectorAll('.tok').length > 20")
    with tempfile.TemporaryDirectory() as place:
        tab.downloads_to(Path(place))
        tab.click('#conversations [aria-label="Save as a page to share"]')
        end = time.monotonic() + 10
        while not (pages := [*Path(place).glob("*.html")]):
            if time.monotonic() > end:
                raise TimeoutError("the page was not saved within 10 s")
            time.sleep(0.1)
        page = open_tab(pages[0].as_uri(), **WIDE)
        page.theme("light")
        page.until("document.querySelectorAll('.turn').length === 2")
        page.picture(folder / "playground-shared.png")


def attachments(tab: Tab, folder: Path) -> None:
    """Pasted images before they are sent, and the notice for another file."""
    from PIL import Image

    tab.until("!document.querySelector('#attach').hidden")
    for color in ((200, 60, 40), (40, 90, 200)):
        image = Image.linear_gradient("L").resize((280, 280))
        image = Image.merge("RGB", [image.point([x * c // 255 for x in range(256)]) for c in color])
        data = io.BytesIO()
        image.save(data, "PNG")
        tab.js(f"{PASTE}({base64.b64encode(data.getvalue()).decode()!r})")
    tab.until("document.querySelectorAll('.attachment').length === 2")
    tab.js(
        "(() => { const files = new DataTransfer(); files.items.add(new File(['x'], 'notes.zip'));"
        "document.querySelector('main').dispatchEvent("
        "new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true})); })()"
    )
    tab.until("document.querySelector('.notice')")
    tab.click("#prompt")
    tab.type("Which picture is warmer?")
    still(tab)
    tab.picture(folder / "playground-attachments.png")


def banner(open_tab: Open, engines: Mapping[str, Any], folder: Path) -> None:
    """The server stops: the banner counts down, and the failed answer can be retried."""
    with ExitStack() as server:
        url = server.enter_context(background({**engines}, drain_seconds=0))
        tab = opened(open_tab, url.removesuffix("v1"))
        write(tab, "#set-max_tokens", 60)
        say(tab, QUESTION)
    tab.until("!document.querySelector('#banner').hidden")
    say(tab, "What is a generator?", FAILED)
    still(tab)
    tab.picture(folder / "playground-banner.png")


def take(open_tab: Open, engines: Mapping[str, Any], vision: Any, folder: Path) -> None:
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


def main() -> None:
    """Load the models and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "runs" / "quickstart" / "model")
    parser.add_argument("--vision", type=Path, help="checkpoint of a vision-language model")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    values = parser.parse_args()
    vision = None
    if values.vision is not None:
        from ed_esurge.command.load import add_model_arguments, served_engine

        flags = argparse.ArgumentParser()
        add_model_arguments(flags)
        vision = served_engine(flags.parse_args([str(values.vision), "--no-compile-runner"]))
    engine = engine_of(values.model)
    with browser() as open_tab:
        take(open_tab, {"quickstart": engine}, vision, values.folder)


if __name__ == "__main__":
    main()
