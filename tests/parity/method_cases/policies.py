"""Compare methods that train on sampled completions with their papers, torch in float64."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.parity.method_cases import groups, harness

#: Rewards of the learner's completions.
SCORES = [1.0, -0.5, 2.0, 0.25, -1.5, 0.75]
#: Rewards of the other policy's completions.
OTHER_SCORES = [0.5, 0.5, -1.0, 0.75, -2.0, 1.5]
PROMPT, COMPLETION = 8, harness.LENGTH - 8


class FixedRollout:
    """A rollout that returns fixed completions; those of the maximum length do not end."""

    def __init__(self, answers: list[list[int]]):
        self.answers = answers

    def generate(self, prompts: Any, params: Any, weights: Any, *, seeds: Any = None) -> Any:
        from ed_trainers.rollout import Sampled

        return [
            Sampled(ids, [0.0] * len(ids), weights.version, ended=len(ids) < 8)
            for ids in self.answers
        ]


def completed(side: int) -> list[harness.Answer]:
    """Return prompts with completions of the learner (0) or of the other policy (1)."""
    return [pair[side] for pair in harness.pairs()]


def scores_of(completion_ids: list[list[int]]) -> list[float]:
    """Return the scores of completions of both sides."""
    known = {tuple(a.answer): s for a, s in zip(completed(0), SCORES, strict=True)}
    known |= {tuple(a.answer): s for a, s in zip(completed(1), OTHER_SCORES, strict=True)}
    return [known[tuple(ids)] for ids in completion_ids]


def online(method: str, frozen: Any, learner: Path | None = None, **arguments: Any) -> Any:
    """Return a trainer with fixed completions, and its prompts; `learner`: the folder of its
    model."""
    from ed_trainers import arguments_class, trainer_class

    made: Any = arguments_class(method)
    options = made(
        total_batch_size=6,
        max_prompt_length=PROMPT,
        max_completion_length=COMPLETION,
        **arguments,
    )
    more = {} if "teacher" in frozen else {"reward_functions": [scores_of]}
    rollout = FixedRollout([a.answer for a in completed(0)])
    kind: Any = trainer_class(method)
    trainer = kind(
        options,
        harness.our_model(learner or harness.folder(0)),
        rollout=rollout,
        frozen={name: harness.our_model(path) for name, path in frozen.items()},
        **more,
    )

    phase = trainer.method.phase
    phase.rollout_of = lambda make: FixedRollout([a.answer for a in completed(1)])
    return trainer, SimpleNamespace(input_ids=[a.prompt for a in completed(0)])


class Side:
    """Log-probabilities under a torch model, [n, t], at the positions that predict the tokens."""

    def __init__(self, model: Any, documents: list[harness.Answer], temperature: float = 1.0):
        tensors = harness.answer_tensors(documents)
        ids, mask = tensors["input_ids"], tensors["completion_mask"][:, 1:]
        output = model(ids, attention_mask=tensors["attention_mask"], output_hidden_states=True)
        self.mask = mask.double()
        self.hidden = output.hidden_states[-1][:, :-1]
        self.all_logps = (output.logits[:, :-1] / temperature).log_softmax(-1)
        self.logps = self.all_logps.gather(-1, ids[:, 1:, None])[..., 0] * self.mask

    @property
    def sums(self) -> Any:
        """The log-probability of each completion."""
        return self.logps.sum(-1)


def models() -> tuple[Any, Any]:
    """Return learner and reference in float64."""
    learner, reference = (harness.hf_model(harness.folder(seed)).double() for seed in (0, 1))
    return learner, reference


def moved(array: np.ndarray, mask: np.ndarray, seed: int) -> np.ndarray:
    """Return values with noise, as a policy before the updates would have them."""
    noise = np.random.default_rng(seed).normal(0, 0.3, (6, harness.LENGTH)).astype(np.float32)
    return array + noise[:, : array.shape[1]] * mask


def whitened(values: np.ndarray, here: np.ndarray, *, shift: bool = True) -> np.ndarray:
    """Whiten the masked values as TRL's `masked_whiten` does."""
    own = values[here]
    out = np.zeros_like(values)
    out[here] = (own - own.mean()) / np.sqrt(own.var(ddof=1) + 1e-8) + (0 if shift else own.mean())
    return out


