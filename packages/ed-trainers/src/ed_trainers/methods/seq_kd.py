"""Sequence-level distillation: a student learns the answers that a teacher gives to prompts.

Kim and Rush, arXiv:1606.07947: the cross-entropy of the teacher's likeliest answer, here the greedy
one. Prompts come from a loader as ids; the teacher answers when a batch is made, and each prompt
once.

Legend: b prompts, s positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import numpy as np
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel

from ed_trainers.batches import HostBatch
from ed_trainers.endings import until_end
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.methods.sft import SFTTrainer
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.distillation import SeqKDArguments


@runtime_checkable
class PromptBatch(Protocol):
    """A batch of prompts, as ed-data's `build_prompts` gives them."""

    @property
    def input_ids(self) -> Sequence[Sequence[int]]:
        """Token ids of each prompt."""
        ...


class SeqKDTrainer(SFTTrainer):
    """Learns the answers of the model `"teacher"`, which stands beside the steps, not in them.

    `arguments` are `SeqKDArguments`; loaders give prompts. The teacher has `generate`.
    """

    arguments_class: ClassVar[type[TrainingArguments]] = SeqKDArguments
    frozen_models: ClassVar[tuple[str, ...]] = ("teacher",)

    def frozen_of(self, models: Mapping[str, LanguageModel]) -> Mapping[str, LanguageModel]:
        """Keep the teacher for the host; the steps get no frozen model."""
        self._teacher = self.on_mesh("teacher", super().frozen_of(models)["teacher"])
        self._answers: dict[tuple[int, ...], list[int]] = {}
        return {}

    @property
    def whole_batches(self) -> bool:
        """All processes ask the teacher together."""
        return True

    def prepare(self, batch: HostBatch) -> dict[str, np.ndarray]:
        """Let the teacher answer, and make rows [b, s] of prompts and answers.

        Raises:
            ConfigError: the batch holds no prompts.
        """
        if not isinstance(batch, PromptBatch):
            raise ConfigError(
                f"seq_kd takes batches of prompts, not {type(batch).__name__}: give a loader of "
                "ed_data.build_prompts"
            )
        arguments = self._options()
        prompts = [tuple(ids)[-arguments.max_prompt_length :] for ids in batch.input_ids]
        self._answer([p for p in dict.fromkeys(prompts) if p not in self._answers])
        width = arguments.max_prompt_length + arguments.max_completion_length
        rows = {
            "input_ids": np.zeros((len(prompts), width), np.int32),
            "segment_ids": np.zeros((len(prompts), width), np.int32),
            "labels": np.full((len(prompts), width), -100, np.int32),
        }
        for row, prompt in enumerate(prompts):
            answer = self._answers[prompt]
            end = len(prompt) + len(answer)
            rows["input_ids"][row, :end] = [*prompt, *answer]
            rows["segment_ids"][row, :end] = 1
            rows["labels"][row, len(prompt) : end] = answer
        return next_token_batch(rows)

    def _options(self) -> SeqKDArguments:
        assert isinstance(self.arguments, SeqKDArguments)
        return self.arguments

    def _answer(self, prompts: list[tuple[int, ...]]) -> None:
        """Ask the teacher, in rows of one width, so that one program is compiled."""
        if not prompts:
            return
        arguments = self._options()
        size = arguments.total_batch_size
        for start in range(0, len(prompts), size):
            asked = prompts[start : start + size]
            filled = [*asked, *[asked[0]] * (size - len(asked))]
            width = arguments.max_prompt_length
            ids = np.zeros((size, width), np.int32)
            mask = np.zeros((size, width), np.int32)
            for row, prompt in enumerate(filled):
                ids[row, width - len(prompt) :] = prompt
                mask[row, width - len(prompt) :] = 1
            output = cast(Any, self._teacher).generate(
                ids, attention_mask=mask, max_new_tokens=arguments.max_completion_length
            )
            for prompt, sequence in zip(asked, output.sequences.tolist(), strict=False):
                # the end is to be learned as well
                self._answers[prompt] = until_end(sequence[width:], self._teacher)
