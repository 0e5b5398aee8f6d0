"""`POST /v1/completions`: several prompts, several choices per prompt, echo, log-probabilities."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ed_esurge.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from ed_esurge.sampling import SamplingParams
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.answer_size import (
    ID_BYTES,
    SCORE_BYTES,
    SCORE_TEXT_BYTES,
    TOKEN_BYTES,
    AnswerCost,
    AnswerSize,
    score_count,
)
from ed_esurge.server.generation.answers import Completion
from ed_esurge.server.generation.logprobs import CompletionLogprobs, join_logprobs, prompt_logprobs
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.pipeline import (
    PromptTask,
    RunningGeneration,
    finish_reason,
    openai_usage,
)
from ed_esurge.server.generation.prompt_embeds import read_prompt_embeds
from ed_esurge.server.generation.prompts import EncodedPrompt
from ed_esurge.server.generation.requests import CompletionRequest
from ed_esurge.server.generation.structured import compile_one
from ed_esurge.server.http.body import aside
from ed_esurge.server.http.json_parts import JsonItems, encode_json, write_text
from ed_esurge.server.openai.chunks import Chunks
from ed_esurge.server.routing import post

# OpenAI's default of `max_tokens`.
DEFAULT_MAX_TOKENS = 16


async def _complete(model: ServedModel, body: CompletionRequest, request: Request) -> Response:
    """Answer a completion request.

    Raises:
        APIError: a prompt is too long, or an option does not fit the model.
    """
    prompts = len(body.prompt_embeds) + len(body.prompt)
    model.check_generations(prompts * (body.best_of or body.n))
    tasks = await _tasks(model, body)
    size = model.answer_size(request)
    _check_size(size, body, tasks)
    generation = RunningGeneration(model, body, request, tasks, "cmpl", size=size, numbered=True)
    completions = _Completions(body, generation)
    return await generation.answer(body.stream, completions.events, completions.build_response)


async def _tasks(model: ServedModel, body: CompletionRequest) -> list[PromptTask]:
    """Return the prompts as token ids that fit the context, with their sampling options."""
    prompts = model.prompts
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    cut = body.truncate_prompt_tokens is not None
    special = body.add_special_tokens
    encoded = iter(await prompts.encode(texts, add_special_tokens=special, cut=cut))
    # The engine also samples one token of a request that only scores (max_tokens 0).
    max_tokens = None if body.max_tokens is None else max(body.max_tokens, 1)
    best_of, logprobs = body.best_of or body.n, body.logprobs
    if best_of > body.n and logprobs is None:
        logprobs = 0  # `_best` compares the log-probabilities
    scored = [body.logprobs] if body.echo else []
    scored = [count for count in (*scored, body.prompt_logprobs) if count is not None]
    structured = await compile_one(model.engine, body.outputs())
    first: SamplingParams | None = None
    params: dict[int, SamplingParams] = {}
    tasks = []
    embeds = (
        await read_prompt_embeds(model.engine, body.prompt_embeds) if body.prompt_embeds else []
    )
    for prompt in (*embeds, *body.prompt):
        if isinstance(prompt, EncodedPrompt):
            prompt_tokens, param, items = prompt.tokens, "prompt_embeds", prompt.encoder_inputs
        else:
            prompt_tokens = next(encoded) if isinstance(prompt, str) else prompt
            param, items = "prompt", ()
        checked = prompts.check(
            prompt_tokens, max_tokens, param=param, last=body.truncate_prompt_tokens
        )
        tokens, limit = checked.token_ids, checked.max_tokens
        if max_tokens is None:
            limit = min(limit, DEFAULT_MAX_TOKENS)
        if limit not in params:
            if first is None:
                first = await model.sampling_params(
                    body,
                    limit,
                    n=best_of,
                    logprobs=logprobs,
                    prompt_logprobs=max(scored, default=None),
                    structured_outputs=structured,
                )
            # Only the limit differs between the prompts, and validating long lists is slow.
            params[limit] = first.model_copy(update={"max_tokens": limit})
        echo = None
        if body.echo:
            unchanged = isinstance(prompt, str) and tokens == prompt_tokens
            echo = str(prompt) if unchanged else await prompts.decode(tokens)
        tasks.append(PromptTask(checked, params[limit], echo, items))
    return tasks


def _check_size(size: AnswerSize, body: CompletionRequest, tasks: list[PromptTask]) -> None:
    """Check the bound of the answer, and count the bytes of its prompts.

    Raises:
        APIError: 400, the answer would be too large; 503, too many bytes are in flight.
    """
    requested_counts = [body.prompt_logprobs, body.logprobs if body.echo else None]
    scored = score_count(max((top for top in requested_counts if top is not None), default=None))
    repeated = sum(map(score_count, requested_counts)) * SCORE_TEXT_BYTES
    repeated += ID_BYTES * (body.return_token_ids + body.echo)
    # `best_of` compares log-probabilities that the client did not request.
    new = score_count(tasks[0].params.logprobs) * (SCORE_BYTES + SCORE_TEXT_BYTES) + TOKEN_BYTES
    choices = body.best_of or body.n
    prompts = new_tokens = 0
    for task in tasks:
        prompts += len(task.tokens) * (scored * SCORE_BYTES + choices * repeated)
        new_tokens += choices * (task.params.max_tokens or 1)
    size.check(
        AnswerCost(prompts, new, 1).bytes(new_tokens),
        "prompt" if prompts > new * new_tokens else "max_tokens",
        "request fewer tokens, choices, prompts or log-probabilities, or send shorter prompts (the "
        f"request has {len(tasks)} prompts with {choices} completions each)",
    )
    size.add(prompts)


def _get_prompt_ids(task: PromptTask) -> list[int] | None:
    """Return the token ids of a prompt for the client; None for embeddings."""
    return None if task.encoder_inputs else task.tokens


class _Completions:
    """Writes the answer to a completion request.

    A request with `max_tokens: 0` scores its prompts: the sampled token is not part of the answer.
    """

    def __init__(self, body: CompletionRequest, generation: RunningGeneration) -> None:
        self.body, self.generation = body, generation
        self._scores_only = body.max_tokens == 0

    async def build_response(self) -> dict[str, Any]:
        """Return the complete answer."""
        generation = self.generation
        outputs: list[RequestOutput | None] = [None] * len(generation.tasks)
        async with aclosing(generation.outputs()) as deltas:
            async for index, delta in deltas:
                merged_output = outputs[index]
                if merged_output is None:
                    outputs[index] = delta
                else:
                    merged_output.add(delta)
        completions = [
            (task, output, completion)
            for task, output in zip(generation.tasks, outputs, strict=True)
            if output is not None
            for completion in self._best(output)
        ]
        finishes = [self._finish(completion) for _, _, completion in completions]

        def choices() -> Iterator[dict[str, Any]]:
            for index, (parts, finish) in enumerate(zip(completions, finishes, strict=True)):
                yield self._choice(*parts, index, finish)

        return {
            "id": generation.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": generation.model.name,
            "choices": JsonItems(choices, group=0),
            "usage": self._usage(),
        }

    def _best(self, output: RequestOutput) -> list[CompletionOutput]:
        """Return the `n` completions with the highest log-probability per token, best first."""
        body = self.body
        if (body.best_of or body.n) == body.n:
            return output.outputs

        def score(completion: CompletionOutput) -> float:
            return (completion.cumulative_logprob or 0.0) / max(len(completion.token_ids), 1)

        return sorted(output.outputs, key=score, reverse=True)[: body.n]

    def _finish(self, completion: CompletionOutput) -> str:
        return "length" if self._scores_only else finish_reason(completion.finish_reason)

    def _choice(
        self,
        task: PromptTask,
        output: RequestOutput,
        completion: CompletionOutput,
        index: int,
        finish: str,
    ) -> dict[str, Any]:
        body, scores_only = self.body, self._scores_only
        logprobs = None
        writer = self._writer()
        if writer is not None:
            parts = []
            if task.echo is not None:
                parts.append(writer.prompt(task.echo, task.tokens, output.prompt_logprobs or []))
            if not scores_only:
                parts.append(writer.completion(completion.token_ids, completion.logprobs or []))
            logprobs = join_logprobs(parts)
        choice = {
            "index": index,
            "text": (task.echo or "") + ("" if scores_only else completion.text),
            "logprobs": logprobs,
            "finish_reason": finish,
        }
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self.generation.model.texts, output.prompt_logprobs, body.prompt_logprobs
            )
        if body.return_token_ids:
            choice["prompt_token_ids"] = _get_prompt_ids(task)
            choice["token_ids"] = [] if scores_only else completion.token_ids
        return choice

    def _writer(self) -> CompletionLogprobs | None:
        count = self.body.logprobs
        texts = self.generation.model.texts_for(self.body)
        return None if count is None else CompletionLogprobs(texts, count)

    def _usage(self) -> dict[str, Any]:
        return openai_usage(self.generation, completion_tokens=0 if self._scores_only else None)

    async def events(self) -> AsyncGenerator[str]:
        """Yield the chunks of a stream. The chunks of one engine step are sent in one write."""
        body, generation = self.body, self.generation
        chunks = Chunks(
            "text_completion",
            generation.request_id,
            generation.model.name,
            int(time.time()),
            usage=body.include_usage,
            so_far=self._usage if body.continuous_usage else None,
        )
        writers: dict[int, CompletionLogprobs | None] = {}
        scores: dict[int, list[PositionLogprobs | None]] = {}
        async with aclosing(generation.outputs()) as deltas:
            async for place, delta in deltas:
                if delta.prompt_logprobs is not None:
                    scores[place] = delta.prompt_logprobs
                task = generation.tasks[place]
                events = []
                for out in delta.outputs:
                    index = place * body.n + out.index
                    first = index not in writers
                    ids = self._ids(task, out, first)
                    if first:
                        writers[index] = self._writer()
                    writer = writers[index]
                    if first and task.echo is not None:
                        logprobs = await self._prompt_scores(writer, task, scores.get(place) or [])
                        payload = f'"text":{encode_json(task.echo)}'
                        events.append(chunks.written_choice(index, payload, logprobs, None))
                    finish = out.finish_reason and finish_reason(out.finish_reason)
                    if self._scores_only:
                        events.append(chunks.choice(index, f'"text":""{ids}', None, "length"))
                        continue
                    logprobs = None
                    if writer is not None and out.token_ids:
                        logprobs = writer.completion(out.token_ids, out.logprobs or [])
                    if out.text or finish or ids or logprobs is not None:
                        payload = f'"text":{encode_json(out.text)}{ids}'
                        events.append(chunks.choice(index, payload, logprobs, finish))
                if events:
                    yield "".join(events)
        if body.include_usage:
            yield chunks.usage(self._usage())

    @staticmethod
    async def _prompt_scores(
        writer: CompletionLogprobs | None,
        task: PromptTask,
        scores: Sequence[PositionLogprobs | None],
    ) -> str:
        """Return the JSON text of the log-probabilities of a prompt."""
        if writer is None:
            return "null"
        size = sum(len(position) for position in scores if position) * SCORE_TEXT_BYTES
        part = await aside(lambda: writer.prompt(task.echo or "", task.tokens, scores), size)
        return await write_text(part, size)

    def _ids(self, task: PromptTask, out: CompletionOutput, first: bool) -> str:
        """Return the JSON fields of the token ids, if requested."""
        if not self.body.return_token_ids:
            return ""
        ids = f',"token_ids":{encode_json([] if self._scores_only else out.token_ids)}'
        return f'{ids},"prompt_token_ids":{encode_json(_get_prompt_ids(task))}' if first else ids


ENDPOINTS = (
    post(
        "/v1/completions",
        "Continue one or several prompts.",
        _complete,
        CompletionRequest,
        Completion,
        streams=True,
        batched=True,
        ability=GENERATES,
    ),
)
