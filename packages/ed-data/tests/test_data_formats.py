"""Rows as other people write them: published formats, completions, cells, JSON columns, folders."""

from __future__ import annotations

import json
import logging
import pickle

import numpy as np
import pytest
from ed_data import DataError, Inform, Mixture, build_loader, build_prompts
from ed_data.checks import check_names
from ed_data.rows.documents import Documents
from ed_data.rows.formats import ROW_FORMATS, convert_row, detect_format
from ed_data.schema import COMPLETION, LABELLED, PREFERENCE, SCORED_PAIR, TEXT, Cell
from ed_data.sources.files import find_split, select_split
from ed_data.tokens.tokenizers import count_ids

QUESTION, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
TURNS = [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]
HISTORY = [["q", "r"]]
CALL = '{"name": "f", "arguments": {"x": 1}}'
TOOL_TURNS = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "a?"},
    {"from": "function_call", "value": CALL},
    {"from": "observation", "value": "r"},
    {"from": "gpt", "value": "b"},
]


@pytest.mark.parametrize(
    ("name", "row", "fields"),
    [
        ("sharegpt", {"conversations": TURNS}, {"messages": [QUESTION, ANSWER]}),
        (
            "sharegpt",
            {"conversations": TURNS, "system": "s"},
            {"messages": [{"role": "system", "content": "s"}, QUESTION, ANSWER]},
        ),
        (
            "sharegpt",
            {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": [TURNS[1]]},
            {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [ANSWER]},
        ),
        (
            "alpaca",
            {"instruction": "a", "input": "i", "output": "b"},
            {
                "prompt": [{"role": "user", "content": "a\n\ni"}],
                "completion": [{"role": "assistant", "content": "b"}],
            },
        ),
        (
            "alpaca",
            {
                "instruction": "a?",
                "input": "",
                "output": "b",
                "system": "s",
                "history": [["q", "r"]],
            },
            {
                "prompt": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "r"},
                    QUESTION,
                ],
                "completion": [ANSWER],
            },
        ),
        (
            "alpaca",
            {"instruction": "a?", "chosen": "b", "rejected": "c"},
            {
                "prompt": [QUESTION],
                "chosen": [ANSWER],
                "rejected": [{"role": "assistant", "content": "c"}],
            },
        ),
        ("openai", {"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, ANSWER]}),
        (
            "openai",
            {
                "input": {"messages": [QUESTION], "tools": [{"type": "function"}]},
                "preferred_output": [ANSWER],
                "non_preferred_output": [ANSWER],
            },
            {
                "prompt": [QUESTION],
                "chosen": [ANSWER],
                "rejected": [ANSWER],
                "tools": [{"type": "function"}],
            },
        ),
        (
            "llava",
            {
                "image": "a.png",
                "conversations": [{"from": "human", "value": "<image>\na?"}, TURNS[1]],
            },
            {
                "image": "a.png",
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image"}, {"type": "text", "text": "a?"}],
                    },
                    ANSWER,
                ],
            },
        ),
    ],
)
def test_published_formats_become_messages_and_answers(name, row, fields):
    assert detect_format(row) == name
    assert convert_row(name, row, "row 1") == fields


def test_calls_of_sharegpt_become_calls_and_results():
    chat = convert_row("sharegpt", {"conversations": TOOL_TURNS}, "row 1")["messages"]
    assert [message["role"] for message in chat] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    (call,) = chat[2]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_rows_without_the_format_name_the_row_and_the_fields(name):
    with pytest.raises(DataError, match=rf"row 7: .*{name}.*"):
        convert_row(name, {"other": 1}, "row 7")
    with pytest.raises(DataError, match="narrator"):
        convert_row("sharegpt", {"conversations": [{"from": "narrator", "value": "a"}]}, "row 7")


