"""Parsing of YAML to values with locations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from ed_elarge.config import nodes
from ed_elarge.errors import MAX_SHOWN, InputError
from hypothesis import given
from hypothesis import strategies as st


def value(text: str) -> object:
    return nodes.parse_yaml(text).value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2e-5", 2e-5),
        ("1.5E3", 1500.0),
        ("-.5", -0.5),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("0x10", 16),
        ("0o17", 15),
        ("1_000", 1000),
        ("007", 7),
        ("+3", 3),
        ("on", "on"),
        ("yes", "yes"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
        ("'5'", "5"),
        ("!!str 5", "5"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars_are_yaml_1_2(text: str, expected: object) -> None:
    found = value(f"a: {text}")
    assert found == {"a": expected}
    assert type(found["a"]) is type(expected)


def test_yaml_nan_parses_to_nan() -> None:
    assert math.isnan(value("a: .nan")["a"])


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("abcxyz_", min_size=1, max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values)
def test_yaml_dump_output_parses_to_same_value(data: object) -> None:
    assert value(yaml.safe_dump({"a": data}, allow_unicode=True)) == {"a": data}


def test_parsed_nodes_have_spans_and_merge_keys() -> None:
    text = "base: &b\n  x: 1\n  y: 2\nother:\n  <<: *b\n  y: 3\nlist: [1, {k: v}]\n"
    document = nodes.parse_yaml(text)
    assert document.value["other"] == {"x": 1, "y": 3}
    assert document.span(("other", "y"), on_key=True) == (5, 2, 3)
    assert document.span(("other", "x"), on_key=True) == (1, 2, 3)  # where the anchor has it
    assert document.span(("list", 1, "k"), on_key=False) == (6, 14, 15)
    assert document.span(("base", "nowhere"), on_key=False) == (0, 0, 4)  # the nearest ancestor


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3:1", "duplicate key 'a' (first given on line 1)"),
        ("a:\n  b: 1\n  b: 1\n", "f:3:3", "a.b: duplicate key 'b'"),
        ("a:\n\t- b\n", "f:2:1", "the indentation contains a tab"),
        ("a: [1,\n b: }\n", "f:2:5", "found '}'"),
        ("a: &x [*x]\n", "f:1:4", "refers to a node that contains it"),
        ("a: !!python/object/apply:os.system [x]\n", "f:1:4", "not supported"),
        ("? [1]\n: 2\n", "f:1:3", "a key must be plain text"),
        ("a: 1\n---\nb: 2\n", "f:2:1", "found another document"),
        ("a: \x01", "f:1:4", "not allowed in YAML"),
        ("a: !!int x\n", "f:1:4", "'x' is not a valid int"),
        ("a: {<<: 3}\n", "f:1:9", "needs a mapping"),
    ],
)
def test_invalid_yaml_raises_input_error_with_position(text: str, place: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        nodes.parse_yaml(text, "f")
    assert str(error.value).startswith(place + ": ")
    assert words in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a: 1")
    with pytest.raises(InputError, match=r"no such file \(YAML files there: run.yaml\)"):
        nodes.read_yaml(tmp_path / "rum.yaml")
    with pytest.raises(InputError, match="is a directory"):
        nodes.read_yaml(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        nodes.read_yaml(tmp_path / "binary.yaml")


def test_message_of_many_problems_shows_the_first_and_counts_all():
    text = "".join(f"k{number}: 1\nk{number}: 2\n" for number in range(500))
    with pytest.raises(InputError) as caught:
        nodes.parse_yaml(text, "run.yaml")
    message = str(caught.value)
    assert message.count("duplicate key") == MAX_SHOWN
    assert "the other 436 errors are not shown" in message
    assert message.endswith("500 errors in run.yaml")
    assert len(caught.value.problems) == 500


def test_message_of_a_long_line_does_not_quote_the_line():
    with pytest.raises(InputError) as caught:
        nodes.parse_yaml("{" + ", ".join(["a: 1"] * 10_000) + "}", "run.yaml")
    assert len(str(caught.value)) < 20_000


def test_pairs_of_surrogates_are_characters_and_halves_are_errors():
    assert value('{"a": "\\ud83d\\ude00", "\\ud83d\\ude00": 1}') == {"a": "😀", "😀": 1}
    for text in ('a: "\\ud83d"', 'a: "\\ude00\\ud83d"', '"\\ud83d": 1', '"a\\udfff": {b: 1}'):
        with pytest.raises(InputError, match="half of a pair of surrogates"):
            nodes.parse_yaml(text)
