"""`POST /v1/completions`: several prompts, several choices of each, echo, logprobs, streams."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from ed_esurge.outputs import CompletionOutput, RequestOutput
from ed_esurge.sampling import SamplingParams
from ed_esurge.server.generation.choices import Tally, collect, finish_reason
from ed_esurge.server.generation.logprobs import CompletionLogprobs, join, prompt_logprobs
from ed_esurge.server.generation.models import Served, new_id
from ed_esurge.server.generation.requests import CompletionRequest
from ed_esurge.server.generation.structured import one_of
from ed_esurge.server.http.errors import client_gone
from ed_esurge.server.http.streaming import (
    Chunks,
    answer,
    encode,
    headers_of,
    merge,
    respond,
    usage,
)

# What OpenAI generates when `max_tokens` is not given.
DEFAULT_MAX_TOKENS = 16


@dataclass(slots=True)
class _Job:
    """One prompt of the request.

    Attributes:
        tokens: of the prompt, as far as it is used.
        truncated_tokens: how many tokens were cut off the prompt.
        echo: what `echo` shows of the prompt.
        params: how to sample.
    """

    tokens: list[int]
    truncated_tokens: int
    echo: str | None
    params: SamplingParams


async def complete(served: Served, body: CompletionRequest, request: Request) -> Response:
    """Answer one request.

    Raises:
        APIError: the prompt does not fit, the model is not this one, or the engine is down.
    """
    served.check_generations(len(body.prompt) * (body.best_of or body.n))
    queue = served.queue_options(body)
    jobs = await _jobs(served, body)
    request_id = new_id("cmpl", body.request_id)
    watch = served.watch(request)
    streams = [
        served.generate(job.tokens, job.params, f"{request_id}-{place}", **queue)
        for place, job in enumerate(jobs)
    ]
    deltas = merge(streams)
    tally = Tally(
        [job.tokens for job in jobs], truncated_tokens=sum(job.truncated_tokens for job in jobs)
    )
    headers = headers_of(request_id, tally.truncated_tokens)
    if body.stream:
        return await respond(watch, _events(served, body, jobs, deltas, tally, request_id), headers)
    outputs = await watch.over(collect(deltas, len(jobs), tally))
    if outputs is None:
        return client_gone()
    choices = []
    for job, output in zip(jobs, outputs, strict=True):
        for completion in _best(output, body):
            choices.append(_choice(served, body, job, output, completion, len(choices)))
    return answer(
        {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
            "choices": choices,
            "usage": _usage(body, tally),
        },
        headers,
    )


async def _jobs(served: Served, body: CompletionRequest) -> list[_Job]:
    """The prompts of a request as tokens that fit, and how each is sampled."""
    prompts = served.prompts
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    encoded = iter(await prompts.encode(texts, add_special_tokens=body.add_special_tokens))
    # Scoring alone (max_tokens 0) still runs one sampled position, which is thrown away.
    wanted = None if body.max_tokens is None else max(body.max_tokens, 1)
    best_of, logprobs = body.best_of or body.n, body.logprobs
    if best_of > body.n and logprobs is None:
        logprobs = 0  # to choose by
    scored = [body.logprobs] if body.echo else []
    scored = [count for count in (*scored, body.prompt_logprobs) if count is not None]
    structured = await one_of(served.engine, body.outputs())
    first: SamplingParams | None = None
    params: dict[int, SamplingParams] = {}
    jobs = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            whole = next(encoded)
        else:
            prompts.check_tokens(prompt, param="prompt")
            whole = prompt
        tokens, limit = prompts.fit(
            whole,
            wanted,
            param="prompt",
            default=DEFAULT_MAX_TOKENS,
            last=body.truncate_prompt_tokens,
        )
        if limit not in params:
            if first is None:
                first = await served.sampling_params(
                    body,
                    limit,
                    n=best_of,
                    logprobs=logprobs,
                    prompt_logprobs=max(scored, default=None),
                    structured_outputs=structured,
                )
            # The prompts of a request differ in nothing else, and validating long lists takes time.
            params[limit] = first.model_copy(update={"max_tokens": limit})
        echo = None
        if body.echo:
            as_sent = isinstance(prompt, str) and tokens == whole
            echo = str(prompt) if as_sent else await prompts.decode(tokens)
        jobs.append(_Job(tokens, len(whole) - len(tokens), echo, params[limit]))
    return jobs


def _best(output: RequestOutput, body: CompletionRequest) -> list[CompletionOutput]:
    """The `n` completions with the highest log-probability per token, best first."""
    if (body.best_of or body.n) == body.n:
        return output.outputs

    def score(completion: CompletionOutput) -> float:
        return (completion.cumulative_logprob or 0.0) / max(len(completion.token_ids), 1)

    return sorted(output.outputs, key=score, reverse=True)[: body.n]


def _choice(
    served: Served,
    body: CompletionRequest,
    job: _Job,
    output: RequestOutput,
    completion: CompletionOutput,
    index: int,
) -> dict[str, Any]:
    """One entry of `choices`, whole."""
    scoring = body.max_tokens == 0
    logprobs = None
    if body.logprobs is not None:
        writer = CompletionLogprobs(served.texts, body.logprobs)
        parts = []
        if job.echo is not None:
            parts.append(writer.prompt(job.echo, job.tokens, output.prompt_logprobs or []))
        if not scoring:
            parts.append(writer.completion(completion.token_ids, completion.logprobs or []))
        logprobs = join(parts)
    choice = {
        "index": index,
        "text": (job.echo or "") + ("" if scoring else completion.text),
        "logprobs": logprobs,
        "finish_reason": "length" if scoring else finish_reason(completion.finish_reason),
    }
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(
            served.texts, output.prompt_logprobs, body.prompt_logprobs
        )
    if body.return_token_ids:
        choice["prompt_token_ids"] = job.tokens
        choice["token_ids"] = [] if scoring else completion.token_ids
    return choice


def _usage(body: CompletionRequest, tally: Tally) -> dict[str, Any]:
    return usage(tally, completion_tokens=0 if body.max_tokens == 0 else None)


async def _events(
    served: Served,
    body: CompletionRequest,
    jobs: list[_Job],
    deltas: AsyncGenerator[tuple[int, RequestOutput]],
    tally: Tally,
    request_id: str,
) -> AsyncGenerator[str]:
    """The chunks of a stream; those that one engine step gives leave in one write."""
    chunks = Chunks(
        "text_completion",
        request_id,
        served.name,
        int(time.time()),
        usage=body.include_usage,
        so_far=(lambda: _usage(body, tally)) if body.continuous_usage else None,
    )
    scoring = body.max_tokens == 0
    writers: dict[int, CompletionLogprobs | None] = {}
    prompt_logprobs: dict[int, Any] = {}
    async with aclosing(deltas) as items:
        async for place, delta in items:
            tally.observe(place, delta)
            if delta.prompt_logprobs is not None:
                prompt_logprobs[place] = delta.prompt_logprobs
            job = jobs[place]
            events = []
            for out in delta.outputs:
                index = place * body.n + out.index
                ids = ""
                if body.return_token_ids:
                    ids = f',"token_ids":{encode([] if scoring else out.token_ids)}'
                    if index not in writers:
                        ids += f',"prompt_token_ids":{encode(job.tokens)}'
                if index not in writers:
                    writers[index] = writer = (
                        None
                        if body.logprobs is None
                        else CompletionLogprobs(served.texts, body.logprobs)
                    )
                    if job.echo is not None:
                        known = prompt_logprobs.get(place) or []
                        shown = writer and writer.prompt(job.echo, job.tokens, known)
                        payload = f'"text":{encode(job.echo)}'
                        events.append(chunks.choice(index, payload, shown, None))
                writer = writers[index]
                finish = out.finish_reason and finish_reason(out.finish_reason)
                if scoring:
                    events.append(chunks.choice(index, f'"text":""{ids}', None, "length"))
                    continue
                shown = None
                if writer is not None and out.token_ids:
                    shown = writer.completion(out.token_ids, out.logprobs or [])
                if out.text or finish or ids or shown is not None:
                    payload = f'"text":{encode(out.text)}{ids}'
                    events.append(chunks.choice(index, payload, shown, finish))
            if events:
                yield "".join(events)
    if body.include_usage:
        yield chunks.usage(_usage(body, tally))
