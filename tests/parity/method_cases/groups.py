"""Compare methods with groups of completions with TRL's trainers, from the rewards to the loss.

The completions are fixed, so nothing is sampled. Each trainer scores them with one model, and then
computes the loss of a second model that differs by some noise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.method_cases.harness import (
    LENGTH,
    Case,
    Outcome,
    config_of,
    errors,
    folder,
    hf_model,
    our_model,
    our_outcome,
    pairs,
    their_outcome,
    tokenizer,
)

GROUP, PROMPTS, END = 3, 2, 2


def completions(seed: int = 5) -> Any:
    """Return three answers to each of two prompts; two answers reach the maximum length."""
    from ed_trainers.online.completions import Completions

    random = np.random.default_rng(seed)
    prompts = [a.prompt for a, _ in pairs()[:PROMPTS] for _ in range(GROUP)]
    lengths, ended = [4, 7, 3, 8, 8, 2], [True, True, True, False, False, True]
    ids = [random.integers(3, 64, n).tolist() for n in lengths]
    ids = [[*own[:-1], END] if end else own for own, end in zip(ids, ended, strict=True)]
    logps = [(-4 + random.normal(0, 0.5, len(own))).tolist() for own in ids]
    return Completions(
        prompts=["t3"] * len(ids),
        prompt_ids=prompts,
        completion_ids=ids,
        logprobs=logps,
        completions=[" ".join(f"t{i}" for i in own) for own in ids],
        ended=ended,
    )


def remainder(completion_ids: list[list[int]], **fields: Any) -> list[float | None]:
    """Return an arbitrary reward; None for the shortest completion."""
    return [None if len(ids) < 3 else sum(ids) % 7 / 3 for ids in completion_ids]


def length(completion_ids: list[list[int]], **fields: Any) -> list[float]:
    """Return a second arbitrary reward."""
    return [len(ids) / 4 for ids in completion_ids]


@cache
def moved(noise: float = 0.01) -> Path:
    """Return the folder of a model with added noise, as after some training steps."""
    import torch

    model = hf_model(folder(0))
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn_like(parameter)
    path = Path(tempfile.mkdtemp(prefix="methods-"))
    model.save_pretrained(path)
    return path


#: Texts of the `checked` completions, the expected answers, and the expected rewards.
TEXTS: list[tuple[str, str | None, float | None]] = [
    (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
    ("#### 7", "8", 0.0),
    ("<answer>1,200</answer>", "1200", 1.0),
    ("12 or 13", "13", 1.0),
    ("I do not know", "3", 0.0),
    ("4", None, None),
]


def checked() -> Any:
    """Return the completions with texts, some of which are correct."""
    texts, answers, _ = zip(*TEXTS, strict=True)
    return replace(completions(), completions=list(texts), fields={"answer": list(answers)})


def math_answer(completion_ids: list[list[int]], **fields: Any) -> list[float | None]:
    """Return the expected reward of each `checked` completion, without the rule under test."""
    expected = {tuple(ids): right for ids, (_, _, right) in zip(_ids(), TEXTS, strict=True)}
    return [expected[tuple(ids)] for ids in completion_ids]


def _ids() -> list[list[int]]:
    return completions().completion_ids


def functions_of(options: dict[str, Any]) -> list[Callable[..., Any]]:
    """Return one reward function per weight."""
    return [remainder, length][: len(options.get("reward_weights", (1, 1)))]


def ours(
    method: str, options: dict[str, Any], functions: list[Callable[..., Any]], given: Any
) -> Outcome:
    """Compute rows with the first model, and the loss with the second."""
    from ed_trainers import arguments_class, trainer_class

    made_by: Any = trainer_class(method)
    arguments: Any = arguments_class(method)
    arguments = arguments(
        total_batch_size=6,
        num_iterations=2,
        max_prompt_length=LENGTH - 8,
        max_completion_length=8,
        num_return_sequences=GROUP,
        **options,
    )
    frozen = {"reference": our_model(folder(1))} if arguments.has_reference else {}
    first, later = (
        made_by(arguments, our_model(path), frozen=frozen, reward_functions=functions)
        for path in (folder(0), moved())
    )
    control = later.method.entropy_control
    if control is not None:  # as after a step below the target
        control.load_state_dict({"coefficient": arguments.entropy_coef, "entropy": 0.0})
    phase = first.method.phase
    rows, figures = phase.get_rows(given, first.weights(), 0)
    outcome = our_outcome(later, rows)
    metrics = {**given.figures(), **figures, **outcome.metrics}
    return Outcome(outcome.loss, metrics, outcome.gradients)


def theirs(
    trainer_of: Any,
    config: Any,
    options: dict[str, Any],
    functions: list[Callable[..., Any]],
    corrects: str = "",
    given: Any = None,
    group: int = GROUP,
) -> Outcome:
    """Compute the same rows and loss with TRL's trainer."""
    import torch

    given = completions() if given is None else given
    with tempfile.TemporaryDirectory() as directory:
        trainer, model = build_trainer(
            directory, trainer_of, config, options, functions, group, corrects
        )
        trainer._last_world_entropy = 0.0
        inputs = score_there(trainer, given)
        with torch.no_grad():
            later = dict(hf_model(moved()).named_parameters())
            for name, parameter in model.named_parameters():
                parameter.copy_(later[name])
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(model, inputs)
        return their_outcome(model, loss, trainer._metrics["train"])


