"""The path that every generation endpoint uses: request, prompts, engine, events, answer.

`RunningGeneration` runs the prompts of a request on the engine. `ChatGeneration` adds what
conversations
need: the chat template, tools, and the parsing of replies. An endpoint converts its request to a
`CompletionRequest` or `ChatRequest`, and writes the results in the format of its API.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.core.commands import EncoderInput
from ed_esurge.engine.intake import CheckedPrompt
from ed_esurge.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from ed_esurge.replies.blocks import BlockTracker, Change
from ed_esurge.replies.events import CallEnds, Event, Reasoning, Reply, ReplyText
from ed_esurge.sampling import SamplingParams, StructuredOutputs
from ed_esurge.server.generation.answer_size import (
    ID_BYTES,
    SCORE_BYTES,
    SCORE_TEXT_BYTES,
    STORED_SCORE_BYTES,
    TOKEN_BYTES,
    AnswerCost,
    AnswerSize,
    score_count,
)
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.generation.prompts import EncodedPrompt
from ed_esurge.server.generation.reply_formats import Parser
from ed_esurge.server.generation.requests import ChatRequest, GenerationRequest
from ed_esurge.server.generation.structured import NamedTool, compile_one, required_calls
from ed_esurge.server.http.body import get_body_size
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.json_parts import answer_json
from ed_esurge.server.http.streaming import OPENAI_STREAM, StreamFormat, merge_streams

#: Header of the answer to a truncated prompt: the number of removed tokens.
TRUNCATED = "X-Truncated-Prompt-Tokens"
#: Header with the number of prompt tokens read from the prefix cache.
CACHED = "X-Cached-Prompt-Tokens"


@dataclass(slots=True)
class PromptTask:
    """One prompt of a request.

    Attributes:
        prompt: the checked prompt.
        echo: text of the prompt, for answers that repeat the prompt.
        encoder_inputs: images or embeddings of the prompt.
    """

    prompt: CheckedPrompt
    params: SamplingParams
    echo: str | None = None
    encoder_inputs: tuple[EncoderInput, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """Token ids of the prompt after truncation."""
        return self.prompt.token_ids


class RunningGeneration:
    """The running prompts of one request.

    Args:
        id_prefix: prefix of the request id.
        numbered: whether the log and traces name each prompt by the request id and its index.
        size: counter of the bytes of the answer.
        stores: whether the endpoint stores the log-probabilities of the answer until its end.

    Attributes:
        completion_tokens: number of tokens generated so far.
        cached_tokens: number of prompt tokens read from the prefix cache.
        times: times of the prompt that had the last output; None before the first output.
    """

    def __init__(
        self,
        model: ServedModel,
        body: GenerationRequest,
        request: Request,
        tasks: list[PromptTask],
        id_prefix: str,
        *,
        size: AnswerSize,
        numbered: bool = False,
        stores: bool = False,
    ) -> None:
        self.model, self.tasks, self._numbered = model, tasks, numbered
        self.size, self._counts = size, stores or not body.stream
        self._score_bytes = STORED_SCORE_BYTES if stores else SCORE_BYTES + SCORE_TEXT_BYTES
        self.request_id = new_id(id_prefix, body.request_id)
        self._request = request
        self.prompt_tokens = sum(len(task.prompt) for task in tasks)
        self.truncated_tokens = sum(task.prompt.removed for task in tasks)
        self.completion_tokens = 0
        self.times: RequestMetrics | None = None
        self._cached = [0] * len(tasks)
        self._queue = model.queue_options(body)
        self._length_penalty = body.length_penalty if body.use_beam_search else None

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    @property
    def headers(self) -> dict[str, str]:
        headers = answer_headers(self.request_id, self.truncated_tokens)
        if self.times is not None:  # after the first output
            headers[CACHED] = str(self.cached_tokens)
        return headers

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield the deltas of the engine, each with the index of its prompt, and count the tokens.

        Closing the generator aborts the request.
        """
        streams = [self._stream(index, task) for index, task in enumerate(self.tasks)]
        async with aclosing(merge_streams(streams)) as deltas:
            async for index, delta in deltas:
                self.times = delta.metrics
                self._cached[index] = delta.metrics.num_cached_tokens
                count = delta.num_tokens
                self.completion_tokens += count
                if self._counts:  # a stream sends its chunks at once
                    scores = sum([len(at) for out in delta.outputs for at in out.logprobs or ()])
                    self.size.add(count * TOKEN_BYTES + scores * self._score_bytes)
                yield index, delta

    def _stream(self, index: int, task: PromptTask) -> AsyncGenerator[RequestOutput]:
        label = f"{self.request_id}-{index}" if self._numbered else self.request_id
        options = self._queue.copy()
        if task.encoder_inputs:
            options["encoder_inputs"] = task.encoder_inputs
        if self._length_penalty is not None:
            if task.encoder_inputs:
                raise APIError("beam search reads no images", param="use_beam_search")
            most = self.model.engine.config.max_logprobs
            params = with_beams(task.params, self._length_penalty, most)
            return self.model.generate(task.prompt, params, label, **options)
        return self.model.generate(task.prompt, task.params, label, **options)

    async def answer(
        self,
        stream: bool,
        events: Callable[[], AsyncGenerator[str]],
        build_response: Callable[[], Any],
        form: StreamFormat = OPENAI_STREAM,
        *,
        size: Callable[[], int] | None = None,
    ) -> Response:
        """Answer with a stream of events, or with one JSON body.

        Args:
            events: returns the events of the stream.
            build_response: returns a coroutine for the body.
            form: format of the stream.
            size: returns the estimated bytes of the body; None = those of this generation.
        """
        if stream:
            lifetime = self.model.lifetime(self._request)
            return await lifetime.respond(events(), lambda: self.headers, form)
        body = await build_response()
        return await answer_json(body, self.size.bytes if size is None else size(), self.headers)


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """New output of one choice.

    Attributes:
        events: parsed events of the new text.
        out: the new tokens.
        finish: OpenAI's finish reason in the last piece of the choice, else None.
    """

    index: int
    events: list[Event]
    out: CompletionOutput
    finish: str | None


