"""The endpoints of EasyLM's server: its paths, request fields and answers.

`/loglikelihood`, `/loglikelihood-rolling`, `/generate`, `/greedy-until`, `/chat` and `/ready`, for
clients such as `EasyLM.serving.LMClient`. Scores agree with lm-evaluation-harness: context and
continuation are encoded together, and rolling scores use disjoint windows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ed_esurge.outputs import RequestOutput
from ed_esurge.sampling import SamplingParams
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel, new_id
from ed_esurge.server.generation.requests import GenerationRequest
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.fields import RequestBody
from ed_esurge.server.http.json_parts import answer_json
from ed_esurge.server.http.streaming import run_in_turns
from ed_esurge.server.routing import Endpoint, post

#: EasyLMTexts of one request.
EasyLMTexts = Annotated[list[str], Field(min_length=1, max_length=1024)]
#: Maximum number of generated tokens, as in EasyLM.
MAX_TOKENS = 1024


class InferenceRequest(RequestBody):
    """Body of the endpoints that read lists of texts."""

    ALIASES: ClassVar[Mapping[str, str]] = {"prefix": "prefix_text"}

    prefix_text: EasyLMTexts | None = None
    text: EasyLMTexts | None = None
    until: list[str] | list[list[str]] | None = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    max_tokens: Annotated[int, Field(gt=0, lt=2**31)] = MAX_TOKENS


class TurnRequest(RequestBody):
    """Body of `POST /chat`."""

    prompt: str
    context: str = ""
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    max_tokens: Annotated[int, Field(gt=0, lt=2**31)] = MAX_TOKENS


class Likelihoods(AnswerBody):
    """Scores of texts: sums of log-probabilities, and whether every token is the likeliest."""

    prefix_text: list[str] | None = None
    text: list[str]
    log_likelihood: list[float]
    is_greedy: list[bool]


class OutputTexts(AnswerBody):
    """Continuations of prefixes."""

    prefix_text: list[str]
    until: list[str] | list[list[str]] | None = None
    output_text: list[str]
    temperature: float | None = None


class Turn(AnswerBody):
    """An answer, and the context of the next request."""

    response: str
    context: str
    temperature: float | None = None


async def loglikelihood(model: ServedModel, body: InferenceRequest) -> dict[str, Any]:
    """Score each text as the continuation of its prefix."""
    texts = _require_value(body.text, "text")
    prefixes = body.prefix_text if body.prefix_text is not None else [""] * len(texts)
    _same_number(prefixes, texts, "prefix_text", "text")
    pairs = [await _pair(model, *pair) for pair in zip(prefixes, texts, strict=True)]
    scores = await _scores(model, pairs)
    return {"prefix_text": prefixes, "text": texts, **_answer(scores)}


async def rolling(model: ServedModel, body: InferenceRequest) -> dict[str, Any]:
    """Score each text as a whole, in windows of the context length."""
    texts = _require_value(body.text, "text")
    windows: list[tuple[list[int], list[int]]] = []
    owners: list[int] = []
    room = model.prompts.max_model_len - 2
    for number, tokens in enumerate(await model.prompts.encode(texts, add_special_tokens=True)):
        for start in range(0, len(tokens), room):
            # A later window begins as early as the context allows.
            end = min(start + room, len(tokens))
            context = [_first_token(model)] if start == 0 else tokens[end - room - 1 : start]
            windows.append((context, tokens[start:end]))
            owners.append(number)
    totals = [[0.0, True] for _ in texts]
    scores = await _scores(model, windows)
    for number, (score, greedy) in zip(owners, scores, strict=True):
        totals[number][0] += score
        totals[number][1] = totals[number][1] and greedy
    return {"text": texts, **_answer([(t, bool(g)) for t, g in totals])}


async def _generate(model: ServedModel, body: InferenceRequest) -> dict[str, Any]:
    """Sample a continuation of each prefix."""
    prefixes = _require_value(body.prefix_text, "prefix_text")
    temperature = 1.0 if body.temperature is None else body.temperature
    outputs = await _continue_prefixes(model, prefixes, body.max_tokens, temperature)
    texts = [output.outputs[0].text for output in outputs]
    return {"prefix_text": prefixes, "output_text": texts, "temperature": temperature}


async def greedy_until(model: ServedModel, body: InferenceRequest) -> dict[str, Any]:
    """Continue each prefix with the likeliest tokens, up to one of its stop strings."""
    prefixes = _require_value(body.prefix_text, "prefix_text")
    stop_texts = _require_value(body.until, "until")
    _same_number(stop_texts, prefixes, "until", "prefix_text")
    stops = [(stop,) if isinstance(stop, str) else tuple(stop) for stop in stop_texts]
    outputs = await _continue_prefixes(model, prefixes, body.max_tokens, 0.0, stops)
    texts = [output.outputs[0].text for output in outputs]
    return {"prefix_text": prefixes, "until": stop_texts, "output_text": texts}


async def _chat(model: ServedModel, body: TurnRequest) -> dict[str, Any]:
    """Answer a prompt after a context; the next request sends the returned context.

    The context is the text of the conversation, without a chat template.
    """
    text = body.context + body.prompt
    temperature = 1.0 if body.temperature is None else body.temperature
    (output,) = await _continue_prefixes(model, [text], body.max_tokens, temperature)
    said = output.outputs[0].text
    return {"response": said, "context": text + said, "temperature": body.temperature}


def _write_json(work: Callable[[ServedModel, Any], Awaitable[dict[str, Any]]]) -> Any:
    """Return the handler of an endpoint that answers with JSON."""

    async def handle(model: ServedModel, body: RequestBody, request: Request) -> Response:
        return await answer_json(await work(model, body))

    return handle


async def ready(server: ServedModels, request: Request) -> Response:
    """Answer that the server is ready."""
    return PlainTextResponse("Ready!\n")


def _require_value(value: object, name: str) -> Any:
    if value is None:
        raise APIError(f"{name} is missing: send a list of texts", param=name)
    return value


def _same_number(
    one: Sequence[Any], reference: Sequence[Any], name: str, reference_name: str
) -> None:
    if len(one) != len(reference):
        numbers = f"{name} has {len(one)} entries, and {reference_name} has {len(reference)}"
        raise APIError(f"{numbers}: send as many", param=name)


def _answer(scores: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    return {
        "log_likelihood": [score for score, _ in scores],
        "is_greedy": [greedy for _, greedy in scores],
    }


def _first_token(model: ServedModel) -> int:
    """Return the token that replaces an empty context: BOS, else EOS."""
    tokenizer = model.prompts.tokenizer
    candidates = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    token = next((one for one in candidates if one is not None), None)
    if token is None:
        raise APIError("the tokenizer has neither a BOS nor an EOS token for an empty prefix")
    return token


async def _pair(model: ServedModel, prefix: str, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of its continuation, encoded as one text.

    Spaces at the end of the context belong to the continuation.
    """
    spaces = len(prefix) - len(prefix.rstrip())
    if spaces:
        prefix, text = prefix[:-spaces], prefix[-spaces:] + text
    if not prefix:
        (tokens,) = await model.prompts.encode([text], add_special_tokens=False)
        return [_first_token(model)], tokens
    full_tokens, context_tokens = await model.prompts.encode(
        [prefix + text, prefix], add_special_tokens=True
    )
    return full_tokens[: len(context_tokens)], full_tokens[len(context_tokens) :]


