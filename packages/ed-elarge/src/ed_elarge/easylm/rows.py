"""Rows of EasyLM's data sets: fields that are joined to tokens, with or without loss."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from ed_infra.errors import ConfigError


class FieldPart(NamedTuple):
    """A part of `text_processor.fields`: the text between two commas.

    Attributes:
        text: The part without brackets.
        has_loss: Whether its tokens are learned; a part in brackets is not.
    """

    text: str
    has_loss: bool


def parse_fields(text: str) -> list[FieldPart]:
    """Split `[prompt],completion` into its parts.

    Raises:
        ConfigError: A part in brackets follows one without, or no part has loss.
    """
    parts = []
    for one in text.split(","):
        masked = one.startswith("[") and one.endswith("]")
        parts.append(FieldPart(one[1:-1] if masked else one, not masked))
    losses = [part.has_loss for part in parts]
    if losses != sorted(losses) or not losses[-1]:
        raise ConfigError(
            f"text_processor.fields={text!r}: parts in brackets come first, and a part without "
            "brackets is last. For other orders write chats, and set assistant_only_loss"
        )
    return parts


@dataclass
class TextFields:
    """Converts a row to the tokens of `prompt` (without loss) and `completion`.

    The parts are fields, fields that are joined by `+`, `<|bos|>`, `<|eos|>` or `<|NUMBER|>` for
    one token, and `{field}` for base64 text of token ids. Each part is encoded alone.

    Attributes:
        fields: The parts; empty: `fields_from_example` names the field that contains them.
        fields_from_example: The field of a row with its parts.
        separator: Text between joined fields.
        prepend_text: Text before the first part.
        token_dtype: Dtype of the ids in base64.
        add_bos_token: Whether a row begins with the token of the beginning.
        add_special_tokens: Whether the tokenizer adds its own tokens to each part.
        tokenizer: Directory or name of the tokenizer.
    """

    fields: str
    fields_from_example: str
    separator: str
    prepend_text: str
    token_dtype: str
    add_bos_token: bool
    add_special_tokens: bool
    tokenizer: str
    _loaded: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.fields:
            parse_fields(self.fields)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    def __call__(self, row: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return the tokens of a row."""
        if self._loaded is None:
            from ed_models.checkpoints.tokenizers import load_tokenizer

            self._loaded = load_tokenizer(self.tokenizer)
        named = self.fields or self._read(row, self.fields_from_example)
        tokens: dict[bool, list[int]] = {False: [], True: []}
        if self.add_bos_token:
            tokens[False].append(self._special("bos"))
        for number, part in enumerate(parse_fields(named)):
            tokens[part.has_loss] += self._encode(row, part.text, first=number == 0)
        return {"prompt": tokens[False], "completion": tokens[True]}

    def _encode(self, row: Mapping[str, Any], part: str, *, first: bool) -> list[int]:
        if part.startswith("<|") and part.endswith("|>"):
            return [self._special(part[2:-2])]
        if part.startswith("{") and part.endswith("}"):
            ids = base64.b64decode(self._read(row, part[1:-1]), validate=True)
            return np.frombuffer(ids, np.dtype(self.token_dtype)).tolist()
        text = self.separator.join(self._texts(row, part))
        text = self.prepend_text + text if first else text
        return self._loaded.encode(text, add_special_tokens=self.add_special_tokens)

    def _texts(self, row: Mapping[str, Any], part: str) -> Iterator[str]:
        for name in part.split("+"):
            yield self._read(row, name)

    def _read(self, row: Mapping[str, Any], name: str) -> str:
        if not isinstance(row.get(name), str):
            raise ConfigError(f"the field {name!r} must be a text, got {row.get(name)!r:.80}")
        return row[name]

    def _special(self, name: str) -> int:
        token_ids = {"bos": self._loaded.bos_token_id, "eos": self._loaded.eos_token_id}
        if name in token_ids:
            if token_ids[name] is None:
                raise ConfigError(f"the tokenizer has no token <|{name}|>: set add_{name}_token")
            return token_ids[name]
        if not name.isdecimal():
            raise ConfigError(f"<|{name}|> must be <|bos|>, <|eos|> or the number of a token")
        return int(name)