@dataclass(slots=True)
class FinishedChoice:
    """A complete choice."""

    index: int
    reply: Reply
    out: CompletionOutput
    finish: str


@dataclass
class ChatGeneration:
    """A running chat request. All endpoints with messages use this class.

    Attributes:
        ending: text of the last tokens of the prompt.
        prompt_logprobs: log-probabilities of the prompt, if requested, after the first output.
        last: the piece with the finish reason, after `changes` has yielded that piece.
        is_text_only: whether the reply is text only, without thoughts and calls.
        stores: whether the endpoint reads the next two attributes.
        answer_tokens: tokens of the first choice so far.
        answer_logprobs: their log-probabilities, if requested.
    """

    body: ChatRequest
    generation: RunningGeneration
    ending: str
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    last: ReplyPiece | None = None
    is_text_only: bool = False
    stores: bool = False
    answer_tokens: list[int] = field(default_factory=list)
    answer_logprobs: list[PositionLogprobs] = field(default_factory=list)
    _characters: Counter[int] = field(default_factory=Counter)
    _parsers: dict[int, Parser] = field(default_factory=dict)
    _called: set[int] = field(default_factory=set)

    @classmethod
    async def begin(
        cls,
        model: ServedModel,
        body: ChatRequest,
        request: Request,
        id_prefix: str,
        *,
        tokens: Sequence[int] = (),
        raw_prompt: EncodedPrompt | None = None,
        context: int | None = None,
        stores: bool = False,
    ) -> ChatGeneration:
        """Check a request, and create its prompt.

        Args:
            id_prefix: prefix of the request id.
            tokens: token ids before the prompt.
            raw_prompt: prompt that replaces the messages. The reply is text only.
            context: see `PromptEncoder.check`.
            stores: whether the endpoint stores the tokens and log-probabilities of the answer.

        Raises:
            APIError: the conversation is too long, the template rejects it, or an option does not
                fit the model.
        """
        if model.derivation is not None and raw_prompt is None:
            body = model.derivation(body)
        model.check_generations(body.n)
        model.formats.check(body)
        check_template(model, body)
        prompt = raw_prompt or await model.prompts.chat(body, get_body_size(request))
        if tokens:
            prompt = prompt.after(tokens)
        requested = body.max_completion_tokens or body.max_tokens
        checked = model.prompts.check(
            prompt.tokens,
            requested,
            param="messages",
            last=body.truncate_prompt_tokens,
            context=context,
        )
        size = model.answer_size(request)
        cost = chat_cost(body, len(checked), stores=stores)
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        most = size.fit_tokens(cost, requested, checked.max_tokens, name)
        size.add(cost.prompt)
        ending = model.prompts.ending(checked)
        more: dict[str, Any] = {}
        if model.formats.shows_special(body):
            more["skip_special_tokens"] = False
        budget = body.thinking_token_budget
        if budget is not None and budget >= 0:
            more["thinking_budget"] = model.formats.thinking_budget(budget, ending)
        if body.stop and raw_prompt is None and not body.use_beam_search:
            more["thought_texts"] = model.formats.thought_texts(body, ending)
        ends = () if raw_prompt is not None else model.formats.ends_of_thoughts(ending)
        requested_outputs = _structured_outputs(body, model.formats.call_starts(body))
        if requested_outputs:
            more["structured_outputs"] = await compile_one(model.engine, requested_outputs, ends)
        params = await model.sampling_params(
            body,
            most,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            **more,
        )
        task = PromptTask(checked, params, encoder_inputs=prompt.encoder_inputs)
        generation = RunningGeneration(
            model, body, request, [task], id_prefix, size=size, stores=stores
        )
        return cls(body, generation, ending, is_text_only=raw_prompt is not None, stores=stores)

    @cached_property
    def blocks(self) -> BlockTracker:
        """The blocks of the reply, filled by `changes`."""
        return BlockTracker()

    @property
    def model(self) -> ServedModel:
        return self.generation.model

    @property
    def request_id(self) -> str:
        return self.generation.request_id

    @property
    def tokens(self) -> list[int]:
        """Token ids of the prompt."""
        return self.generation.tasks[0].tokens

    async def pieces(self) -> AsyncGenerator[list[ReplyPiece]]:
        """Yield the new pieces after each step of the engine. Closing it aborts the request."""
        formats = self.model.formats
        make = None if self.is_text_only else formats.parsers(self.body, self.ending)
        async with aclosing(self.generation.outputs()) as items:
            async for _, delta in items:
                yield self._read(delta, make)

    def _read(self, delta: RequestOutput, make: Callable[[], Parser] | None) -> list[ReplyPiece]:
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        result = []
        for out in delta.outputs:
            reason = out.finish_reason and finish_reason(out.finish_reason)
            if self.stores and out.index == 0:
                self.answer_tokens += out.token_ids
                self.answer_logprobs += out.logprobs or ()
            if make is None:
                self._characters[out.index] += len(out.text)
                end = self._characters[out.index]
                events: list[Event] = [ReplyText(out.text, end)] if out.text else []
            else:
                if out.index not in self._parsers:
                    self._parsers[out.index] = make()
                parser = self._parsers[out.index]
                events = parser.feed(out.text) if out.text else []
                if reason is not None:
                    events += parser.close(cut=reason == "length")
                if any(isinstance(event, CallEnds) for event in events):
                    self._called.add(out.index)
                # OpenAI reports "stop" for a function that the request selected by name.
                by_name = isinstance(self.body.tool_choice, NamedTool)
                if reason == "stop" and out.index in self._called and not by_name:
                    reason = "tool_calls"
            if not self.body.include_reasoning:
                events = [event for event in events if not isinstance(event, Reasoning)]
            result.append(ReplyPiece(out.index, events, out, reason))
        return result

    async def choices(self) -> list[FinishedChoice]:
        """Return all choices when they are complete."""
        choices_by_index: dict[int, FinishedChoice] = {}
        async with aclosing(self.pieces()) as items:
            async for pieces in items:
                for piece in pieces:
                    choice = choices_by_index.get(piece.index)
                    if choice is None:
                        choice = FinishedChoice(piece.index, Reply(), piece.out, "")
                        choices_by_index[piece.index] = choice
                    else:
                        choice.out.add(piece.out)
                    choice.reply.add(piece.events)
                    choice.finish = piece.finish or choice.finish
        return [choices_by_index[index] for index in sorted(choices_by_index)]

    async def changes(self) -> AsyncGenerator[list[tuple[Change, str | None]]]:
        """Yield the changes of the reply's blocks after each step of the engine.

        The changes at the end of the reply have its finish reason; the others have None.
        """
        async with aclosing(self.pieces()) as items:
            async for pieces in items:
                changes: list[tuple[Change, str | None]] = []
                for piece in pieces:
                    changes += [(change, None) for change in self.blocks.take(piece.events)]
                    if piece.finish is not None:
                        self.last = piece
                        changes += [(change, piece.finish) for change in self.blocks.end()]
                yield changes

    async def finish(self) -> None:
        """Read the reply to its end."""
        async with aclosing(self.changes()) as items:
            async for _ in items:
                pass


