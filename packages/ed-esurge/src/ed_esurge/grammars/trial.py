"""Trial of a grammar in a process that may crash: compile it and run its matcher."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING

from ed_esurge.grammars.build import GrammarSource, build_matcher, grammar_text
from ed_esurge.grammars.limits import GrammarError
from ed_esurge.grammars.messages import TOO_COMPLEX, UNSATISFIABLE, locate_failure, translate_error

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


# Number of trial outputs, and number of tokens in each.
WALKS, STEPS = 2, 32
# Limits in seconds of processor time: for one step, and for the search for the failing part of a
# schema.
STEP_SECONDS, LOCATE_SECONDS = 0.25, 0.5


class SlowStepError(GrammarError):
    """A step exceeded its time limit, which a busy machine can also cause."""


def compile_grammar(tokenizer: LLTokenizer, source: GrammarSource) -> tuple[str, LLMatcher]:
    """Return a grammar in llguidance's format, and its matcher.

    Args:
        tokenizer: result of `ed_esurge.grammars.build.make_tokenizer`.

    Raises:
        GrammarError: the grammar is invalid, or exceeds a limit.
    """
    try:
        text = grammar_text(source)
    except GrammarError:
        raise
    except ValueError as error:
        kind = source[0].replace("schema_or_calls", "json_schema")
        raise GrammarError(translate_error(kind, str(error))) from None
    matcher = build_matcher(tokenizer, text)
    if matcher.is_error():
        raise GrammarError(_refusal(tokenizer, source, matcher.get_error()))
    return text, matcher


def try_matcher(matcher: LLMatcher) -> None:
    """Check that a matcher does not exceed its limits for random tokens.

    Raises:
        SlowStepError: a step exceeds the time limit.
        GrammarError: the matcher exceeds another limit, or allows no text.
    """
    for walk in range(WALKS):
        _walk(matcher.deep_copy(), random.Random(walk))


def _walk(matcher: LLMatcher, rng: random.Random) -> None:
    """Generate random allowed tokens in the same way as the engine."""
    for step in range(STEPS):
        began = time.process_time()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            ended = "NoExtension" in matcher.get_error()
            if ended and step:
                return  # a dead end of this tokenizer, which the engine reports
            raise GrammarError(UNSATISFIABLE if ended else TOO_COMPLEX)
        token = _choose(mask, rng)
        is_accepted = token is not None and matcher.consume_token(token)
        if time.process_time() - began > STEP_SECONDS:
            raise SlowStepError(TOO_COMPLEX)
        if not is_accepted and matcher.is_error() and "NoExtension" not in matcher.get_error():
            raise GrammarError(TOO_COMPLEX)
        if not is_accepted or matcher.is_stopped():
            return


def _choose(mask: bytes, rng: random.Random) -> int | None:
    """Return a token with a set bit; None without set bits."""
    start = rng.randrange(len(mask))
    turned = mask[start:] + mask[:start]
    remaining_bytes = turned.lstrip(b"\0")
    if not remaining_bytes:
        return None
    place = (start + len(turned) - len(remaining_bytes)) % len(mask)
    bits = [bit for bit in range(8) if mask[place] >> bit & 1]
    return place * 8 + rng.choice(bits)


def _refusal(tokenizer: LLTokenizer, source: GrammarSource, said: str) -> str:
    """Return the message for an invalid grammar; for a schema, with a JSON path."""
    kind, content = source
    if kind == "schema_or_calls":
        kind, content = "json_schema", content[0]
    if kind != "json_schema":
        return translate_error(kind, said)
    deadline = time.process_time() + LOCATE_SECONDS
    reason = said

    def fails(part: object) -> bool:
        nonlocal reason
        if not isinstance(part, dict) or time.process_time() > deadline:
            return False
        try:
            matcher = build_matcher(tokenizer, grammar_text((kind, json.dumps(part))))
        except ValueError:
            return False
        if matcher.is_error():
            reason = matcher.get_error()
        return bool(matcher.is_error())

    path = locate_failure(json.loads(content), fails)
    return f"at {path}: {translate_error(kind, reason)}"
