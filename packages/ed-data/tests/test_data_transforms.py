"""Rows to documents: fields, functions, dropped rows, invalid rows."""

from __future__ import annotations

from functools import partial
from textwrap import dedent

import pytest
from ed_data import DataError, Inform, documents
from ed_data.sources.python import find_address, resolve_address

ROWS = [
    {"question": "q0", "answer": "a0", "id": 0},
    {"question": "q1", "answer": "a1", "id": 1},
    {"question": "q2", "answer": "a2", "id": 2},
]


@pytest.fixture
def contents(jsonl):
    def read(rows=ROWS, **options):
        return [d.content for d in documents(Inform(data_files=jsonl(rows), **options))]

    return read


@pytest.mark.proves(
    "mixture.informs.format_callback",
    "mixture.informs.format_fields",
    "mixture.informs.preprocessing_fn",
)
def test_callback_renames_and_preprocessing_run_in_order(contents):
    assert contents(
        format_callback=lambda row: None if row["id"] == 1 else {**row, "old": row["answer"] + "!"},
        format_fields={"old": "new"},
        content_field="new",
        preprocessing_fn=str.upper,
    ) == ["A0!", "A2!"]


def test_preprocessing_function_is_imported_by_name(contents):
    assert contents(content_field="answer", preprocessing_fn="builtins:str.upper") == [
        "A0",
        "A1",
        "A2",
    ]
    with pytest.raises(DataError, match=r"cannot import 'no\.module:f'"):
        contents(content_field="answer", preprocessing_fn="no.module:f")


@pytest.mark.proves("mixture.informs.additional_fields")
def test_function_of_a_file_is_imported_by_path(contents, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suffix_of_answers.py").write_text("SUFFIX = '!'")
    (tmp_path / "rows.py").write_text(
        "from suffix_of_answers import SUFFIX\nclass Rows:\n    @staticmethod\n"
        "    def shout(row):\n        return {**row, 'answer': row['answer'] + SUFFIX}\n"
    )
    for address in ("rows.py:Rows.shout", f"{tmp_path}/rows.py:Rows.shout"):
        found = contents(content_field="answer", format_callback=address)
        assert found == ["a0!", "a1!", "a2!"]
    with pytest.raises(DataError, match=r"there is no file .*absent\.py"):
        contents(content_field="answer", format_callback="absent.py:f")
    with pytest.raises(DataError, match=r"has no 'shouts'"):
        contents(content_field="answer", format_callback="rows.py:Rows.shouts")
    function = resolve_address("rows.py:Rows.shout", "x")
    assert find_address(function) == "rows.py:Rows.shout"


def test_only_functions_that_can_be_imported_again_have_an_address():
    def inner(row):
        return row

    for function in (inner, lambda row: row, partial(str.upper), "a".upper, Counting()):
        assert find_address(function) is None
    for function, address in ((dedent, "textwrap:dedent"), (str.upper, None)):
        assert find_address(function) == address
    own = find_address(increment)
    assert own is not None
    assert resolve_address(own, "x")({"id": 1}) == {"id": 2}


def increment(row):
    return {**row, "id": row["id"] + 1}


class Counting:
    def __call__(self, row):
        return row


def test_documents_keep_additional_fields(jsonl):
    inform = Inform(data_files=jsonl(ROWS), content_field="question", additional_fields=["id"])
    assert [d.extra for d in documents(inform)] == [{"id": 0}, {"id": 1}, {"id": 2}]


def test_empty_contents_are_dropped(contents):
    assert contents(["a", "", "  \n", "b"]) == ["a", "b"]
    assert contents([{"content": None}, {"content": []}, {"content": "c"}]) == ["c"]


def test_messages_and_token_ids_are_valid_contents(contents):
    chat = [{"role": "user", "content": "hi"}]
    assert contents([{"content": chat}, {"content": [1, 2]}]) == [chat, [1, 2]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"content_field": "anser"}, "fields: question, answer, id.*did you mean 'answer'"),
        ({"content_field": "question", "additional_fields": ["idd"]}, "did you mean 'id'"),
        ({"format_fields": {"quest": "x"}, "content_field": "x"}, "did you mean 'question'"),
        ({"content_field": "id"}, "'id' is a int"),
        ({"content_field": "answer", "format_callback": lambda row: 3}, "returned a int"),
        ({"content_field": "answer", "preprocessing_fn": lambda text: [text]}, "neither chat"),
    ],
)
def test_unsuitable_content_raises_data_error_with_reason(contents, options, says):
    with pytest.raises(DataError, match=says):
        contents(**options)


def test_error_of_malformed_row_names_row_and_solution(contents):
    rows = [{"content": "good"}, {"content": 3}]
    with pytest.raises(
        DataError, match=r"data\.jsonl:2: 'content' is a int; .* correct the row, or"
    ):
        contents(rows)
    rows = [{"content": "good"}, {"contents": "bad"}]
    with pytest.raises(DataError, match=r"data\.jsonl:2: .*did you mean 'contents'.*or the row"):
        contents(rows)
    with pytest.raises(DataError, match=r"data\.jsonl:1: format_callback raised KeyError: 'x'"):
        contents(format_callback=lambda row: row["x"])
    with pytest.raises(DataError, match=r"data\.jsonl:3: preprocessing_fn raised ValueError"):
        contents(["1", "2", "three"], preprocessing_fn=lambda text: str(int(text)))


def test_equal_contents_have_equal_digests(jsonl):
    chat = [{"role": "user", "content": "hi"}]
    other = [{"content": "hi", "role": "user"}]
    rows = [{"content": chat}, {"content": other}, {"content": "hi"}]
    first, second, third = documents(Inform(data_files=jsonl(rows)))
    assert first.digest == second.digest != third.digest
