"""Retrieval: for each query, the documents of a corpus in the order of their similarity.

The layout is that of BEIR and MTEB: queries and corpus with `_id` and `text`, and relevance
judgements (qrels) with `query-id`, `corpus-id` and `score`.
"""

from __future__ import annotations

from itertools import islice

from ed_data import DataError
from ed_data.errors import did_you_mean
from ed_trainers.figures.ranking import MAP_DEPTH, TopDocuments, retrieval_metrics

from ed_elarge.config.local_tasks import LocalTask
from ed_elarge.evaluation.local_rows import (
    Row,
    count_examples,
    get_number_field,
    get_rows,
    get_text_field,
    identity,
)
from ed_elarge.evaluation.text_model import TextModel

#: Documents that are embedded and scored at a time.
_CHUNK = 2048


class Retrieval:
    """A retrieval task. The texts of the corpus are read again for each evaluation.

    Args:
        task: The files and cutoffs.
        limit: Number of queries, or below 1 the fraction of them. The corpus is always whole.

    Raises:
        DataError: A row is broken, an id occurs twice, or a judgement names an unknown id.
    """

    def __init__(self, task: LocalTask, limit: float | None) -> None:
        assert task.queries
        assert task.corpus
        assert task.qrels
        self._task = task
        numbers: dict[str, int] = {}
        for place, row in get_rows(task.corpus):
            _document(place, row)
            row_id = identity(place, row, "_id")
            if row_id in numbers:
                raise DataError(f"{place}: the _id {row_id!r} occurs twice in the corpus")
            numbers[row_id] = len(numbers)
        queries: dict[str, str] = {}
        for place, row in get_rows(task.queries):
            row_id = identity(place, row, "_id")
            if row_id in queries:
                raise DataError(f"{place}: the _id {row_id!r} occurs twice in the queries")
            queries[row_id] = get_text_field(place, row, "text")
        relevant: dict[str, dict[int, float]] = {}
        for place, row in get_rows(task.qrels):
            query, document = (identity(place, row, name) for name in ("query-id", "corpus-id"))
            gain = get_number_field(place, row, "score")
            if query not in queries:
                hint = did_you_mean(query, islice(queries, 1000))
                raise DataError(f"{place}: the query-id {query!r} is not in the queries{hint}")
            if document not in numbers:
                hint = did_you_mean(document, islice(numbers, 1000))
                raise DataError(f"{place}: the corpus-id {document!r} is not in the corpus{hint}")
            if gain > 0:
                relevant.setdefault(query, {})[numbers[document]] = gain
        if not relevant:
            raise DataError(f"{task.qrels[0]}: no judgement has a score above 0")
        # As in BEIR, queries without a relevant document are not evaluated.
        judged = [name for name in queries if name in relevant]
        judged = judged[: count_examples(len(judged), limit)]
        self._queries = [queries[name] for name in judged]
        self._relevant = [relevant[name] for name in judged]

    def evaluate(self, model: TextModel) -> dict[str, float]:
        """Return nDCG, MRR and recall at each cutoff, and the MAP at 100."""
        model.check_embeds("retrieval")
        assert self._task.corpus
        depth = max(MAP_DEPTH, *self._task.k)
        search = TopDocuments(model.embed(self._queries, "query"), depth, model.similarity)
        documents = (_document(place, row) for place, row in get_rows(self._task.corpus))
        while chunk := list(islice(documents, _CHUNK)):
            search.add(model.embed(chunk, "document"))
        return retrieval_metrics(search.rankings(self._relevant), self._task.k)


def _document(place: str, row: Row) -> str:
    """Return the title and the text of a document, as BEIR joins them."""
    title = row.get("title")
    if title is None or title == "":
        return get_text_field(place, row, "text")
    title, body = get_text_field(place, row, "title"), row.get("text")
    if body is not None and not isinstance(body, str):
        get_text_field(place, row, "text")
    return f"{title} {body or ''}".strip()
