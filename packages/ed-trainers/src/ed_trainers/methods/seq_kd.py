"""Sequence-level distillation: the student is trained on the answers of a teacher to prompts.

Kim and Rush, arXiv:1606.07947: the cross-entropy of the teacher's most probable answer, here the
greedy answer. A loader yields prompts as token ids. The teacher answers each prompt once, when the
first batch with the prompt is prepared.

Legend: b prompts, s positions.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Method, MethodRun, Prepared
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.methods.sft import loss
from ed_trainers.online.completions import PromptRows
from ed_trainers.options.distillation import SeqKDArguments
from ed_trainers.rollout import until_end
from ed_trainers.trainer import Trainer


class TeacherAnswers:
    """The answers of the frozen model `"teacher"`, which no compiled step reads.

    Args:
        run: the run of the method.
        models: the frozen models by role; loses the teacher.
    """

    def __init__(self, run: MethodRun[SeqKDArguments], models: dict[str, LanguageModel]):
        self._arguments = run.arguments
        self._teacher = run.placement.frozen("teacher", models.pop("teacher"))
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def of(self, prompts: list[tuple[int, ...]]) -> list[list[int]]:
        """Return the answer to each prompt, the end token included."""
        self._generate([p for p in dict.fromkeys(prompts) if p not in self._answers])
        return [self._answers[prompt] for prompt in prompts]

    def _generate(self, prompts: list[tuple[int, ...]]) -> None:
        # Rows of one width and batches of one size: one compiled program.
        arguments = self._arguments
        size, width = arguments.sequences_per_step, arguments.max_prompt_length
        for start in range(0, len(prompts), size):
            prompt_batch = prompts[start : start + size]
            filled = [*prompt_batch, *[prompt_batch[0]] * (size - len(prompt_batch))]
            ids = np.zeros((size, width), np.int32)
            mask = np.zeros((size, width), np.int32)
            for row, prompt in enumerate(filled):
                ids[row, width - len(prompt) :] = prompt
                mask[row, width - len(prompt) :] = 1
            output = cast(Any, self._teacher).generate(
                ids, attention_mask=mask, max_new_tokens=arguments.max_completion_length
            )
            for prompt, sequence in zip(prompt_batch, output.sequences.tolist(), strict=False):
                self._answers[prompt] = until_end(sequence[width:], self._teacher)


class SeqKDRun(MethodRun[SeqKDArguments]):
    """A run of `seq_kd`."""

    answers: TeacherAnswers

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        self.answers = TeacherAnswers(self, models)


def prepare(run: SeqKDRun, batch: HostBatch) -> Prepared:
    """Return rows [b, s] of prompts and the teacher's answers.

    Raises:
        ConfigError: the batch holds no prompts.
    """
    if not isinstance(batch, PromptRows):
        raise ConfigError(
            f"seq_kd requires batches of prompts, not {type(batch).__name__}: pass a loader of "
            "ed_data.build_prompts"
        )
    arguments = run.arguments
    prompts = [tuple(ids)[-arguments.max_prompt_length :] for ids in batch.input_ids]
    answers = run.answers.of(prompts)
    width = arguments.max_prompt_length + arguments.max_completion_length
    rows = {
        "input_ids": np.zeros((len(prompts), width), np.int32),
        "segment_ids": np.zeros((len(prompts), width), np.int32),
        "labels": np.full((len(prompts), width), -100, np.int32),
    }
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        rows["input_ids"][row, :end] = [*prompt, *answer]
        rows["segment_ids"][row, :end] = 1
        rows["labels"][row, len(prompt) : end] = answer
    return next_token_batch(rows)


SEQ_KD = Method[SeqKDRun](
    run=SeqKDRun,
    prepare=prepare,
    loss=loss,
    whole_batches=True,  # all processes run the teacher together
)


class SeqKDTrainer(Trainer):
    """Trains a model on the answers of the model `"teacher"`; `arguments` are `SeqKDArguments`.

    Loaders yield prompts. The teacher has `generate`.
    """

    entry = METHODS["seq_kd"]
    record = SEQ_KD