def written(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def read(file, schema=TEXT, **options):
    return [d.fields for d in Documents(Inform(data_files=str(file), **options), schema=schema)]


@pytest.mark.proves("mixture.informs.format")
def test_a_named_format_is_used_in_rows_with_other_fields(tmp_path):
    row = {"content": "text", "instruction": "a?", "output": "b"}
    file = written(tmp_path, row)
    assert read(file) == [{"content": "text"}]
    (fields,) = read(file, COMPLETION, format="alpaca")
    assert fields == {"prompt": [QUESTION], "completion": [ANSWER]}


def test_formats_are_detected_and_named_in_the_log(tmp_path, caplog):
    file = written(tmp_path, {"conversations": TURNS}, {"conversations": TURNS})
    with caplog.at_level(logging.INFO, "ed_data"):
        assert read(file) == [{"content": [QUESTION, ANSWER]}] * 2
    assert caplog.text.count("the format sharegpt") == 1


def test_detected_formats_do_not_replace_fields_that_the_method_reads(tmp_path):
    row = {"content": "text", "conversations": TURNS, "instruction": "a", "output": "b"}
    assert read(written(tmp_path, row)) == [{"content": "text"}]
    pair = {"prompt": "p", "chosen": "b", "rejected": "c", "messages": [QUESTION, ANSWER]}
    assert read(written(tmp_path, pair), PREFERENCE) == [
        {"prompt": "p", "chosen": "b", "rejected": "c"}
    ]


def batch(tmp_path, tokenizer, *rows, **options):
    mixture = Mixture(informs=[Inform(data_files=str(written(tmp_path, *rows)), **options)])
    loader = build_loader(mixture, tokenizer, batch_size=len(rows), seq_length=96, shuffle=False)
    return loader.batch_at(0)


def learned(tokenizer, batch, row):
    labels = batch["labels"][row]
    return tokenizer.decode(labels[labels != -100])


def test_only_the_completion_of_a_prompt_is_learned(tmp_path, tokenizer):
    rows = [{"prompt": "two and two is", "completion": " four"}, {"content": "all of this"}]
    values = batch(tmp_path, tokenizer, *rows)
    shown = tokenizer.decode(values["input_ids"][0][values["segment_ids"][0] > 0])
    assert "two and two is four" in shown
    assert learned(tokenizer, values, 0).startswith(" four")
    assert "all of this" in learned(tokenizer, values, 1)


def test_texts_beside_completions_equal_texts_alone(tmp_path, tokenizer):
    text = {"content": "a plain text"}
    alone = batch(tmp_path, tokenizer, text)
    mixed = batch(tmp_path, tokenizer, {"prompt": "p", "completion": "c"}, text)
    assert np.array_equal(alone["input_ids"][0], mixed["input_ids"][1])
    # The first label has no prediction.
    assert np.array_equal(alone["labels"][0, 1:], mixed["labels"][1, 1:])


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "p", "completion": "c"}, "prompt"),
        ({"instruction": "p", "output": "c"}, "instruction"),
        ({"question": "p", "answer": "c"}, "question"),
        ({"query": "p", "response": "c"}, "query"),
        ({"prompt": "p", "chosen": "c", "rejected": "d"}, "prompt"),
    ],
)
def test_answers_beside_a_named_prompt_are_an_error(tmp_path, row, field):
    informs = [Inform(data_files=str(written(tmp_path, row)), content_field=field)]
    ((path, message),) = check_names(Mixture(informs=informs))
    assert path[-1] == "content_field"
    assert any(repr(name) in message for name in row if name != field)


def test_answers_beside_another_field_are_a_warning(tmp_path, caplog):
    file = written(tmp_path, {"text": "t", "completion": "c"})
    with caplog.at_level(logging.WARNING, "ed_data"):
        assert (
            check_names(Mixture(informs=[Inform(data_files=str(file), content_field="text")])) == []
        )
    assert "'completion', which is not trained on" in caplog.text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True),
        ("false", False),
        ("0.5", 0.5),
        ("3", 3),
        ("", None),
        ("null", None),
        ("1e400", float("inf")),
        ("many", "many"),
    ],
)
def test_cells_have_values_where_numbers_are_read(text, value):
    assert Cell(text).value == value
    assert type(Cell(text).value) is type(value)