def build_trainer(
    directory: str,
    trainer_of: Any,
    config: Any,
    options: dict[str, Any],
    functions: list[Callable[..., Any]],
    group: int,
    corrects: str,
) -> tuple[Any, Any]:
    """Return a trainer of TRL with a reference, and its model in training mode."""
    from datasets import Dataset

    arguments = config_of(
        config,
        directory,
        num_generations=group,
        num_iterations=2,
        max_completion_length=8,
        **{k: list(v) if isinstance(v, tuple) else v for k, v in options.items()},
    )
    model = hf_model(folder(0))
    trainer = trainer_of(
        model=model,
        reward_funcs=functions,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "t3"}] * GROUP * PROMPTS),
        processing_class=tokenizer(),
    )
    trainer.ref_model = hf_model(folder(1)).eval()
    _same_forward(trainer.ref_model, options.get("temperature", 1.0))
    if corrects:
        trainer.use_vllm = True
        trainer.vllm_importance_sampling_correction = True
        trainer.vllm_importance_sampling_mode = corrects
        trainer.vllm_importance_sampling_clip_max = 3.0
        trainer.vllm_importance_sampling_clip_min = None
    model.train()
    return trainer, model


def score_there(trainer: Any, given: Any) -> Any:
    """Return the inputs of the loss for given completions from TRL's trainer."""
    trainer._tokenize_prompts = lambda prompts: (given.prompt_ids, None, {})
    made = given.completion_ids, given.logprobs
    trainer._generate_single_turn = lambda *_, **__: made if _is_grpo(trainer) else made[0]
    return trainer._generate_and_score_completions([{"prompt": "t3"}] * len(given))


def _is_grpo(trainer: Any) -> bool:
    return type(trainer).__name__ == "GRPOTrainer"


def _same_forward(model: Any, temperature: float) -> None:
    """Patch the reference's forward pass, as TRL's trainers do for references that they load."""
    from trl.trainer.grpo_trainer import add_fused_lm_head

    add_fused_lm_head(model, temperature=temperature)


def grpo(loss_type: str, corrects: str = "", **options: Any) -> dict[str, float]:
    """Compare `grpo` with `trl.GRPOTrainer`."""
    from trl import GRPOConfig, GRPOTrainer

    own, other = get_options(loss_type, corrects, options)
    functions = functions_of(options)
    return errors(
        ours("grpo", own, functions, completions()),
        theirs(GRPOTrainer, GRPOConfig, other, functions, corrects),
    )


