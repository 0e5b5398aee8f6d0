"""The longer prompts of `sdpo`: the prompt of a completion with a successful one, or with feedback.

Legend: n completions, t positions of a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from ed_infra.errors import ConfigError

from ed_trainers.contract import Prepared
from ed_trainers.online.completions import Completions, PromptContent
from ed_trainers.options.groups import SDPOArguments

#: The field of the data with feedback.
_FIELD = "privileged_context"
# Rows grow by this number of tokens, so that few shapes are compiled.
_LONGER = 64
_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Reprompts:
    """The teacher's prompts.

    Attributes:
        completions: the completions after these prompts.
        distilled: whether each prompt differs from the learner's, bool [n].
        figures: for the log, with TRL's names.
    """

    completions: Completions
    distilled: np.ndarray
    figures: Mapping[str, float]

    @property
    def prompt_ids(self) -> list[list[int]]:
        """The tokens of the prompts."""
        return self.completions.prompt_ids

    def rows(self) -> Prepared:
        """Return one row for each completion, int32 [n, t]; see `Completions.rows`."""
        pairs = zip(self.prompt_ids, self.completions.completion_ids, strict=True)
        longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
        return self.completions.rows(-(-longest // _LONGER) * _LONGER)


def build_reprompts(
    options: SDPOArguments,
    completions: Completions,
    rewards: np.ndarray,
    tokenizer: object | None,
    positions: int | None,
) -> Reprompts:
    """Return the teacher's prompts of completions.

    Args:
        options: the templates, and the conditions of a successful completion.
        completions: the completions of groups, ordered by prompt.
        rewards: reward of each completion, [n].
        tokenizer: encodes the prompts if the batch of prompts cannot.
        positions: maximum length of the model; None = unknown.

    Raises:
        ConfigError: a prompt is neither a text nor a chat that ends with a question.
    """
    count, size = len(completions), options.num_return_sequences
    good = rewards >= options.success_reward_threshold
    feedback = completions.fields.get(_FIELD, [None] * count)
    feedback_flags = [isinstance(text, str) and bool(text.strip()) for text in feedback]
    if options.include_environment_feedback and _FIELD not in completions.fields:
        raise ConfigError(
            f"include_environment_feedback reads the field {_FIELD!r} of the data, and the rows do "
            f"not have it: write additional_fields: [{_FIELD}] in the inform"
        )
    limit = options.max_reprompt_len
    if positions is not None:
        limit = min(limit, max(positions - options.max_completion_length, 1))
    prompt_ids, solved, used = [], 0, 0
    distilled = np.zeros(count, bool)
    for row in range(count):
        start = row // size * size
        successful_rows = [
            candidate
            for candidate in range(start, min(start + size, count))
            if good[candidate] and not (options.skips_self_success and candidate == row)
        ]
        solution = (
            successful_rows[0] if options.use_successful_as_teacher and successful_rows else None
        )
        reads = options.include_environment_feedback and feedback_flags[row]
        reads &= solution is None or not options.environment_feedback_only_without_solution
        solved, used = solved + (solution is not None), used + reads
        if solution is None and not reads:
            prompt_ids.append(completions.prompt_ids[row])
            continue
        distilled[row] = True
        solution_text = "" if solution is None else _solution(options, completions, solution)
        feedback_text = (
            options.feedback_template.format(feedback_raw=feedback[row]) if reads else ""
        )
        prompt = _reprompt(options, completions.prompts[row], solution_text, feedback_text)
        prompt_ids.append(_encode_prompt(completions, row, prompt, tokenizer)[-limit:])
    groups = good.reshape(-1, size) if count % size == 0 else good[None]
    figures = {
        "success_group_fraction": groups.any(axis=1).mean(),
        "success_sample_fraction": solved / count,
        "feedback_available_fraction": np.mean(feedback_flags),
        "feedback_used_fraction": used / count,
        "reprompt_sample_fraction": distilled.mean(),
    }
    return Reprompts(
        Completions(
            prompts=completions.prompts,
            prompt_ids=prompt_ids,
            completion_ids=completions.completion_ids,
            logprobs=completions.logprobs,
            completions=completions.completions,
            ended=completions.ended,
        ),
        distilled,
        {f"self_distillation/{name}": float(value) for name, value in figures.items()},
    )


def _solution(options: SDPOArguments, completions: Completions, number: int) -> str:
    text = _text(completions.completions[number])
    if options.remove_thinking_from_demonstration:
        text = _THINKING.sub("", text).strip()
    return options.solution_template.format(successful_previous_attempt=text)


def _reprompt(
    options: SDPOArguments, prompt: PromptContent, solution: str, feedback: str
) -> PromptContent:
    text = options.reprompt_template.format(
        prompt=_text(prompt, role="user"), solution=solution, feedback=feedback
    )
    if isinstance(prompt, str):
        return text
    messages: Any = prompt
    return [*messages[:-1], {"role": "user", "content": text}]


def _text(content: PromptContent, role: str = "assistant") -> str:
    """Return a text, or the text of the last message of a chat."""
    if isinstance(content, str):
        return content
    last = content[-1] if content else None
    if not isinstance(last, dict) or last.get("role") != role:
        raise ConfigError(
            f"sdpo writes prompts for the teacher, and {content!r:.60} is neither a text nor a "
            f"chat that ends with a message of the role {role}: use texts or chats, and a tokenizer"
        )
    said = last.get("content", "")
    if isinstance(said, list):
        return " ".join(part.get("text", "") for part in said if part.get("type") == "text")
    return str(said)


def _encode_prompt(
    completions: Completions, row: int, prompt: PromptContent, tokenizer: Any
) -> list[int]:
    if completions.encode is not None:
        return list(completions.encode(row, prompt))
    if isinstance(prompt, str) and tokenizer is not None:
        return list(tokenizer(prompt)["input_ids"])
    raise ConfigError(
        "sdpo writes prompts for the teacher: pass a loader of ed_data.build_prompts, or a "
        "tokenizer for prompts that are texts"
    )
