"""Where the answers of a chat are, for templates that do not mark them with `{% generation %}`.

A turn is what showing one more message adds to the text: the answer begins where the template with
`add_generation_prompt` ends, and ends with the turn. Space at the end of a turn, behind the token
that ends it, is no part of the answer. Tokens belong to an answer by their characters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: A half-open range of characters.
Span = tuple[int, int]


def with_answers(
    tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]]
) -> tuple[list[int], list[int]]:
    """Tokens of a chat, and 1 for each that belongs to an answer.

    Raises:
        ValueError: the template shows a turn in another way once others follow, or the tokenizer
            cannot tell characters.
    """
    text = _shown(tokenizer, chat)
    spans = answers(tokenizer, chat, text)
    try:
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
    except NotImplementedError as error:
        raise ValueError(
            "this tokenizer does not say which characters a token has, so the chat template must "
            "mark the answers with {% generation %} … {% endgeneration %}"
        ) from error
    places: list[Span] = encoded["offset_mapping"]  # type: ignore[assignment]
    mask = [
        int(any(start < stop and begin < stop and start < end for begin, end in spans))
        for start, stop in places
    ]
    return list(encoded["input_ids"]), mask  # type: ignore[arg-type]


def answers(
    tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]], text: str
) -> list[Span]:
    """The answers in the text of a chat.

    Raises:
        ValueError: as `with_answers`.
    """
    spans: list[Span] = []
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        before = _shown(tokenizer, chat[:i], add_generation_prompt=True) if i else ""
        after = text if i == len(chat) - 1 else _shown(tokenizer, chat[: i + 1])
        if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
            raise ValueError(
                f"the template shows message {i} in another way once others follow, so nothing "
                "tells where the answer is: mark the answers in the template with "
                "{% generation %} … {% endgeneration %}"
            )
        spans.append((len(before), len(after.rstrip())))
    return spans


def _shown(
    tokenizer: PreTrainedTokenizerBase,
    chat: list[dict[str, Any]],
    add_generation_prompt: bool = False,
) -> str:
    return str(
        tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    )
