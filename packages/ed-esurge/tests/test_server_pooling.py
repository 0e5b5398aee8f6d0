"""`/pooling` and the fields that all endpoints for vectors and scores share, in vLLM's formats."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest
from ed_esurge import eSurge
from ed_esurge.server.launch import background
from ed_esurge.server.openai.embeddings import Embeddings
from ed_esurge.server.openai.pooling import PooledList
from ed_esurge.testing import ScriptedEngine, byte_tokenizer
from ed_infra import registry

FIELDS = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}
TEXTS = ["The cat sleeps", "x" * 40, "a"]
CHAT = [{"role": "user", "content": "The cat sleeps"}]


def with_ends() -> Any:
    """Return a tokenizer of bytes that adds a token before and after a text."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    names = ("<s>", "</s>")
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in names]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=ids
    )
    return tokenizer


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    config = registry.get_config("bert")

    def model(task: str, seed: int, **fields: Any) -> Any:
        return registry.get_module(task, "bert").create(config(**FIELDS, **fields), seed=seed)

    return {
        "embedder": model("embedding", 1),
        "classifier": model("sequence-classification", 2, id2label={0: "a", 1: "b", 2: "c"}),
        "reranker": model("sequence-classification", 3, num_labels=1),
    }


@pytest.fixture(scope="module")
def root(models):
    options = {"max_num_seqs": 4, "compile_runner": False, "silent_mode": True}
    engines: dict[str, Any] = {
        name: eSurge(model, with_ends(), model_name=name, **options)
        for name, model in models.items()
    }
    with background({**engines, "generator": ScriptedEngine()}) as url:
        yield url.removesuffix("/v1")


def post(root: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{root}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def pool(root: str, model: str, **body: Any) -> list[Any]:
    answer = PooledList.model_validate(post(root, "/pooling", model=model, **body))
    assert answer.id.startswith("pooling-") and answer.model == model and answer.created > 0
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.data for item in answer.data]


