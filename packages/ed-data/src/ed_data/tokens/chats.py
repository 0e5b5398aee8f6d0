"""Encode chats: the chat template, the loss on the answers, and the end of a chat.

The tokens of a chat are those of `apply_chat_template` for the messages that
`ed_data.conversation` prepares. An end-of-text token is appended only to an
answer at the end of a chat, if the template does not end it with an end token (and optional white
space). A model that never sees an end token after an answer does not learn to stop.
"""

from __future__ import annotations

import json
import logging
import re
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from ed_data.conversation import ConversationFormat
from ed_data.errors import DataError
from ed_data.schema import KWARGS, TOOLS, Message
from ed_data.tokens.answers import TokenSpan, mask_tokens, with_answers
from ed_data.tokens.items import DocumentField, TokenSequence, with_blame
from ed_data.tokens.tokenizers import chat_template, end_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("ed_data")

#: Roles of messages that precede an answer.
_ASKING = ("system", "developer", "user", "tool", "function")
#: Number of chats whose marks are checked, and of characters of a message that is looked for.
CHECKED_CHATS, QUOTED = 32, 12
_GENERATION = re.compile(r"\{%-?\s*generation\b")


class ChatEncoder:
    """Encodes chats with the chat template of a tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        eos: id that ends a chat without an end token.
        assistant_only_loss: restrict the loss to the answers.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, eos: int, assistant_only_loss: bool
    ) -> None:
        self._tokenizer, self._eos = tokenizer, eos
        self._assistant_only_loss = assistant_only_loss
        self._unused: set[str] = set()
        self._marked_chats = 0
        self._formats: dict[str, ConversationFormat] = {}

    @cached_property
    def _end_tokens(self) -> dict[int, str]:
        return end_tokens(self._tokenizer, self._eos)

    def prompts(self, items: list[DocumentField]) -> list[TokenSequence]:
        """Encode chats that end with the start of an answer.

        Raises:
            DataError: there is no chat template, or it rejects a chat; the message names the row.
        """
        return self._encode(items, begins_answer=True)

    def encode_chats(self, items: list[DocumentField]) -> list[TokenSequence]:
        """Encode complete chats; an answer at the end of a chat has an end token.

        Raises:
            DataError: as `prompts`, or the answers of a chat cannot be located.
        """
        encoded = self._encode(items, begins_answer=False)
        return [self._append_eos(t, item) for t, item in zip(encoded, items, strict=True)]

    def _encode(self, items: list[DocumentField], begins_answer: bool) -> list[TokenSequence]:
        """Encode consecutive chats with equal template arguments together."""
        prepared = [self._prepare(item) for item in items]
        runs = [list(run) for _, run in groupby(prepared, key=_arguments_key)]
        return [tokens for run in runs for tokens in self._run(run, begins_answer)]

    def _prepare(self, item: DocumentField) -> DocumentField:
        """Return a chat whose messages the template accepts, and the arguments that it reads."""
        template = chat_template(self._tokenizer, TOOLS in item.template)
        if not template:
            return item
        if template not in self._formats:

            def render(messages: list[Message], **options: Any) -> str:
                options = {"chat_template": template, "tokenize": False, **options}
                return str(self._tokenizer.apply_chat_template(messages, **options))

            self._formats[template] = ConversationFormat(template, render)
        chat = cast("list[Message]", item.content)
        messages, tools = self._formats[template].prepare(chat, item.template.get(TOOLS) or ())
        arguments = {name: value for name, value in item.template.items() if name != TOOLS}
        if tools:
            arguments[TOOLS] = tools
        return item._replace(content=messages, template=arguments)

    def _run(self, items: list[DocumentField], begins_answer: bool) -> list[TokenSequence]:
        arguments = items[0].template
        template = chat_template(self._tokenizer, TOOLS in arguments)
        if not template:
            raise DataError(
                f"{items[0].location}: the row is a chat, but the tokenizer has no chat template"
            )
        self._check_arguments(items[0], template)
        masked = self._assistant_only_loss and not begins_answer
        if masked and not _GENERATION.search(template):
            problem = "the answers of the chat cannot be located"
            return with_blame(self._with_found_answers, items, problem)

        def encode(chats: list[DocumentField]) -> list[TokenSequence]:
            if masked:
                return self._with_marked_answers(chats, template)
            output: Any = self._tokenizer.apply_chat_template(
                [chat.content for chat in chats],  # type: ignore[arg-type]
                tokenize=True,
                return_dict=True,
                add_generation_prompt=begins_answer,
                **arguments,
            )
            return list(map(TokenSequence, output["input_ids"]))

        return with_blame(encode, items, "the chat template cannot render the messages")

    def _with_marked_answers(
        self, items: list[DocumentField], template: str
    ) -> list[TokenSequence]:
        """Encode chats whose answers the template marks with `{% generation %}`.

        The offsets of the tokens determine the mask. transformers uses the token of the last
        character of a mark, and if the tokenizer drops this character, its mask reaches to the end
        of the chat.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments: Any = {**self._tokenizer.special_tokens_map, **items[0].template}
        chats: Any = [item.content for item in items]
        rendered: Any = render_jinja_template(
            chats, chat_template=template, return_assistant_tokens_mask=True, **arguments
        )
        texts, places = rendered
        try:
            encoded: Any = self._tokenizer(
                list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        except NotImplementedError as error:
            raise ValueError(
                "the tokenizer does not return character offsets, which assistant_only_loss "
                "requires: use its fast version"
            ) from error
        for item, text, spans in zip(items, texts, places, strict=True):
            self._check_marks(item, text, spans)
        rows = zip(encoded["input_ids"], encoded["offset_mapping"], places, strict=True)
        return [TokenSequence(ids, mask_tokens(offsets, spans)) for ids, offsets, spans in rows]

    def _check_marks(self, item: DocumentField, text: str, spans: list[TokenSpan]) -> None:
        """Warn once if the marks of a template leave out the end token of an answer, or contain a
        message of another role. The first chats are checked."""
        if self._marked_chats >= CHECKED_CHATS:
            return
        self._marked_chats += 1
        ends, marked = tuple(self._end_tokens.values()), [text[a:b] for a, b in spans]
        problem = ""
        for (_, stop), answer in zip(spans, marked, strict=True):
            following = next((end for end in ends if text[stop:].lstrip().startswith(end)), None)
            if answer.strip() and not answer.rstrip().endswith(ends) and following is not None:
                problem = f"end before {following!r}, so the model does not learn to end its answer"
        chat = cast("list[Message]", item.content)
        answers = str([message["content"] for message in chat if message["role"] not in _ASKING])
        for message in chat:
            words = str(message["content"]).strip()
            is_other = message["role"] in _ASKING and len(words) >= QUOTED and words not in answers
            if is_other and any(words in answer for answer in marked):
                problem = f"contain a message of the role {message['role']}, which is learned"
        if problem:
            self._marked_chats = CHECKED_CHATS
            log.warning(
                "%s: the marks {%% generation %%} of the chat template %s: correct the template",
                item.location,
                problem,
            )

    def _with_found_answers(self, items: list[DocumentField]) -> list[TokenSequence]:
        texts = self._end_tokens.values()
        result: list[TokenSequence] = []
        for item in items:

            def render(chat: list[Message], begins_answer: bool, item: DocumentField = item) -> str:
                rendered = self._tokenizer.apply_chat_template(
                    chat, tokenize=False, add_generation_prompt=begins_answer, **item.template
                )
                return str(rendered)

            chat = cast("list[Message]", item.content)
            result.append(TokenSequence(*with_answers(self._tokenizer, chat, render, texts)))
        return result

    def _append_eos(self, tokens: TokenSequence, item: DocumentField) -> TokenSequence:
        """Append the end-of-text token to an answer that ends without an end token.

        The end of an answer has loss, and so does the text between the answer and its end, because
        a model must generate this text to reach the end token.
        """
        last = cast("list[Message]", item.content)[-1]
        if last["role"] in _ASKING or self._has_end(tokens.ids):
            return tokens
        ids, mask = [*tokens.ids, self._eos], tokens.mask
        if mask is None:
            return tokens._replace(ids=ids)
        end = max((i + 1 for i, flag in enumerate(mask) if flag), default=len(mask))
        return tokens._replace(ids=ids, mask=[*mask[:end], *[1] * (len(ids) - end)])

    def _has_end(self, ids: list[int]) -> bool:
        """Return whether the last token that is not white space may end a turn."""
        for token in reversed(ids):
            if token in self._end_tokens:
                return True
            if str(self._tokenizer.decode([token])).strip():
                return False
        return False

    def _check_arguments(self, item: DocumentField, template: str) -> None:
        """Warn once about each argument of a row that the template does not read."""
        for name in item.template.keys() - self._unused:
            if not re.search(rf"\b{re.escape(name)}\b", template):
                self._unused.add(name)
                log.warning(
                    "%s: the chat template does not read %r (of the field %r), so the argument "
                    "does not change the tokens",
                    item.location,
                    name,
                    TOOLS if name == TOOLS else KWARGS,
                )


def end_of_answer(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that a model generates after its answer in a chat.

    Args:
        tokenizer: a tokenizer of transformers.

    Returns:
        The first end token after an answer of the chat template, or the end-of-text token if the
        template writes none. None without a chat template, or if the template rejects a chat of
        one question and one answer.
    """
    eos = tokenizer.eos_token_id
    if not chat_template(tokenizer) or not isinstance(eos, int):
        return None
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        output: Any = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)
    except Exception as error:  # a template may raise any error, of jinja or of Python
        log.debug("the chat template rejects a chat of two messages: %s", error)
        return None
    end_ids, end = end_tokens(tokenizer, eos), eos
    for token in reversed(output["input_ids"]):
        if token in end_ids:
            end = token
        elif str(tokenizer.decode([token])).strip():
            break
    return end


def _arguments_key(item: DocumentField) -> str:
    return json.dumps(item.template, sort_keys=True, default=str) if item.template else ""
