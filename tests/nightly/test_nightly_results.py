"""The file of the last results of the nightly tests is exact, sorted, small and complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.nightly.results import (
    NEVER,
    PATH,
    Result,
    format_results,
    merge_results,
    parse_results,
    read_log,
    sort_by_age,
)

RESULTS = {
    "tests/a/test_a.py::test_plain": Result("0064010b", 3.1),
    "tests/a/test_a.py::TestClass::test_method": Result("0064010b", 0.0),
    "tests/a/test_a.py::test_case[x: y (z): saved]": Result("0064010b", 12.0),
    "tests/a/test_a.py::test_case[x: y (z): packed]": Result("0064010b", 250.0),
    "tests/a/test_a.py::test_case[x: y (z): parity]": Result("11111111", 0.4, "failed"),
    "tests/a/test_a.py::test_case[a b | c::d \\n [e] @f]": Result("0064010b", 9.9),
    "tests/a/test_a.py::test_plainer[x]": Result("0064010b", 1.0),
    "tests/a/test_a.py::test_case[]": Result(NEVER, 0.0),
    "packages/b/tests/test_b.py::test_case[1.5]": Result(
        "22222222", 0.0, "skipped: could not import 'ray': No module named 'ray'"
    ),
}


def test_results_are_equal_after_writing_and_reading() -> None:
    assert parse_results(format_results(RESULTS)) == RESULTS


def test_order_of_the_results_does_not_change_the_file() -> None:
    assert format_results(dict(reversed(RESULTS.items()))) == format_results(RESULTS)


def test_result_of_one_test_changes_at_most_two_lines() -> None:
    name = "tests/a/test_a.py::test_case[x: y (z): packed]"
    before = format_results(RESULTS).splitlines()
    after = format_results(RESULTS | {name: Result("33333333", 251.0)}).splitlines()
    assert len(set(before) ^ set(after)) <= 3  # one line without the case, one with it


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("test_a\t0064010b\t 3", "line 1.*no file"),
        ("a.py\n[x: \t0064010b\ty 3", "line 2.*no function"),
        ("a.py\ntest_a\t0064010b\t3 x", "line 2.*'3 x'.*seconds"),
        ("a.py\ntest_a\t0064010b", "line 2.*columns"),
        ("a.py\ntest_a\tnot hex\t 3", "line 2.*'not hex'.*commit"),
        ("a.py\ntest_a\t0064010b\t -1", "line 2.*seconds"),
        ("a.py\ntest_a\t0064010b\t 1\ntest_a\t11111111\t 1", "line 3.*twice"),
        ("<<<<<<< HEAD\na.py\ntest_a\t0064010b\t 1", "line 1.*conflict"),
    ],
)
def test_damaged_line_is_an_error_with_its_number(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_results(text)


def test_oldest_results_come_first_and_missing_results_before_them() -> None:
    order = ["11111111", "22222222", "33333333"]
    results = {
        "new": Result("33333333", 1.0),
        "old": Result("11111111", 1.0),
        "middle": Result("22222222", 1.0),
        "never": Result(NEVER, 0.0),
        "rewritten": Result("99999999", 1.0),
    }
    assert sort_by_age(results, order) == ["never", "rewritten", "old", "middle", "new"]


def test_log_of_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    entry = {"id": "a.py::test_a", "commit": "0064010b", "seconds": 1.0, "outcome": "passed"}
    log.write_text(json.dumps(entry) + "\n" + json.dumps(entry | {"id": "a.py::test_b"})[:40])
    assert read_log(log) == {"a.py::test_a": Result("0064010b", 1.0)}
    assert read_log(tmp_path / "absent.jsonl") == {}


def test_later_results_replace_earlier_ones_and_deferred_tests_keep_theirs() -> None:
    old = {"a": Result("11111111", 5.0), "b": Result("11111111", 7.0)}
    log = {"a": Result("22222222", 6.0), "b": Result("22222222", 0.0, "deferred")}
    assert merge_results(old, log) == {"a": Result("22222222", 6.0), "b": old["b"]}


def test_skipped_test_keeps_the_seconds_of_its_last_run() -> None:
    old = {"a": Result("11111111", 5.0)}
    log = {"a": Result("22222222", 0.1, "skipped: no ray")}
    assert merge_results(old, log) == {"a": Result("22222222", 5.0, "skipped: no ray")}


def test_stored_file_is_small_and_in_its_only_form() -> None:
    text = PATH.read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert format_results(parse_results(text)) == text, "run: python -m tools.nightly record"
