"""Rewards of rules: 1 for a correct completion, 0 for a wrong one, None without an answer; some
rules have values between, and penalties are below 0.

Each rule is a reward function. Its further parameters are its settings in a run file, as in
`reward_functions: [{regex: {pattern: "^yes"}}]`. `field` is the field of a row that contains the
correct answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

from pydantic import AfterValidator, Field

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_NAMED = re.compile(r"(?:the answer is|answer\s*[:=])\s*(.+)", re.IGNORECASE)
_THINKING = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
# Maximum number of digits of an answer; parsing longer numbers is slow.
_DIGITS = 200


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"no regular expression ({error})") from None
    return pattern


_Seconds = Annotated[float, Field(gt=0, le=86_400)]
Pattern = Annotated[str, AfterValidator(_compiles)]


def exact(
    completions: Sequence[Any],
    *,
    field: str = "answer",
    ignore_case: bool = False,
    **fields: object,
) -> list[float | None]:
    """Return whether a completion equals the answer, without surrounding spaces."""

    def right(text: str, answer: str) -> bool:
        pair = text.strip(), answer.strip()
        return pair[0].casefold() == pair[1].casefold() if ignore_case else pair[0] == pair[1]

    return _each(right, completions, fields, field)


def _number(
    completions: Sequence[Any], *, field: str = "answer", tolerance: float = 0.0, **fields: object
) -> list[float | None]:
    """Return whether the last number of a completion equals the last number of the answer.

    Args:
        tolerance: maximum relative difference.
    """

    def right(text: str, answer: str) -> bool:
        predicted_number, expected_number = last_number(text), last_number(answer)
        if predicted_number is None or expected_number is None:
            return False
        return abs(predicted_number - expected_number) <= Fraction(tolerance) * abs(expected_number)

    return _each(right, completions, fields, field)


def regex(completions: Sequence[Any], *, pattern: Pattern, **fields: object) -> list[float | None]:
    """Return whether a pattern of Python's `re` matches somewhere in a completion; `.` matches any
    character.

    The pattern is trusted: a pattern with unbounded backtracking blocks the run.
    """
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.search(text_of(one)) is not None) for one in completions]


def format_rule(
    completions: Sequence[Any], *, pattern: Pattern = _THINKING, **fields: object
) -> list[float | None]:
    """Return whether a whole completion has a format: `<think>…</think>` followed by
    `<answer>…</answer>`, or the format of `pattern`."""
    compiled = re.compile(pattern, re.DOTALL)
    return [float(compiled.fullmatch(text_of(one)) is not None) for one in completions]


def length_rule(
    completions: Sequence[Any],
    *,
    target: Annotated[int, Field(ge=1, le=10_000_000)],
    shortest: Annotated[int, Field(ge=0, le=10_000_000)] = 0,
    longest: Annotated[int, Field(ge=1, le=10_000_000)] | None = None,
    **fields: object,
) -> list[float | None]:
    """Return how near the length of a completion is to a target: 1 - |length - target| / target,
    at least 0.

    Args:
        target: number of characters with the reward 1.
        shortest: a completion with fewer characters has the reward 0.
        longest: a completion with more characters has the reward 0; None: no limit.
    """
    rewards: list[float | None] = []
    for completion in completions:
        length = len(text_of(completion))
        outside = length < shortest or (longest is not None and length > longest)
        rewards.append(0.0 if outside else max(0.0, 1.0 - abs(length - target) / target))
    return rewards


def math_answer(
    completions: Sequence[Any], *, field: str = "answer", **fields: object
) -> list[float | None]:
    r"""Return whether a completion ends with the answer of a mathematics problem.

    The answer is the content of the last `\boxed{…}`, otherwise of `<answer>…</answer>`, otherwise
    the text after `####` or "the answer is", otherwise the last number. Numbers, fractions and
    percentages are compared by value, other answers as text.
    """

    def right(text: str, answer: str) -> bool:
        predicted_answer, expected_answer = stated_answer(text), marked_answer(answer) or answer
        if predicted_answer is None:
            return False
        predicted_value = parse_number(predicted_answer)
        expected_value = parse_number(expected_answer)
        if predicted_value is not None and expected_value is not None:
            return predicted_value == expected_value
        return _letters(predicted_answer) == _letters(expected_answer)

    return _each(right, completions, fields, field)


def _verify_math(
    completions: Sequence[Any],
    *,
    field: str = "answer",
    seconds: _Seconds = 5.0,
    **fields: object,
) -> list[float | None]:
    """Return whether the LaTeX of a completion has the value of the answer, by `math-verify`:
    expressions, sets, intervals, matrices and units. The answer must be LaTeX.

    Args:
        seconds: time limit of a comparison, after which the reward is 0.
    """
    from ed_trainers.rewards.math_process import compare_answers

    answers = [None if answer is None else str(answer) for answer in _get_field(fields, field)]
    return compare_answers([text_of(one) for one in completions], answers, seconds)


def _run_code(
    completions: Sequence[Any],
    *,
    field: str = "tests",
    all_tests: bool = False,
    seconds: _Seconds = 5.0,
    memory_mib: Annotated[int, Field(ge=64, le=1_048_576)] = 512,
    parallel: Annotated[int, Field(ge=1, le=256)] = 4,
    **fields: object,
) -> list[float | None]:
    """Return the share of the tests of the row that the program of a completion passes, in a
    sandbox. The program is the last fenced block.

    Args:
        all_tests: 1 if all tests pass, otherwise 0.
        seconds: time limit of a test.
        memory_mib: memory of a program.
        parallel: number of programs that run at the same time.
    """
    from ed_trainers.environments.sandbox import Sandbox
    from ed_trainers.rewards.programs import score_programs

    return score_programs(
        [text_of(one) for one in completions],
        _get_field(fields, field),
        sandbox=Sandbox(seconds=seconds, memory=memory_mib * 2**20),
        parallel=parallel,
        all_tests=all_tests,
    )


def _judge(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    url: str,
    model: str,
    question: str | None = None,
    rubric: dict[str, Annotated[float, Field(gt=0, le=1e6)]] | None = None,
    lowest: float = 0.0,
    highest: float = 10.0,
    reference: str | None = None,
    api_key_variable: str | None = None,
    parameters: dict[str, Any] | None = None,
    timeout: _Seconds = 60.0,
    retries: Annotated[int, Field(ge=0, le=100)] = 3,
    parallel: Annotated[int, Field(ge=1, le=1024)] = 16,
    max_requests: Annotated[int, Field(ge=1)] | None = None,
    cache: str | None = None,
    **fields: object,
) -> list[float | None]:
    """Return the score of a judge, from 0 to 1: a model behind a server with OpenAI's interface.

    Args:
        url: the server, such as `http://localhost:8000/v1`.
        model: name of the model.
        question: template with `$prompt`, `$completion`, `$reference`, `$rubric` and `$reply`.
        rubric: criteria with their weights, each scored on its own.
        lowest: lowest score of the judge.
        highest: highest score of the judge.
        reference: field of a row with a right answer, which the judge sees.
        api_key_variable: environment variable with the key of the server; None: no key.
        parameters: further fields of a request, such as `{max_tokens: 512}`.
        timeout: seconds that a request may take.
        retries: number of repetitions of a request.
        parallel: number of requests at the same time.
        max_requests: maximum number of requests of the run.
        cache: file that keeps the answers.
    """
    from ed_trainers.rewards.judges import QUESTION, JudgeSettings, get_judge

    settings = JudgeSettings(
        url=url,
        model=model,
        question=QUESTION if question is None else question,
        rubric=tuple((rubric or {}).items()),
        lowest=lowest,
        highest=highest,
        api_key_variable=api_key_variable,
        parameters=json.dumps(parameters or {}, sort_keys=True),
        timeout=timeout,
        retries=retries,
        parallel=parallel,
        max_requests=max_requests,
        cache=cache,
    )
    answers = [None] * len(completions) if reference is None else _get_field(fields, reference)
    return get_judge(settings).score(
        [_format_prompt(prompt) for prompt in prompts],
        [text_of(one) for one in completions],
        [None if answer is None else str(answer) for answer in answers],
    )


def _penalize_length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    longest: Annotated[int, Field(ge=1, le=10_000_000)],
    margin: Annotated[int, Field(ge=1, le=10_000_000)],
    **fields: object,
) -> list[float | None]:
    """Return DAPO's penalty of long completions (arXiv:2503.14476, eq. 13): 0 up to `longest` -
    `margin` tokens, falling to -1 at `longest`.

    Args:
        longest: number of tokens with the reward -1.
        margin: number of tokens before `longest` in which the reward falls.
    """
    begin = longest - margin
    return [float(max(min((begin - len(ids)) / margin, 0.0), -1.0)) for ids in completion_ids]


def _penalize_repetition(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    size: Annotated[int, Field(ge=1, le=1000)] = 3,
    penalty: Annotated[float, Field(ge=-1e6, le=0)] = -1.0,
    **fields: object,
) -> list[float | None]:
    """Return a penalty of repeated sequences of tokens (arXiv:2502.03373): their share times
    `penalty`.

    Args:
        size: number of tokens of a sequence.
        penalty: the reward of a completion that only repeats.
    """
    rewards: list[float | None] = []
    for ids in completion_ids:
        count = len(ids) - size + 1
        distinct = len({tuple(ids[i : i + size]) for i in range(count)})
        rewards.append((1 - distinct / count) * penalty if count > distinct else 0.0)
    return rewards


#: Name in a run file -> rule.
RULES: Mapping[str, Callable[..., list[float | None]]] = {
    "exact": exact,
    "number": _number,
    "regex": regex,
    "math_answer": math_answer,
    "format": format_rule,
    "length": length_rule,
    "overlong": _penalize_length,
    "repetition": _penalize_repetition,
    "math_verify": _verify_math,
    "code": _run_code,
    "judge": _judge,
}


def text_of(completion: object) -> str:
    """Return the text of a completion; the last message of a conversation.

    Raises:
        TypeError: the completion consists of token ids.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        return str(completion[-1].get("content", ""))
    raise TypeError(
        "this rule reads text, but the completions are token ids: pass a processing_class to the "
        "trainer, and prompts that are texts or chats"
    )


