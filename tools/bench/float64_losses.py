"""The losses of methods over whole runs, from their definitions, with torch in float64.

Every sequence is a row of its own, padded on the right. The batches follow the order of the rows.
The optimizer is `torch.optim.AdamW`; norms and biases have no weight decay, as in the trainers of
transformers and TRL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LEARNING_RATE = 1e-3
#: Token ids, and the number of tokens of the prompt.
Encoded = tuple[list[int], int]


def compute_losses(
    folder: Path, method: str, steps: int, rows: int, *, decay: float = 0.0, all_decay: bool = False
) -> list[float]:
    """Return the loss of each step of a run.

    Args:
        folder: checkpoints `model`, `teacher` and `scorer`, and the rows `pairs.jsonl`.
        method: the method.
        steps: number of steps.
        rows: texts, or pairs, of a step.
        decay: weight decay.
        all_decay: whether norms and biases decay, too.
    """
    import torch
    from transformers import AutoTokenizer

    lines = (folder / "pairs.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = _load(folder / ("scorer" if method == "reward" else "model"), method == "reward")
    other = _load(folder / ("teacher" if method == "distillation" else "model"), False)
    named = dict(model.named_parameters())
    plain = [] if all_decay else [p for n, p in named.items() if "norm" in n or n.endswith("bias")]
    weights = [p for p in named.values() if not any(p is one for one in plain)]
    groups = [{"params": weights, "weight_decay": decay}]
    groups += [{"params": plain, "weight_decay": 0.0}] if plain else []
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    losses: list[float] = []
    for step in range(steps):
        batch = pairs[step * rows : (step + 1) * rows]
        loss = _LOSSES[method](model, other, [_encode(tokenizer, row) for row in batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _load(path: Path, scores: bool) -> Any:
    import torch
    import transformers

    kind = "LlamaForSequenceClassification" if scores else "LlamaForCausalLM"
    model = getattr(transformers, kind).from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    )
    return model.train()


def _encode(tokenizer: Any, row: dict[str, str]) -> tuple[Encoded, Encoded]:
    """Return the chosen and the rejected answer, each with its prompt and the end token."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    out: list[Encoded] = []
    for side in ("chosen", "rejected"):
        ids = [*tokenizer(row["prompt"] + row[side])["input_ids"], tokenizer.eos_token_id]
        same = 0
        while same < min(len(ids), len(prompt)) and ids[same] == prompt[same]:
            same += 1
        out.append((ids, same))
    return out[0], out[1]


class _Texts:
    """Log-probabilities of texts under a model.

    Attributes:
        logps: of each token after the first, [b, s].
        tokens: 1 at tokens after the first, [b, s].
        answers: 1 at tokens of answers, [b, s].
        logits: of the positions before them, [b, s, v].
    """

    def __init__(self, model: Any, documents: Sequence[Encoded]) -> None:
        ids, mask = _pad(documents)
        logits = model(ids, attention_mask=mask).logits[:, :-1]
        self.logits = logits
        self.logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        self.tokens = mask[:, 1:].double()
        self.answers = self.tokens.clone()
        for row, (_, prompt) in enumerate(documents):
            self.answers[row, : prompt - 1] = 0

    def sum_answers(self) -> torch.Tensor:
        """Return the log-probability of each answer."""
        return (self.logps * self.answers).sum(1)

    def cross_entropy(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the mean over the tokens of a mask."""
        return -(self.logps * mask).sum() / mask.sum()


def _pad(documents: Sequence[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    width = max(len(ids) for ids, _ in documents)
    ids = torch.zeros(len(documents), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (tokens, _) in enumerate(documents):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    return ids, mask


def _sides(model: Any, batch: Sequence[tuple[Encoded, Encoded]]) -> tuple[_Texts, _Texts]:
    return _Texts(model, [pair[0] for pair in batch]), _Texts(model, [pair[1] for pair in batch])


def _sft(model: Any, other: Any, batch: Sequence[tuple[Encoded, Encoded]]) -> torch.Tensor:
    texts = _Texts(model, [pair[0] for pair in batch])
    return texts.cross_entropy(texts.tokens)


def _distillation(model: Any, other: Any, batch: Sequence[tuple[Encoded, Encoded]]) -> torch.Tensor:
    import torch

    documents, temperature = [pair[0] for pair in batch], 2.0
    texts = _Texts(model, documents)
    with torch.no_grad():
        teacher = (_Texts(other, documents).logits / temperature).log_softmax(-1)
    student = (texts.logits / temperature).log_softmax(-1)
    divergence = (teacher.exp() * (teacher - student)).sum(-1) * texts.tokens
    mean = divergence.sum() / texts.tokens.sum()
    return 0.5 * temperature**2 * mean + 0.5 * texts.cross_entropy(texts.tokens)


def _dpo(model: Any, other: Any, batch: Sequence[tuple[Encoded, Encoded]]) -> torch.Tensor:
    import torch

    chosen, rejected = (texts.sum_answers() for texts in _sides(model, batch))
    with torch.no_grad():
        base, other_base = (texts.sum_answers() for texts in _sides(other, batch))
    margin = (chosen - base) - (rejected - other_base)
    return -torch.nn.functional.logsigmoid(0.1 * margin).mean()


def _cpo(model: Any, other: Any, batch: Sequence[tuple[Encoded, Encoded]]) -> torch.Tensor:
    import torch

    good, bad = _sides(model, batch)
    margin = 0.1 * (good.sum_answers() - bad.sum_answers())
    return -torch.nn.functional.logsigmoid(margin).mean() + good.cross_entropy(good.answers)


def _orpo(model: Any, other: Any, batch: Sequence[tuple[Encoded, Encoded]]) -> torch.Tensor:
    import torch

    good, bad = _sides(model, batch)
    chosen, rejected = (texts.sum_answers() / texts.answers.sum(1) for texts in (good, bad))
    odds = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
    ratio = torch.nn.functional.logsigmoid(odds).mean()
    return good.cross_entropy(good.tokens) - 0.1 * ratio


def _reward(model: Any, other: Any, batch: Sequence[tuple[Encoded, Encoded]]) -> torch.Tensor:
    import torch

    scores: list[torch.Tensor] = []
    for side in (0, 1):
        ids, mask = _pad([pair[side] for pair in batch])
        hidden = model.model(ids, attention_mask=mask).last_hidden_state
        last = mask.sum(1) - 1
        scores.append(model.score(hidden)[torch.arange(len(ids)), last, 0])
    chosen, rejected = scores
    centered = 0.1 * ((chosen + rejected) ** 2).mean()
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean() + centered


_LOSSES = {
    "sft": _sft,
    "dpo": _dpo,
    "orpo": _orpo,
    "cpo": _cpo,
    "reward": _reward,
    "distillation": _distillation,
}
