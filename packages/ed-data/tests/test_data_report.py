"""The report: known statistics, as text and as a page."""

from __future__ import annotations

import re

import pytest
from ed_data import data_report
from ed_data.report import near_duplicates
from ed_data.storage.prepare import prepare_tokens
from ed_data.tokens.encoder import Encoder
from ed_data.tokens.parallel import Encoding

CHAT = [{"role": "user", "content": "hi <b>"}, {"role": "assistant", "content": "hello & bye"}]


@pytest.fixture
def two(mixture, jsonl):
    many = [f"text {i} of " + "sheep " * (i % 30) for i in range(40)]
    first = jsonl([*many, many[0], many[1], ""], "first.jsonl")
    second = jsonl([{"content": many[5]}, {"content": CHAT}, {"content": None}], "second.jsonl")
    return mixture(
        informs=[{"data_files": first}, {"data_files": second}],
        mixture_weights={"first": 3, "second": 1},
        pack_seq_length=32,
    )


@pytest.mark.parametrize("how", [{}, {"streaming": True}])
def test_data_report_contains_figures_in_text_and_html(two, tokenizer, how):
    found = data_report(two.replace(**how), tokenizer, batch_size=2)
    first, second = found.sources
    assert (first.rows, first.documents, second.rows, second.documents) == (43, 42, 3, 2)
    assert (first.duplicates, second.duplicates) == (2, 1)
    assert first.dropped == {"'content' is empty": 1}
    assert second.dropped == {"'content' is null": 1}
    assert (first.weight, second.weight) == (0.75, 0.25)
    assert first.per_epoch + second.per_epoch == 44
    assert first.share == pytest.approx(0.75, abs=0.02)
    assert sum(count for _, count in found.histogram) == 44
    assert found.over_length > 0
    assert found.learned == 1.0
    text = str(found)
    for part in ("99." if found.stats["fill"] < 1 else "100", "≤", "'content' is null", "row 0"):
        assert part in text or f"{found.stats['fill']:.2%}" in text
    assert re.search(r"first\s+43\s+42", text)
    page = found.html()
    assert page.count("<table>") == 4
    assert "<b>" not in page.replace("<body>", "")
    assert first.near_duplicates is None


def test_report_marks_text_with_loss(mixture, tokenizer):
    made = mixture(
        [{"content": CHAT}], tokenization={"assistant_only_loss": True}, pack_seq_length=128
    )
    found = data_report(made, tokenizer)
    (sample,) = found.samples
    learned = "".join(text for text, loss in sample if loss)
    assert learned == "hello & bye<|eos|>"
    assert 0 < found.learned < 1
    assert "\x1b[32mhello & bye<|eos|>" in found.text(colour=True)
    assert "⟧hello & bye<|eos|>" in str(found)
    assert '<span class="loss">hello &amp; bye&lt;|eos|&gt;</span>' in found.html()


def test_near_duplicates_are_counted(mixture, tokenizer):
    base = " ".join(f"word{i}" for i in range(80))
    other = " ".join(f"other{i * 7}" for i in range(80))
    rows = [
        base,
        base + " end",
        other,
        f"so {other}",
        "short",
        "short",
        "brief",
        base[: len(base) // 2],
    ]
    made = mixture(rows)
    encoder = Encoder.create(tokenizer, made.tokenization, None)
    (part,) = prepare_tokens(made, Encoding(encoder), "train", made.cache_dir)
    assert near_duplicates(part) == 3  # of base, of other, and "short"
    (source,) = data_report(made, tokenizer, with_near_duplicates=True).sources
    assert source.near_duplicates == 3
