"""DPO and GRPO with images from run files: losses of torch, improvement, resume, frozen parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ed_elarge import eLargeModel
from ed_infra.testing import require_torch
from safetensors.numpy import load_file

from tests.image_checkpoints import save_checkpoint
from tests.image_runs import trained

Image = pytest.importorskip("PIL.Image")

FAMILY, FEATURES, ROWS = "internvl", 4, 8
SIDES = "chosen", "rejected"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, a reference with other weights, and prompts with 0, 1 and 2 images."""
    path = tmp_path_factory.mktemp("images")
    save_checkpoint(FAMILY, path / "model")
    save_checkpoint(FAMILY, path / "reference", seed=6)
    rows = []
    for number in range(ROWS):
        names = []
        for place in range(number % 3):
            names.append(str(path / f"{number}-{place}.png"))
            size = (20 + 9 * place, 60 - 3 * number)
            Image.new("RGB", size, (30 * number, 255 - 30 * number, 7)).save(names[-1])
        parts = [*[{"type": "image"}] * len(names), {"type": "text", "text": f"what {number}"}]
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": parts}], "images": names}
        for side, text in (("chosen", "a cat"), ("rejected", "the dog")):
            row[side] = [{"role": "assistant", "content": [{"type": "text", "text": text}]}]
        rows.append(row)
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "rewards.py").write_text(
        "def vowels(completions, **fields):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [sum(x in 'aeiou' for x in text) / 4 for text in texts]\n"
    )
    return path


def document(folder: Path, name: str, method: str, **trainer: Any) -> dict[str, Any]:
    """Return a run file whose batches contain all rows."""
    mixture = {
        "prefetch_workers": 0,
        "informs": [{"data_files": str(folder / "rows.jsonl")}],
    }
    online: dict[str, Any] = {
        "reward_functions": [f"{folder}/rewards.py:vowels"],
        "num_return_sequences": 4,
        "max_prompt_length": 96,
        "max_completion_length": 8,
        "beta": 0.5,
        "importance_sampling_correction": "none",
    }
    if method == "dpo":
        online, mixture["tokenization"] = {"beta": 0.5}, {"max_length": 128}
    return {
        "model": {"name_or_path": str(folder / "model"), "task": "image-text-to-text"},
        "reference_model": {"name_or_path": str(folder / "reference")},
        "mixture": mixture,
        "trainer": {
            "trainer_type": method,
            "total_batch_size": ROWS,
            "max_training_steps": 6,
            "learning_rate": 3e-3,
            "weight_decay": 0.0,
            "log_steps": 1,
            "use_tensorboard": False,
            "save_directory": str(folder / name),
            **online,
            **trainer,
        },
        "actions": ["train"],
    }


def their_logps(path: Path, rows: dict[str, np.ndarray]) -> list[Any]:
    """Return the log-probability of each label of rows under the model of transformers."""
    torch = require_torch()
    import transformers

    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(path).eval()
    token, found = model.config.image_token_id, []
    for row, ids in enumerate(rows["input_ids"]):
        here = rows["segment_ids"][row] > 0
        tiles = int((ids == token).sum()) // FEATURES
        images = {}
        if tiles:
            images["pixel_values"] = torch.tensor(rows["pixel_values"][row, :tiles])
        tokens = torch.tensor(ids[here]).long()[None]
        with torch.no_grad():
            logits = model(input_ids=tokens, **images).logits[0]
        logps = torch.log_softmax(logits, dim=-1)
        labels = torch.tensor(rows["labels"][row][here]).long()
        places = torch.nonzero(labels[1:] >= 0)[:, 0]
        found.append(logps[places, labels[places + 1]].double())
    return found


def loss_of_trl(folder: Path, batch: dict[str, np.ndarray]) -> tuple[float, float]:
    """Return the loss and the mean margin that `trl.DPOTrainer` computes for a batch of pairs."""
    torch = require_torch()
    import transformers
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    kind: Any = transformers.AutoModelForImageTextToText
    model, reference = (kind.from_pretrained(folder / name) for name in ("model", "reference"))

    def both(name: str) -> Any:
        return torch.tensor(np.concatenate([batch[f"{side}_{name}"] for side in SIDES])).long()

    ids, counts = both("input_ids"), []
    for row in ids[:ROWS]:
        counts.append(int((row == model.config.image_token_id).sum()) // FEATURES)
    tiles = np.concatenate([row[:n] for row, n in zip(batch["pixel_values"], counts, strict=True)])
    inputs = {
        "input_ids": ids,
        "attention_mask": (both("segment_ids") > 0).long(),
        "completion_mask": (both("labels") >= 0).long(),
        "pixel_values": torch.tensor(np.concatenate([tiles, tiles])),
    }
    texts = [{"prompt": "what", "chosen": "a cat", "rejected": "the dog"}] * ROWS
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        args=DPOConfig(str(folder / "trl"), beta=0.5, report_to=[], use_cpu=True, bf16=False),
        train_dataset=Dataset.from_list(texts),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
    )
    loss = float(trainer.compute_loss(model.train(), inputs).detach())
    return loss, float(np.mean(trainer._metrics["train"]["rewards/margins"]))