async def _scores(
    model: ServedModel, pairs: Sequence[tuple[list[int], list[int]]]
) -> list[tuple[float, bool]]:
    """Return the log-probability of each continuation, and whether it is greedy."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    room = model.prompts.max_model_len - 1
    for _, continuation in pairs:
        if len(continuation) >= room:
            message = f"a text of {len(continuation)} tokens exceeds the context of {room} tokens"
            raise APIError(f"{message}: send a shorter text", param="text")
    prompts = [(context + continuation)[-room:] for context, continuation in pairs]
    outputs = await _outputs(model, prompts, [params] * len(prompts), "text")
    continuation_scores = []
    for (_, continuation), prompt, output in zip(pairs, prompts, outputs, strict=True):
        scores = output.prompt_logprobs or []
        length = len(continuation)
        token_scores = [
            position[token]
            for token, position in zip(
                prompt[-length:], scores[-length:] if length else (), strict=False
            )
            if position is not None
        ]
        total = float(sum(score.logprob for score in token_scores))
        continuation_scores.append((total, all(score.rank == 1 for score in token_scores)))
    return continuation_scores


async def _continue_prefixes(
    model: ServedModel,
    prefixes: Sequence[str],
    max_tokens: int,
    temperature: float,
    stops: Sequence[tuple[str, ...]] = (),
) -> list[RequestOutput]:
    """Continue each prefix; a prefix that is too long keeps its last tokens."""
    encoded = await model.prompts.encode(list(prefixes), add_special_tokens=True)
    room = model.prompts.max_model_len
    limit = min(max_tokens, room - 1)
    prompts = [tokens[-(room - limit) :] or [_first_token(model)] for tokens in encoded]
    params = [
        SamplingParams(
            max_tokens=limit,
            temperature=temperature,
            stop=tuple(stop for stop in stop_texts if stop),
            skip_special_tokens=True,
            seed=None,
        )
        for stop_texts in (stops or [()] * len(prompts))
    ]
    return await _outputs(model, prompts, params, "prefix_text")


async def _outputs(
    model: ServedModel,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    param: str,
) -> list[RequestOutput]:
    """Return the complete output of each prompt."""
    model.check_generations(len(prompts))
    label = new_id("easylm", None)
    options = model.queue_options(GenerationRequest())

    async def one(number: int) -> RequestOutput:
        checked = model.prompts.check(prompts[number], params[number].max_tokens, param=param)
        output: RequestOutput | None = None
        stream = model.generate(checked, params[number], f"{label}-{number}", **options)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                if output is None:
                    output = delta
                else:
                    output.add(delta)
        assert output is not None
        return output

    return await run_in_turns(map(one, range(len(prompts))))


_ANSWERS: tuple[tuple[str, str, Any, type[RequestBody], type[AnswerBody]], ...] = (
    ("/loglikelihood", "Score continuations.", loglikelihood, InferenceRequest, Likelihoods),
    ("/loglikelihood-rolling", "Score whole texts.", rolling, InferenceRequest, Likelihoods),
    ("/generate", "Continue texts.", _generate, InferenceRequest, OutputTexts),
    ("/greedy-until", "Continue up to a stop string.", greedy_until, InferenceRequest, OutputTexts),
    ("/chat", "Answer one turn of a conversation.", _chat, TurnRequest, Turn),
)
ENDPOINTS = (
    *(
        post(path, f"{summary} (EasyLM)", _write_json(work), accepts, returns, ability=GENERATES)
        for path, summary, work, accepts, returns in _ANSWERS
    ),
    Endpoint("/ready", "Answer that the server is ready. (EasyLM)", ready, "text/plain"),
)
