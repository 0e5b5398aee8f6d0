"""The teacher's prompts of `sdpo` and `sdft`, with a completion, feedback or a demonstration.

Legend: n completions, t positions of a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ed_infra.errors import ConfigError

from ed_trainers.contract import Prepared
from ed_trainers.online.completions import Completions, PromptContent
from ed_trainers.options.distillation import SDFTArguments
from ed_trainers.options.groups import SDPOArguments

#: The field of the data with feedback or a demonstration.
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
        prompt_ids.append(encode_prompt(completions.encode, row, prompt, tokenizer)[-limit:])
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


def build_demonstrations(
    options: SDFTArguments, completions: Completions, tokenizer: object | None
) -> Reprompts:
    """Return the teacher's prompts with the demonstrations of the rows.

    Args:
        options: the template and the length of the prompts.
        completions: the completions, with the field `privileged_context`.
        tokenizer: encodes the prompts if the batch of prompts cannot.

    Raises:
        ConfigError: a row has no demonstration, or its prompt is neither a text nor a chat.
    """
    contexts = completions.fields.get(_FIELD, [None] * len(completions))
    prompt_ids = []
    for row, (prompt, context) in enumerate(zip(completions.prompts, contexts, strict=True)):
        teacher_prompt = demonstrate(options, prompt, context)
        ids = encode_prompt(completions.encode, row, teacher_prompt, tokenizer)
        prompt_ids.append(ids[-options.max_prompt_length :])
    longer = replace(completions, prompt_ids=prompt_ids, images={}, given=[], experts=[])
    return Reprompts(longer, np.ones(len(completions), bool), {})


def demonstrate(options: SDFTArguments, prompt: PromptContent, context: object) -> PromptContent:
    """Return the teacher's prompt with the demonstration of its row.

    Args:
        options: the template.
        prompt: the learner's prompt, a text or a chat.
        context: the demonstration, a text or a chat.

    Raises:
        ConfigError: there is no demonstration.
    """
    if context is None or context == "":
        raise ConfigError(
            f"sdft reads a demonstration from the field {_FIELD!r} of each row, and a row does not "
            f"have it: add the field to the rows, and additional_fields: [{_FIELD}] to the inform"
        )
    if isinstance(context, list):
        context = "\n".join(text for message in context if (text := _read_text(message)))
    text = options.teacher_prompt_template.format(
        prompt=_text(prompt, role="user"), privileged_context=context
    )
    return _replace_question(prompt, text)


def _replace_question(prompt: PromptContent, text: str) -> PromptContent:
    """Return a text, or a chat with a text as its last question."""
    if isinstance(prompt, str):
        return text
    messages: Any = prompt
    return [*messages[:-1], {"role": "user", "content": text}]


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
    return _replace_question(prompt, text)


def _text(content: PromptContent, role: str = "assistant") -> str:
    """Return a text, or the text of the last message of a chat."""
    if isinstance(content, str):
        return content
    last = content[-1] if content else None
    if not isinstance(last, dict) or last.get("role") != role:
        raise ConfigError(
            f"the method writes the teacher's prompts, and {content!r:.60} is neither a text nor a "
            f"chat that ends with a message of the role {role}: use texts or chats, and a tokenizer"
        )
    return _read_text(last)


def _read_text(message: object) -> str:
    """Return the text of a message of a chat."""
    said = message.get("content", "") if isinstance(message, Mapping) else message
    if isinstance(said, list):
        return " ".join(part.get("text", "") for part in said if part.get("type") == "text")
    return str(said)


def encode_prompt(
    encode: Callable[[int, PromptContent], list[int]] | None,
    row: int,
    prompt: PromptContent,
    tokenizer: Any,
) -> list[int]:
    """Return the tokens of another prompt of a row.

    Args:
        encode: encodes a prompt for a row of a batch; None: the batch cannot encode prompts.
        row: number of the row.
        prompt: a text or a chat.
        tokenizer: encodes a text if the batch cannot.

    Raises:
        ConfigError: neither can encode the prompt.
    """
    if encode is not None:
        return list(encode(row, prompt))
    if isinstance(prompt, str) and tokenizer is not None:
        return list(tokenizer(prompt)["input_ids"])
    raise ConfigError(
        "the method writes the teacher's prompts: pass a loader of ed_data.build_prompts, or a "
        "tokenizer for prompts that are texts"
    )
