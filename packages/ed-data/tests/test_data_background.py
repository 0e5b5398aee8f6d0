"""Training starts while the cache is being written, with the same batches before and after."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from ed_data import DataError, build_loader
from ed_data.order import plan
from ed_data.storage import background as growing
from ed_data.storage import prepare
from ed_data.storage.background import BackgroundTokens
from ed_data.tokens.parallel import Encoding

TEXTS = [f"{i} " + "sheep " * (i % 17) for i in range(300)]


def same(first, second) -> bool:
    return all(np.array_equal(first[key], second[key]) for key in {**first, **second})


@pytest.fixture
def aside(monkeypatch):
    """Write every store in the background, after the gate opens."""
    gate = threading.Event()
    whole = Encoding.all

    def gated(self, documents, label, tally):
        for encoded in whole(self, documents, label, tally):
            if threading.current_thread().name == "ed-data-store":
                gate.wait(60)
            yield encoded

    monkeypatch.setattr(Encoding, "all", gated)
    monkeypatch.setattr(prepare, "BACKGROUND_BYTES", 0)
    monkeypatch.setattr(plan, "WINDOW", 60)
    yield gate
    gate.set()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_available_before_the_cache_is_complete(
    mixture, tokenizer, tmp_path, aside, workers
):
    options = {"eval_fraction": 0.2, "tokenization": {"batch_size": 30}}
    reference = mixture(TEXTS, pack_on_the_fly=True, **options)
    expected = build_loader(reference, tokenizer, batch_size=2)
    made = mixture(TEXTS, prefetch_workers=workers, **options)
    loader = build_loader(made, tokenizer, batch_size=2)
    held_out = build_loader(made, tokenizer, batch_size=2, split="eval")
    tokens = loader._order.tokens[0]
    assert isinstance(tokens, BackgroundTokens)
    assert held_out._order.tokens[0] is tokens, "one store is written once"
    assert same(loader.batch_at(0), expected.batch_at(0))
    assert same(loader.batch_at(3), expected.batch_at(3))
    assert not tokens.complete
    assert not (tmp_path / "cache" / "plans").exists()
    state = loader.state_dict()
    assert loader.fingerprint == expected.fingerprint
    aside.set()
    tokens._thread.join()
    assert tokens.complete
    for step in (0, 5, 40):
        assert same(loader.batch_at(step), expected.batch_at(step))
    assert loader.stats == expected.stats
    loader.close()
    again = build_loader(made, tokenizer, batch_size=2)
    assert not isinstance(again._order.tokens[0], BackgroundTokens)
    again.load_state_dict(state)
    assert same(again.batch_at(9), expected.batch_at(9))
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


def test_sequential_read_waits_for_all_document_lengths(mixture, tokenizer, aside, monkeypatch):
    monkeypatch.setattr(growing, "AHEAD", 130)
    loader = build_loader(mixture(TEXTS), tokenizer, batch_size=2)
    tokens = loader._order.tokens[0]
    loader.batch_at(0)
    threading.Timer(0.2, aside.set).start()
    assert loader.stats["documents"] == 300  # requires the length of every document
    assert tokens.complete
    assert tokens._lazy.encoded <= 130


def test_last_user_stops_the_background_writer(mixture, tokenizer, aside):
    made = mixture(TEXTS, eval_fraction=0.2)
    loader = build_loader(made, tokenizer, batch_size=2)
    held_out = build_loader(made, tokenizer, batch_size=2, split="eval")
    loader.close()
    loader.close()
    assert held_out.batch_at(0)
    aside.set()
    held_out._order.tokens[0]._thread.join()
    assert held_out._order.tokens[0].complete
    held_out.close()


def test_closed_loader_stops_writing_tokens_and_rejects_reads(mixture, tokenizer, tmp_path, aside):
    made = mixture(TEXTS, tokenization={"batch_size": 30})
    loader = build_loader(made, tokenizer, batch_size=2)
    loader.batch_at(0)
    closing = threading.Thread(target=loader.close)
    closing.start()
    while not loader._order.tokens[0]._closed:
        time.sleep(0.001)
    aside.set()
    closing.join()
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []
    with pytest.raises(DataError, match="the loader was closed"):
        loader.batch_at(0)
    assert build_loader(made, tokenizer, batch_size=2).batch_at(0)


def test_background_encoding_error_is_raised_with_next_batch(mixture, tokenizer, aside):
    rows = [*TEXTS, [10**6]]
    made = mixture(
        [{"content": row} for row in rows], shuffle_buffer_size=1, tokenization={"batch_size": 30}
    )
    loader = build_loader(made, tokenizer, batch_size=2)
    assert loader.batch_at(0)
    aside.set()
    loader._order.tokens[0]._thread.join()
    with pytest.raises(DataError, match=r"data\.jsonl:301, content_field: token id 1000000"):
        loader.batch_at(1)


def test_small_source_is_tokenized_before_training(mixture, tokenizer):
    loader = build_loader(mixture(TEXTS), tokenizer, batch_size=2)
    assert not isinstance(loader._order.tokens[0], BackgroundTokens)
