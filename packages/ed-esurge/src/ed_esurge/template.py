"""Chat templates that never convert user text to special tokens.

Both the template and a user can write a special token (`<|im_end|>`) as text. Before rendering,
each special token in the user's texts is marked. After rendering, only unmarked occurrences, which
the template has written, become special tokens.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ed_infra.conversation import ConversationFormat, Messages
from ed_infra.errors import ConfigError, did_you_mean

from ed_esurge.marked_text import MarkedText
from ed_esurge.sampling import SamplingParams
from ed_esurge.tokenizer import Tokenizer

# Noncharacters of Unicode, which do not occur in regular text.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
# Text that resembles a mark. The number of a mark has a limited number of digits.
_MARKED = re.compile(f"{OPEN}([0-9]{{1,9}})\\.")


class ChatTemplate:
    """Renders and encodes conversations for one tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        source: Jinja text that replaces the template of the tokenizer.
        reads_parts: whether content must be a list of parts; None = a probe finds it.

    Raises:
        ConfigError: the tokenizer or the template is missing.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        source: str | None = None,
        *,
        reads_parts: bool | None = None,
    ) -> None:
        if tokenizer is None:
            raise ConfigError("chat needs a tokenizer: give one to eSurge(model, tokenizer)")
        if source is None and getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                "the tokenizer has no chat template: use generate() with plain text, or give "
                "chat_template="
            )
        self.tokenizer, self.source = tokenizer, source
        self._reads_parts = reads_parts

    def token_ids(self, messages: Sequence[Mapping[str, Any]], **options: object) -> list[int]:
        """Return the token ids of a conversation; see `render`."""
        return self.encode(*self.render(messages, **options))

    def render(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> tuple[str, re.Pattern[str]]:
        """Return the text of a conversation and a pattern that matches its marked characters.

        The messages are converted to the form that the template accepts, see
        `ed_infra.conversation`.

        Args:
            messages: list of `{"role": …, "content": …}`.
            options: options of `apply_chat_template` (`tools`, variables of the template, …).
        """
        prepared, tools = self.conversation.prepare(messages, options.pop("tools", None) or ())
        if tools:
            options["tools"] = tools
        return self._render_chat(prepared, options)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check that `apply_chat_template` or the template itself reads each option.

        Raises:
            ConfigError: An option is unknown.
        """
        source = self.source or self.tokenizer.chat_template
        named = source.values() if isinstance(source, Mapping) else [source]
        words = set(re.findall(r"[A-Za-z_]\w*", " ".join(map(str, named))))
        function = inspect.signature(self.tokenizer.apply_chat_template)
        option_names = {name for name in function.parameters if not name.startswith("return_")}
        option_names -= {"conversation", "tokenize", "kwargs", "options"}
        sampling = set(SamplingParams.model_fields)
        for name in options:
            if name in option_names or name in words:
                continue
            if name in sampling:
                hint = f": pass SamplingParams({name}=…) as the second argument"
            elif name == "stream":
                hint = ": use eSurge.stream(prompt), or the server, for a stream"
            else:
                suggestion = did_you_mean(name, option_names)
                hint = f"{suggestion}: neither apply_chat_template nor the template reads it"
            raise ConfigError(f"chat has no argument {name!r}{hint}")

    @cached_property
    def conversation(self) -> ConversationFormat:
        """The shapes of conversations that the template accepts."""

        def render(messages: Messages, **options: object) -> str:
            if self.source is not None:
                options["chat_template"] = self.source
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

        source = self.source or self.tokenizer.chat_template
        return ConversationFormat(source, render, self._reads_parts)

    def _render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]
    ) -> tuple[str, re.Pattern[str]]:
        said = "".join(texts_in((messages, options)))
        used_numbers = {int(number) for number in _MARKED.findall(said)}
        number = next(number for number in itertools.count() if number not in used_numbers)
        mark = f"{OPEN}{number}."

        def mark_character(character: str) -> str:
            return f"{mark}{ord(character):x}{CLOSE}"

        def mark_text(text: str) -> str:
            return self._special.sub(lambda hit: mark_character(hit[0][0]) + hit[0][1:], text)

        def wrap_text(text: str) -> str:
            places = [hit.start() for hit in self._special.finditer(text)]
            return MarkedText(text, places, mark_character) if places else text

        def render(convert: Callable[[str], str]) -> str:
            template_options = {
                key: options[key] for key in ("tokenize", "chat_template") if key in options
            }
            if self.source is not None:
                template_options["chat_template"] = self.source
            arguments = {
                "add_generation_prompt": True,
                **_convert_texts(options, convert),
                **template_options,
            }
            arguments["tokenize"] = False
            return self.tokenizer.apply_chat_template(
                _convert_texts([*messages], convert), **arguments
            )

        marks = re.compile(f"{re.escape(mark)}([0-9a-f]+){CLOSE}")
        text = render(mark_text)
        if self._special.search(said) is None:
            return text, marks
        # A template may look for special tokens in the texts, such as the end of the thoughts.
        expected = render(str)
        if self.remove_marks(text, marks) != expected:
            typed_text = self._render_types(
                _convert_texts([*messages], wrap_text), _convert_texts(options, wrap_text)
            )
            if typed_text is not None and self.remove_marks(typed_text, marks) == expected:
                return typed_text, marks
        return text, marks

    def _render_types(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
        """Return a rendered conversation whose texts keep their types; None if that fails.

        `apply_chat_template` converts all texts to `str`.
        """
        from transformers.utils import chat_template_utils

        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        if compile_template is None:
            return None
        source = self.source or options.get("chat_template")
        unread = ("tokenize", "chat_template")
        values = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **getattr(self.tokenizer, "special_tokens_map", {}),
            **{key: value for key, value in options.items() if key not in unread},
        }
        chat = [{k: v for k, v in message.items() if v is not None} for message in messages]
        tokenizer: Any = self.tokenizer
        try:
            chat_template = tokenizer.get_chat_template(source, tools=values["tools"])
            return str(compile_template(str(chat_template)).render(messages=chat, **values))
        except Exception:  # a template can raise any exception
            return None

    def remove_marks(self, text: str, marks: re.Pattern[str]) -> str:
        """Return a rendered conversation without the marks."""
        return marks.sub(lambda hit: chr(int(hit[1], 16)), text)

    def encode(self, text: str, marks: re.Pattern[str]) -> list[int]:
        """Return the token ids of a rendered conversation. Marked characters never form a special
        token."""

        def remove_marks(piece: str) -> str:
            return self.remove_marks(piece, marks)

        places = list(self._special.finditer(text))
        expected = [self._ids[hit[0]] for hit in places]
        token_ids = list(self.tokenizer(remove_marks(text), add_special_tokens=False)["input_ids"])
        if [token for token in token_ids if token in self._special_ids] == expected:
            return token_ids
        # Encode each piece of text between the template's special tokens separately.
        ids: list[int] = []
        at = 0
        for hit, token in zip(places, expected, strict=True):
            ids += [*self.as_text(remove_marks(text[at : hit.start()])), token]
            at = hit.end()
        return [*ids, *self.as_text(remove_marks(text[at:]))]

    @cached_property
    def _ids(self) -> dict[str, int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    @cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(filter(None, self._ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def _text_only(self) -> Any:
        """A copy of the Rust tokenizer that encodes special tokens as text. A copy is required,
        because all threads share the flag of the original."""
        original = getattr(self.tokenizer, "_tokenizer", None)
        if original is None:
            return None
        copy = _copy_tokenizer(original)
        copy.no_padding()
        copy.no_truncation()
        copy.encode_special_tokens = True
        return copy

    def as_text(self, piece: str) -> list[int]:
        """Return the token ids of a text whose special tokens are text."""
        if not piece:
            return []
        if self._text_only is not None:
            return self._text_only.encode(piece, add_special_tokens=False).ids
        options: dict[str, Any] = {"add_special_tokens": False, "split_special_tokens": True}
        return list(self.tokenizer(piece, **options)["input_ids"])


def _copy_tokenizer(original: Any) -> Any:
    """Return a Rust tokenizer with flags of its own, and the model and components of another.

    A copy through text would take a second for a large vocabulary, and hold the interpreter lock.
    """
    copy = type(original)(original.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        component = getattr(original, name)
        if component is not None:
            setattr(copy, name, component)
    added = original.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (copy.add_special_tokens if token.special else copy.add_tokens)([token])
    if copy.get_added_tokens_decoder() == added:
        return copy
    return type(original).from_str(original.to_str())  # the ids of the added tokens have gaps


def _convert_texts(value: object, convert: Callable[[str], str]) -> Any:
    """Return nested lists and mappings with converted strings."""
    if isinstance(value, str):
        return convert(value)
    if isinstance(value, Mapping):
        return {
            _convert_texts(key, convert): _convert_texts(item, convert)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_convert_texts(item, convert) for item in value]
    return value


def texts_in(value: object) -> Iterator[str]:
    """Yield every string in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from texts_in(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
