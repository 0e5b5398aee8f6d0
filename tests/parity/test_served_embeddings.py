"""Embeddings over HTTP equal `encode` of sentence-transformers for checkpoints with its modules."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ed_infra.testing import english_topics, require_torch

torch = require_torch()
pytest.importorskip("sentence_transformers")
pytestmark = [pytest.mark.nightly, pytest.mark.torch]

LIMIT = 1e-5
#: Pooling, include_prompt, Dense, Normalize of each checkpoint.
KINDS: dict[str, tuple[str | list[str], bool, bool, bool]] = {
    "mean": ("mean", True, False, False),
    "mean without prompt, dense, normalized": ("mean", False, True, True),
    "cls, normalized": ("cls", True, False, True),
    "max, dense": ("max", True, True, False),
    "last token": ("lasttoken", True, False, False),
    "cls and mean": (["cls", "mean"], True, False, True),
}
PROMPTS = {"query": "search for the words: ", "document": "the words: "}


def texts() -> list[str]:
    """Return texts of very different lengths; each character is about one token."""
    words = " ".join(" ".join(english_topics().values()).split())
    lengths = (1, 3, 70, 7, 8, 40, 2, 5, 60, 11, 4, 25)
    return [words[n * 500 : n * 500 + length].strip() for n, length in enumerate(lengths)]


def write(folder: Path, kind: str) -> Any:
    """Write a tiny checkpoint, and return its `SentenceTransformer`."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import (
        Dense,
        Normalize,
        Pooling,
        Transformer,
    )
    from transformers import BertConfig, BertModel, BertTokenizerFast

    pooling, include, dense, normalize = KINDS[kind]
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,:;'\"()-_=`*<>[]{}/\\|!?&%$#@~^+"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=128)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    inner = folder / "inner"
    BertModel(config).save_pretrained(inner)
    tokenizer.save_pretrained(inner)
    body = Transformer(str(inner), max_seq_length=100)
    size = body.get_embedding_dimension()
    modules: list[Any] = [body, Pooling(size, pooling, include_prompt=include)]
    if dense:
        modules.append(Dense(modules[-1].get_embedding_dimension(), 16))
    if normalize:
        modules.append(Normalize())
    model = SentenceTransformer(
        modules=modules, device="cpu", prompts=PROMPTS, default_prompt_name="document"
    )
    model.save(str(folder / "model"))
    return SentenceTransformer(str(folder / "model"), device="cpu").eval()


@pytest.fixture(scope="module", params=KINDS)
def served(request: Any, tmp_path_factory: Any) -> Iterator[tuple[Any, str, bool]]:
    """The model of sentence-transformers, the URL of its server, and whether it normalizes."""
    from ed_esurge.command.load import create_engine, parse_model_arguments
    from ed_esurge.server import background

    folder = tmp_path_factory.mktemp("model")
    theirs = write(folder, request.param)
    flags = ["--no-compile-runner", "--silent-mode", "--max-num-batched-tokens", "128"]
    engine = create_engine(parse_model_arguments([str(folder / "model"), *flags]))
    with background(engine) as url:
        yield theirs, url, KINDS[request.param][3]


def ask(url: str, given: Any, **options: Any) -> np.ndarray:
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    known = ("dimensions", "encoding_format")
    own = {name: options.pop(name) for name in known if name in options}
    answer = client.embeddings.create(model="model", input=given, extra_body=options, **own)
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    vectors: list[Any] = [item.embedding for item in answer.data]
    if own.get("encoding_format") == "base64":  # the client decodes only its own default
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    return np.array(vectors, np.float32)


@pytest.mark.parametrize("encoding_format", ["base64", "float"])
def test_vectors_equal_encode(served: Any, encoding_format: str) -> None:
    theirs, url, _ = served
    found = ask(url, texts(), normalize=False, encoding_format=encoding_format)
    np.testing.assert_allclose(found, theirs.encode(texts()), atol=LIMIT)
    unit = theirs.encode(texts(), normalize_embeddings=True)
    np.testing.assert_allclose(ask(url, texts()), unit, atol=LIMIT)


@pytest.mark.parametrize("name", ["query", "document"])
def test_prompts_equal_encode(served: Any, name: str) -> None:
    theirs, url, _ = served
    found = ask(url, texts(), normalize=False, prompt_name=name)
    np.testing.assert_allclose(found, theirs.encode(texts(), prompt_name=name), atol=LIMIT)


def test_no_prompt_and_token_ids_equal_encode(served: Any) -> None:
    theirs, url, _ = served
    expected = theirs.encode(texts(), prompt="")
    found = ask(url, texts(), normalize=False, prompt_name="")
    np.testing.assert_allclose(found, expected, atol=LIMIT)
    tokens = theirs.tokenizer(texts(), truncation=True, max_length=100)["input_ids"]
    np.testing.assert_allclose(ask(url, tokens, normalize=False), expected, atol=LIMIT)


def test_dimensions_equal_truncated_and_normalized_vectors(served: Any) -> None:
    theirs, url, _ = served
    for count in (1, 5, 16):
        expected = theirs.encode(texts(), truncate_dim=count, normalize_embeddings=True)
        np.testing.assert_allclose(ask(url, texts(), dimensions=count), expected, atol=LIMIT)


def test_rerank_sorts_by_the_similarity_of_sentence_transformers(served: Any) -> None:
    theirs, url, _ = served
    query, *documents = texts()
    body = {"model": "model", "query": query, "documents": documents}
    answer = httpx.post(f"{url}/rerank", json=body).json()["results"]
    both = (
        theirs.encode(query, prompt_name="query"),
        theirs.encode(documents, prompt_name="document"),
    )
    expected = theirs.similarity(*both)[0].numpy()
    scores = {result["index"]: result["relevance_score"] for result in answer}
    np.testing.assert_allclose([scores[n] for n in range(len(documents))], expected, atol=LIMIT)
    assert [result["index"] for result in answer] == np.argsort(-expected, kind="stable").tolist()
