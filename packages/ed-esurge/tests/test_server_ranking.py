"""Scores, ranks and embeddings over HTTP equal those of sentence-transformers and of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ed_esurge import PoolingParams, eSurge
from ed_esurge.outputs import LabelSet
from ed_esurge.server.launch import background
from ed_esurge.server.openai.ranking import Reranked
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from ed_infra.errors import ConfigError
from ed_models.checkpoints import hub
from ed_models.checkpoints.tokenizers import load_tokenizer

pytestmark = pytest.mark.torch
ONE = {"sharding_axis_dims": (1, 1, 1, 1, 1)}
SHAPE = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "initializer_range": 0.3,
    "pad_token_id": 257,
}
OPTIONS = {"max_num_seqs": 4, "compile_runner": False, "silent_mode": True}
QUERY = "who sleeps?"
DOCUMENTS = ["the cat sleeps", "a stone", "Grüße 世界", "rivers flow to the sea"]


def pair_tokenizer(second_type: int) -> Any:
    """Return a tokenizer of bytes whose second text of a pair has a token type."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(chat_template=None)
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s>:0 $A:0 </s>:0",
        pair=f"<s>:0 $A:0 </s>:0 $B:{second_type} </s>:{second_type}",
        special_tokens=ids,
    )
    tokenizer.pad_token = "</s>"
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cross-encoders and an embedding model of transformers with random weights."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, extra in (("Bert", {}), ("Roberta", {"type_vocab_size": 1, "pad_token_id": 1})):
        shape = SHAPE | {"num_labels": 1} | extra
        config = getattr(transformers, f"{name}Config")(**shape)
        model = getattr(transformers, f"{name}ForSequenceClassification")(config)
        with torch.no_grad():
            for parameter, value in model.named_parameters():
                if "embeddings" in parameter and "LayerNorm" not in parameter:
                    value.normal_(0.0, 1.0)
        model.save_pretrained(folder / name)
        pair_tokenizer(int(name == "Bert")).save_pretrained(folder / name)
    raw = json.loads((folder / "Bert/config.json").read_text())
    raw["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    for file in (folder / "Bert").iterdir():
        (folder / "Raw").mkdir(exist_ok=True)
        (folder / "Raw" / file.name).write_bytes(file.read_bytes())
    (folder / "Raw/config.json").write_text(json.dumps(raw))
    body = transformers.BertModel(transformers.BertConfig(**SHAPE))
    body.save_pretrained(folder / "Embedder")
    pair_tokenizer(1).save_pretrained(folder / "Embedder")
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {"path": f"{place}_{kind}" if place else "", "type": f"sentence_transformers.models.{kind}"}
        | {"idx": place, "name": str(place)}
        for place, kind in enumerate(kinds)
    ]
    prompts = {"query": "query: ", "document": "text: ", "other": "o: "}
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {
            "word_embedding_dimension": 32,
            "pooling_mode_mean_tokens": True,
            "include_prompt": False,
        },
        "config_sentence_transformers.json": {"prompts": prompts, "default_prompt_name": "other"},
        "sentence_bert_config.json": {"max_seq_length": 60},
    }
    for name, content in files.items():
        (folder / "Embedder" / name).parent.mkdir(exist_ok=True)
        (folder / "Embedder" / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def engines(folder: Path) -> dict[str, Any]:
    def engine(name: str) -> Any:
        model: Any = hub.from_pretrained(folder / name, task="auto-bind", **ONE)
        return eSurge(model, load_tokenizer(str(folder / name)), model_name=name, **OPTIONS)

    return {name: engine(name) for name in ("Bert", "Roberta", "Raw", "Embedder")}


@pytest.fixture(scope="module")
def url(engines: dict[str, Any]) -> Any:
    with background(engines) as url:
        yield url.removesuffix("/v1")


def post(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def torch_logits(folder: Path, name: str, pairs: list[tuple[str, str]], **options: Any) -> Any:
    """Return the logits of pairs, one by one."""
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / name).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
    with torch.no_grad():
        rows = [tokenizer(*pair, return_tensors="pt", **options) for pair in pairs]
        return np.array([float(model(**row).logits[0, 0]) for row in rows])


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("name", ["Bert", "Roberta"])
@pytest.mark.daily("Bert")
def test_cross_encoder_scores_equal_the_sigmoid_of_torch(url, folder, name) -> None:
    pairs = [(QUERY, document) for document in DOCUMENTS]
    want = sigmoid(torch_logits(folder, name, pairs))
    assert np.ptp(want) > 0.01, "the scores depend on the documents"
    data = post(url, "/v1/score", model=name, text_1=QUERY, text_2=DOCUMENTS)["data"]
    np.testing.assert_allclose([item["score"] for item in data], want, atol=1e-5)
    ranked = Reranked.model_validate(
        post(url, "/v1/rerank", model=name, query=QUERY, documents=DOCUMENTS)
    )
    assert [item.index for item in ranked.results] == np.argsort(-want).tolist()


@pytest.mark.nightly
def test_token_types_of_a_pair_change_the_score_of_bert(engines) -> None:
    ids = engines["Bert"].tokenizer(QUERY, DOCUMENTS[0])["input_ids"]
    params = [PoolingParams(second_text_start=start) for start in (None, 12)]
    one, two = engines["Bert"].embed([ids, ids], params)
    assert abs(float(one.pooled[0]) - float(two.pooled[0])) > 1e-3


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Raw"])
def test_cross_encoder_scores_equal_those_of_sentence_transformers(url, folder, name) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = library.CrossEncoder(str(folder / name), device="cpu", max_length=60)
    documents = [*DOCUMENTS, "x y " * 20]
    want = model.predict([(QUERY, document) for document in documents])
    body = {"model": name, "text_1": QUERY, "text_2": documents, "truncate_prompt_tokens": 60}
    data = post(url, "/v1/score", **body)["data"]
    np.testing.assert_allclose([item["score"] for item in data], want, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "second"), [("a" * 40, "b" * 50), ("a" * 60, "b"), ("a", "b" * 60), ("a" * 30,) * 2]
)
@pytest.mark.parametrize("limit", [9, 20, 33])
@pytest.mark.daily("9-a-*", "33-*")
def test_truncated_pairs_equal_the_truncation_of_transformers(url, folder, first, second, limit):
    options = {"truncation": "longest_first", "max_length": limit}
    want = sigmoid(torch_logits(folder, "Bert", [(first, second)], **options))
    answer = httpx.post(
        f"{url}/score",
        json={"model": "Bert", "text_1": first, "text_2": second, "truncate_prompt_tokens": limit},
    )
    np.testing.assert_allclose(answer.json()["data"][0]["score"], want[0], atol=1e-5)
    assert answer.json()["usage"]["prompt_tokens"] == limit
    removed = len(first) + len(second) + 3 - limit
    assert answer.headers["x-truncated-prompt-tokens"] == str(removed)


