"""`ctc`: losses and gradients of torch, the losses of transformers, error rates, bad batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models.auto import AutoEasyDeLModelForCTC
from ed_trainers.figures.word_errors import ErrorRates, edit_distance
from ed_trainers.methods.ctc import CTCTrainer, ctc_losses
from ed_trainers.options.supervised import CTCArguments

from tests.speech_cases import RATE, recording, write_wav2vec2

FLOAT32 = {"dtype": "float32", "param_dtype": "float32"}


def random_case(blank: int) -> tuple[np.ndarray, ...]:
    """Return logits, steps, labels and lengths: equal labels, no labels, too many labels."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(6, 14, 7)) * 2).astype(np.float32)
    labels = rng.choice([label for label in range(7) if label != blank], (6, 5))
    labels[2] = [3, 3, 3, 2, 2]
    steps, lengths = np.array([14, 10, 14, 7, 3, 14]), np.array([5, 3, 5, 2, 4, 0])
    return logits, steps, labels, lengths


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("blank", [0, 4])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_losses_and_gradients_equal_torch(blank: int, zero_infinity: bool) -> None:
    torch = pytest.importorskip("torch")
    logits, steps, labels, lengths = random_case(blank)
    scores = torch.tensor(logits, requires_grad=True)
    want = torch.nn.functional.ctc_loss(
        torch.log_softmax(scores, -1).transpose(0, 1),
        torch.tensor(labels),
        torch.tensor(steps),
        torch.tensor(lengths),
        blank=blank,
        reduction="none",
        zero_infinity=zero_infinity,
    )

    def ours(logits: jax.Array) -> jax.Array:
        arrays = map(jnp.asarray, (steps, labels, lengths))
        return ctc_losses(logits, *arrays, blank=blank, zero_infinity=zero_infinity)

    np.testing.assert_allclose(ours(jnp.asarray(logits)), want.detach().numpy(), rtol=1e-6)
    possible = torch.isfinite(want)
    want[possible].sum().backward()
    gradient = jax.grad(lambda x: jnp.sum(jnp.where(possible.numpy(), ours(x), 0)))(
        jnp.asarray(logits)
    )
    # torch has the gradient NaN for an infinite loss.
    kept = possible.numpy()
    np.testing.assert_allclose(gradient[kept], scores.grad.numpy()[kept], atol=1e-5)
    assert not np.asarray(gradient)[~kept].any()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("wav2vec2")
    return folder, write_wav2vec2(folder)


def batch(rows: int = 2) -> dict[str, np.ndarray]:
    """Return recordings of different lengths, and their labels."""
    values, mask = np.zeros((rows, RATE), np.float32), np.zeros((rows, RATE), np.int32)
    labels = np.full((rows, 6), -100, np.int32)
    for row in range(rows):
        samples = recording(0.6 + 0.1 * row, row)
        samples = (samples - samples.mean()) / samples.std()
        values[row, : len(samples)], mask[row, : len(samples)] = samples, 1
        labels[row, : 6 - row] = [5, 7, 7, 4, 9, 9][: 6 - row]
    return {"input_values": values, "attention_mask": mask, "labels": labels}


def trainer(folder: Path, directory: Path, data: Any, **config: Any) -> CTCTrainer:
    model = AutoEasyDeLModelForCTC.from_pretrained(folder, config_kwargs=config, **FLOAT32)
    arguments = CTCArguments(save_directory=str(directory), total_batch_size=2)
    return CTCTrainer(arguments, model, None, data)


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.daily("mean")
def test_loss_equals_transformers(
    checkpoint: tuple[Path, Any], tmp_path: Path, reduction: str
) -> None:
    import torch

    folder, model = checkpoint
    made, rows = batch(), []
    for row in range(2):
        count = int(made["attention_mask"][row].sum())
        own = {name: torch.tensor(array[row : row + 1]) for name, array in made.items()}
        del own["attention_mask"]
        own["input_values"] = own["input_values"][:, :count]
        model.config.ctc_loss_reduction = reduction
        with torch.no_grad():
            rows.append(
                float(model(**{k: v.long() if k == "labels" else v for k, v in own.items()}).loss)
            )
    want = sum(rows) if reduction == "sum" else sum(rows) / 2
    found = trainer(folder, tmp_path, [made], ctc_loss_reduction=reduction).evaluate()
    assert found["eval_loss"] == pytest.approx(want, rel=1e-5)
    assert "eval_wer" not in found


@pytest.mark.nightly
def test_padded_rows_do_not_change_the_loss(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = checkpoint
    made = batch()
    padded = {name: np.concatenate([array, array * 0]) for name, array in made.items()}
    padded["labels"][2:] = -100
    found = trainer(folder, tmp_path, [padded]).evaluate()["eval_loss"]
    assert found == pytest.approx(
        trainer(folder, tmp_path, [made]).evaluate()["eval_loss"], rel=1e-6
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "a batch for ctc has labels"),
        ({"labels": 40}, "the label 40 is invalid: vocab_size is 17"),
        ({"labels": 0}, r"the label 0 is the blank \(pad_token_id\)"),
        ({"attention_mask": 700}, "row 1 of the batch needs 6 time steps .* have 4"),
    ],
)
def test_bad_batch_is_an_error(
    checkpoint: tuple[Path, Any], tmp_path: Path, change: dict[str, int | None], message: str
) -> None:
    made = batch()
    ((name, value),) = change.items()
    if value is None:
        del made[name]
    elif name == "labels":
        made[name][1, 2] = value
    else:
        made[name][1, value:] = 0
    with pytest.raises(ConfigError, match=message):
        trainer(checkpoint[0], tmp_path, [made]).evaluate()
    if name == "attention_mask":
        allowed = trainer(checkpoint[0], tmp_path, [made], ctc_zero_infinity=True).evaluate()
        made["labels"][1] = -100
        assert np.isfinite(allowed["eval_loss"])


def test_error_rates_equal_jiwer() -> None:
    jiwer = pytest.importorskip("jiwer")
    rng = np.random.default_rng(0)
    rates, references, hypotheses = ErrorRates(), [], []
    for _ in range(50):
        text = [rng.choice(["a", "bc", "de", "f"], rng.integers(1, 9)) for _ in range(2)]
        references.append(" ".join(text[0]))
        hypotheses.append(" ".join(text[1]))
        rates.add(references[-1], hypotheses[-1])
    assert rates.rates() == {
        "wer": pytest.approx(jiwer.wer(references, hypotheses)),
        "cer": pytest.approx(jiwer.cer(references, hypotheses)),
    }


def test_edit_distance_counts_insertions_deletions_and_substitutions() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == edit_distance("abc", "") == 3
    rates = ErrorRates()
    assert rates.rates() == {}
    rates.add("the cat sat", "the bat")
    assert rates.rates()["wer"] == pytest.approx(2 / 3)