def chat_cost(body: ChatRequest, prompt_tokens: int, *, stores: bool = False) -> AnswerCost:
    """Return the bytes of the answer to a chat request; see `ChatGeneration.begin`."""
    score = STORED_SCORE_BYTES if stores else SCORE_BYTES + SCORE_TEXT_BYTES
    top = (body.top_logprobs or 0) if body.logprobs else None
    scored = score_count(body.prompt_logprobs) * (SCORE_BYTES + SCORE_TEXT_BYTES)
    prompt = prompt_tokens * (scored + ID_BYTES * body.return_token_ids)
    return AnswerCost(prompt, TOKEN_BYTES + score_count(top) * score, body.n)


def check_template(model: ServedModel, body: ChatRequest) -> None:
    """Check that the server accepts the template of a request. Raises APIError: 400."""
    if body.chat_template is not None and not model.state.trust_request_chat_template:
        raise APIError(
            "chat templates of clients are not supported by this server: start the server with "
            "--trust-request-chat-template, or send chat_template_kwargs",
            param="chat_template",
            code="unsupported_value",
        )


def _structured_outputs(
    body: ChatRequest, call_starts: tuple[str, ...]
) -> dict[str, StructuredOutputs]:
    """Return the structured outputs of a request by the field that requests them.

    Args:
        call_starts: texts that begin calls, which the model may write instead of the answer.
    """
    outputs = body.outputs() if body.is_guided else {}
    calls = None
    if body.tools:
        calls = required_calls(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    text = body.response_format.schema_text if body.response_format is not None else None
    if calls is not None:  # a reply of calls has no content that response_format could constrain
        outputs["tool_choice"] = calls
    elif text is not None:
        outputs["response_format"] = StructuredOutputs(json_schema=text, calls=call_starts)
    return outputs


def finish_reason(reason: str | None) -> str:
    """Return a finish reason of the engine as OpenAI's.

    Raises:
        APIError: 503, the engine aborted the completion.
    """
    if reason not in ("stop", "length"):
        raise APIError(f"the engine ended the completion ({reason})", status=503)
    return reason


def truncation(tokens: int) -> dict[str, int]:
    """Return the usage field for the tokens that were removed from the prompt, if any."""
    return {"truncated_tokens": tokens} if tokens else {}


def answer_headers(request_id: str, truncated_tokens: int) -> dict[str, str]:
    """Return the headers of a generated answer."""
    headers = {"X-Request-Id": request_id}
    if truncated_tokens:
        headers[TRUNCATED] = str(truncated_tokens)
    return headers


def openai_usage(
    generation: RunningGeneration, completion_tokens: int | None = None
) -> dict[str, Any]:
    """Return OpenAI's `usage` object.

    Args:
        completion_tokens: None = the tokens that were generated.
    """
    generated = generation.completion_tokens if completion_tokens is None else completion_tokens
    details: Mapping[str, int] = truncation(generation.truncated_tokens)
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": generation.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens, **details},
    }


def with_beams(params: SamplingParams, length_penalty: float, most_logprobs: int) -> SamplingParams:
    """Return the options for a search with `n` beams.

    Raises:
        APIError: 400, there are too many beams, or an option has no effect on beam search.
    """
    if 2 * params.n > most_logprobs:
        raise APIError(
            f"{params.n} beams need {2 * params.n} log-probabilities for each token, and the "
            f"engine returns at most {most_logprobs} (max_logprobs): request fewer beams",
            param="n",
        )
    for name in params.without_effect_on_beams():
        raise APIError(f"{name} has no effect on beam search: omit it", param=name)
    return params.replace(use_beam_search=True, length_penalty=length_penalty)
