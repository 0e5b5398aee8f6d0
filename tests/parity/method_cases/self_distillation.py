"""Compare `sdpo` and `sdft` with TRL's trainers: the teacher's prompts, distillation, policy loss.

The completions are fixed, so nothing is sampled. The learner of the loss differs from the model
that sampled by some noise.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.parity.method_cases import groups, harness

_REWARDS = [0.2, 1.0, 0.4, 0.1, 0.3, 0.6]
_OPTIONS: dict[str, Any] = {
    "success_reward_threshold": 0.5,
    "reprompt_template": "{prompt}{solution}{feedback} t9",
    "solution_template": " t7 {successful_previous_attempt}",
    "feedback_template": " t8 {feedback_raw}",
    "include_environment_feedback": True,
}
#: Of each completion; the last one has neither feedback nor another successful completion.
_FEEDBACK = ["t5 t6", "", None, "t11", "t12 t13 t14", " "]
#: Demonstrations of `sdft`, of each completion, and the template of its prompts.
_DEMONSTRATIONS = ["t5 t6", "t5 t6", "t5 t6", "t11", "t11", "t12 t13 t14"]
_TEMPLATE = "t9 {prompt} {privileged_context} t7"


def tokenizer() -> Any:
    """Return a tokenizer of the words `t3`, `t4`, and so on."""
    from tokenizers import pre_tokenizers

    made = harness.tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def completions() -> Any:
    """Return the completions with their texts, and prompts that are texts."""
    made = groups.completions()
    words = tokenizer()
    prompts = [" ".join(f"t{i}" for i in ids) for ids in made.prompt_ids]
    texts = [words.decode(ids, skip_special_tokens=True) for ids in made.completion_ids]
    return replace(
        made, prompts=prompts, completions=texts, fields={"privileged_context": _FEEDBACK}
    )


def rewards(completion_ids: list[list[int]], **fields: Any) -> list[float]:
    """Return the fixed rewards."""
    return list(_REWARDS)


def ours(options: dict[str, Any]) -> harness.Outcome:
    """Compute rows with the first model, and the loss with the second."""
    from ed_trainers import arguments_class, trainer_class

    arguments: Any = arguments_class("sdpo")
    arguments = arguments(
        total_batch_size=6,
        num_iterations=2,
        max_prompt_length=harness.LENGTH - 8,
        max_completion_length=8,
        num_return_sequences=groups.GROUP,
        importance_sampling_correction="none",
        **_OPTIONS,
        **options,
    )
    made: Any = trainer_class("sdpo")
    first, later = (
        made(
            arguments,
            harness.our_model(path),
            processing_class=tokenizer(),
            reward_functions=[rewards],
        )
        for path in (harness.folder(0), groups.moved())
    )
    rows, figures = first.method.phase.get_rows(completions(), first.weights(), 0)
    # The teacher of the loss is the model that sampled.
    if "teacher" in later.method.frozen._graphdefs:
        later.method.frozen = first.method.frozen
    outcome = harness.our_outcome(later, rows)
    return harness.Outcome(outcome.loss, {**figures, **outcome.metrics}, outcome.gradients)


def build_trainer(kind: Any, whole: Any, model: Any, sampler: Any) -> Any:
    """Return a trainer of TRL without a run, and without loading a model."""
    trainer: Any = kind.__new__(kind)
    trainer.args, trainer.model = whole, model.train()
    trainer.teacher_model = model if whole.teacher_model_kind == "live" else sampler
    trainer.accelerator = SimpleNamespace(
        device="cpu",
        process_index=0,
        gather=lambda x: x,
        pad_across_processes=lambda x, **_: x,
    )
    trainer.processing_class = trainer._tokenizer = tokenizer()
    trainer.num_generations = groups.GROUP
    trainer.model_kwarg_keys, trainer.temperature = {"logits_to_keep"}, whole.temperature
    trainer.max_completion_length, trainer.max_prompt_length = 8, harness.LENGTH - 8
    trainer.use_teacher_server, trainer.current_gradient_accumulation_steps = False, 1
    trainer._metrics = {"train": defaultdict(list)}
    return trainer


def build_config(kind: Any, options: dict[str, Any]) -> Any:
    """Return a configuration of TRL."""
    return kind(
        output_dir="unused",
        report_to=[],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=6,
        num_generations=groups.GROUP,
        **options,
    )


def build_inputs(trainer: Any, sampler: Any, given: Any) -> dict[str, Any]:
    """Return prompts and completions as TRL's trainers pad them, and the sampler's logps."""
    import torch
    from trl.trainer.utils import pad

    inputs: dict[str, Any] = {}
    rows_of = {"prompt": (given.prompt_ids, "left"), "completion": (given.completion_ids, "right")}
    for name, (rows, side) in rows_of.items():
        ids = [torch.tensor(row) for row in rows]
        ones = [torch.ones_like(row) for row in ids]
        inputs[f"{name}_ids"] = pad(ids, padding_value=0, padding_side=side)
        inputs[f"{name}_mask"] = pad(ones, padding_value=0, padding_side=side)
    with torch.no_grad():
        logits = trainer._forward_logits(
            sampler,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
        )
    index = inputs["completion_ids"][..., None]
    inputs["old_per_token_logps"] = torch.log_softmax(logits, -1).gather(-1, index)[..., 0]
    return inputs


def theirs(options: dict[str, Any]) -> harness.Outcome:
    """Compute the same with TRL's trainer."""
    import torch
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer
    from trl.experimental.sdpo.sdpo_trainer import SuccessfulRolloutTeacherContextBuilder

    given, words = completions(), tokenizer()
    sampler, model = harness.hf_model(harness.folder(0)), harness.hf_model(groups.moved())
    whole = build_config(SDPOConfig, {**_OPTIONS, **options})
    trainer = build_trainer(SDPOTrainer, whole, model, sampler)
    trainer.epsilon_low, trainer.epsilon_high = whole.epsilon, whole.epsilon_high
    trainer.loss_type = whole.loss_type
    trainer.importance_sampling_level = whole.importance_sampling_level
    trainer._tokenize_prompts_untruncated = lambda prompts: words(prompts)["input_ids"]
    inputs = build_inputs(trainer, sampler, given)
    scores = torch.tensor(_REWARDS)
    in_groups = scores.view(-1, groups.GROUP)
    advantages = (in_groups - in_groups.mean(1, keepdim=True)) / (
        in_groups.std(1, keepdim=True) + 1e-4
    )
    inputs["advantages"] = advantages.view(-1)
    builder = SuccessfulRolloutTeacherContextBuilder(trainer)
    inputs |= builder.build(inputs, given.prompts, scores, feedbacks=_FEEDBACK)
    loss = trainer.compute_loss(model, inputs)
    metrics = {**builder.last_metrics, **trainer._metrics["train"]}
    return harness.their_outcome(model, loss, metrics)