def test_pairs_that_do_not_fit_return_400(url) -> None:
    body = {"model": "Bert", "query": "a" * 50, "documents": ["b" * 50]}
    answer = httpx.post(f"{url}/rerank", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    short = httpx.post(f"{url}/rerank", json={**body, "truncate_prompt_tokens": 3})
    assert short.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_answers_in_the_formats_of_cohere_and_jina(url, path) -> None:
    documents = [{"text": each, "id": place} for place, each in enumerate(DOCUMENTS[:2])]
    body = {"model": "Bert", "query": QUERY, "documents": [*documents, DOCUMENTS[2]], "top_n": 3}
    answer = post(url, path, **body, return_documents=True, rank_fields=["text"])
    Reranked.model_validate(answer)
    by_index = {item["index"]: item["document"] for item in answer["results"]}
    assert by_index == {0: documents[0], 1: documents[1], 2: {"text": DOCUMENTS[2]}}
    scores = [item["relevance_score"] for item in answer["results"]]
    assert scores == sorted(scores, reverse=True) and all(0 <= score <= 1 for score in scores)
    tokens = answer["usage"]["total_tokens"]
    assert answer["meta"]["tokens"] == {"input_tokens": tokens, "output_tokens": 0}
    bare = post(url, path, **body | {"top_n": 1}, return_documents=False)["results"]
    assert len(bare) == 1 and "document" not in bare[0]


@pytest.mark.parametrize("model", ["Bert", "Embedder"])
def test_documents_are_cut_to_max_tokens_per_doc(url, model) -> None:
    long = post(
        url, "/v2/rerank", model=model, query=QUERY, documents=["cat sleeps"], max_tokens_per_doc=3
    )
    short = post(url, "/v2/rerank", model=model, query=QUERY, documents=["cat"])
    scores = [answer["results"][0]["relevance_score"] for answer in (long, short)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert long["results"][0]["document"] == {"text": "cat sleeps"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": [{"title": "a"}]}, "documents[0]"),
        ({"documents": ["a", 5]}, "documents[1]"),
        ({"documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"documents": ["a"], "rank_fields": ["title"]}, "rank_fields"),
        ({"documents": ["a"], "max_chunks_per_doc": 4}, "max_chunks_per_doc"),
    ],
)
def test_invalid_rerank_requests_return_400_with_param(body, param) -> None:
    with background(ScriptedEngine()) as url:
        answer = httpx.post(f"{url}/rerank", json={"query": "a", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_official_cohere_client_reranks_in_both_versions(url) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="none", base_url=url)
    answer = client.rerank(model="Bert", query=QUERY, documents=DOCUMENTS, top_n=2)
    assert [item.index for item in answer.results] == [
        item["index"]
        for item in post(url, "/rerank", model="Bert", query=QUERY, documents=DOCUMENTS)["results"]
    ][:2]
    assert answer.meta.tokens.input_tokens > 0
    old = cohere.Client(api_key="none", base_url=url)
    objects = [{"text": text} for text in DOCUMENTS]
    first = old.rerank(model="Bert", query=QUERY, documents=objects, return_documents=True)
    best = first.results[0]
    assert best.document.text == DOCUMENTS[best.index]
    assert best.relevance_score == pytest.approx(answer.results[0].relevance_score)


def test_served_embeddings_equal_sentence_transformers(url, folder) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(folder / "Embedder"), device="cpu")
    for name in ("query", "document", None):
        for size in (None, 7):
            body = {
                "model": "Embedder",
                "input": DOCUMENTS,
                "prompt_name": name,
                "dimensions": size,
            }
            data = post(url, "/v1/embeddings", **body)["data"]
            want = model.encode(
                DOCUMENTS, prompt_name=name, truncate_dim=size, normalize_embeddings=True
            )
            np.testing.assert_allclose([item["embedding"] for item in data], want, atol=1e-5)
    body = {"model": "Embedder", "input": DOCUMENTS, "prompt_name": ""}
    data = post(url, "/v1/embeddings", **body)["data"]
    want = model.encode(DOCUMENTS, prompt="")
    np.testing.assert_allclose([item["embedding"] for item in data], want, atol=1e-5)
    similarities = model.similarity(model.encode_query(QUERY), model.encode_document(DOCUMENTS))
    ranked = post(url, "/rerank", model="Embedder", query=QUERY, documents=DOCUMENTS)["results"]
    scores = {item["index"]: item["relevance_score"] for item in ranked}
    np.testing.assert_allclose([scores[n] for n in range(4)], similarities[0].numpy(), atol=1e-5)


def test_embeddings_with_prompts_equal_the_formula_in_torch(url, folder) -> None:
    import torch
    import transformers

    body = transformers.BertModel.from_pretrained(folder / "Embedder").eval()
    tokenizer = load_tokenizer(str(folder / "Embedder"))
    with torch.no_grad():
        rows = [tokenizer("query: " + text, return_tensors="pt") for text in DOCUMENTS]
        means = [body(**row)[0][0, 8:].mean(0)[:6] for row in rows]
    want = torch.nn.functional.normalize(torch.stack(means), dim=1).numpy()
    given = {"model": "Embedder", "input": DOCUMENTS, "prompt_name": "query", "dimensions": 6}
    data = post(url, "/v1/embeddings", **given)["data"]
    np.testing.assert_allclose([item["embedding"] for item in data], want, atol=1e-5)
    raw = {"model": "Embedder", "input": tokenizer(DOCUMENTS[0])["input_ids"]}
    alone = post(url, "/v1/embeddings", **raw)["data"][0]["embedding"]
    plain = post(url, "/v1/embeddings", **raw | {"input": DOCUMENTS[0], "prompt_name": ""})
    np.testing.assert_allclose(alone, plain["data"][0]["embedding"], atol=1e-6)


def test_unknown_prompts_and_long_texts_return_400(url) -> None:
    body = {"model": "Embedder", "input": "a"}
    answer = httpx.post(f"{url}/v1/embeddings", json={**body, "prompt_name": "qery"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_name")
    assert "'query'" in answer.json()["error"]["message"]
    long = httpx.post(f"{url}/v1/embeddings", json={**body, "input": "a" * 61})
    assert "maximum context length is 60" in long.json()["error"]["message"]


def test_options_of_encoders_are_errors_for_language_models(surge) -> None:
    for options in ({"prompt_length": 2}, {"second_text_start": 1}):
        with pytest.raises(ConfigError, match="requires an embedding model or a classifier"):
            surge.embed(["abc"], PoolingParams(**options))
    with pytest.raises(ConfigError, match="2 prompts but 1 pooling parameters"):
        surge.embed(["a", "b"], [PoolingParams()])


def test_scores_of_large_logits_are_finite() -> None:
    logits = np.array([[1000.0], [-1000.0], [0.0]], np.float32)
    np.testing.assert_allclose(LabelSet((None,)).scores(logits), [1.0, 0.0, 0.5])
    raw = LabelSet((None,), score_activation="identity").scores(logits)
    np.testing.assert_allclose(raw, logits[:, 0])


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/rerank", {"query": "a", "documents": ["b", "word " * 90]}, "documents"),
        ("/v1/rerank", {"query": "word " * 90, "documents": ["b"]}, "query"),
        ("/v1/score", {"text_1": "a", "text_2": ["word " * 90]}, "text_2"),
        ("/v1/score", {"queries": "word " * 90, "items": ["b"]}, "queries"),
        ("/v1/score", {"data_1": "a", "data_2": "word " * 90}, "data_2"),
    ],
)
def test_errors_name_the_field_of_a_long_text(path, fields, name):
    with background(ScriptedEngine(max_model_len=64)) as url:
        root = url.removesuffix("/v1")
        answer = httpx.post(root + path, json=fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == name and f"the {name} has" in error["message"]
        cut = httpx.post(root + path, json={**fields, "truncate_prompt_tokens": 10})
        assert cut.status_code == 200, cut.text
