"""Encoders over HTTP: embeddings, similarities and labels equal those of the model and of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from ed_esurge import eSurge
from ed_esurge.command.load import create_engine, parse_model_arguments
from ed_esurge.outputs import LabelSet
from ed_esurge.server.launch import background
from ed_esurge.server.openai.classification import ClassificationList
from ed_esurge.server.openai.ranking import Reranked, ScoreList
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from ed_infra import registry
from ed_infra.testing import require_torch

FIELDS = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    # Large weights, so that different texts have different labels.
    "initializer_range": 0.3,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}
NAMES = {0: "negative", 1: "neutral", 2: "positive"}
TEXTS = ["The cat sleeps", "Grüße 世界", "x" * 40, "a"]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Two models with the same fields: an embedder and a classifier."""
    config = registry.get_config("bert")
    return {
        "embedder": registry.get_module("embedding", "bert").create(config(**FIELDS), seed=1),
        "classifier": registry.get_module("sequence-classification", "bert").create(
            config(**FIELDS, id2label=NAMES), seed=2
        ),
    }


@pytest.fixture(scope="module")
def url(models):
    """A server of both models, and of a language model without labels."""
    options = {"max_num_seqs": 4, "compile_runner": False, "silent_mode": True}
    engines: dict[str, Any] = {
        name: eSurge(model, byte_tokenizer(), model_name=name, **options)
        for name, model in models.items()
    }
    with background({**engines, "generator": ScriptedEngine()}) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def token_ids() -> list[list[int]]:
    return [byte_tokenizer()(text)["input_ids"] for text in TEXTS]


def classify(url: str, **body: object) -> httpx.Response:
    return httpx.post(f"{url}/../classify", json={"model": "classifier", **body})


def softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.nightly
def test_embeddings_equal_the_mean_pooled_vectors_of_the_model(client, models, token_ids):
    answer = client.embeddings.create(model="embedder", input=TEXTS)
    rows = [np.asarray(models["embedder"](np.array([ids])).embeddings[0]) for ids in token_ids]
    found = np.array([item.embedding for item in answer.data])
    np.testing.assert_allclose(found, unit(np.array(rows)), atol=2e-5)
    assert answer.usage.prompt_tokens == sum(map(len, token_ids))


@pytest.mark.nightly
def test_probabilities_equal_the_softmax_of_the_logits(url, models, token_ids):
    answer = classify(url, input=TEXTS)
    assert answer.status_code == 200, answer.text
    labels = ClassificationList.model_validate(answer.json())
    logits = np.array([models["classifier"](np.array([ids])).logits[0] for ids in token_ids])
    np.testing.assert_allclose([item.probs for item in labels.data], softmax(logits), atol=2e-5)
    assert [item.label for item in labels.data] == [NAMES[int(row.argmax())] for row in logits]
    assert len({item.label for item in labels.data}) > 1, "the labels depend on the texts"
    assert [(item.index, item.num_classes) for item in labels.data] == [(n, 3) for n in range(4)]
    assert (labels.object, labels.model) == ("list", "classifier")
    assert labels.id.startswith("classify-") and labels.created > 0
    assert labels.usage.prompt_tokens == labels.usage.total_tokens == sum(map(len, token_ids))
    raw = classify(url, input=TEXTS, use_activation=False).json()["data"]
    np.testing.assert_allclose([item["probs"] for item in raw], logits, atol=1e-4)


@pytest.mark.nightly
def test_one_text_and_token_ids_have_the_answer_of_the_list(url, token_ids):
    wanted = [item["probs"] for item in classify(url, input=TEXTS).json()["data"]]
    forms = (TEXTS[:1], TEXTS[0], token_ids[0], [token_ids[0]])
    for form in forms:
        (item,) = classify(url, input=form).json()["data"]
        np.testing.assert_allclose(item["probs"], wanted[0], atol=1e-5)


