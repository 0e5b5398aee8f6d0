"""Conversion of prompts and conversations to token ids that fit the context."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ed_infra.errors import ConfigError

from ed_esurge.children.process import run_cancellable
from ed_esurge.config import EngineConfig
from ed_esurge.core.commands import EncoderInput
from ed_esurge.engine.intake import (
    DECODER_PREFIX,
    CheckedPrompt,
    ContextLengthError,
    TokenIdError,
    check_prompt,
    check_token_ids,
)
from ed_esurge.server.generation.infilling import InfillPrompts
from ed_esurge.server.generation.media import VIDEO, ChatMedia, ProcessedMedium
from ed_esurge.server.generation.rendering import (
    ConversationOptions,
    ConversationRenderer,
    RenderedText,
)
from ed_esurge.server.generation.requests import ChatMessage, ChatRequest
from ed_esurge.server.generation.text_pairs import (
    PairSide,
    encode_pair,
    encode_text,
    first_pair_tokens,
)
from ed_esurge.server.http.errors import APIError
from ed_esurge.template import ChatTemplate
from ed_esurge.tokenizer import Tokenizer, decode_tokens

T = TypeVar("T")

# Length in characters above which a text is tokenized in a thread, because tokenization would block
# the streams of other clients for about 5 ms. Few threads, because a tokenizer uses much memory.
LONG_TEXT = 10_000
# Characters that take as long as the call of the tokenizer for each text.
_CALL_CHARACTERS = 200
_THREADS = 2
# Threads that decode images and recordings. They mostly wait for a child process, and never delay
# the prompts of text. Videos have their own threads, because they last longer than images.
MEDIA_THREADS, VIDEO_THREADS = 4, 2
# Threads that wait for the templates of requests, which are rendered in a child process, too.
TEMPLATE_THREADS = 2
# Number of tokens at the end of a prompt that are searched for the beginning of thoughts.
_ENDING = 16


@dataclass(frozen=True)
class EncodedPrompt:
    """The token ids of a prompt, and the inputs of the model's encoder, such as images."""

    tokens: list[int]
    encoder_inputs: tuple[EncoderInput, ...] = ()

    def after(self, tokens: Sequence[int]) -> EncodedPrompt:
        """Return this prompt after other tokens."""
        count = len(tokens)
        moved = tuple(replace(one, start=one.start + count) for one in self.encoder_inputs)
        return EncodedPrompt([*tokens, *self.tokens], moved)


@dataclass(frozen=True)
class EncodedPair:
    """A pair of texts as one prompt.

    Attributes:
        prompt: the prompt; `removed` counts the tokens that truncation has removed.
        second_start: index of the first token with the token type 1; None = all have type 0.
    """

    prompt: CheckedPrompt
    second_start: int | None


