"""Strings that end a row. The host decodes the latest tokens of each row in every step.

Legend: b rows, t tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from ed_infra.errors import ConfigError
from jaxtyping import Array, Bool, Int

#: Maximum number of strings, and maximum number of characters per string.
MOST, LONGEST = 64, 1024
# A token may be one byte of a character. Tokenizers decode the first token of a text differently,
# so a few more tokens are decoded ahead of the string.
_TOKENS_OF_A_CHARACTER, _AHEAD = 4, 4


class TokenDecoder(Protocol):
    """The tokenizer method that stop strings require."""

    def decode(self, token_ids: Sequence[int], /) -> str | list[str]:
        """Return the text of tokens, including special tokens."""
        ...


@dataclass(frozen=True)
class StopStrings:
    """Stop strings, and the tokenizer that decodes the tokens.

    This is a static argument of a compiled program. Equal strings with the same tokenizer share a
    program.
    """

    strings: tuple[str, ...]
    tokenizer: TokenDecoder

    @classmethod
    def read(cls, name: str, value: object, tokenizer: TokenDecoder | None) -> StopStrings | None:
        """Validate one string or a list of strings; return None for an empty list.

        Raises:
            ConfigError: the value has another type, an empty string, too many strings or a string
                that is too long; or there is no tokenizer.
        """
        strings = tuple(value) if isinstance(value, list | tuple) else (value,)
        stop_strings = tuple(string for string in strings if isinstance(string, str) and string)
        if len(stop_strings) < len(strings):
            raise ConfigError(f"{name} is {value!r}; it must be a string, or several in a list")
        if len(stop_strings) > MOST or max(map(len, stop_strings), default=0) > LONGEST:
            raise ConfigError(
                f"{name} has {len(stop_strings)} strings of up to {max(map(len, stop_strings))} "
                "characters; at "
                f"most {MOST} of {LONGEST} are possible"
            )
        if not stop_strings:
            return None
        if tokenizer is None:
            raise ConfigError(
                f"{name} needs to know what tokens read like: pass the model's tokenizer, "
                "generate(..., tokenizer=tokenizer), or pass eos_token_id"
            )
        return cls(stop_strings, tokenizer)

    def match_rows(self, ids: Int[Array, "b t"]) -> Bool[Array, " b"]:
        """Return the rows in which a stop string ends within the latest token.

        Args:
            ids: right-aligned token ids, -1 to the left of a row's first token.
        """
        longest = max(map(len, self.strings))
        latest = ids[:, -(_TOKENS_OF_A_CHARACTER * longest + _AHEAD) :]
        shape = jax.ShapeDtypeStruct((ids.shape[0],), bool)
        return jax.pure_callback(self._on_host, shape, latest, vmap_method="sequential")

    def _on_host(self, latest: np.ndarray) -> np.ndarray:
        return np.asarray([self._ends([x for x in row if x >= 0]) for row in np.asarray(latest)])

    def _ends(self, tokens: list[int]) -> bool:
        text = str(self.tokenizer.decode([int(x) for x in tokens]))
        prefix_length = len(str(self.tokenizer.decode([int(x) for x in tokens[:-1]])))
        return any(
            text.find(string, max(0, prefix_length - len(string) + 1)) >= 0
            for string in self.strings
        )
