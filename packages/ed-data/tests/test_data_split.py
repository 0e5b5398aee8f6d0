"""The held-out split: disjoint, complete, independent of the seed, and read exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from ed_data import DataError, build_loader, contents, texts
from ed_data.rows.splits import held_out
from hypothesis import given, settings
from hypothesis import strategies as st

TEXTS = [f"text number {i}" for i in range(40)]


@given(
    st.lists(st.lists(st.integers(0, 50), max_size=40), min_size=1, max_size=3),
    st.floats(0.01, 0.99),
)
@settings(deadline=None)
def test_equal_contents_are_in_the_same_split(hashes, fraction):
    arrays = [np.array(h, np.uint64) for h in hashes]
    try:
        masks = held_out(arrays, fraction)
    except DataError:
        assert len({h for some in hashes for h in some}) < 2 or sum(map(len, hashes)) < 60
        return
    held = {v for a, m in zip(arrays, masks, strict=True) for v in a[m].tolist()}
    kept = {v for a, m in zip(arrays, masks, strict=True) for v in a[~m].tolist()}
    assert held
    assert kept
    assert not held & kept


def test_held_out_share_equals_eval_fraction():
    hashes = np.random.default_rng(0).integers(0, 2**63, 1000).astype(np.uint64)
    (mask,) = held_out([hashes], 0.1)
    assert mask.sum() == 100


def test_texts_of_both_splits_are_all_texts(mixture):
    made = mixture(TEXTS, eval_fraction=0.25)
    train, held = list(texts(made)), list(texts(made, "eval"))
    assert len(held) == 10
    assert sorted(train + held) == sorted(TEXTS)
    assert [t for t in TEXTS if t in train] == train


@pytest.mark.proves("mixture.eval_fraction")
def test_batches_contain_the_same_split_as_texts(mixture, tokenizer):
    made = mixture(TEXTS, eval_fraction=0.25, pack_tokens=False)
    held = [[*tokenizer(t)["input_ids"], tokenizer.eos_token_id] for t in texts(made, "eval")]
    for seed in (1, 2):
        loader = build_loader(made, tokenizer, batch_size=4, seq_length=32, split="eval", seed=seed)
        batches = list(loader)
        assert len(batches) == loader.steps_per_epoch == 3
        found = [
            ids[numbers == 1].tolist()
            for batch in batches
            for ids, numbers in zip(batch["input_ids"], batch["segment_ids"], strict=True)
        ]
        assert found == [*held, [], []]  # in order, once; the last batch is padded
        assert (batches[-1]["labels"][2:] == -100).all()
        assert len(list(loader)) == 3  # a second pass restarts
    with pytest.raises(IndexError, match="steps are 0 to 2"):
        loader.batch_at(3)


def test_split_does_not_depend_on_other_options(mixture, tokenizer):
    made = mixture(TEXTS, eval_fraction=0.1)
    assert list(texts(made, "eval")) == list(texts(made.replace(seed=9), "eval"))


@pytest.mark.proves("mixture.eval_informs")
def test_eval_informs_form_the_evaluation_split(mixture, tokenizer, jsonl):
    informs = [{"data_files": jsonl(["held one", "held two"], "held.jsonl")}]
    made = mixture(TEXTS, eval_informs=informs)
    assert list(texts(made)) == TEXTS
    assert list(texts(made, "eval")) == ["held one", "held two"]
    loader = build_loader(made, tokenizer, batch_size=2, split="eval")
    assert loader.stats["sources"] == {"held": {"documents": 2, "per_epoch": 2}}
    both = made.replace(eval_fraction=0.1)
    assert len(list(texts(both, "eval"))) == 4 + 2


def test_weights_do_not_change_evaluation(mixture, tokenizer, jsonl):
    informs = [{"data_files": jsonl(TEXTS, "a.jsonl")}, {"data_files": jsonl(TEXTS[:9], "b.jsonl")}]
    made = mixture(informs=informs, eval_fraction=0.2, mixture_weights={"a": 0.1, "b": 0.9})
    loader = build_loader(made, tokenizer, split="eval")
    held = list(texts(made, "eval"))
    assert loader.stats["documents"] == len(held)
    assert not set(held) & set(texts(made))


def test_chat_rows_yield_message_contents(mixture):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    made = mixture([{"content": chat}, {"content": "plain"}, {"content": [1, 2]}])
    assert list(contents(made)) == [chat, "plain", [1, 2]]
    assert list(texts(made)) == ["hi", "ho", "plain"]


def test_empty_split_raises_data_error(mixture, tokenizer):
    with pytest.raises(DataError, match="no evaluation data"):
        build_loader(mixture(), tokenizer, split="eval")
    with pytest.raises(DataError, match="no document for training"):
        build_loader(mixture(["only one"], eval_fraction=0.5), tokenizer)
    with pytest.raises(DataError, match="no document for training"):
        list(texts(mixture(["same", "same"], eval_fraction=0.5), "eval"))


def test_statistics_distinguish_informs_with_equal_names(mixture, tokenizer, jsonl):
    informs = [
        {"data_files": jsonl(TEXTS, "a.jsonl")},
        {"data_files": jsonl(TEXTS[:9], "b/a.jsonl")},
    ]
    sources = build_loader(mixture(informs=informs), tokenizer).stats["sources"]
    assert {name: s["documents"] for name, s in sources.items()} == {"a": 40, "a (2)": 9}