class PromptEncoder:
    """Encodes prompts for one model.

    Args:
        tokenizer: Hugging Face tokenizer of the served model.
        config: the engine's options, which include the policy for long prompts.
        max_model_len: maximum number of tokens of a prompt and its completion together.
        vocab_size: size of the model's vocabulary.
        media: reader of the images or recordings in conversations.
        chat_template: Jinja text that replaces the template of the tokenizer.
        encoder_decoder: whether the model is an encoder-decoder, see `ed_esurge.engine.intake.fit`.
        oai_like_processor: whether templates that support OpenAI's list of content parts receive
            such a list; False = content is always text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        config: EngineConfig,
        max_model_len: int,
        vocab_size: int,
        media: ChatMedia[Any],
        chat_template: str | None = None,
        oai_like_processor: bool = True,
        volatile_lines: Sequence[str] = (),
        encoder_decoder: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.media = media
        self.config = config
        self.max_model_len, self._encoder_decoder = max_model_len, encoder_decoder
        self.vocab_size = vocab_size
        # A longer text always has more tokens than `max_model_len`.
        longest = max(map(len, tokenizer.get_vocab()), default=1)
        self.most_characters = max_model_len * longest
        template: ChatTemplate | None = None
        if chat_template or getattr(tokenizer, "chat_template", None):
            template = ChatTemplate(
                tokenizer, chat_template, reads_parts=None if oai_like_processor else False
            )
        self.has_template = template is not None
        self.template_text = str(chat_template or getattr(tokenizer, "chat_template", None) or "")
        self.gaps = InfillPrompts(tokenizer)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ed-esurge-tokenizer")
        self._media_threads = ThreadPoolExecutor(
            MEDIA_THREADS, thread_name_prefix="ed-esurge-media"
        )
        self._video_threads = ThreadPoolExecutor(
            VIDEO_THREADS, thread_name_prefix="ed-esurge-video"
        )
        self._template_threads = ThreadPoolExecutor(
            TEMPLATE_THREADS, thread_name_prefix="ed-esurge-template"
        )
        self.renderer = ConversationRenderer(
            tokenizer,
            template,
            self.template_text,
            self.most_characters,
            self._check_length,
            volatile_lines,
        )

    async def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool,
        param: str = "prompt",
        cut: bool = False,
    ) -> list[list[int]]:
        """Return the token ids of texts.

        Raises:
            APIError: 400, a text is not valid Unicode, or too long for the context.
        """
        self._check_texts(texts, param, cut=cut)

        def work() -> list[list[int]]:
            return [
                self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
                for text in texts
            ]

        return await self._aside(work, _measure(texts))

    async def encode_prompts(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool = True,
        most: int | None = None,
        side: PairSide | None = None,
        param: str,
    ) -> tuple[list[CheckedPrompt], int]:
        """Return checked prompts without completions, and the number of removed tokens.

        Args:
            prompts: texts, or token ids.
            most: maximum number of tokens of a prompt; -1 = as many as fit. None: a prompt that is
                too long is an error, unless the engine truncates prompts.
            side: the side that loses tokens; None = `truncation_side` of the tokenizer.
            param: the field of the prompts, for errors.

        Raises:
            APIError: 400, a prompt is too long, or a token id is outside the vocabulary.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        side = self.truncation_side(side)
        limit = self.max_model_len if most is None or most < 1 else min(most, self.max_model_len)
        if most is None:
            token_lists = await self.encode(
                texts, add_special_tokens=add_special_tokens, param=param
            )
            encoded = iter([(tokens, 0) for tokens in token_lists])
        else:
            self._check_texts(texts, param, cut=True)

            def work() -> list[tuple[list[int], int]]:
                options = {"add_special_tokens": add_special_tokens}
                return [encode_text(self.tokenizer, text, limit, side, **options) for text in texts]

            encoded = iter(await self._aside(work, _measure(texts)))
        result, truncated = [], 0
        for prompt in prompts:
            if isinstance(prompt, str):
                tokens, removed = next(encoded)
            else:
                tokens, removed = prompt, 0
                if most is not None and len(prompt) > limit:
                    tokens = prompt[:limit] if side == "right" else prompt[-limit:]
                    removed = len(prompt) - limit
            checked = self.check(tokens, 0, param=param)
            checked = replace(checked, removed=checked.removed + removed)
            truncated += checked.removed
            result.append(checked)
        return result, truncated

    def truncation_side(self, side: PairSide | None) -> PairSide:
        """Return the side of truncated texts that loses tokens: by default the tokenizer's."""
        return side or getattr(self.tokenizer, "truncation_side", "right")

    async def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        longest: int | None = None,
        most: int | None = None,
        param: str,
    ) -> list[EncodedPair]:
        """Return checked pairs of texts, with the special tokens between the texts.

        Args:
            pairs: the texts.
            longest: maximum number of tokens of a pair; -1 = as many as fit. The longer text loses
                tokens at its end, as in `CrossEncoder` of sentence-transformers. None: a pair that
                is too long is an error, unless the engine truncates prompts.
            most: maximum number of tokens of the second text; None = all.
            param: the field of the texts, for errors.

        Raises:
            APIError: 400, a text is not valid Unicode, or a pair is too long.
        """
        self._check_texts([text for pair in pairs for text in pair], param, cut=longest is not None)
        limit = None
        if longest is not None:
            limit = min(longest, self.max_model_len) if longest > 0 else self.max_model_len
        elif self.config.auto_truncate_prompt and not self.config.strict_context:
            limit = self.max_model_len

        def work() -> list[tuple[list[int], int | None, int]]:
            return [encode_pair(self.tokenizer, *pair, limit, most) for pair in pairs]

        encoded = await self._aside(work, _measure([text for pair in pairs for text in pair]))
        return [
            EncodedPair(replace(self.check(tokens, 0, param=param), removed=removed), start)
            for tokens, start, removed in encoded
        ]

    async def infill(
        self,
        prefix: str,
        suffix: str,
        *,
        files: Sequence[tuple[str, str]] = (),
        param: str,
    ) -> list[int]:
        """Return the prompt of a gap between two texts. The texts never become special tokens.

        Args:
            prefix, suffix: the texts around the gap.
            files: names and texts of other files of the repository.
            param: the field that requests the gap, for errors.

        Raises:
            APIError: 400, the model cannot fill gaps, or a text is too long.
        """
        if self.gaps.form is None:
            raise APIError(
                "this model has no special tokens for a text after the answer (fill in the "
                "middle): put the text into the prompt",
                param=param,
                code="unsupported_value",
            )
        texts = [prefix, suffix, *(part for file in files for part in file)]
        self._check_texts(texts, param)
        self._check_length(sum(map(len, texts)), param)
        build = partial(self.gaps.build, prefix, suffix, files)
        return await self._aside(build, _measure(texts))

    async def first_tokens(self, texts: Sequence[str], count: int) -> list[str]:
        """Return the beginning of each text, up to a number of tokens."""

        def work() -> list[str]:
            return [first_pair_tokens(self.tokenizer, text, count) for text in texts]

        return await self._aside(work, _measure(texts))

    async def prefix_length(self, prompt: str) -> int:
        """Return the number of tokens of a prompt in front of a text, with special tokens."""
        (tokens,) = await self.encode([prompt], add_special_tokens=True)
        special = getattr(self.tokenizer, "all_special_ids", ())
        return len(tokens) - (bool(tokens) and tokens[-1] in special)

    async def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return await self._aside(lambda: decode_tokens(self.tokenizer, tokens), len(tokens))

    def ending(self, prompt: CheckedPrompt) -> str:
        """Return the text of the last tokens of a prompt, including special tokens."""
        return str(self.tokenizer.decode(prompt.token_ids[-_ENDING:]))

    async def _aside(self, work: Callable[[], T], size: int) -> T:
        if size < LONG_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _check_texts(self, texts: Sequence[str], param: str, *, cut: bool = False) -> None:
        for text in texts:
            if not cut:
                self._check_length(len(text), param)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise APIError(
                    f"the text is not valid Unicode: {error.reason} (character {error.start})"
                ) from error

    def _check_length(self, characters: int, param: str) -> None:
        may_cut = self.config.auto_truncate_prompt and not self.config.strict_context
        if characters > self.most_characters and not may_cut:
            raise APIError(
                f"this model's maximum context length is {self.max_model_len} tokens; the {param} "
                f"has {characters} characters, and at most {self.most_characters} characters can "
                "fit: shorten it",
                param=param,
                code="context_length_exceeded",
            )

    def check(
        self,
        tokens: list[int],
        max_tokens: int | None,
        *,
        param: str,
        last: int | None = None,
        context: int | None = None,
    ) -> CheckedPrompt:
        """Return a checked prompt, truncated according to the engine's options.

        Args:
            tokens: token ids of the prompt.
            max_tokens: the requested number of tokens to generate; None = as many as fit.
            param: the field of the prompt, for errors.
            last: maximum number of prompt tokens, counted from the end; -1 = as many as fit.
            context: maximum number of tokens of prompt and completion, if it is below the model's.

        Raises:
            APIError: 400, a token id is outside the vocabulary, or the prompt does not fit
                (`context_length_exceeded`).
        """
        count = len(tokens)
        longest = min(context or self.max_model_len, self.max_model_len)
        if last is not None:
            room = 0 if self._encoder_decoder else max_tokens or 1
            tokens = tokens[-(last if last > 0 else longest - room) :]
        limits: dict[str, Any] = {"max_model_len": longest, "vocab_size": self.vocab_size}
        limits["encoder_decoder"] = self._encoder_decoder
        try:
            checked = check_prompt(tokens, max_tokens, self.config, **limits)
            return replace(checked, removed=count - len(checked))
        except TokenIdError as error:
            raise invalid_token(error, param) from None
        except ContextLengthError as error:
            count, requested = error.prompt_tokens, error.max_tokens or 0
            room = error.max_model_len - count
            if self._encoder_decoder and room >= 0:
                room = error.max_model_len - DECODER_PREFIX
                raise APIError(
                    f"the request has {requested} tokens in the completion, and this model "
                    f"generates at most {room}: request fewer",
                    param="max_tokens",
                    code="context_length_exceeded",
                ) from None
            ways = "shorten it" if room < 1 else f"shorten it, or request at most {room} tokens"
            raise APIError(
                f"this model's maximum context length is {error.max_model_len} tokens; the request "
                f"has {count + requested} ({count} in the {param}, {requested} in the completion): "
                f"{ways}",
                param=param,
                code="context_length_exceeded",
            ) from None
        except ConfigError as error:  # the prompt is empty
            raise APIError(str(error), param=param) from None

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        """Check that token ids are in the vocabulary. Raises APIError: 400."""
        try:
            check_token_ids(param, tokens, self.vocab_size)
        except TokenIdError as error:
            raise invalid_token(error, param) from None

    async def chat(self, request: ChatRequest, size: int = 0) -> EncodedPrompt:
        """Return the prompt of a chat request.

        Args:
            size: see `conversation`.

        Raises:
            APIError: 400, see `conversation`; or the template does not support `reasoning_effort`.
        """
        return await self.conversation(request.messages, self._get_options(request), size=size)

    def _get_options(self, request: ChatRequest) -> ConversationOptions:
        variables = request.chat_template_kwargs or {}
        if request.reasoning_effort is not None:
            effort = self._thinking(request.reasoning_effort, hint=request.effort_is_hint)
            variables = {**effort, **variables}
        return ConversationOptions(
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=variables,
            tools=() if request.tool_choice == "none" else request.tools,
            documents=request.documents,
            chat_template=request.chat_template,
        )

    def _thinking(self, effort: str, *, hint: bool) -> dict[str, Any]:
        """Return the template's variables for the amount of thinking.

        Args:
            hint: whether a template without such variables ignores the amount.

        Raises:
            APIError: 400, the template reads none of them.
        """
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        read = {name: value for name, value in variables.items() if name in self.template_text}
        if not read and not hint and effort != "none":
            raise APIError(
                f"this model's chat template does not support a reasoning effort ({effort!r}): "
                "omit it",
                param="reasoning_effort",
                code="unsupported_value",
            )
        return read

    async def conversation(
        self, messages: Sequence[ChatMessage], options: ConversationOptions, *, size: int = 0
    ) -> EncodedPrompt:
        """Return the prompt of messages. Text in messages never becomes a special token.

        Args:
            size: length of the request's body in bytes, which selects whether a thread is used.

        Raises:
            APIError: 400, there is no template, it rejects the conversation, or an image or a
                recording is invalid.
        """
        messages = self._readable(messages)
        template = self.renderer.choose_template(options)
        render = partial(self.renderer.render, template, messages, options)
        has_parts = any(isinstance(message.content, list) for message in messages)
        sources = await self.media.sources(messages) if has_parts else []
        weight = size + 100 * (len(messages) + len(options.tools))
        weight = max(weight, LONG_TEXT) if self.renderer.is_slow else weight
        if not sources and options.chat_template is None:
            return await self._aside(
                lambda: EncodedPrompt(template.encode(*render())),
                weight,
            )
        text, marks = await self._render(render, options.chat_template is not None, weight)
        media: list[ProcessedMedium] = []
        if sources:
            expand = partial(self.media.expand_placeholders, text, sources)
            has_videos = any(self.media.get_kind(source) is VIDEO for source in sources)
            threads = self._video_threads if has_videos else self._media_threads
            text, media = await run_cancellable(threads, expand)

        def locate() -> EncodedPrompt:
            tokens = template.encode(text, marks)
            located = self.media.build_encoder_inputs(tokens, media) if media else ()
            return EncodedPrompt(tokens, located)

        return await self._aside(locate, max(weight, len(text)))

    def _readable(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return messages with texts instead of optional images, if the model reads no images."""
        if self.media.accepts_images:
            return messages
        return [message.replace_optional_media() for message in messages]

    async def _render(
        self, render: Callable[..., RenderedText], untrusted: bool, weight: int
    ) -> RenderedText:
        """Return a rendered conversation. The template of a request has other threads."""
        if untrusted:
            return await run_cancellable(self._template_threads, render)
        return await self._aside(render, weight)

    async def get_text(self, request: ChatRequest) -> str:
        """Return the text of a chat request after the template.

        Raises:
            APIError: see `conversation`.
        """
        options, messages = self._get_options(request), self._readable(request.messages)
        template = self.renderer.choose_template(options)
        render = partial(self.renderer.render, template, messages, options)
        text, marks = await self._render(render, options.chat_template is not None, LONG_TEXT)
        return await self._aside(partial(template.remove_marks, text, marks), len(text))


def _measure(texts: Sequence[str]) -> int:
    """Return the work of tokenizing texts, in characters."""
    return sum(map(len, texts)) + len(texts) * _CALL_CHARACTERS


def invalid_token(error: TokenIdError, param: str) -> APIError:
    """Return the error of the API for a token id outside the vocabulary."""
    return APIError(
        f"token id {error.token} is outside the vocabulary of {error.vocab_size}",
        param=param,
        code="invalid_value",
    )