def ppo(**options: Any) -> dict[str, float]:
    """Compare `ppo` with 1707.06347 and TRL's metrics; advantages follow 1506.02438."""
    import jax.numpy as jnp
    import torch
    from ed_trainers.roles.value_head import value_head

    beta, gamma, lam, clip, clip_value, vf_coef = 0.3, 0.9, 0.8, 0.2, 0.25, 0.4
    estimator, temperature = options.get("kl_estimator", "k1"), options.get("temperature", 1.0)
    trainer, prompts = online(
        "ppo",
        {"reference": harness.folder(1)},
        beta=beta,
        gamma=gamma,
        lam=lam,
        cliprange=clip,
        cliprange_value=clip_value,
        vf_coef=vf_coef,
        **options,
    )
    random = np.random.default_rng(7)
    d = harness.SIZES["hidden_size"]
    kernel, bias = random.normal(0, 0.2, (d, 1)).astype(np.float32), np.array([0.3], np.float32)
    head = value_head(trainer._model)
    head.kernel.set_value(jnp.asarray(kernel))
    head.bias.set_value(jnp.asarray(bias))

    model, reference = models()
    model.value_head = torch.nn.Linear(d, 1).double()
    with torch.no_grad():
        model.value_head.weight.copy_(torch.tensor(kernel.T))
        model.value_head.bias.copy_(torch.tensor(bias))
    documents = completed(0)
    now = Side(model, documents, temperature)
    values = model.value_head(now.hidden)[..., 0] * now.mask
    with torch.no_grad():
        ref_logps = Side(reference, documents, temperature).logps.numpy()
    logps, value, mask = (x.detach().numpy() for x in (now.logps, values, now.mask))
    here = mask > 0

    apart = logps - ref_logps
    kl = {"k1": apart, "k2": apart**2 / 2, "k3": np.exp(-apart) - 1 + apart}[estimator] * mask
    scores = np.array(SCORES)
    penalty = options.get("missing_eos_penalty")
    if penalty is not None:
        scores = scores - penalty * np.array([len(a.answer) >= 8 for a in documents])
    rewards = -beta * kl
    for row in range(6):
        rewards[row, np.flatnonzero(here[row])[-1]] += scores[row]
    if options.get("whiten_rewards"):
        rewards = whitened(rewards, here, shift=False)
    advantages = np.zeros_like(rewards)
    for row in range(6):
        places = np.flatnonzero(here[row])
        for i, place in enumerate(places):
            for k, later in enumerate(places[i:]):
                behind = value[row, later + 1] if later != places[-1] else 0.0
                difference = rewards[row, later] + gamma * behind - value[row, later]
                advantages[row, place] += (gamma * lam) ** k * difference
    returns, advantages = advantages + value, whitened(advantages, here)

    rows = dict(trainer.prepare(prompts))
    ours_here = rows["weights"]
    for name, seed in (("old_logps", 1), ("old_values", 2)):
        rows[name] = moved(rows[name], ours_here, seed)

    old_logps, old_values = (
        torch.tensor(moved(x, mask, seed)) for x, seed in ((logps, 1), (value, 2))
    )
    goal, aim = torch.tensor(advantages), torch.tensor(returns)
    change = (now.logps - old_logps) * now.mask
    ratio = change.exp()
    plain, held = -goal * ratio, -goal * ratio.clamp(1 - clip, 1 + clip)
    near = torch.maximum(torch.minimum(values, old_values + clip_value), old_values - clip_value)
    first, second = (values - aim) ** 2, (near - aim) ** 2

    def mean(x: Any) -> Any:
        return (x * now.mask).sum() / now.mask.sum()

    policy_loss, value_loss = mean(torch.max(plain, held)), 0.5 * mean(torch.max(first, second))
    entropy = -(now.all_logps.exp() * now.all_logps).sum(-1)
    metrics = {
        "loss/policy_avg": policy_loss,
        "loss/value_avg": value_loss,
        "policy/approxkl_avg": mean(0.5 * change**2),
        "policy/clipfrac_avg": mean((held > plain).double()),
        "val/clipfrac_avg": mean((second > first).double()),
        "entropy": mean(entropy),
        "reward": np.mean(SCORES),
        "val/ratio": mean(ratio),
    }
    loss = policy_loss + vf_coef * value_loss - options.get("entropy_coef", 0.0) * mean(entropy)
    theirs = harness.their_outcome(model, loss, metrics)
    return harness.errors(harness.our_outcome(trainer, rows), theirs)


def gkd(beta: float) -> dict[str, float]:
    """Compare `gkd` on sampled completions with `compute_loss` of TRL's GKDTrainer."""
    import torch
    from trl.experimental.gkd import GKDTrainer

    trainer, prompts = online("gkd", {"teacher": harness.folder(1)}, beta=beta, lmbda=1.0)
    tensors = harness.answer_tensors(completed(0))
    model, teacher = models()
    labels = tensors["input_ids"].masked_fill(tensors["completion_mask"] == 0, -100)
    theirs: Any = SimpleNamespace(
        teacher_model=teacher,
        beta=beta,
        generalized_jsd_loss=GKDTrainer.generalized_jsd_loss,
    )
    loss = GKDTrainer.compute_loss(theirs, model, {**tensors, "labels": labels})
    with torch.no_grad():
        own = Side(model, completed(0))
    metrics = {"nll_loss": -own.logps.sum() / own.mask.sum()}
    return harness.errors(
        harness.our_outcome(trainer, prompts), harness.their_outcome(model, loss, metrics)
    )


