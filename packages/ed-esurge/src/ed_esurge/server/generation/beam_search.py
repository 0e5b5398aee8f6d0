"""Beam search with vLLM's definition, as requests of one token to the engine.

Each step extends every beam by its `2 * n` most probable tokens and keeps the `n` best beams. A
beam that ends with an end-of-sequence token is complete. The score of a beam is the sum of its
log-probabilities, divided by its length including the prompt to the power of `length_penalty`. The
prefix cache keeps the tokens of the beams, so a step computes few tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from ed_esurge.engine.intake import CheckedPrompt
from ed_esurge.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from ed_esurge.sampling import SamplingParams
from ed_esurge.server.http.errors import APIError

#: Options of a request that beam search follows, or that cannot change its result.
_FOLLOWED = frozenset(
    ("n", "max_tokens", "temperature", "seed", "ignore_eos", "logprobs", "skip_special_tokens")
)
# Number of tokens of the prompt that are decoded with a completion, for white space at its start.
_BEFORE = 8

Generate = Callable[[CheckedPrompt, SamplingParams, str], AsyncGenerator[RequestOutput]]


@dataclass(frozen=True, eq=False)
class Beam:
    """A completion in progress or complete: a token after the tokens of another beam.

    Beams of a common origin share its tokens, so a step creates a small object for each candidate.

    Attributes:
        parent: the beam without the last token; None for the empty beam.
        token: the last token; -1 in the empty beam.
        position: log-probabilities of the candidates for the last token.
        total: sum of the log-probabilities.
        length: number of tokens.
        ended: whether the last token ends the sequence.
    """

    parent: Beam | None = None
    token: int = -1
    position: PositionLogprobs = field(default_factory=dict)
    total: float = 0.0
    length: int = 0
    ended: bool = False

    def steps(self) -> list[Beam]:
        """Return the beams that end with each token, in order."""
        found, beam = list[Beam](), self
        while beam.parent is not None:
            found.append(beam)
            beam = beam.parent
        return found[::-1]

    def score(self, prompt: int, length_penalty: float) -> float:
        """Return the score. The end-of-sequence token does not count for the length."""
        length = prompt + self.length - self.ended
        return self.total / max(length, 1) ** length_penalty


def check_beam_options(params: SamplingParams, most_logprobs: int) -> None:
    """Check the options of a request.

    Raises:
        APIError: 400, there are too many beams, or an option has no effect on beam search.
    """
    if 2 * params.n > most_logprobs:
        raise APIError(
            f"{params.n} beams need {2 * params.n} log-probabilities for each token, and the "
            f"engine returns at most {most_logprobs} (max_logprobs): request fewer beams",
            param="n",
        )
    default = SamplingParams()
    for name in SamplingParams.model_fields:
        if name not in _FOLLOWED and getattr(params, name) != getattr(default, name):
            raise APIError(f"{name} has no effect on beam search: omit it", param=name)


async def beam_search(
    generate: Generate,
    decode: Callable[[list[int]], str],
    prompt: CheckedPrompt,
    params: SamplingParams,
    label: str,
    *,
    eos: frozenset[int],
    length_penalty: float,
) -> RequestOutput:
    """Return the `n` best completions of a prompt, best first.

    Args:
        generate: the engine's function for the next token of a beam.
        decode: returns the text of tokens.
        params: see `check_beam_options`; `max_tokens` is the number of steps.
        eos: end-of-sequence tokens.
    """
    width, most = params.n, params.max_tokens or 0
    step = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * width, ignore_eos=True)
    metrics: RequestMetrics | None = None
    count = 0

    async def extended(beam: Beam, name: str) -> list[Beam]:
        nonlocal metrics, count
        tokens = [*prompt.token_ids, *(one.token for one in beam.steps())]
        own = replace(prompt, token_ids=tokens, max_tokens=1)
        async with aclosing(generate(own, step, name)) as outputs:
            async for output in outputs:
                for out in output.outputs:
                    if out.finish_reason in ("abort", "error"):
                        raise APIError(output.error or "the engine aborted a beam", status=503)
                    if out.logprobs:
                        metrics = metrics or output.metrics
                        count += 1
                        return [
                            Beam(
                                beam,
                                token,
                                out.logprobs[0],
                                beam.total + found.logprob,
                                beam.length + 1,
                                token in eos and not params.ignore_eos,
                            )
                            for token, found in out.logprobs[0].items()
                        ]
        raise APIError("the engine ended a beam without a token", status=503)

    def best(beams: list[Beam]) -> list[Beam]:
        prompt_length = len(prompt.token_ids)
        ranked = sorted(beams, key=lambda one: -one.score(prompt_length, length_penalty))
        return ranked[:width]

    beams, complete = [Beam()], list[Beam]()
    for number in range(most):
        jobs = (extended(one, f"{label}-{number}-{at}") for at, one in enumerate(beams))
        new = [beam for found in await asyncio.gather(*jobs) for beam in found]
        complete += [beam for beam in new if beam.ended]
        beams = best([beam for beam in new if not beam.ended])
        if not beams:
            break
    before = prompt.token_ids[-_BEFORE:]
    start = len(decode(before))
    outputs = []
    for index, beam in enumerate(best([*complete, *beams])):
        steps = beam.steps()
        tokens = [one.token for one in steps]
        shown = tokens[:-1] if beam.ended else tokens
        wanted = params.logprobs
        outputs.append(
            CompletionOutput(
                index,
                decode([*before, *shown])[start:],
                tokens,
                None if wanted is None else [_first(one, wanted) for one in steps],
                beam.total,
                "stop" if beam.ended else "length",
            )
        )
    assert metrics is not None, "a beam search has at least one step"
    metrics.num_generated_tokens = count
    return RequestOutput(label, prompt.token_ids, outputs, True, metrics, delta=True)


def _first(beam: Beam, count: int) -> PositionLogprobs:
    """Return the entries of the last token and of the `count` most probable tokens."""
    ranked = sorted(beam.position.items(), key=lambda item: -item[1].logprob)[:count]
    return {beam.token: beam.position[beam.token], **dict(ranked)}