@pytest.mark.nightly
@pytest.mark.torch
def test_served_checkpoints_equal_transformers_on_torch(url, client, models, token_ids, tmp_path):
    torch = require_torch()
    from transformers import BertForSequenceClassification, BertModel

    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    body: Any = BertModel.from_pretrained(tmp_path / "embedder").eval()
    theirs: Any = BertForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    with torch.no_grad():
        means = [body(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in token_ids]
        probs = [theirs(torch.tensor([ids])).logits[0].softmax(-1) for ids in token_ids]
    raw = client.embeddings.create(model="embedder", input=TEXTS, extra_body={"normalize": False})
    found = [item.embedding for item in raw.data]
    np.testing.assert_allclose(found, torch.stack(means).numpy(), atol=1e-4)
    data = classify(url, input=TEXTS).json()["data"]
    np.testing.assert_allclose([i["probs"] for i in data], torch.stack(probs).numpy(), atol=1e-4)
    assert [i["label"] for i in data] == [theirs.config.id2label[int(p.argmax())] for p in probs]


@pytest.mark.parametrize("kind", ["embedder", "classifier"])
def test_command_line_loads_the_checkpoint_of_an_encoder(models, kind, tmp_path: Path):
    models[kind].save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    # Checkpoints of transformers have no files of sentence-transformers.
    (tmp_path / "modules.json").unlink(missing_ok=True)
    engine = create_engine(parse_model_arguments([str(tmp_path), "--no-compile-runner"]))
    if kind == "embedder":
        assert (engine.task, engine.labels) == ("embedding", None)
    else:
        assert engine.task == "sequence-classification"
        assert engine.labels == LabelSet(tuple(NAMES.values()))


@pytest.mark.nightly
def test_score_and_rerank_compare_the_vectors_of_an_encoder(url, models, token_ids):
    rows = [np.asarray(models["embedder"](np.array([ids])).embeddings[0]) for ids in token_ids]
    cosines = unit(np.array(rows)) @ unit(np.array(rows))[0]
    body = {"model": "embedder", "text_1": TEXTS[0], "text_2": TEXTS[1:]}
    scores = ScoreList.model_validate(httpx.post(f"{url}/score", json=body).json())
    np.testing.assert_allclose([item.score for item in scores.data], cosines[1:], atol=2e-5)
    body = {"model": "embedder", "query": TEXTS[0], "documents": TEXTS}
    ranked = Reranked.model_validate(httpx.post(f"{url}/rerank", json=body).json())
    assert [item.index for item in ranked.results] == np.argsort(-cosines).tolist()


@pytest.mark.parametrize(
    ("model", "task"), [("embedder", "embedding"), ("generator", "causal-language-model")]
)
def test_classify_rejects_models_of_other_tasks_by_name(url, model, task):
    answer = classify(url, model=model, input="a")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("model", "unsupported_task")
    assert f"'{task}'" in error["message"] and "'sequence-classification'" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("embeddings", {"input": "a"}),
        ("score", {"text_1": "a", "text_2": "b"}),
        ("rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_classifier_rejects_requests_for_embeddings(url, path, body):
    answer = httpx.post(f"{url}/{path}", json={"model": "classifier", **body})
    assert answer.status_code == 400
    assert "'sequence-classification'" in answer.json()["error"]["message"]
    assert "/classify" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("model", "task", "route"),
    [
        ("embedder", "embedding", "/v1/embeddings"),
        ("classifier", "sequence-classification", "/classify"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_an_encoder_return_400(url, model, task, route, stream):
    body = {"model": model, "prompt": "a", "stream": stream}
    answer = httpx.post(f"{url}/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "unsupported_task"
    assert f"'{task}'" in error["message"] and f"send the texts to {route};" in error["message"]
    assert error["message"].endswith("generates tokens is 'generator'")


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ([], "text"),
        (["a", 1], "item 1"),
        ([9999], "vocabulary"),
        ("a" * 64, "maximum context length is 64"),
        (["a"] * 3000, "2048"),
    ],
    ids=["empty", "mixed", "token", "tokens", "inputs"],
)
def test_invalid_inputs_of_classify_return_400_with_param(url, given, fragment):
    answer = classify(url, input=given)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert fragment in error["message"] and error["param"] == "input"


def test_classify_limits_the_size_of_the_body():
    with background(ScriptedEngine(), limits={"max_body_bytes": 1024}) as url:
        assert classify(url, input="a" * 1024).status_code == 413
        assert classify(url, model="scripted", input="a").status_code == 400


@pytest.mark.parametrize("side", ["left", "right", None])
def test_truncated_text_has_the_answer_of_its_first_or_last_tokens(url, side):
    text, tokenizer = "abcdefghijklmnop", byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    tokenizer.truncation_side = side or tokenizer.truncation_side
    of_text = tokenizer(text, truncation=True, max_length=7)["input_ids"]
    of_ids = ids[-7:] if side == "left" else ids[:7]
    for given, kept in ((text, of_text), (ids, of_ids)):
        answer = classify(url, input=given, truncate_prompt_tokens=7, truncation_side=side)
        assert answer.headers["x-truncated-prompt-tokens"] == str(len(ids) - 7)
        assert answer.json()["usage"]["truncated_tokens"] == len(ids) - 7
        alone = classify(url, input=kept)
        np.testing.assert_allclose(
            answer.json()["data"][0]["probs"], alone.json()["data"][0]["probs"], atol=1e-5
        )


def test_openapi_document_describes_the_classify_route(url):
    document = httpx.get(f"{url}/../openapi.json").json()
    operation = document["paths"]["/classify"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert body.endswith("/ClassificationRequest")
    assert {"400", "401", "413"} <= set(operation["responses"])


def test_decode_health_check_computes_vectors_of_encoders(url):
    answer = httpx.get(f"{url}/../health/decode")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("problem", "logits", "wanted"),
    [
        (None, [0.0, 0.0], [0.5, 0.5]),
        (None, [0.0], [0.5]),
        ("single_label_classification", [1000.0, 0.0], [1.0, 0.0]),
        ("single_label_classification", [3.0], [1.0]),
        ("multi_label_classification", [0.0, -1000.0, 1000.0], [0.5, 0.0, 1.0]),
        ("regression", [-3.5], [-3.5]),
    ],
)
def test_problem_type_selects_the_activation_of_the_logits(problem, logits, wanted):
    labels = LabelSet((None,) * len(logits), problem)
    np.testing.assert_allclose(labels.probabilities(np.array([logits], np.float32)), [wanted])


@pytest.mark.nightly
@pytest.mark.parametrize("activation", ["linear.Identity", "activation.Sigmoid"])
def test_scores_of_a_cross_encoder_have_the_activation_of_its_files(activation, tmp_path):
    """The files are those of a `CrossEncoder` of sentence-transformers 6."""
    config = registry.get_config("bert")(**FIELDS, num_labels=1)
    model = registry.get_module("sequence-classification", "bert").create(config, seed=3)
    tokenizer = byte_tokenizer()
    model.save_pretrained(tmp_path, tokenizer=tokenizer)
    module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    settings = {"model_type": "CrossEncoder", "activation_fn": f"torch.nn.modules.{activation}"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    flags = [str(tmp_path), "--max-num-seqs", "4", "--dtype", "float32"]
    engine = create_engine(parse_model_arguments(flags))
    expected = []
    for text in TEXTS[1:]:
        logit = float(model(np.array([tokenizer(TEXTS[0], text)["input_ids"]])).logits[0, 0])
        is_sigmoid = activation.endswith("Sigmoid")
        expected.append(1 / (1 + np.exp(-logit)) if is_sigmoid else logit)
    with background({engine.model_name: engine}) as url:
        body = {"model": engine.model_name, "text_1": TEXTS[0], "text_2": TEXTS[1:]}
        scores = ScoreList.model_validate(httpx.post(f"{url}/score", json=body).json())
        body = {"model": engine.model_name, "query": TEXTS[0], "documents": TEXTS[1:]}
        ranked = Reranked.model_validate(httpx.post(f"{url}/rerank", json=body).json())
    np.testing.assert_allclose([item.score for item in scores.data], expected, atol=2e-5)
    found = {item.index: item.relevance_score for item in ranked.results}
    np.testing.assert_allclose([found[i] for i in range(len(expected))], expected, atol=2e-5)
