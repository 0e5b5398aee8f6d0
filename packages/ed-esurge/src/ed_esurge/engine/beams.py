"""Beam search with vLLM's definition, inside an engine.

Each step extends every beam by its `2 * n` most probable tokens and keeps the `n` best beams. A
beam that ends with an end-of-sequence token is complete. The score of a beam is the sum of its
log-probabilities, divided by its length including the prompt to the power of `length_penalty`.

A beam is a sequence of the scheduler. The first kept extension continues the sequence, and each
further one forks it: both then share the full pages. A sequence without a kept extension ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ed_esurge.core.commands import Add
from ed_esurge.core.request import Request
from ed_esurge.core.scheduler import Scheduler
from ed_esurge.engine.deltas import position_logprobs
from ed_esurge.outputs import CompletionOutput
from ed_esurge.runner.result import TokenScores
from ed_esurge.sampling import SamplingParams
from ed_esurge.tokenizer import Tokenizer

# Number of tokens of the prompt that are decoded with a completion, for white space at its start.
_BEFORE = 8


@dataclass(frozen=True, eq=False, slots=True)
class Beam:
    """A completion in progress or complete: a token after the tokens of another beam.

    Beams of a common origin share its tokens, so a step creates a small object for each candidate.

    Attributes:
        parent: the beam without the last token; None for the empty beam.
        token: the last token; -1 in the empty beam.
        scores: log-probabilities of the candidates for the last token.
        total: sum of the log-probabilities.
        length: number of tokens.
        ended: whether the last token ends the sequence.
    """

    parent: Beam | None = None
    token: int = -1
    scores: TokenScores | None = None
    total: float = 0.0
    length: int = 0
    ended: bool = False

    def steps(self) -> list[Beam]:
        """Return the beams that end with each token, in order."""
        beams, beam = list[Beam](), self
        while beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]


class BeamSearch:
    """The beams of one request.

    Args:
        add: the command that queued the request.
        first: the sequence of the empty beam.
        tokenizer: tokenizer of the outputs; None produces no text.
    """

    def __init__(self, add: Add, first: Request, tokenizer: Tokenizer | None) -> None:
        assert isinstance(add.params, SamplingParams), "pooled requests have no beams"
        self._add, self._params = add, add.params
        self._tokenizer = tokenizer if add.params.detokenize else None
        self.sequences = {first.request_id: first}
        """The sequences of the beams in progress, by id."""
        self._beams = {first.request_id: Beam()}
        self._found: dict[str, TokenScores] = {}  # by the id of a sequence
        self._complete: list[Beam] = []
        self._names = 1
        self.num_tokens = 0
        """Number of computed tokens over all beams."""

    @property
    def num_candidates(self) -> int:
        """Number of most probable tokens by which a beam is extended."""
        return 2 * self._params.n

    def take(self, sequence: str, scores: TokenScores) -> None:
        """Store the candidates for the next token of a sequence."""
        self.num_tokens += sequence not in self._found
        self._found[sequence] = scores

    def extend(self, scheduler: Scheduler) -> bool:
        """Extend the beams if the candidates of all sequences are known.

        Returns:
            whether the search has ended. The caller then reads `outputs` and ends the sequences.
        """
        if len(self._found) < len(self._beams):
            return False
        new = [
            (name, beam)
            for name, origin in self._beams.items()
            for beam in self._extensions(origin, self._found[name])
        ]
        self._found.clear()
        self._complete += [beam for _, beam in new if beam.ended]
        going = [(name, beam) for name, beam in new if not beam.ended]
        best_beams = sorted(going, key=lambda one: -self._score(one[1]))[: self._params.n]
        if not best_beams or best_beams[0][1].length == self._add.max_tokens:
            self._complete += [beam for _, beam in best_beams]
            return True
        origins = {name for name, _ in best_beams}
        for name in self._beams.keys() - origins:
            scheduler.finish(name, "abort")
            del self.sequences[name]
        continued: dict[str, Beam] = {}
        self._beams = {}
        for name, beam in best_beams:
            if name not in continued:
                continued[name] = beam
                self._beams[name] = beam
                continue
            fork = self.sequences[name].fork(f"{self._add.request_id}#{self._names}")
            self._names += 1
            fork.output.append(beam.token)
            scheduler.fork(self.sequences[name], fork)
            self.sequences[fork.request_id] = fork
            self._beams[fork.request_id] = beam
        for name, beam in continued.items():  # after the forks, which copy the tokens before
            self.sequences[name].output.append(beam.token)
        return False

    def outputs(self) -> list[CompletionOutput]:
        """Return the best completions, best first, after the end of the search."""
        best = sorted(self._complete, key=lambda beam: -self._score(beam))[: self._params.n]
        return [self._output(index, beam) for index, beam in enumerate(best)]

    def _extensions(self, origin: Beam, scores: TokenScores) -> Iterator[Beam]:
        candidates = {scores.token: scores.logprob} | dict(scores.top)
        for token, logprob in candidates.items():
            ended = token in self._add.eos_token_ids
            total, length = origin.total + logprob, origin.length + 1
            yield Beam(origin, token, scores, total, length, ended)

    def _score(self, beam: Beam) -> float:
        """Return the score. The end-of-sequence token does not count for the length."""
        length = len(self._add.token_ids) + beam.length - beam.ended
        return beam.total / max(length, 1) ** self._params.length_penalty

    def _output(self, index: int, beam: Beam) -> CompletionOutput:
        steps, num_logprobs = beam.steps(), self._params.logprobs
        tokens = [one.token for one in steps]
        out = CompletionOutput(index, self._text(tokens[:-1] if beam.ended else tokens), tokens)
        out.cumulative_logprob = beam.total
        out.finish_reason = "stop" if beam.ended else "length"
        if num_logprobs is not None:
            out.logprobs = []
            for one in steps:
                assert one.scores is not None, "only the empty beam has no scores"
                entries = {one.scores.token: one.scores.logprob} | dict(one.scores.top)
                rank = 1 + [*entries].index(one.token)
                top = one.scores.top[:num_logprobs]
                token_scores = TokenScores(one.token, entries[one.token], rank, top)
                out.logprobs.append(position_logprobs(token_scores, self._tokenizer))
        return out

    def _text(self, tokens: list[int]) -> str:
        prompt_tail = self._add.token_ids[-_BEFORE:]
        return self._decode([*prompt_tail, *tokens])[len(self._decode(prompt_tail)) :]

    def _decode(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        special = self._params.skip_special_tokens
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )
        )


def params_of_step(params: SamplingParams) -> SamplingParams:
    """Return the sampling options of the sequences of a beam search."""
    return SamplingParams(
        temperature=0,
        max_tokens=None,
        logprobs=2 * params.n,
        ignore_eos=True,
        use_beam_search=True,
        detokenize=False,
    )