def _format_prompt(prompt: object) -> str:
    """Return the text of a prompt; the messages of a conversation with their roles."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return "\n\n".join(f"{one.get('role')}: {one.get('content', '')}" for one in prompt)
    return text_of(prompt)


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly; commas between digits are ignored."""
    return next((n for n in map(_fraction, reversed(_NUMBER.findall(text))) if n is not None), None)


def stated_answer(text: str) -> str | None:
    """Return the part of a text that contains its answer; see `math_answer`."""
    marked = marked_answer(text)
    if marked is not None:
        return marked
    if parse_number(text) is not None:
        return text.strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def marked_answer(text: str) -> str | None:
    """Return the part of a text that is marked as its answer."""
    boxed = _extract_boxed_answer(text)
    if boxed is not None:
        return boxed
    for opening, closing in (("<answer>", "</answer>"), ("####", "\n")):
        if opening in text:
            return text.rsplit(opening, 1)[1].split(closing, 1)[0].strip()
    named = _NAMED.findall(text)
    return named[-1].strip().rstrip(".") if named else None


def parse_number(text: str) -> Fraction | None:
    r"""Return the number of a text such as `3`, `1,200`, `1/3`, `\frac{1}{3}`, `50\%`, `$2.50`."""
    clean_text = _LATEX_FRACTION.sub(r"\1/\2", text)
    clean_text = re.sub(r"\\[,;!]|\\left|\\right|[$\s{}]|\\text|\\\$", "", clean_text).rstrip(".")
    percent = clean_text.endswith("%")
    clean_text = clean_text.removesuffix("%").removesuffix("\\")
    parts = clean_text.split("/")
    fractions = [_fraction(part) if _NUMBER.fullmatch(part) else None for part in parts]
    numbers = [number for number in fractions if number is not None]
    if len(parts) > 2 or len(numbers) < len(parts) or (len(parts) == 2 and numbers[1] == 0):
        return None
    value = numbers[0] if len(parts) == 1 else numbers[0] / numbers[1]
    return value / 100 if percent else value


def _extract_boxed_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`, including nested braces."""
    begin = text.rfind("\\boxed{")
    if begin < 0:
        return None
    begin += len("\\boxed{")
    depth = 1
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if not depth:
            return text[begin:i].strip()
    return None


def _fraction(text: str) -> Fraction | None:
    digits = text.replace(",", "")
    if len(digits) > _DIGITS:
        return None
    return Fraction(digits)


def _letters(text: str) -> str:
    clean_text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\\left|\\right|\\[,;!]|[\s$]", "", clean_text).rstrip(".").casefold()


def _each(
    right: Callable[[str, str], bool],
    completions: Sequence[Any],
    fields: Mapping[str, Any],
    field: str,
) -> list[float | None]:
    return [
        None if answer is None else float(right(text_of(one), str(answer)))
        for one, answer in zip(completions, _get_field(fields, field), strict=True)
    ]


def _get_field(fields: Mapping[str, Any], field: str) -> Sequence[Any]:
    """Return the values of a field of the rows.

    Raises:
        KeyError: the rows do not have the field.
    """
    if field not in fields:
        raise KeyError(
            f"the rows of data have no field {field!r}: name it in additional_fields of the "
            "inform, or set field"
        )
    return fields[field]