def sdpo(**options: Any) -> dict[str, float]:
    """Compare `sdpo` with `trl.experimental.sdpo.SDPOTrainer`."""
    return harness.errors(ours(options), theirs(options))


def sdft(skipped: int = 0, **options: Any) -> dict[str, float]:
    """Compare `sdft` with `trl.experimental.sdft.SDFTTrainer`."""
    from ed_trainers import arguments_class, trainer_class
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer
    from trl.experimental.sdft.sdft_trainer import DemonstrationTeacherContextBuilder

    given = replace(completions(), fields={"privileged_context": _DEMONSTRATIONS})
    options |= {"num_loss_tokens_to_skip": skipped, "teacher_prompt_template": _TEMPLATE}
    arguments: Any = arguments_class("sdft")
    arguments = arguments(
        total_batch_size=6,
        num_iterations=2,
        max_prompt_length=harness.LENGTH - 8,
        max_completion_length=8,
        num_return_sequences=groups.GROUP,
        **options,
    )
    build: Any = trainer_class("sdft")
    first, later = (
        build(arguments, harness.our_model(path), processing_class=tokenizer())
        for path in (harness.folder(0), groups.moved())
    )
    rows, _ = first.method.phase.get_rows(given, first.weights(), 0)
    if "teacher" in later.method.frozen._graphdefs:
        later.method.frozen = first.method.frozen
    ours = harness.our_outcome(later, rows)

    sampler, model = harness.hf_model(harness.folder(0)), harness.hf_model(groups.moved())
    whole = build_config(SDFTConfig, options)
    trainer = build_trainer(SDFTTrainer, whole, model, sampler)
    trainer.num_loss_tokens_to_skip, trainer.chat_template_kwargs = skipped, {}
    inputs = build_inputs(trainer, sampler, given)
    builder = DemonstrationTeacherContextBuilder(trainer)
    masked = inputs["completion_ids"], inputs["completion_mask"]
    inputs |= builder.build(given.prompts, _DEMONSTRATIONS, *masked)
    loss = trainer.compute_loss(model, inputs)
    return harness.errors(ours, harness.their_outcome(model, loss, trainer._metrics["train"]))


_SDPO = "`trl.experimental.sdpo.SDPOTrainer`"
_SDFT = "`trl.experimental.sdft.SDFTTrainer`"
CASES = {
    "sdpo": harness.Case(_SDPO, sdpo),
    "sdpo vocabulary, temperature": harness.Case(
        _SDPO,
        partial(
            sdpo,
            distillation_mode="full_logits",
            distillation_alpha=0.3,
            temperature=0.7,
            distillation_is_clip=1.01,
        ),
    ),
    "sdpo most probable tokens, present teacher": harness.Case(
        _SDPO,
        partial(
            sdpo,
            distillation_mode="topk_logits",
            distillation_topk=5,
            distillation_add_tail=True,
            distillation_alpha=0.0,
            teacher_model_kind="live",
            environment_feedback_only_without_solution=True,
        ),
    ),
    "sdpo normalized tokens, policy loss": harness.Case(
        _SDPO,
        partial(
            sdpo,
            distillation_mode="topk_logits",
            distillation_topk=5,
            distillation_alpha=0.5,
            distillation_weight=0.4,
            teacher_model_kind="base",
            dont_reprompt_on_self_success=False,
            loss_type="grpo",
        ),
    ),
    "sdft": harness.Case(_SDFT, partial(sdft, distillation_topk=5)),
    "sdft vocabulary, first tokens skipped": harness.Case(
        _SDFT,
        partial(
            sdft,
            skipped=2,
            distillation_mode="full_logits",
            distillation_alpha=0.0,
            temperature=0.7,
            distillation_is_clip=1.01,
        ),
    ),
    "sdft sampled tokens, present teacher": harness.Case(
        _SDFT,
        partial(
            sdft,
            distillation_mode="sampled_token",
            distillation_alpha=1.0,
            teacher_model_kind="live",
        ),
    ),
}
