"""Where the answers of a chat are, for templates that do not mark them with `{% generation %}`.

An answer begins where the template with `add_generation_prompt` ends, or where the chat begins to
differ from that text: some templates begin an answer with a thought that they do not keep. The
answer ends with its turn, which the template shows at the end of a chat that is cut there. A turn
that others follow may lose its beginning (a thought) or have another end token. White space that
follows the end token is no part of the answer. Tokens belong to an answer by their characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ed_data.schema import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A half-open range of characters.
Span = tuple[int, int]
#: Renders messages as text, with the beginning of an answer where the flag is set.
Render = Callable[[list[Message], bool], str]


def with_answers(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[Message],
    render: Render,
    end_tokens: Collection[str],
) -> tuple[list[int], list[int]]:
    """Return the tokens of a chat, and 1 for each token of an answer.

    Args:
        tokenizer: one that returns offsets.
        chat: the messages.
        render: the chat template.
        end_tokens: texts of the tokens that may end a turn.

    Raises:
        ValueError: the template changes a turn once others follow, or the tokenizer returns no
            offsets.
    """
    text = render(chat, False)
    spans = _Turns(text, render, end_tokens).answers(chat)
    try:
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
    except NotImplementedError as error:
        raise ValueError(
            "this tokenizer does not return the characters of its tokens, so the chat template "
            "must mark the answers with {% generation %} … {% endgeneration %}"
        ) from error
    places: list[Span] = encoded["offset_mapping"]  # type: ignore[assignment]
    mask = [
        int(any(start < stop and begin < stop and start < end for begin, end in spans))
        for start, stop in places
    ]
    return list(encoded["input_ids"]), mask  # type: ignore[arg-type]


class _Turns:
    """Finds the turns of a chat in its text.

    Args:
        text: of the whole chat.
        render: the chat template.
        end_tokens: texts of the tokens that may end a turn.
    """

    def __init__(self, text: str, render: Render, end_tokens: Collection[str]) -> None:
        self._text, self._render, self._ends = text, render, tuple(end_tokens)
        ends = sorted(map(re.escape, end_tokens), key=len, reverse=True)
        self._units = re.compile("|".join([*ends, "."]), re.DOTALL)

    def answers(self, chat: list[Message]) -> list[Span]:
        """Return the place of each message of the assistant.

        Raises:
            ValueError: the template changes a turn once others follow.
        """
        return [
            self._answer(chat, i)
            for i, message in enumerate(chat)
            if message["role"] == "assistant"
        ]

    def _answer(self, chat: list[Message], i: int) -> Span:
        begin = 0
        if i:
            asking = self._render(chat[:i], True)
            begin = self._shared(self._text, asking)
            if begin < len(asking) and begin < self._shared(self._render(chat[:i], False), asking):
                raise self._changed(i)
        end = len(self._text)
        if i < len(chat) - 1:
            found = self._end(begin, self._render(chat[: i + 1], False))
            if found is None:
                raise self._changed(i)
            end = found
        turn = self._text[begin:end]
        stripped = turn.rstrip()
        # Without an end token, the white space is what ends the turn.
        return begin, begin + len(stripped if stripped.endswith(self._ends) else turn)

    def _end(self, begin: int, cut: str) -> int | None:
        """Where a turn ends that others follow.

        Args:
            begin: where the turn begins.
            cut: the text of the chat that is cut after the turn.
        """
        text = self._text
        same = self._shared(text, cut)
        if same == len(cut):
            return same
        if same >= begin and self._is_ends(cut[same:]):
            # The end of a chat has a token of its own: behind the turn's, or in its place.
            if text[begin:same].rstrip().endswith(self._ends):
                return same
            following = self._units.match(text, same)
            return following.end() if following and following.group() in self._ends else same
        turn = cut[begin:]
        for start in range(1, len(turn)):
            if text.startswith(turn[start:], begin) and not self._is_ends(turn[start:]):
                return begin + len(turn) - start
        return None

    def _shared(self, first: str, second: str) -> int:
        """The characters that two texts begin with; an end token is one unit."""
        length = 0
        for one, other in zip(
            self._units.finditer(first), self._units.finditer(second), strict=False
        ):
            if one.group() != other.group():
                break
            length = one.end()
        return length

    def _is_ends(self, text: str) -> bool:
        """Whether a text holds end tokens and white space alone."""
        return not self._units.sub(
            lambda unit: "" if unit.group() in self._ends else unit.group(), text
        ).strip()

    def _changed(self, i: int) -> ValueError:
        return ValueError(
            f"the template shows message {i} in another way once others follow, so nothing tells "
            "where the answer is: mark the answers in the template with {% generation %} … "
            "{% endgeneration %}"
        )
