"""The end of a model's thoughts, found in the text of its tokens.

The text that ends thoughts may be one token or several, and its last token may hold more text. The
grammar of the answer begins behind the text. White space there belongs to neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

BITS = 32


class ThoughtEnds:
    """The texts that end thoughts, for one tokenizer.

    Args:
        texts: the first of them that appears ends the thoughts.
        tokenizer: llguidance's form of the tokenizer.
        size: tokens of a mask.
        eos_token_ids: not allowed within thoughts: the answer is missing.
    """

    def __init__(
        self, texts: Sequence[str], tokenizer: Any, size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._texts = [text.encode() for text in texts]
        self._kept = max(map(len, self._texts))
        self._tokenizer = tokenizer
        self._inside = np.full(-(-size // BITS), -1, np.int32)
        forbid(self._inside, eos_token_ids)
        # Tokens that end thoughts and go on with text of an answer that no grammar has seen, by
        # the beginning of the end that must come before them.
        self._overrun: dict[bytes, list[int]] = {}
        lasts = {text[-1] for text in self._texts}
        for token in range(min(size, tokenizer.vocab_size)):
            written: bytes = tokenizer.decode_bytes([token])
            if any(last in written[:-1] for last in lasts):
                for before in self._overrun_by(written):
                    self._overrun.setdefault(before, []).append(token)
        self._masks: dict[tuple[bytes, ...], np.ndarray] = {}

    def advance(self, tail: bytes, token: int) -> bytes | None:
        """Return the end of the thoughts' text after a token; None where thoughts have ended.

        Args:
            tail: what was returned for the token before; b"" at the beginning.
        """
        tail += self._tokenizer.decode_bytes([token])
        if any(text in tail for text in self._texts):
            return None
        return tail[-self._kept :]

    def mask(self, tail: bytes) -> np.ndarray:
        """Return the bits of the tokens that are allowed within thoughts."""
        befores = tuple(before for before in self._overrun if tail.endswith(before))
        if befores not in self._masks:
            mask = self._inside.copy()
            for before in befores:
                forbid(mask, self._overrun[before])
            self._masks[befores] = mask
        return self._masks[befores]

    def _overrun_by(self, written: bytes) -> Iterable[bytes]:
        for text in self._texts:
            for length in range(len(text)):
                rest = text[length:]
                found = written.find(rest) if not length else 0 if written.startswith(rest) else -1
                if found >= 0 and written[found + len(rest) :].strip():
                    yield text[:length]


def forbid(masks: np.ndarray, tokens: Iterable[int]) -> None:
    """Clear the bits of tokens in place.

    Args:
        masks: [..., words], int32.
    """
    for token in tokens:
        if token < masks.shape[-1] * BITS:
            bit = np.array(1 << token % BITS, np.uint32).view(np.int32)
            masks[..., token // BITS] &= ~bit