def refusal(root: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{root}{path}", json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def close(found: Any, expected: Any) -> None:
    """Assert that numbers are equal, up to the rounding of batches of other sizes."""
    np.testing.assert_allclose(found, expected, atol=2e-6)


def numbers(answer: dict[str, Any]) -> list[Any]:
    """Return the numbers of an answer."""
    names = ("data", "embedding", "probs", "score")
    return [item[next(n for n in names if n in item)] for item in answer["data"]]


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.parametrize("model", ["embedder", "generator"])
@pytest.mark.nightly
def test_pooled_embeddings_equal_those_of_the_embeddings_endpoint(root, model):
    answer = post(root, "/v1/embeddings", model=model, input=TEXTS)
    expected = [item.embedding for item in Embeddings.model_validate(answer).data]
    for more in ({}, {"task": "embed"}):
        close(pool(root, model, input=TEXTS, **more), expected)
    short = pool(root, model, input=TEXTS, dimensions=4, use_activation=False)
    raw = pool(root, model, input=TEXTS, normalize=False)
    close(short, [row[:4] for row in raw])


@pytest.mark.nightly
def test_pooled_labels_equal_those_of_the_classify_endpoint(root):
    for more in ({}, {"use_activation": False}):
        expected = numbers(post(root, "/classify", model="classifier", input=TEXTS, **more))
        close(pool(root, "classifier", input=TEXTS, **more), expected)
        close(pool(root, "classifier", input=TEXTS, task="classify", **more), expected)


@pytest.mark.nightly
def test_token_vectors_equal_the_hidden_states_of_the_model(root, models):
    found = pool(root, "embedder", input=TEXTS, task="token_embed", use_activation=False)
    normalized = pool(root, "embedder", input=TEXTS, task="token_embed")
    for text, rows, units in zip(TEXTS, found, normalized, strict=True):
        ids = np.array([with_ends()(text)["input_ids"]])
        expected = np.asarray(models["embedder"](ids).last_hidden_state[0])
        np.testing.assert_allclose(rows, expected, atol=1e-4)
        np.testing.assert_allclose(units, unit(expected), atol=1e-5)


@pytest.mark.nightly
def test_base64_has_the_numbers_of_the_requested_type_and_order(root):
    for path, name in (("/pooling", "data"), ("/v1/embeddings", "embedding")):
        body = {"model": "embedder", "input": TEXTS[0]}
        values = np.array(post(root, path, **body)["data"][0][name])
        for dtype, order, code in (
            ("float32", "native", "=f4"),
            ("float32", "big", ">f4"),
            ("float16", "little", "<f2"),
        ):
            more = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": order}
            (item,) = post(root, path, **body, **more)["data"]
            decoded = np.frombuffer(base64.b64decode(item[name]), code)
            np.testing.assert_array_equal(decoded, values.astype(code))
    tokens = {"task": "token_embed", "encoding_format": "base64"}
    (text,) = pool(root, "embedder", input=TEXTS[0], **tokens)
    (rows,) = pool(root, "embedder", input=TEXTS[0], task="token_embed")
    decoded = np.frombuffer(base64.b64decode(text), "=f4").reshape(-1, FIELDS["hidden_size"])
    np.testing.assert_array_equal(decoded, np.array(rows, np.float32))


@pytest.mark.parametrize("path", ["/pooling", "/classify", "/v1/embeddings"])
@pytest.mark.nightly
def test_conversation_has_the_answer_of_its_template(root, path):
    model = "classifier" if path == "/classify" else "embedder"
    template = byte_tokenizer().apply_chat_template
    for generates in (False, True):
        tokens = template(CHAT, add_generation_prompt=generates, return_dict=False)
        more = {"add_generation_prompt": generates}
        found = post(root, path, model=model, messages=CHAT, **more)
        expected = post(root, path, model=model, input=tokens)
        close(numbers(found), numbers(expected))
        assert found["usage"] == expected["usage"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_texts_keep_their_special_tokens_as_in_transformers(root, side):
    tokenizer = with_ends()
    tokenizer.truncation_side = side
    for limit in (3, 9, 40):
        ids = tokenizer("abcdefghijklmnop", truncation=True, max_length=limit)["input_ids"]
        body = {"model": "embedder", "truncate_prompt_tokens": limit, "truncation_side": side}
        found = post(root, "/v1/embeddings", **body, input="abcdefghijklmnop")
        expected = post(root, "/v1/embeddings", model="embedder", input=ids)
        close(numbers(found), numbers(expected))
        assert found["usage"]["prompt_tokens"] == len(ids)
    body = {"model": "embedder", "input": "abc", "truncate_prompt_tokens": 2}
    assert refusal(root, "/v1/embeddings", **body)["param"] == "truncate_prompt_tokens"


def test_limits_of_queries_and_documents_equal_shorter_texts(root):
    for model in ("embedder", "reranker"):
        body = {"model": model, "max_tokens_per_query": 3, "max_tokens_per_doc": 2}
        found = post(root, "/score", **body, text_1="abcdef", text_2=["ghij", "k"])
        expected = post(root, "/score", model=model, text_1="abc", text_2=["gh", "k"])
        close(numbers(found), numbers(expected))
        found = post(root, "/rerank", **body, query="abcdef", documents=["ghij", "k"])
        scores = sorted(item["relevance_score"] for item in found["results"])
        close(scores, sorted(numbers(expected)))
        zero = {"max_tokens_per_query": 0, "max_tokens_per_doc": 0}
        same = post(root, "/score", model=model, text_1="abc", text_2=["gh", "k"], **zero)
        close(numbers(same), numbers(expected))


def test_scores_without_activation_are_logits(root):
    body = {"model": "reranker", "text_1": "a", "text_2": ["b", "cd"]}
    scores = np.array([item["score"] for item in post(root, "/score", **body)["data"]])
    raw = post(root, "/score", **body, use_activation=False)["data"]
    logits = np.array([item["score"] for item in raw])
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-logits)), rtol=1e-6)


