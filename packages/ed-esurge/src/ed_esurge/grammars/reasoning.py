"""Detection of the end of a model's reasoning in the text of its tokens.

The text that ends the reasoning may consist of several tokens, and its last token may contain more
text. The grammar of the answer applies after this text and any white space in the same token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLTokenizer


BITS = 32


class ThoughtEnds:
    """The texts that end reasoning, for one tokenizer.

    Args:
        texts: strings; the first occurrence of one of them ends the reasoning.
        tokenizer: the tokenizer in llguidance's format.
        size: number of tokens in a mask.
        eos_token_ids: tokens that are forbidden during reasoning, because the answer is missing.
    """

    def __init__(
        self, texts: Sequence[str], tokenizer: LLTokenizer, size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._texts = [text.encode() for text in texts]
        self._kept = max(map(len, self._texts))
        self._tokenizer = tokenizer
        self._inside = np.full(-(-size // BITS), -1, np.int32)
        forbid(self._inside, eos_token_ids)
        # Tokens that end the reasoning and also contain text of the answer, which would bypass the
        # grammar. The key is the part of the end text that precedes the token.
        self._overrun: dict[bytes, list[int]] = {}
        lasts = {text[-1] for text in self._texts}
        for token in range(min(size, tokenizer.vocab_size)):
            token_bytes: bytes = tokenizer.decode_bytes([token])
            if any(last in token_bytes[:-1] for last in lasts):
                for prefix in self._overrun_by(token_bytes):
                    self._overrun.setdefault(prefix, []).append(token)
        self._masks: dict[tuple[bytes, ...], np.ndarray] = {}

    def advance(self, tail: bytes, token: int) -> bytes | None:
        """Return the last bytes of the reasoning after a token, or None if the reasoning has ended.

        Args:
            tail: return value for the previous token; b"" at the beginning.
            token: the next token.
        """
        tail += self._tokenizer.decode_bytes([token])
        if any(text in tail for text in self._texts):
            return None
        return tail[-self._kept :]

    def mask(self, tail: bytes) -> np.ndarray:
        """Return the mask of the tokens that are allowed during reasoning."""
        befores = tuple(prefix for prefix in self._overrun if tail.endswith(prefix))
        if befores not in self._masks:
            mask = self._inside.copy()
            for prefix in befores:
                forbid(mask, self._overrun[prefix])
            self._masks[befores] = mask
        return self._masks[befores]

    def _overrun_by(self, token_bytes: bytes) -> Iterable[bytes]:
        for text in self._texts:
            for length in range(len(text)):
                suffix = text[length:]
                position = (
                    token_bytes.find(suffix)
                    if not length
                    else 0
                    if token_bytes.startswith(suffix)
                    else -1
                )
                if position >= 0 and token_bytes[position + len(suffix) :].strip():
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
