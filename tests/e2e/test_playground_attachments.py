"""Images and recordings on the playground, with small random vision-language and speech models."""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ed_esurge.command.load import parse_model_arguments, served_engine
from ed_esurge.server.launch import background
from ed_infra.testing import require_torch
from playwright.sync_api import Page

from tests.image_checkpoints import save_checkpoint
from tests.playground import ask, failures, needs_chromium, set_value, until
from tests.speech_cases import RATE, recording, write_whisper

Image = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.nightly, needs_chromium]
FLAGS = "--max-model-len 256 --max-num-seqs 2 --page-size 16 --no-compile-runner --silent-mode"
# Give a file to the page, as the browser does for a pasted or dropped file.
GIVE = """(async (data, type, name, kind) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], name, {type}));
  const target = document.querySelector(kind === 'paste' ? '#prompt' : 'main');
  const event = kind === 'paste'
    ? new ClipboardEvent('paste', {clipboardData: files, bubbles: true, cancelable: true})
    : new DragEvent('drop', {dataTransfer: files, bubbles: true, cancelable: true});
  target.dispatchEvent(event);
})"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    require_torch()
    engines: dict[str, Any] = {}
    for name in ("gemma3", "whisper"):
        folder = tmp_path_factory.mktemp(name)
        if name == "whisper":
            write_whisper(folder)
        else:
            save_checkpoint(name, folder)
        flags = FLAGS if name == "gemma3" else "--silent-mode"
        engines[name] = served_engine(parse_model_arguments([str(folder), *flags.split()]))
    with background(engines) as url:
        yield url.removesuffix("v1")


def give(tab: Page, data: bytes, kind: str, name: str, how: str) -> None:
    import base64

    text = base64.b64encode(data).decode()
    tab.evaluate(f"{GIVE}({text!r}, {kind!r}, {name!r}, {how!r})")


def png(color: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (28, 28), color).save(file, "PNG")
    return file.getvalue()


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(np.round(samples * 2**15).clip(-(2**15), 2**15 - 1).astype("<i2").tobytes())
    return file.getvalue()


def test_pasted_and_dropped_images_are_sent_to_a_vision_model(open_tab, root: str) -> None:
    tab = open_tab(root)
    until(tab, "!document.querySelector('#attach').hidden")
    set_value(tab, "#set-max_tokens", 8)
    set_value(tab, "#set-temperature", 0)
    give(tab, png((250, 20, 20)), "image/png", "red.png", "paste")
    until(tab, "document.querySelectorAll('.attachment').length === 1")
    give(tab, png((20, 20, 250)), "image/png", "blue.png", "drop")
    until(tab, "document.querySelectorAll('.attachment').length === 2")
    give(tab, struct.pack("<I", 7), "application/zip", "no.zip", "drop")
    assert "image or an audio file" in until(tab, "document.querySelector('.notice')?.innerText")
    tab.click('.attachment [aria-label="Remove image 2"]')
    tab.evaluate(
        "window.sent = []; const real = fetch; window.fetch = (path, options) => {"
        "if (String(path).includes('completions')) sent.push(JSON.parse(options.body));"
        "return real(path, options); }; 0"  # `evaluate` calls a value that is a function
    )
    ask(tab, "what is this")
    parts = tab.evaluate("sent[0].messages[0].content.map((one) => one.type)")
    assert parts == ["image_url", "text"]
    assert tab.evaluate("document.querySelectorAll('.turn.user img').length") == 1
    assert "8 tokens" in tab.evaluate(
        "document.querySelector('.turn.assistant .figures').innerText"
    )
    # The image persists after a reload.
    tab.reload()
    until(tab, "document.querySelector('.turn.user img')?.naturalWidth === 28")
    assert failures(tab) == []


def test_recording_is_transcribed_into_the_prompt(open_tab, root: str) -> None:
    tab = open_tab(root)
    until(tab, "!document.querySelector('#attach').hidden")
    tab.evaluate(
        "window.heard = []; const real = fetch; window.fetch = async (path, options) => {"
        "const answer = await real(path, options);"
        "if (String(path).includes('transcriptions')) "
        "heard.push((await answer.clone().json()).text);"
        "return answer; }; 0"
    )
    give(tab, wav(recording(0.8)), "audio/wav", "tone.wav", "drop")
    until(tab, "heard.length === 1 && !document.querySelector('.transcribing')")
    # An input changes line ends, which a random model can produce.
    plain = "((text) => text.replace(/[\\r\\n]+/g, ' ').trim())"
    assert tab.evaluate("heard[0].length") > 0
    assert tab.evaluate(f"{plain}(document.querySelector('#prompt').value) === {plain}(heard[0])")
    assert failures(tab) == []
