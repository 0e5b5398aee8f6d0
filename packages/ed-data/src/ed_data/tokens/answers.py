"""The positions of answers in a chat, for templates without `{% generation %}` marks.

An answer begins at the end of the text that the template renders with `add_generation_prompt`, or
at the first character in which the chat differs from this text, because some templates start an
answer with reasoning that they remove later. An answer ends with its turn, which the template
renders at the end of a chat that is truncated after the turn. If other turns follow, a turn may
lose its beginning (the reasoning) or have another end token. White space after the end token does
not belong to the answer. A turn without an end token ends with the special token that begins the
next turn of another role. Character offsets determine the tokens of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ed_data.schema import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A half-open range of characters.
TokenSpan = tuple[int, int]
#: Renders messages as text, with the beginning of an answer where the flag is set.
RenderMessages = Callable[[list[Message], bool], str]


def with_answers(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[Message],
    render: RenderMessages,
    end_tokens: Collection[str],
) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat, and a mask with 1 for each token of an answer.

    Args:
        tokenizer: a tokenizer that returns offsets.
        chat: the messages.
        render: the chat template.
        end_tokens: texts of the tokens that may end a turn.

    Raises:
        ValueError: the template renders a turn differently if other turns follow, or the tokenizer
            does not return offsets.
    """
    text = render(chat, False)
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    spans = _Turns(text, render, end_tokens, added).answers(chat)
    try:
        encoded: Mapping[str, Any] = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
    except NotImplementedError as error:
        raise ValueError(
            "the tokenizer does not return character offsets, so the chat template must mark the "
            "answers with {% generation %} … {% endgeneration %}"
        ) from error
    return list(encoded["input_ids"]), mask_tokens(encoded["offset_mapping"], spans)


def mask_tokens(places: Sequence[TokenSpan], spans: Sequence[TokenSpan]) -> list[int]:
    """Return 1 for each token with a character of a span, else 0.

    Args:
        places: first character of each token, and the character after it, in order.
        spans: ranges of characters, in order.
    """
    mask, span = [0] * len(places), 0
    for number, (start, stop) in enumerate(places):
        while span < len(spans) and spans[span][1] <= start:
            span += 1
        if span < len(spans) and start < stop and spans[span][0] < stop:
            mask[number] = 1
    return mask


@lru_cache(maxsize=8)
def _compile_units(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for the longest of some tokens, or one character.

    Tokens with equal first characters share a branch: some tokenizers have thousands of tokens.
    """
    branches: dict[str, list[str]] = {}
    # White space alone is a token of some tokenizers, and part of texts.
    for token in sorted({token for token in tokens if token.strip()}, key=len, reverse=True):
        branches.setdefault(token[0], []).append(re.escape(token[1:]))
    texts = [f"{re.escape(first)}(?:{'|'.join(suffixes)})" for first, suffixes in branches.items()]
    return re.compile("|".join([*texts, "."]), re.DOTALL)


class _Turns:
    """Finds the turns of a chat in its text.

    Args:
        text: text of the whole chat.
        render: the chat template.
        end_tokens: texts of the tokens that may end a turn.
        added_tokens: texts of all added tokens, which are compared as a whole.
    """

    def __init__(
        self,
        text: str,
        render: RenderMessages,
        end_tokens: Collection[str],
        added_tokens: Collection[str] = (),
    ) -> None:
        self._text, self._render, self._ends = text, render, tuple(end_tokens)
        self._units = _compile_units((*end_tokens, *added_tokens))

    def answers(self, chat: list[Message]) -> list[TokenSpan]:
        """Return the characters of each message of the assistant.

        Raises:
            ValueError: the template renders a turn differently if other turns follow.
        """
        return [
            self._answer(chat, i)
            for i, message in enumerate(chat)
            if message["role"] == "assistant"
        ]

    def _answer(self, chat: list[Message], i: int) -> TokenSpan:
        begin = 0
        if i:
            asking = self._render(chat[:i], True)
            begin = self._count_common_prefix(self._text, asking)
            if begin < len(asking) and begin < self._count_common_prefix(
                self._render(chat[:i], False), asking
            ):
                raise self._build_change_error(i)
        end = len(self._text)
        if i < len(chat) - 1:
            turn_end = self._end(begin, self._render(chat[: i + 1], False))
            if turn_end is None:
                raise self._build_change_error(i)
            end = turn_end
        turn = self._text[begin:end]
        stripped = turn.rstrip()
        if stripped.endswith(self._ends):
            return begin, begin + len(stripped)
        # Without an end token, white space ends the turn, or the model writes the first token of
        # the next turn to end its own (GLM-4: `<|user|>`, `<|observation|>`).
        following = self._units.match(self._text, end)
        is_other = i < len(chat) - 1 and chat[i + 1]["role"] != "assistant"
        if is_other and following is not None and following.group() in self._ends:
            return begin, following.end()
        return begin, end

    def _end(self, begin: int, cut: str) -> int | None:
        """Return the end of a turn that other turns follow, or None.

        Args:
            begin: first character of the turn.
            cut: text of the chat that is truncated after the turn.
        """
        text = self._text
        same = self._count_common_prefix(text, cut)
        if same == len(cut):
            return same
        if same >= begin and self._is_ends(cut[same:]):
            # The chat has a separate end token, after or instead of that of the turn.
            if text[begin:same].rstrip().endswith(self._ends):
                return same
            following = self._units.match(text, same)
            return following.end() if following and following.group() in self._ends else same
        turn = cut[begin:]
        for start in range(1, len(turn)):
            if text.startswith(turn[start:], begin) and not self._is_ends(turn[start:]):
                return begin + len(turn) - start
        return None

    def _count_common_prefix(self, first: str, second: str) -> int:
        """Return the length of the common prefix of two texts; an added token is one unit."""
        length = 0
        for one, second_match in zip(
            self._units.finditer(first), self._units.finditer(second), strict=False
        ):
            if one.group() != second_match.group():
                break
            length = one.end()
        return length

    def _is_ends(self, text: str) -> bool:
        """Return whether a text consists of end tokens and white space."""
        return not self._units.sub(
            lambda unit: "" if unit.group() in self._ends else unit.group(), text
        ).strip()

    def _build_change_error(self, i: int) -> ValueError:
        return ValueError(
            f"the template renders message {i} differently if other messages follow: mark the "
            "answers in the template with {% generation %} … {% endgeneration %}"
        )
