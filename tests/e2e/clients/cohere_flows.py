"""Documented flows of `cohere`: both versions of rerank."""

from __future__ import annotations

import sys

import cohere
from cohere.core.api_error import ApiError
from flows import KEY, MODEL, flow, main, raises

DOCUMENTS = ["The capital of Switzerland is Bern.", "bbbbbbbb", "Cats sleep."]
QUERY = "The capital of Switzerland?"


def root(url: str) -> str:
    return url.removesuffix("/v1")


@flow("scripted")
def rerank_of_version_1(url: str) -> None:
    client = cohere.Client(api_key=KEY, base_url=root(url))
    answer = client.rerank(
        model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True
    )
    assert answer.results[0].index == 0
    assert len(answer.results) == 2
    assert answer.results[0].document.text == DOCUMENTS[0]
    assert answer.results[0].relevance_score > answer.results[1].relevance_score
    assert answer.meta.tokens.input_tokens > 0
    fields = [{"text": text, "title": "t"} for text in DOCUMENTS]
    again = client.rerank(model=MODEL, query=QUERY, documents=fields, return_documents=True)
    assert again.results[0].document.title == "t"


@flow("scripted")
def rerank_of_version_2(url: str) -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=root(url))
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, max_tokens_per_doc=100)
    assert sorted(result.index for result in answer.results) == [0, 1, 2]
    scores = [result.relevance_score for result in answer.results]
    assert scores == sorted(scores, reverse=True)
    assert answer.meta.api_version.version == "2"


@flow("scripted")
def errors_have_a_status(url: str) -> None:
    client = cohere.ClientV2(api_key=KEY, base_url=root(url))
    for documents, model, status in ((DOCUMENTS, "other", 404), ([], MODEL, 400)):
        with raises(ApiError, lambda error, status=status: error.status_code == status):
            client.rerank(model=model, query=QUERY, documents=documents)


if __name__ == "__main__":
    sys.exit(main())
