"""Make the pictures of the playground in `docs/`: python -m tools.playground_pictures [FOLDER]

The answers are written here, and so are their probabilities: what is shown is the page.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
from ed_esurge.outputs import Logprob, PositionLogprobs
from ed_esurge.server.launch import background
from ed_esurge.testing import CHAT_TEMPLATE, ScriptedEngine

from tools.chromium import Tab, browser
from tools.workspace import ROOT

QUESTION = "Why does a server keep keys and values of old tokens?"
ANSWER = (
    "Each new token attends to **every token before it**. The keys and values of those do not "
    "change, so the server keeps them:\n\n"
    "1. A prompt is computed once, in pieces (*prefill*).\n"
    "2. Every further token costs one step over the pages that are there (*decode*).\n"
    "3. Requests with an equal beginning share its pages.\n\n"
    "```python\nfor output in engine.stream(prompt, params):\n"
    '    print(output.outputs[0].text, end="")\n```\n\n'
    "Without the cache, a text of `n` tokens would be computed `n` times."
)
WAIT = "new Promise((done) => setTimeout(done, 300))"
OTHERS = ["the", "a", "that", "every", "all", "its", "one", "new", "more", "most", "any", "some"]


def tokenizer_of_words(texts: list[str]) -> Any:
    """A tokenizer whose tokens are words with the space before them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    splits = [piece for text in texts for piece in re.findall(r" ?\w+|\s+|[^\w\s]+", text)]
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {spelled.pre_tokenize_str(piece)[0][0] for piece in splits if piece}
    pieces = [*letters, *sorted(words - set(letters))]
    vocabulary = {piece: place for place, piece in enumerate([*pieces, "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    split = pre_tokenizers.Split(_pattern(), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spelled])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _pattern() -> Any:
    from tokenizers import Regex

    return Regex(r" ?\w+|\s+|[^\w\s]+")


class Talker(ScriptedEngine):
    """Gives the answer, with probabilities as a model's may be, and busy numbers."""

    def __init__(self) -> None:
        texts = [ANSWER, QUESTION, "".join(f" {word}" for word in OTHERS)]
        super().__init__(
            lambda prompt, choice: ANSWER,
            tokenizer=tokenizer_of_words(texts),
            max_model_len=8192,
            delay=0.012,
        )
        self.model_name = "llama-3.2-1b"
        self._others = [self.tokenizer(f" {word}")["input_ids"][0] for word in OTHERS]
        self._steps = 0

    def stats(self) -> dict[str, float]:
        self._steps += 1
        wave = 0.5 + 0.5 * math.sin(self._steps / 7)
        running = max(self._running, 0)
        return {
            "num_requests_running": running,
            "num_requests_waiting": max(0, running - 5),
            "kv_cache_usage": 0.18 + 0.05 * running + 0.02 * wave,
            "prefix_cache_queries": 48200,
            "prefix_cache_hits": 31900,
        }

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: Any, request_id: str, **options: Any
    ) -> Any:
        params = sampling_params
        outputs = super().generate(prompt_token_ids, params, request_id, **options)
        async for output in outputs:
            for out in output.outputs:
                if out.logprobs is not None:
                    tokens = zip(out.token_ids, out.logprobs, strict=True)
                    count = params.logprobs or 0
                    out.logprobs = [self._scores(token, count) for token, _ in tokens]
            yield output

    def _scores(self, token: int, count: int) -> PositionLogprobs:
        """Few tokens are surprising; which, their number says."""
        noise = hashlib.blake2b(f"{token}:{self._steps}".encode(), digest_size=4).digest()
        share = int.from_bytes(noise, "big") / 2**32
        word = self.tokenizer.decode([token])
        chosen = 0.99 - 0.93 * share**3 if word[:1] == " " else 0.995 - 0.3 * share**4
        scores = {token: Logprob(math.log(chosen), rank=1 if chosen > 0.4 else 2)}
        rest = 1 - chosen
        start = noise[0] % len(self._others)
        for place in range(1, count):
            other = self._others[(start + place) % len(self._others)]
            if other not in scores:
                scores[other] = Logprob(math.log(max(rest * 0.5**place, 1e-6)), rank=place + 1)
        return scores


def load(url: str, stop: threading.Event) -> None:
    """Other clients, so that the panel has something to show."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}
    place = 0
    while not stop.wait(0.4 * abs(math.sin(place))):
        place += 1
        httpx.post(f"{url}/chat/completions", json=body, timeout=60)


def talk(tab: Tab) -> None:
    """A question and its answer."""
    tab.until("document.querySelector('.starters')")
    tab.click("#prompt")
    tab.type(QUESTION)
    tab.press("Enter", 13)
    tab.until("document.querySelector('.turn.assistant .figures')")


def main(folder: Path) -> None:
    """Take the pictures."""
    stop = threading.Event()
    with background(Talker()) as url, browser() as open_tab:
        page = url.removesuffix("v1")
        for _ in range(6):
            threading.Thread(target=load, args=(url, stop), daemon=True).start()
        try:
            tab = open_tab(page, width=1360, height=860)
            tab.theme("light")
            talk(tab)
            for _ in range(100):  # half a minute of curves
                tab.js(WAIT)
            tab.js("document.getElementById('log').scrollTop = 0")
            tab.picture(folder / "playground-light.png")
            tab.theme("dark")
            tab.click("#heat")
            tab.until("document.querySelector('.tok')")
            tab.js("document.getElementById('log').scrollTop = 0")
            tab.js(WAIT)
            place = tab.js(
                "(() => { const all = [...document.querySelectorAll('.tok')];"
                "const heat = (one) => one.style.getPropertyValue('--l');"
                "all.sort((a, b) => heat(b) - heat(a));"
                "const at = [...all[2].getClientRects()].at(-1);"
                "return [at.left + at.width / 2, at.top + at.height / 2]; })()"
            )
            tab.hover(*place)
            tab.until("!document.getElementById('popover').hidden")
            tab.picture(folder / "playground-dark.png")
            phone = open_tab(page, width=390, height=780, scale=2)
            phone.theme("light")
            talk(phone)
            phone.js("document.getElementById('log').scrollTop = 0")
            phone.js(WAIT)
            phone.picture(folder / "playground-phone.png")
        finally:
            stop.set()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