def test_request_id_names_the_answer(root):
    for path, body, start in (
        ("/pooling", {"model": "embedder", "input": "a"}, "pooling-"),
        ("/v1/embeddings", {"model": "embedder", "input": "a"}, "embd-"),
        ("/classify", {"model": "classifier", "input": "a"}, "classify-"),
        ("/score", {"model": "reranker", "text_1": "a", "text_2": "b"}, "score-"),
        ("/rerank", {"model": "reranker", "query": "a", "documents": ["b"]}, "rerank-"),
    ):
        assert post(root, path, **body, request_id="mine")["id"] == f"{start}mine"


INPUT = {"model": "embedder", "input": "a"}
PAIR = {"model": "reranker", "text_1": "a", "text_2": "b"}


@pytest.mark.parametrize(
    ("path", "body", "param", "fragment"),
    [
        ("/pooling", {**INPUT, "task": "score"}, "task", "send pairs of texts to /score"),
        ("/pooling", {**INPUT, "task": "encode"}, "task", "use token_embed"),
        ("/pooling", {**INPUT, "task": "token_classify"}, "task", "use classify"),
        ("/pooling", {**INPUT, "task": "plugin"}, "task", "no plugins"),
        ("/pooling", {**INPUT, "task": "embed&token_classify"}, "task", "use embed"),
        ("/pooling", {**INPUT, "task": "sort"}, "task", "'token_embed'"),
        ("/pooling", {**INPUT, "data": {"a": 1}}, "data", "send input or messages"),
        ("/pooling", {**INPUT, "task": "classify"}, "model", "is one of 'classifier', 'reranker'"),
        ("/pooling", {**INPUT, "task": "token_embed", "dimensions": 2}, "dimensions", "'embed'"),
        ("/pooling", {**INPUT, "model": "generator", "task": "token_embed"}, "model", "'embedder'"),
        ("/pooling", {**INPUT, "model": "classifier", "task": "embed"}, "model", "'generator'"),
        ("/pooling", {"model": "embedder"}, "input", "either input or messages"),
        ("/v1/embeddings", {**INPUT, "messages": CHAT}, "input", "either input or messages"),
        ("/v1/embeddings", {**INPUT, "encoding_format": "bytes"}, "encoding_format", "use base64"),
        ("/v1/embeddings", {**INPUT, "embed_dtype": "bfloat16"}, "embed_dtype", "use float16"),
        ("/v1/embeddings", {**INPUT, "embed_dtype": "float16"}, "embed_dtype", "use base64"),
        ("/v1/embeddings", {**INPUT, "endianness": "big"}, "endianness", "use base64"),
        ("/v1/embeddings", {**INPUT, "padding": "max_length"}, "padding", "omit it"),
        ("/v1/embeddings", {**INPUT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        ("/v1/embeddings", {**INPUT, "priority": 3}, "priority", "scheduling_policy: priority"),
        ("/v1/embeddings", {**INPUT, "input": CHAT}, "input", "in the field messages"),
        ("/v1/embeddings", {**INPUT, "input": [CHAT]}, "input", "in the field messages"),
        ("/v1/embeddings", {"messages": [CHAT, CHAT]}, "messages", "one conversation in each"),
        ("/v1/embeddings", {"messages": CHAT, "chat_template": "x"}, "chat_template", "start the"),
        ("/v1/embeddings", {**INPUT, "add_generation_prompt": True}, None, "messages only"),
        ("/v1/embeddings", {"messages": CHAT, "add_special_tokens": True}, None, "chat template"),
        ("/classify", {**INPUT, "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "omit"),
        ("/classify", {**INPUT, "media_io_kwargs": {"a": {}}}, "media_io_kwargs", "omit"),
        ("/score", {**PAIR, "instruction": "rank"}, "instruction", "into the first text"),
        ("/score", {**PAIR, "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "first"),
        ("/score", {**PAIR, "truncation_side": "left"}, "truncation_side", "omit"),
        (
            "/score",
            {**PAIR, "model": "embedder", "use_activation": False},
            "use_activation",
            "cross-encoder",
        ),
    ],
)
def test_unsupported_fields_are_refused_with_a_way_out(root, path, body, param, fragment):
    error = refusal(root, path, **body)
    assert fragment in error["message"], error
    if param is not None:
        assert error["param"] == param
