"""Columns of schemas: values, steps, pairs, and prompts for rollouts."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from ed_data import Column, DataError, Schema, Value, build_loader, build_prompts
from ed_data.schema import COMPLETION, EMBEDDING, LABELLED, REWARD, REWARDED, STEPS

HOW = [{}, {"pack_on_the_fly": True}, {"streaming": True}, {"pack_tokens": False}]


def read(mixture, tokenizer, rows, schema, **options):
    """Return the text, the text with loss, and the values of each segment of an epoch."""
    made = mixture(rows, **options)
    length = None if made.pack_tokens else 64
    loader = build_loader(made, tokenizer, batch_size=2, seq_length=length, schema=schema)
    names = [f"{column.name}_" if column.name else "" for column in schema.columns]
    found = []
    while len(found) < len(rows):
        batch = next(loader)
        for row in range(2):
            numbers = batch[f"{names[0]}segment_ids"][row]
            for value in schema.values:
                column = f"{value.column}_" if value.column else ""
                padding = batch[f"{column}segment_ids"][row] == 0
                assert batch[value.name].dtype == np.float32
                assert (batch[value.name][row][padding] == -100).all()
            for n in range(1, numbers.max() + 1):
                texts, learned = [], []
                for name in names:
                    here = batch[f"{name}segment_ids"][row] == n
                    labels = batch[f"{name}labels"][row][here]
                    ids = batch[f"{name}input_ids"][row][here]
                    texts.append(tokenizer.decode(ids, skip_special_tokens=True))
                    learned.append(tokenizer.decode(labels[labels >= 0], skip_special_tokens=True))
                values = []
                for value in schema.values:
                    column = f"{value.column}_" if value.column else ""
                    here = batch[f"{column}segment_ids"][row] == n
                    values.append(batch[value.name][row][here].tolist())
                found.append((texts, learned, values))
    loader.close()
    return found[: len(rows)] if len(found) > len(rows) else found


@pytest.mark.parametrize("how", HOW)
def test_labels_and_rewards_are_at_the_tokens_of_their_answers(mixture, tokenizer, how):
    rows = [
        {"prompt": f"{i}?", "completion": f" yes {i}", "label": i % 3 == 0, "reward": i / 4}
        for i in range(8)
    ]
    for schema, key in ((LABELLED, "label"), (REWARDED, "reward")):
        found = read(mixture, tokenizer, rows, schema, **how)
        by_text = {row["prompt"] + row["completion"]: row for row in rows}
        assert sorted(texts[0] for texts, _, _ in found) == sorted(by_text)
        for (text,), (learned,), (values,) in found:
            assert learned == by_text[text]["completion"]
            assert set(values) == {float(by_text[text][key])}


@pytest.mark.parametrize("how", HOW)
def test_step_label_is_at_the_last_token_of_the_step(mixture, tokenizer, how):
    rows = [
        {
            "prompt": f"{i}? ",
            "completions": [f"step {k} of {i}" for k in range(1 + i % 3)],
            "labels": [k % 2 == 0 for k in range(1 + i % 3)],
        }
        for i in range(6)
    ]
    found = read(mixture, tokenizer, rows, STEPS, pack_seq_length=96, **how)
    by_text = {row["prompt"] + "".join(f"{s}\n" for s in row["completions"]): row for row in rows}
    assert sorted(texts[0] for texts, _, _ in found) == sorted(by_text)
    for (text,), (learned,), (values,) in found:
        row = by_text[text]
        assert learned == text[len(row["prompt"]) :]
        at = [i for i, value in enumerate(values) if value != -100]
        assert [values[i] for i in at] == [float(label) for label in row["labels"]]
        ids = tokenizer(row["prompt"])["input_ids"]
        for place, step in zip(at, row["completions"], strict=True):
            ids += tokenizer(f"{step}\n", add_special_tokens=False)["input_ids"]
            assert place == len(ids) - 1


def test_margin_is_at_the_tokens_of_its_pair(mixture, tokenizer):
    rows = [{"prompt": f"{i}?", "chosen": f" y{i}", "rejected": f" n{i}"} for i in range(6)]
    rows[3]["margin"] = 2.5
    found = read(mixture, tokenizer, rows, REWARD)
    margins = {texts[0]: set(values[0]) for texts, _, values in found}
    assert margins["3? y3"] == {2.5}
    assert all(margins[f"{i}? y{i}"] == {0.0} for i in (0, 1, 2, 4, 5))
    assert all(texts[0].replace("y", "n") == texts[1] for texts, _, _ in found)


def test_embedding_pairs_and_completions_have_the_expected_columns(mixture, tokenizer):
    rows = [{"anchor": f"a{i}", "positive": f"p{i}"} for i in range(5)]
    found = read(mixture, tokenizer, rows, EMBEDDING)
    assert sorted(texts for texts, _, _ in found) == [[f"a{i}", f"p{i}"] for i in range(5)]
    rows = [{"prompt": f"{i}?", "completion": f" yes {i}"} for i in range(5)]
    found = read(mixture, tokenizer, rows, COMPLETION)
    assert sorted(learned[0] for _, learned, _ in found) == [f" yes {i}" for i in range(5)]


@pytest.mark.parametrize(
    ("schema", "row", "says"),
    [
        (LABELLED, {"label": "good"}, "'label' must be a number, true or false, got 'good'"),
        (LABELLED, {"labels": 1}, "there is no field 'label'.*did you mean 'labels'"),
        (REWARDED, {"reward": None}, "'reward' must be a number"),
        (REWARDED, {"reward": 1e999}, "Infinity is not a JSON value"),
        (STEPS, {"completions": ["a", "b"], "labels": [1]}, "one number for each of the 2 steps"),
        (STEPS, {"completions": "a", "labels": [1]}, "must be a list of texts, the"),
        (
            STEPS,
            {"completions": ["a", " "], "labels": [1, 1]},
            "must be a list of texts, the",
        ),
    ],
)
def test_invalid_schema_fields_raise_error_with_field_name(mixture, tokenizer, schema, row, says):
    rows = [{"prompt": "p", "completion": "c", **row}]
    with pytest.raises(DataError, match=rf"data\.jsonl:1: .*{says}"):
        build_loader(mixture(rows), tokenizer, schema=schema)


def test_saved_rows_contain_label_values(mixture, tokenizer, tmp_path):
    rows = [{"prompt": "p", "completion": "c", "label": True}]
    made = mixture(rows, pack_tokens=False, save={"path": tmp_path / "out", "format": "json"})
    build_loader(made, tokenizer, seq_length=16, schema=LABELLED)
    saved = json.loads((tmp_path / "out" / "train-00000-of-00001.jsonl").read_text())
    assert saved["label"] == 1.0


def test_changed_labels_change_the_fingerprint(mixture, tokenizer):
    rows = [{"prompt": "p", "completion": "c", "label": True}]
    state = build_loader(mixture(rows), tokenizer, schema=LABELLED).state_dict()
    rows[0]["label"] = False
    with pytest.raises(DataError, match="sources"):
        build_loader(mixture(rows), tokenizer, schema=LABELLED).load_state_dict(state)


def test_documents_with_values_are_never_split(mixture, tokenizer):
    rows = [{"prompt": "p", "completion": "so " * 90, "label": True}] * 3
    loader = build_loader(mixture(rows), tokenizer, schema=LABELLED)
    assert loader.stats["rows"] == 3
    assert loader.stats["tokens_cut"] > 0
    with pytest.raises(DataError, match="'wrapped' splits documents at any token"):
        build_loader(mixture(rows, pack_strategy="wrapped"), tokenizer, schema=LABELLED)


def test_invalid_schema_raises_data_error():
    column = Column("", "content")
    with pytest.raises(DataError, match="different names"):
        Schema((column,), values=(Value("x", "a"), Value("x", "b")))
    with pytest.raises(DataError, match="names the column 'y'"):
        Schema((column,), values=(Value("x", "a", column="y"),))


CHAT = [{"role": "user", "content": "hi"}]


def test_prompts_are_kept_as_text_and_ids(mixture, tokenizer, jsonl):
    rows = [{"prompt": f"{i} + 1 =", "answer": i + 1} for i in range(9)]
    rows += [{"prompt": CHAT, "answer": None}, {"prompt": [5, 6], "answer": 0}]
    informs = [{"data_files": jsonl(rows), "additional_fields": ["answer"], "name": "sums"}]
    loader = build_prompts(mixture(informs=informs), tokenizer, batch_size=4)
    assert loader.steps_per_epoch == 2
    batches = [loader.batch_at(step) for step in range(11)]  # four epochs
    drawn = list(
        itertools.chain.from_iterable(
            zip(b.prompts, b.input_ids, b.fields["answer"], b.sources, strict=True) for b in batches
        )
    )
    for epoch in range(4):
        part = drawn[11 * epoch : 11 * epoch + 11]
        assert sorted(json.dumps(prompt) for prompt, *_ in part) == sorted(
            json.dumps(row["prompt"]) for row in rows
        )
    for prompt, ids, answer, source in drawn:
        assert source == "sums"
        if isinstance(prompt, str):
            assert ids == tokenizer(prompt)["input_ids"]
            assert answer == int(prompt.split()[0]) + 1
        elif prompt == CHAT:
            text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
            assert tokenizer.decode(ids) == text
        else:
            assert ids == [5, 6]
    again = build_prompts(mixture(informs=informs), tokenizer, batch_size=4)
    assert again.batch_at(7) == batches[7]
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    with pytest.raises(DataError, match="batch_size: 4 → 3"):
        build_prompts(mixture(informs=informs), tokenizer, batch_size=3).load_state_dict(
            loader.state_dict()
        )


def test_long_prompts_are_dropped_and_counted(mixture, tokenizer, jsonl, caplog):
    rows = [{"question": "why " * (1 + 30 * (i == 2))} for i in range(4)]
    informs = [{"data_files": jsonl(rows), "content_field": "question"}]
    options = {"tokenization": {"max_length": 20}, "eval_fraction": 0.3}
    made = mixture(informs=informs, **options)
    rows[:] = [{"question": f"why {i}"} for i in range(6)] + rows[2:3]
    jsonl(rows)
    train = build_prompts(made, tokenizer, batch_size=2)
    held = build_prompts(made, tokenizer, batch_size=4, split="eval")
    assert held.steps_per_epoch == 1
    with pytest.raises(IndexError):
        held.batch_at(1)
    both = {*held.batch_at(0).prompts, *train.batch_at(0).prompts, *train.batch_at(1).prompts}
    assert both == {f"why {i}" for i in range(6)}
    assert train.stats["sources"]["data"]["dropped"] == {"longer than max_length 20": 1}
    assert "longer than max_length 20" in caplog.text