def on_policy_distillation(**options: float) -> dict[str, float]:
    """Compare `on_policy_distillation` with the loss of `trl.DistillationTrainer`."""
    import torch
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    frozen = {"teacher": harness.folder(1)}
    trainer, prompts = online("on_policy_distillation", frozen, **options)
    tensors = harness.answer_tensors(completed(0))
    model, teacher = models()
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask")}
    hidden = model.model(**inputs).last_hidden_state[:, :-1]
    with torch.no_grad():
        wanted = teacher.model(**inputs).last_hidden_state[:, :-1]
        own = Side(model, completed(0))
    loss, _, _ = _chunked_divergence_loss(
        hidden,
        wanted,
        model.lm_head.weight,
        teacher.lm_head.weight,
        tensors["completion_mask"][:, 1:],
        options.get("beta", 1.0),
        temperature=options.get("temperature", 1.0),
    )
    metrics = {"nll_loss": -own.logps.sum() / own.mask.sum()}
    return harness.errors(
        harness.our_outcome(trainer, prompts), harness.their_outcome(model, loss, metrics)
    )


def sparse_distillation(add_tail: bool, temperature: float) -> dict[str, float]:
    """Compare `sparse_distillation` with the loss of TRL's ServerDistillationTrainer."""
    import torch
    from trl.experimental.server_distillation import ServerDistillationTrainer

    trainer, prompts = online(
        "sparse_distillation",
        {"teacher": harness.folder(1)},
        loss_top_k=5,
        loss_add_tail=add_tail,
        temperature=temperature,
    )
    tensors = harness.answer_tensors(completed(0))
    model, teacher = models()
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask")}
    logps = torch.log_softmax(model(**inputs).logits[:, :-1] / temperature, dim=-1)
    with torch.no_grad():
        wanted = torch.log_softmax(teacher(**inputs).logits[:, :-1] / temperature, dim=-1)
        found = wanted.topk(5, dim=-1)
        own = Side(model, completed(0))
    labels = tensors["input_ids"].masked_fill(tensors["completion_mask"] == 0, -100)[:, 1:]
    theirs: Any = SimpleNamespace(
        loss_add_tail=add_tail,
        _reduce_divergence_loss=ServerDistillationTrainer._reduce_divergence_loss,
    )
    loss = ServerDistillationTrainer._compute_server_forward_kl_loss(
        theirs, {"topk_logprobs": found.values, "topk_token_ids": found.indices}, logps, labels
    )
    metrics = {"nll_loss": -own.logps.sum() / own.mask.sum()}
    return harness.errors(
        harness.our_outcome(trainer, prompts), harness.their_outcome(model, loss, metrics)
    )