def get_options(
    loss_type: str, corrects: str, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of `grpo`, and those of TRL."""
    own = {"loss_type": loss_type, "beta": 0.04, **options}
    other = dict(own)
    if loss_type == "gspo":
        other |= {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    return own | {"importance_sampling_correction": corrects or "none"}, other


def gspo() -> dict[str, float]:
    """Compare `gspo` and its defaults with `trl.GRPOTrainer` and the settings of the paper."""
    from trl import GRPOConfig, GRPOTrainer

    paper = {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "beta": 0.0,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    }
    functions = functions_of({})
    return errors(
        ours("gspo", {"importance_sampling_correction": "none"}, functions, completions()),
        theirs(GRPOTrainer, GRPOConfig, paper, functions),
    )


def gfpo(remain: int, **options: Any) -> dict[str, float]:
    """Compare `gfpo` with `trl.GRPOTrainer` on the completions that the formula selects."""
    from trl import GRPOConfig, GRPOTrainer

    functions, given = functions_of({}), completions()
    scored = zip(*(f(given.completion_ids) for f in functions), strict=True)
    rewards = [sum(x for x in own if x is not None) for own in scored]
    lengths = [len(ids) for ids in given.completion_ids]
    efficiency = [reward / count for reward, count in zip(rewards, lengths, strict=True)]
    largest = max(map(abs, efficiency))
    of_length = options.get("length_weight", 0.5) * options.get("filter_by_length", True)
    scores = [
        0.5 * e / largest + of_length * (1 - n / 8)
        for e, n in zip(efficiency, lengths, strict=True)
    ]
    kept = []
    for start in range(0, len(scores), GROUP):
        order = sorted(range(start, start + GROUP), key=lambda i: -scores[i])
        kept += sorted(order[:remain])
    own = {"beta": 0.04, "num_remains_in_group": remain, "importance_sampling_correction": "none"}
    mine = ours("gfpo", {**own, **options}, functions, given)
    other = {"beta": 0.04, "loss_type": "dapo"}
    selected = given.select(kept)
    others = theirs(GRPOTrainer, GRPOConfig, other, functions, given=selected, group=remain)
    # Ours also counts the completions that are not trained in the figures of rewards and lengths.
    trained = {
        name: value
        for name, value in others.metrics.items()
        if not name.startswith(("rewards/", "reward_std", "completions/"))
    }
    return errors(mine, Outcome(others.loss, trained, others.gradients))


def rlvr() -> dict[str, float]:
    """Compare `rlvr` and its rule with `trl.GRPOTrainer` and the expected rewards."""
    from trl import GRPOConfig, GRPOTrainer

    own = {"loss_type": "dapo", "beta": 0.04}
    return errors(
        ours("rlvr", {**own, "importance_sampling_correction": "none"}, [], checked()),
        theirs(GRPOTrainer, GRPOConfig, own, [math_answer]),
    )


def rloo(**options: Any) -> dict[str, float]:
    """Compare `rloo` with `trl.RLOOTrainer`."""
    from trl import RLOOConfig, RLOOTrainer

    own = {"beta": 0.05, **options}
    functions = functions_of(options)
    return errors(
        ours("rloo", own, functions, completions()),
        theirs(RLOOTrainer, RLOOConfig, own, functions),
    )


GRPO, RLOO = "`trl.GRPOTrainer`", "`trl.RLOOTrainer`"
CASES: dict[str, Case] = {
    "grpo dapo": Case(GRPO, partial(grpo, "dapo")),
    "grpo grpo": Case(GRPO, partial(grpo, "grpo", reward_weights=(1.0, 0.5))),
    "grpo dr_grpo": Case(GRPO, partial(grpo, "dr_grpo", scale_rewards="none")),
    "grpo bnpo": Case(GRPO, partial(grpo, "bnpo", scale_rewards="batch", temperature=0.7)),
    "grpo gspo": Case(GRPO, partial(grpo, "gspo", epsilon=0.003, epsilon_high=0.004)),
    "grpo cispo": Case(GRPO, partial(grpo, "cispo", epsilon_high=1.05, beta=0.0)),
    "grpo clipped": Case(
        GRPO, partial(grpo, "dapo", epsilon=0.02, epsilon_high=0.05, delta=1.1, beta=0.0)
    ),
    "grpo corrected for the engine": Case(GRPO, partial(grpo, "grpo", "token_truncate")),
    "grpo corrected, masked": Case(GRPO, partial(grpo, "dapo", "token_mask")),
    "grpo ratios of sequences, masked": Case(
        GRPO,
        partial(grpo, "dapo", "sequence_mask", importance_sampling_level="sequence"),
    ),
    "grpo truncated, ratios of sequences": Case(
        GRPO, partial(grpo, "grpo", "sequence_truncate", mask_truncated_completions=True)
    ),
    "grpo divergence without ratio": Case(
        GRPO, partial(grpo, "dapo", use_bias_correction_kl=False, beta=0.5)
    ),
    "grpo with a bonus for entropy": Case(
        GRPO, partial(grpo, "dr_grpo", entropy_coef=0.1, temperature=0.7)
    ),
    "grpo on uncertain tokens": Case(
        GRPO, partial(grpo, "dapo", top_entropy_quantile=0.3, entropy_coef=-0.05)
    ),
    "grpo on the most uncertain token": Case(
        GRPO,
        partial(grpo, "grpo", importance_sampling_level="sequence", top_entropy_quantile=0.0),
    ),
    "grpo luspo": Case(
        GRPO, partial(grpo, "luspo", importance_sampling_level="sequence", epsilon=0.003)
    ),
    "grpo sapo": Case(
        GRPO, partial(grpo, "sapo", sapo_temperature_pos=3.0, sapo_temperature_neg=4.0)
    ),
    "grpo vespo": Case(GRPO, partial(grpo, "vespo")),
    "grpo vespo corrected": Case(
        GRPO, partial(grpo, "vespo", "token_truncate", vespo_k_neg=1.5, vespo_lambda_pos=1.0)
    ),
    "grpo without completions that the policy left": Case(
        GRPO, partial(grpo, "dapo", "token_truncate", off_policy_mask_threshold=0.1)
    ),
    "grpo with adaptive entropy": Case(
        GRPO,
        partial(grpo, "dapo", entropy_coef=0.1, use_adaptive_entropy=True, entropy_target=9.0),
    ),
    "gspo": Case(GRPO, gspo),
    "gfpo": Case("`trl.GRPOTrainer` on the completions that 2508.09726 selects", partial(gfpo, 2)),
    "gfpo by efficiency": Case(
        "`trl.GRPOTrainer` on the completions that 2508.09726 selects",
        partial(gfpo, 2, filter_by_length=False),
    ),
    "rloo": Case(RLOO, rloo),
    "rloo normalized": Case(
        RLOO,
        partial(
            rloo, normalize_advantages=True, reward_clip_range=(0.2, 1.5), epsilon=0.02, beta=0.0
        ),
    ),
    "rlvr": Case("`trl.GRPOTrainer`, expected rewards", rlvr),
}