def test_csv_and_tsv_have_labels_and_scores(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("prompt,completion,label\n1,2,True\n3,4,False\n")
    documents = [*Documents(Inform(data_files=str(file)), schema=LABELLED)]
    assert [d.values for d in documents] == [(1.0,), (0.0,)]
    assert documents[0].fields == {"prompt": "1", "completion": "2"}
    file = tmp_path / "a.tsv"
    file.write_text("sentence1\tsentence2\tscore\na\tb\t0.5\nc\td\tmany\n")
    rows = iter(Documents(Inform(data_files=str(file)), schema=SCORED_PAIR))
    assert next(rows).values == (0.5,)
    with pytest.raises(DataError, match="'many'"):
        next(rows)


VALUES = [{"a": 1, "b": [2, None]}, "text", [1, {"c": "d"}]]


@pytest.mark.parametrize("layout", ["parquet", "folder", "list", "struct"])
def test_json_columns_are_decoded_by_every_reader(tmp_path, layout):
    datasets = pytest.importorskip("datasets")
    kind = datasets.Json()
    column = [*VALUES]
    feature = kind
    if layout == "list":
        column, feature = [[value] for value in VALUES], datasets.List(kind)
    if layout == "struct":
        column = [{"inner": value, "n": 1} for value in VALUES]
        feature = {"inner": kind, "n": datasets.Value("int64")}
    features = datasets.Features({"content": datasets.Value("string"), "extra": feature})
    data = datasets.Dataset.from_dict({"content": ["x"] * 3, "extra": column}, features=features)
    data.save_to_disk(str(tmp_path / "disk"))
    data.to_parquet(str(tmp_path / "a.parquet"))
    for options in (
        {"data_files": str(tmp_path / "a.parquet")},
        {"data_files": str(tmp_path / "disk"), "type": "arrow"},
        {"data_files": str(tmp_path / "disk"), "type": "huggingface"},
    ):
        inform = Inform(**options, additional_fields=["extra"])
        assert [d.extra["extra"] for d in Documents(inform)] == column, options


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("/train/data-00000-of-00001.arrow", "train"),
        ("/data/validation-00000.parquet", "validation"),
        ("/my-dev.jsonl", "validation"),
        ("/eval/a.jsonl", "test"),
        ("/constrained/a.jsonl", None),
        ("/contest.csv", None),
        ("/part-0.json", None),
    ],
)
def test_words_of_a_path_name_its_split(path, split):
    assert find_split(path) == split


def test_folders_give_the_files_of_the_split_without_caches(caplog):
    files = [
        "/f/train/data-0.arrow",
        "/f/test/data-0.arrow",
        "/f/train/cache-57496c5f17d841f9.arrow",
    ]
    with caplog.at_level(logging.INFO, "ed_data"):
        assert select_split(files, "/f", "train", "x") == files[:1]
    assert "2 files of the folder are not read" in caplog.text
    assert select_split(["/f/a.json", "/f/b.json"], "/f", "train", "x") == [
        "/f/a.json",
        "/f/b.json",
    ]
    assert select_split(["/test/a.json"], "/test", "train", "x") == ["/test/a.json"]
    with pytest.raises(DataError, match="splits test, and none to 'train'"):
        select_split(["/f/test.json"], "/f", "train", "x")


@pytest.mark.parametrize(
    ("rows", "size", "epochs", "steps"),
    [(7, 4, 3, 6), (7, 4, 10, 18), (7, 5, 2, 3), (8, 4, 2, 4), (3, 4, 1, 1), (3, 4, 5, 4)],
)
def test_epochs_are_passes_over_the_rows(tmp_path, tokenizer, rows, size, epochs, steps):
    file = written(tmp_path, *({"content": f"row {number}"} for number in range(rows)))
    loader = build_loader(
        Mixture(informs=[Inform(data_files=str(file))]), tokenizer, batch_size=size, seq_length=16
    )
    assert loader.count_steps(epochs) == steps
    seen = np.concatenate([loader.batch_at(step)["input_ids"] for step in range(steps)])
    counts = {tuple(row): 0 for row in seen.tolist()}
    for row in seen.tolist():
        counts[tuple(row)] += 1
    assert len(counts) == rows and min(counts.values()) >= epochs


LONG = {"prompt": "p" * 40, "completion": "c"}
SHORT = {"prompt": "p", "completion": "c" * 5}
MIDDLE = {"prompt": "p" * 4, "completion": "c" * 60}


def load(tmp_path, tokenizer, rows, **options):
    tokenization = options.pop("tokenization", {})
    mixture = Mixture(
        informs=[Inform(data_files=str(written(tmp_path, *rows)))],
        tokenization=tokenization,
        **options,
    )
    return build_loader(mixture, tokenizer, batch_size=1, seq_length=32, shuffle=False)


