"""Evaluation of embedding models and rerankers on local files (`eval.local_tasks`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_data import DataError
from ed_elarge import eLargeModel
from ed_elarge.config.local_tasks import LocalTask
from ed_elarge.errors import InputError
from ed_elarge.evaluation.embedding_tasks import ClassificationTask, Similarity
from ed_elarge.evaluation.reranking import Reranking
from ed_elarge.evaluation.retrieval import Retrieval
from run_files import run

COLOURS = ("red", "blue", "green", "white", "black", "brown", "pink", "grey")


def save_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def execute_run(folder: Path, sections: dict[str, Any], actions: list[str]) -> Path:
    """Execute actions, and return the directory of the trainer."""
    sections["mixture"] |= {"batch_size": 8, "prefetch_workers": 0}
    sections["trainer"] |= {
        "save_directory": str(folder / "run"),
        "use_tensorboard": False,
        "progress_bar_type": "none",
    }
    assert run({**sections, "actions": actions}) == 0
    return folder / "run"


def retrieval(folder: Path, **changed: Any) -> dict[str, Any]:
    """Write a retrieval task; `changed` replaces the rows of a file."""
    rows = {
        "queries": [{"_id": f"q{i}", "text": f"a {name} cat"} for i, name in enumerate(COLOURS)],
        "corpus": [
            {"_id": f"d{i}", "title": "", "text": f"the cat is {name}"}
            for i, name in enumerate(COLOURS)
        ],
    } | changed
    files = {name: save_rows(folder / f"{name}.jsonl", of) for name, of in rows.items()}
    qrels = folder / "qrels.tsv"
    lines = changed.get("qrels") or [f"q{i}\td{i}\t1" for i in range(6)]
    qrels.write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n")
    return {"type": "retrieval", **files, "qrels": str(qrels)}


def sts(folder: Path) -> dict[str, Any]:
    rows = [
        {"sentence1": f"a {a} cat", "sentence2": f"the cat: {b}", "score": float(a == b) + i / 9}
        for i, (a, b) in enumerate(zip(COLOURS, (*COLOURS[:4], *COLOURS[:4]), strict=True))
    ]
    return {"type": "sts", "data_files": save_rows(folder / "sts.jsonl", rows)}


def classification(folder: Path) -> dict[str, Any]:
    rows = [
        {"text": f"{animal} {name}", "label": animal}
        for name in COLOURS
        for animal in ("cat", "dog")
    ]
    return {
        "type": "classification",
        "train_files": save_rows(folder / "train.jsonl", rows[:10]),
        "test_files": save_rows(folder / "test.jsonl", rows[10:]),
    }


def reranking(folder: Path) -> dict[str, Any]:
    rows = [
        {"query": f"a {name} cat", "positive": [f"{name} cat"], "negative": ["a dog", "a bird"]}
        for name in COLOURS
    ]
    return {"type": "reranking", "data_files": save_rows(folder / "lists.jsonl", rows)}


def loaded(kind: Any, task: dict[str, Any]) -> Any:
    return kind(LocalTask(**task), None)


BROKEN: dict[str, tuple[Any, Any, str]] = {
    "query without text": (
        Retrieval,
        lambda at: retrieval(at, queries=[{"_id": "q0", "txt": "a"}]),
        r"queries.jsonl:1: the field 'text' is missing; did you mean 'txt'",
    ),
    "document twice": (
        Retrieval,
        lambda at: retrieval(at, corpus=[{"_id": 1, "text": "a"}, {"_id": "1", "text": "b"}]),
        r"corpus.jsonl:2: the _id '1' occurs twice",
    ),
    "unknown document": (
        Retrieval,
        lambda at: retrieval(at, qrels=["q0\td0\t1", "q0\td99\t1"]),
        r"qrels.tsv:3: the corpus-id 'd99' is not in the corpus",
    ),
    "score that is no number": (
        Retrieval,
        lambda at: retrieval(at, qrels=["q0\td0\tyes"]),
        "score must be a finite number, got 'yes'",
    ),
    "no relevant document": (
        Retrieval,
        lambda at: retrieval(at, qrels=["q0\td0\t0"]),
        "no judgement has a score above 0",
    ),
    "empty sentence": (
        Similarity,
        lambda at: {
            "type": "sts",
            "data_files": save_rows(
                at / "a.jsonl", [{"sentence1": " ", "sentence2": "b", "score": 1}]
            ),
        },
        r"a.jsonl:1: sentence1 must be a text that is not empty",
    ),
    "label of the test only": (
        ClassificationTask,
        lambda at: (
            classification(at)
            | {"test_files": save_rows(at / "other.jsonl", [{"text": "a", "label": "cow"}])}
        ),
        "other.jsonl:1: no row of train_files has the label 'cow'",
    ),
    "negative that is no list": (
        Reranking,
        lambda at: {
            "type": "reranking",
            "data_files": save_rows(
                at / "a.jsonl", [{"query": "q", "positive": "p", "negative": 3}]
            ),
        },
        "a.jsonl:1: negative must be a list of texts, got 3",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_row_is_reported_with_file_and_row(name: str, tmp_path: Path) -> None:
    kind, task, message = BROKEN[name]
    with pytest.raises(DataError, match=message):
        loaded(kind, task(tmp_path))


def test_task_rejects_files_of_another_kind() -> None:
    for task, message in (
        ({"type": "sts", "queries": "a"}, "data_files: a sts task needs these files"),
        ({"type": "sts", "data_files": "a", "k": 3}, "k: a sts task reads only data_files"),
        ({"type": "search"}, "unknown type 'search'"),
    ):
        with pytest.raises(ValueError, match=message):
            LocalTask(**task)


def errors(tmp_path: Path, sections: dict[str, Any]) -> str:
    from ed_elarge.config import nodes
    from ed_elarge.config.normalize import normalize

    file = tmp_path / "run.json"
    file.write_text(json.dumps(sections))
    with pytest.raises(InputError) as caught:
        normalize(nodes.read_yaml(str(file)), require_actions=True)
    return str(caught.value)


def test_misspelled_name_of_local_task_has_suggestion(tmp_path: Path) -> None:
    own = {"local_tasks": [sts(tmp_path) | {"name": "cats"}], "tasks": ["cast"]}
    sections = {
        "model": {"name_or_path": str(tmp_path), "task": "embedding"},
        "eval": own,
        "actions": ["eval"],
    }
    assert "unknown task 'cast'; did you mean 'cats'" in errors(tmp_path, sections)
    own["tasks"] = ["cats", "heldout_cloze"]
    assert "either local tasks (cats) or tasks of lm-evaluation" in errors(tmp_path, sections)
    own |= {"tasks": [], "local_tasks": [sts(tmp_path), sts(tmp_path)]}
    assert "two tasks have the name 'sts'" in errors(tmp_path, sections)
    own |= {"local_tasks": [sts(tmp_path)]}
    sections["model"]["task"] = "causal-language-model"
    assert "local_tasks evaluate models for" in errors(tmp_path, sections)


BERT: dict[str, Any] = {
    "config": {
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    },
    "tokenizer": {"train": {"vocab_size": 300}},
}


@pytest.mark.nightly
def test_embedding_run_logs_metrics_and_evaluates_local_tasks(tmp_path: Path) -> None:
    rows = [{"anchor": f"a {x} cat", "positive": f"the cat is {x}"} for x in COLOURS for _ in "ab"]
    tasks = [make(tmp_path) for make in (retrieval, sts, classification, reranking)]
    sections = {
        "model": BERT,
        "mixture": {
            "informs": [{"data_files": save_rows(tmp_path / "rows.jsonl", rows)}],
            "eval_informs": [{"data_files": save_rows(tmp_path / "held.jsonl", rows)}],
            "tokenization": {"max_length": 32},
        },
        "trainer": {
            "trainer_type": "embedding",
            "max_training_steps": 30,
            "total_batch_size": 8,
            "learning_rate": 3e-3,
            "evaluation_steps": 15,
            "benchmark_interval": 15,
            "benchmarks": ["retrieval", "sts"],
        },
        "eval": {"local_tasks": tasks, "use_tqdm": False},
        "esurge": {"max_model_len": 32, "max_num_seqs": 8, "compile_runner": False},
    }
    directory = execute_run(tmp_path, sections, ["train", "eval"])
    logged = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["eval_ndcg_at_10"] for row in logged if "eval_ndcg_at_10" in row]
    assert 0 < held_out[0] <= held_out[-1] <= 1
    assert held_out[-1] > 0.9
    during = [row for row in logged if "benchmark/retrieval/ndcg_at_10" in row]
    assert len(during) == 2
    results = json.loads((directory / "eval/results.json").read_text())["results"]
    assert set(results) == {"retrieval", "sts", "classification", "reranking"}
    last = results["retrieval"]["ndcg_at_10,none"]
    assert during[-1]["benchmark/retrieval/ndcg_at_10"] == pytest.approx(last, abs=1e-6)
    assert 0 < last <= 1
    assert results["classification"]["accuracy,none"] > 0.5
    elm = eLargeModel(
        {
            "model": {"name_or_path": str(directory / "model"), "task": "embedding"},
            "eval": {"local_tasks": tasks, "use_tqdm": False},
            "esurge": sections["esurge"],
        }
    )
    found = elm.run_benchmarks("sts")["sts"]["cosine_spearman"]
    assert found == pytest.approx(_spearman(elm, tmp_path / "sts.jsonl"), abs=1e-6)


def _spearman(elm: eLargeModel, file: Path) -> float:
    """Compute the correlation with the module itself, one text at a time."""
    from scipy.stats import spearmanr

    model, tokenizer = elm.build_model(), elm.build_tokenizer()
    rows = [json.loads(line) for line in file.read_text().splitlines()]

    def vector(text: str) -> np.ndarray:
        ids = np.array([tokenizer(text)["input_ids"]])
        found: Any = model
        return np.asarray(found(ids, attention_mask=np.ones_like(ids)).embeddings)[0].ravel()

    cosines = []
    for row in rows:
        left, right = vector(row["sentence1"]), vector(row["sentence2"])
        cosines.append(left @ right / np.linalg.norm(left) / np.linalg.norm(right))
    return float(spearmanr(cosines, [row["score"] for row in rows]).statistic)


@pytest.mark.nightly
@pytest.mark.parametrize("contrastive", [False, True])
def test_cross_encoder_run_logs_metrics_and_reranks(tmp_path: Path, contrastive: bool) -> None:
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(COLOURS):
        other = COLOURS[i - 1]
        if contrastive:
            texts = {"positive": f"{name} cat", "negative": [f"{other} cat", "a dog"]}
            rows += [{"query": f"a {name} cat", **texts}] * 4
        else:
            for document, label in ((f"{name} cat", 1), (f"{other} dog", 0)):
                rows += [{"query": f"a {name} cat", "document": document, "label": label}] * 2
    trainer: dict[str, Any] = {
        "trainer_type": "cross_encoder",
        "max_training_steps": 40,
        "total_batch_size": 8,
        "learning_rate": 3e-3,
        "evaluation_steps": 20,
    }
    if contrastive:
        trainer |= {"loss_type": "localized_contrastive", "num_negatives": 2}
    sections = {
        "model": BERT,
        "mixture": {
            "informs": [{"data_files": save_rows(tmp_path / "rows.jsonl", rows)}],
            "eval_informs": [{"data_files": save_rows(tmp_path / "held.jsonl", rows)}],
            "pack_tokens": False,
            "tokenization": {"max_length": 32},
        },
        "trainer": trainer,
        "eval": {"local_tasks": [reranking(tmp_path)], "use_tqdm": False},
        "esurge": {"max_model_len": 32, "max_num_seqs": 8, "compile_runner": False},
    }
    directory = execute_run(tmp_path, sections, ["train", "eval"])
    logged = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    names = ("map", "mrr_at_10", "ndcg_at_10") if contrastive else ("average_precision",)
    for name in names:
        values = [row[f"eval_{name}"] for row in logged if f"eval_{name}" in row]
        assert values[-1] > 0.7, (name, values)
    results = json.loads((directory / "eval/results.json").read_text())["results"]["reranking"]
    assert {"map,none", "mrr_at_10,none", "ndcg_at_10,none"} < set(results)
    assert 1 / 3 <= results["map,none"] <= 1