def iw_opd(**options: float) -> dict[str, float]:
    """Compare `iw_opd` with the loss of TRL's IWOPDTrainer, after a change of the learner."""
    import torch
    from trl.experimental.iw_opd import IWOPDTrainer

    frozen = {"teacher": harness.folder(1)}
    sampler, prompts = online("iw_opd", frozen, **options)
    generation = sampler.method.phase.generate(prompts, sampler.weights(), 0)
    trainer, _ = online("iw_opd", frozen, groups.moved(), **options)
    ours = harness.our_outcome(trainer, generation.rows)
    ours = harness.Outcome(ours.loss, {**generation.figures, **ours.metrics}, ours.gradients)

    temperature = options.get("temperature", 1.0)
    tensors = harness.answer_tensors(completed(0))
    before, teacher = models()
    model = harness.hf_model(groups.moved()).double()
    with torch.no_grad():
        old, wanted = (Side(x, completed(0), temperature).logps for x in (before, teacher))
        entropy = Side(model, completed(0), temperature)
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask")}
    labels = tensors["input_ids"].masked_fill(tensors["completion_mask"] == 0, -100)[:, 1:]
    theirs: Any = SimpleNamespace(
        temperature=temperature,
        iw_opd_gamma=options.get("iw_opd_gamma", 0.5),
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    loss = IWOPDTrainer._compute_iw_opd_loss(
        theirs,
        model(**inputs).logits[:, :-1],
        tensors["input_ids"][:, 1:],
        labels,
        wanted,
        rollout_logprobs=old,
    )
    spread = -(entropy.all_logps.exp() * entropy.all_logps).sum(-1)
    metrics = {
        **theirs._metrics["train"],
        "entropy": (spread * entropy.mask).sum() / entropy.mask.sum(),
    }
    return harness.errors(ours, harness.their_outcome(model, loss, metrics))


def xpo(loss_type: str) -> dict[str, float]:
    """Compare `xpo` with algorithm 1 of 2405.21046."""
    import torch
    from torch.nn.functional import logsigmoid

    alpha, beta = 0.02, 0.1
    trainer, prompts = online(
        "xpo", {"reference": harness.folder(1)}, alpha=alpha, beta=beta, loss_type=loss_type
    )
    model, reference = models()
    own, other = Side(model, completed(0)), Side(model, completed(1))
    with torch.no_grad():
        base = [Side(reference, completed(side)).sums for side in (0, 1)]
    ratios = own.sums - base[0], other.sums - base[1]
    won = torch.tensor(SCORES) >= torch.tensor(OTHER_SCORES)
    chosen, rejected = torch.where(won, *ratios), torch.where(won, *reversed(ratios))
    difference = chosen - rejected
    if loss_type == "ipo":
        of_pairs = (difference - 1 / (2 * beta)) ** 2
    else:
        of_pairs = -logsigmoid(beta * difference)
    explored = alpha * other.sums
    metrics = {
        "loss/dpo": of_pairs.mean(),
        "loss/xpo": explored.mean(),
        "objective/kl": ratios[0].mean(),
        "objective/entropy": -own.sums.mean(),
        "rewards/chosen": beta * chosen.mean(),
        "rewards/margins": beta * difference.mean(),
        "rewards/accuracies": (difference > 0).double().mean(),
        "logps/chosen": torch.where(won, own.sums, other.sums).mean(),
    }
    theirs = harness.their_outcome(model, (of_pairs + explored).mean(), metrics)
    return harness.errors(harness.our_outcome(trainer, prompts), theirs)


def nash_md() -> dict[str, float]:
    """Compare `nash_md` with the gradient of section 8 of 2312.00886."""
    import torch

    beta = 0.2
    trainer, prompts = online("nash_md", {"reference": harness.folder(1)}, beta=beta)
    model, reference = models()
    own = Side(model, completed(0)).sums
    with torch.no_grad():
        ratio = own - Side(reference, completed(0)).sums
    wins = torch.sigmoid(torch.tensor(SCORES) - torch.tensor(OTHER_SCORES)).double()
    score, divergence = (wins - 0.5) * own, beta * ratio * own
    metrics = {
        "loss/score": score.mean(),
        "loss/kl": divergence.mean(),
        "objective/kl": ratio.mean(),
        "rewards/probabilities": wins.mean(),
        "rewards/accuracies": (wins > 0.5).double().mean(),
    }
    theirs = harness.their_outcome(model, (divergence - score).mean(), metrics)
    return harness.errors(harness.our_outcome(trainer, prompts), theirs)


_PPO = "1707.06347, 1506.02438, torch in float64"
_IW_OPD = "`trl.experimental.iw_opd.IWOPDTrainer`, in float64"
_SERVER = "`trl.experimental.server_distillation.ServerDistillationTrainer`, in float64"
CASES = {
    "ppo": harness.Case(_PPO, ppo),
    "ppo k3, temperature, whitened rewards, penalty": harness.Case(
        _PPO,
        partial(
            ppo, kl_estimator="k3", temperature=0.7, whiten_rewards=True, missing_eos_penalty=1.0
        ),
    ),
    "ppo with a bonus for entropy": harness.Case(_PPO, partial(ppo, entropy_coef=0.2)),
    "gkd": harness.Case("`trl.experimental.gkd.GKDTrainer`, in float64", partial(gkd, 0.5)),
    "gkd forward": harness.Case("`trl.experimental.gkd.GKDTrainer`, in float64", partial(gkd, 0.0)),
    "on_policy_distillation": harness.Case(
        "`trl.DistillationTrainer`, in float64", on_policy_distillation
    ),
    "on_policy_distillation Jensen-Shannon, temperature": harness.Case(
        "`trl.DistillationTrainer`, in float64",
        partial(on_policy_distillation, beta=0.3, temperature=0.7),
    ),
    "iw_opd": harness.Case(_IW_OPD, iw_opd),
    "iw_opd weights up to 3, temperature": harness.Case(
        _IW_OPD, partial(iw_opd, iw_opd_gamma=2.0, temperature=0.7)
    ),
    "sparse_distillation": harness.Case(_SERVER, partial(sparse_distillation, True, 1.0)),
    "sparse_distillation normalized, temperature": harness.Case(
        _SERVER, partial(sparse_distillation, False, 0.7)
    ),
    "xpo": harness.Case("2405.21046, torch in float64", partial(xpo, "sigmoid")),
    "xpo ipo": harness.Case("2405.21046, torch in float64", partial(xpo, "ipo")),
    "nash_md": harness.Case("2312.00886, torch in float64", nash_md),
}