@pytest.mark.parametrize(
    ("truncation", "texts", "said"),
    [
        (None, ("p" * 31, "pc", "ppppc"), ("2 of the first 3", "lose their end", "1 of these")),
        ("right", ("p" * 31, "pc", "ppppc"), ("2 of the first 3", "lose their end", "1 of these")),
        ("left", ("p" * 30 + "c", "pc", "c" * 31), ("2 of the first 3", "lose their beginning")),
        ("drop", ("pc",), ("2 of the first 3", "are dropped")),
        ("split", ("p" * 31,), ("2 of the first 3", "are split")),
    ],
)
def test_longer_documents_are_counted_and_cut_as_requested(
    tmp_path, tokenizer, caplog, truncation, texts, said
):
    options = {} if truncation is None else {"truncation": truncation}
    with caplog.at_level(logging.INFO, "ed_data"):
        loader = load(tmp_path, tokenizer, [LONG, SHORT, MIDDLE], tokenization=options)
    for text in said:
        assert text in caplog.text
    assert ("lose their whole answer" in caplog.text) == ("1 of these" in said)
    rows = loader.stats["rows"]
    assert rows == {"drop": 1, "split": 6}.get(truncation, 3)
    for step, text in enumerate(texts):
        batch = loader.batch_at(step)
        shown = tokenizer.decode(batch["input_ids"][0][batch["segment_ids"][0] > 0])
        assert text in shown


def test_pairs_that_lose_an_answer_are_counted(tmp_path, tokenizer, caplog):
    row = {"prompt": "p" * 40, "chosen": "c", "rejected": "d"}
    short = {"prompt": "p", "chosen": "c", "rejected": "d"}
    mixture = Mixture(informs=[Inform(data_files=str(written(tmp_path, row, short, row)))])
    with caplog.at_level(logging.WARNING, "ed_data"):
        build_loader(mixture, tokenizer, batch_size=1, seq_length=32, schema=PREFERENCE)
    assert "2 of these documents lose their whole answer" in caplog.text


def test_documents_with_a_prompt_per_column_keep_their_beginning(tmp_path, tokenizer):
    row = {"prompt": "p", "chosen": "c", "rejected": "d"}
    mixture = Mixture(
        informs=[Inform(data_files=str(written(tmp_path, row)))],
        tokenization={"truncation": "left"},
    )
    with pytest.raises(DataError, match="cannot lose their beginning"):
        build_loader(mixture, tokenizer, seq_length=32, schema=PREFERENCE)


def with_note(tokenizer, **special):
    own = pickle.loads(pickle.dumps(tokenizer))
    own.add_tokens(["<note>"])
    for name, token in special.items():
        setattr(own, name, token)
    return own


def test_ids_without_a_row_in_the_embedding_are_an_error_that_names_them(tmp_path, tokenizer):
    own, rows = with_note(tokenizer), count_ids(tokenizer)
    mixture = Mixture(
        informs=[Inform(data_files=str(written(tmp_path, {"content": "a"}, {"content": "<note>"})))]
    )
    message = rf"rows.jsonl:2: .*'<note>' has the id {rows}.*{rows} rows"
    for options in ({}, {"pack_on_the_fly": True}):
        changed = mixture.replace(**options)
        with pytest.raises(DataError, match=message):
            build_loader(changed, own, batch_size=2, seq_length=16, embedding_rows=rows).batch_at(0)
    loader = build_loader(mixture, own, batch_size=2, seq_length=16, embedding_rows=rows + 1)
    assert loader.batch_at(0)["input_ids"].max() == rows
    prompts = Mixture(
        informs=[Inform(data_files=str(written(tmp_path, {"prompt": "a"}, {"prompt": "<note>"})))]
    )
    with pytest.raises(DataError, match="'<note>'"):
        build_prompts(prompts, own, batch_size=1, embedding_rows=rows)


def test_padding_needs_no_row_in_the_embedding(tmp_path, tokenizer):
    own, rows = with_note(tokenizer, pad_token="<note>"), count_ids(tokenizer)
    mixture = Mixture(informs=[Inform(data_files=str(written(tmp_path, {"content": "a"})))])
    loader = build_loader(mixture, own, batch_size=1, seq_length=16, embedding_rows=rows)
    assert loader.batch_at(0)["input_ids"].max() < rows


def test_ids_with_holes_are_counted_by_the_largest(tokenizer):
    assert count_ids(tokenizer) == max(tokenizer.get_vocab().values()) + 1
    assert count_ids(with_note(tokenizer)) == count_ids(tokenizer) + 1


def test_completion_rows_have_the_schema_of_completions():
    assert COMPLETION.columns[0].context == "prompt"