def loss_of_grpo_in_trl(
    folder: Path, rows: dict[str, np.ndarray], reference: list[Any]
) -> tuple[float, float]:
    """Return the loss and the mean divergence that `trl.GRPOTrainer` computes for completions.

    Args:
        folder: contains the model.
        rows: tokens, labels, images and advantages of each completion.
        reference: log-probabilities of the labels of each row under the reference.
    """
    torch = require_torch()
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    kind: Any = transformers.AutoModelForImageTextToText
    model, pad = kind.from_pretrained(folder / "model"), torch.nn.utils.rnn.pad_sequence
    prompts, completions, tiles, counts = [], [], [], []
    for row, ids in enumerate(rows["input_ids"]):
        own = torch.tensor(ids[rows["segment_ids"][row] > 0]).long()
        prompts.append(own[: -len(reference[row])])
        completions.append(own[-len(reference[row]) :])
        counts.append(int((own == model.config.image_token_id).sum()) // FEATURES)
        tiles.append(torch.tensor(rows["pixel_values"][row, : counts[-1]]))

    def ones(parts: list[Any]) -> list[Any]:
        return [torch.ones_like(part) for part in parts]

    mask = pad(ones(completions), batch_first=True)
    inputs = {
        "prompt_ids": pad(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad(ones(prompts), batch_first=True, padding_side="left"),
        "completion_ids": pad(completions, batch_first=True),
        "completion_mask": mask,
        "advantages": torch.tensor(rows["advantages"]).float(),
        "ref_per_token_logps": pad([x.float() for x in reference], batch_first=True),
        "pixel_values": torch.cat(tiles),
        "num_tiles": counts,
        "num_items_in_batch": mask.sum(),
    }
    options: dict[str, Any] = {"beta": 0.0, "num_generations": 4, "loss_type": "dapo"}
    trainer: Any = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **fields: [0.0] * len(completions),
        args=GRPOConfig(
            str(folder / "grpo-trl"), report_to=[], use_cpu=True, bf16=False, **options
        ),
        train_dataset=Dataset.from_list([{"prompt": "what"}] * ROWS),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model"),
    )
    trainer.beta, trainer.current_gradient_accumulation_steps = 0.5, 1
    loss = float(trainer._compute_loss(model.train(), inputs).detach())
    return loss, float(np.mean(trainer._metrics["train"]["kl"]))


@pytest.mark.nightly
@pytest.mark.torch
def test_dpo_with_images_has_the_loss_of_torch_and_learns_the_preference(folder: Path) -> None:
    torch = require_torch()
    made = document(folder, "dpo", "dpo")
    (folder / "loader.yaml").write_text(yaml.safe_dump(made))
    loader: Any = eLargeModel.from_yaml(str(folder / "loader.yaml")).build_dataset()
    batch = loader.batch_at(0)
    ratios = {}
    for side in SIDES:
        names = ("input_ids", "segment_ids", "labels")
        rows = {name: batch[f"{side}_{name}"] for name in names}
        rows["pixel_values"] = batch["pixel_values"]
        policy, reference = (their_logps(folder / name, rows) for name in ("model", "reference"))
        ratios[side] = torch.stack(
            [a.sum() - b.sum() for a, b in zip(policy, reference, strict=True)]
        )
    margins = 0.5 * (ratios["chosen"] - ratios["rejected"])
    wanted = float(-torch.nn.functional.logsigmoid(margins).mean())
    assert loss_of_trl(folder, batch) == pytest.approx((wanted, float(margins.mean())), abs=1e-4)
    figures, _ = trained(made)
    assert figures[0]["loss"] == pytest.approx(wanted, rel=1e-4)
    assert figures[0]["rewards/margins"] == pytest.approx(float(margins.mean()), abs=1e-4)
    assert figures[-1]["loss"] < 0.5 * figures[0]["loss"]
    assert figures[-1]["rewards/margins"] > figures[0]["rewards/margins"]


@pytest.mark.nightly
@pytest.mark.torch
def test_grpo_with_images_has_the_loss_of_torch(folder: Path) -> None:
    torch = require_torch()
    from ed_trainers.contract import Models, build_log_metrics
    from flax import nnx

    file = folder / "grpo-loss.yaml"
    file.write_text(yaml.safe_dump(document(folder, "grpo-loss", "grpo")))
    trainer: Any = eLargeModel.from_yaml(str(file)).build_trainer()
    phase, weights = trainer.method.phase, trainer.weights()
    generation = phase.generate(trainer.feed.dataset.batch_at(1), weights, 0)
    rows = generation.rows
    assert generation.rows["pixel_values"].any(), "the prompts have images"
    graphdef, params, other = weights.model.split_module()
    frozen = trainer.method.frozen
    models = Models(nnx.merge(graphdef, params, other), frozen.merge(frozen.leaves))
    loss = trainer.loss(models, trainer.prepare(rows), None).validate_terms()
    own = build_log_metrics(
        *({n: float(m.value) for n, m in x.items()} for x in (loss.sums, loss.metrics))
    )
    labels = np.full_like(rows["input_ids"], -100)
    labels[:, 1:] = np.where(rows["weights"][:, :-1] > 0, rows["targets"][:, :-1], -100)
    given = {**rows, "labels": labels}
    policy, reference = (their_logps(folder / name, given) for name in ("model", "reference"))
    total = count = 0.0
    for row, (a, b) in enumerate(zip(policy, reference, strict=True)):
        kl = torch.exp(b - a) - (b - a) - 1
        total += float((0.5 * kl - rows["advantages"][row]).sum())
        count += len(a)
    assert own["loss"] == pytest.approx(total / count, rel=1e-4, abs=1e-5)
    theirs = loss_of_grpo_in_trl(folder, given, reference)
    assert (own["loss"], own["kl"]) == pytest.approx(theirs, abs=1e-4)
    assert own["kl"] > 1e-3


@pytest.mark.nightly
def test_grpo_with_images_raises_the_reward(folder: Path) -> None:
    made = document(
        folder,
        "grpo",
        "grpo",
        max_training_steps=30,
        total_batch_size=16,
        num_return_sequences=8,
        learning_rate=5e-3,
        beta=0.0,
    )
    del made["reference_model"]
    figures, _ = trained(made)
    rewards = [figure["reward"] for figure in figures]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_resumed_run_with_images_equals_uninterrupted_run(folder: Path, method: str) -> None:
    whole = document(folder, f"{method}-whole", method, max_training_steps=4)
    _, wanted = trained(whole)
    first = document(folder, f"{method}-parts", method, max_training_steps=2, save_steps=2)
    trained(first)
    rest = document(folder, f"{method}-parts", method, max_training_steps=4, save_steps=2)
    figures, found = trained(rest)
    assert figures[-1]["step"] == 4
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.nightly
def test_kept_features_of_images_do_not_change_grpo(folder: Path) -> None:
    rules = {"trainable_rules": [["language_model|lm_head", True]], "max_training_steps": 3}
    found = []
    for name, option in (("pixels", {}), ("kept", {"image_feature_cache_gib": 0.01})):
        made = document(folder, f"grpo-{name}", "grpo", **rules, **option)
        del made["reference_model"]
        found.append(trained(made)[0])
    for name in ("loss", "reward", "kl"):
        values = [[row[name] for row in rows if name in row] for rows in found]
        assert len(values[0]) == 3
        np.testing.assert_allclose(*values, atol=1e-5)
    encoded = [row["encoded_images"] for row in found[1]]
    assert 0 < encoded[-1] <= 20, "completions of a prompt share its images"


PARTS = ("vision_tower", "multi_modal_projector", "language_model")


def moved(folder: Path, made: dict[str, Any]) -> dict[str, float]:
    """Train for the steps of a document, and return the largest change of a value of each part."""
    before = load_file(folder / "model" / "model.safetensors")
    _, after = trained(made)
    assert after.keys() == before.keys()
    apart = {name: float(np.abs(after[name] - before[name]).max()) for name in before}
    return {part: max(x for name, x in apart.items() if part in name) for part in PARTS}


@pytest.mark.nightly
@pytest.mark.parametrize("frozen", PARTS)
def test_rules_freeze_a_part_of_a_model_of_images(folder: Path, frozen: str) -> None:
    rules = {"trainable_rules": [[frozen, False], [".", True]]}
    made = document(folder, f"frozen-{frozen}", "dpo", max_training_steps=2, **rules)
    assert {part for part, apart in moved(folder, made).items() if not apart} == {frozen}


@pytest.mark.nightly
def test_rules_scale_the_learning_rate_of_each_tower(folder: Path) -> None:
    """The first step of adamw moves each value by the learning rate."""
    rules = {"learning_rate_rules": [["vision_tower", 0.1], ["multi_modal_projector", 10.0]]}
    made = document(
        folder, "rates", "dpo", max_training_steps=1, optimizer="adamw", scheduler="none", **rules
    )
    rate = made["trainer"]["learning_rate"]
    wanted = {"vision_tower": 0.1, "multi_modal_projector": 10.0, "language_model": 1.0}
    for part, apart in moved(folder, made).items():
        assert apart == pytest.approx(rate * wanted[part], rel=1e-2), part


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_adapters_train_one_part_of_a_model_of_images(folder: Path, part: str) -> None:
    made = document(folder, f"lora-{part}", "dpo", max_training_steps=3, merge_adapters=True)
    # The embedding is also the head, so it gets no adapter.
    target = f"{part}.layers" if part == "language_model" else part
    made["lora"] = {"rank": 4, "targets": [target]}
    assert {name for name, apart in moved(folder, made).items() if apart} == {part}
