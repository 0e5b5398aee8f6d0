"""Slices of the nightly tests: thirty-one cover all, in equal time, whole files first."""

from __future__ import annotations

import itertools
import random

import pytest

from tools.nightly.results import NEVER, PATH, Result, read_results
from tools.nightly.slices import (
    CAPACITY,
    COUNT,
    LAST_START,
    LONGEST,
    PART,
    Test,
    compare_entries,
    estimate_seconds,
    make_plan,
)

SECONDS = random.Random(0)
TESTS = [
    Test(f"tests/t/test_{file}.py::test_{function}[{case}]", f"tests/t/test_{file}.py")
    for file in range(60)
    for function in range(4)
    for case in range(file % 9 + 1)
]
RESULTS = {test.id: Result("11111111", round(SECONDS.expovariate(0.1), 1)) for test in TESTS}


def plan(number: int, tests=TESTS, results=RESULTS, capacity: float = 1e9):
    return make_plan(tests, results, number, capacity)


def test_consecutive_slices_contain_each_test_exactly_once() -> None:
    ids = [id for number in range(100, 100 + COUNT) for id in plan(number).ids]
    assert sorted(ids) == sorted(test.id for test in TESTS)


@pytest.mark.parametrize("stride", [2, 3, 5, 6, 10, 15, 30])
def test_slices_cover_all_tests_when_several_commits_land_together(stride: int) -> None:
    ids = {id for turn in range(COUNT) for id in plan(7 + turn * stride).ids}
    assert ids == {test.id for test in TESTS}


def test_slice_is_a_function_of_the_commit_and_not_of_the_order_of_collection() -> None:
    shuffled = random.Random(1).sample(TESTS, len(TESTS))
    assert plan(5, shuffled).ids == plan(5).ids


def test_slices_need_equal_seconds_and_not_equal_numbers_of_tests() -> None:
    totals = [sum(RESULTS[id].seconds for id in plan(n).ids) for n in range(COUNT)]
    mean = sum(totals) / COUNT
    largest = max(
        sum(RESULTS[t.id].seconds for t in TESTS if t.group == group)
        for group in {t.group for t in TESTS}
    )
    assert max(totals) <= mean + largest
    assert len({len(plan(n).ids) for n in range(COUNT)}) > 1


def test_short_files_stay_in_one_slice() -> None:
    seconds: dict[str, float] = {}
    for test in TESTS:
        seconds[test.group] = seconds.get(test.group, 0) + RESULTS[test.id].seconds
    short = [group for group, total in seconds.items() if total <= PART]
    assert len(short) > 20
    slices = [{id.partition("::")[0] for id in plan(number).ids} for number in range(COUNT)]
    assert all(sum(group in files for files in slices) == 1 for group in short)


def test_tests_of_a_file_follow_each_other_in_a_slice() -> None:
    files = [id.partition("::")[0] for id in plan(3).ids]
    changes = sum(before != after for before, after in itertools.pairwise(files))
    assert changes == len(set(files)) - 1


def test_file_longer_than_a_slice_is_divided_among_slices() -> None:
    tests = [*TESTS, *(Test(f"long.py::test_long[{n}]", "long.py") for n in range(40))]
    results = RESULTS | {f"long.py::test_long[{n}]": Result("11111111", 60.0) for n in range(40)}
    plans = [plan(number, tests, results) for number in range(COUNT)]
    shares = [sum(id.startswith("long.py") for id in one.ids) for one in plans]
    assert sum(shares) == 40
    assert max(shares) <= 8


def test_new_test_comes_first_in_every_slice_until_it_has_a_result() -> None:
    new = Test("tests/t/test_new.py::test_new", "tests/t/test_new.py")
    assert all(plan(n, [*TESTS, new]).ids[0] == new.id for n in range(COUNT))
    results = RESULTS | {new.id: Result("22222222", 1.0)}
    assert sum(new.id in plan(n, [*TESTS, new], results).ids for n in range(COUNT)) == 1


def test_file_with_a_new_test_comes_first_as_a_whole() -> None:
    due = plan(3).ids[-1].partition("::")[0]
    new = Test(f"{due}::test_new", due)
    ids = plan(3, [*TESTS, new]).ids
    count = sum(id.startswith(due) for id in ids)
    assert count > 1
    assert ids[0] == new.id
    assert all(id.startswith(due) for id in ids[:count])


def test_failed_and_deferred_tests_run_again_in_the_next_slice() -> None:
    failed, deferred = TESTS[10].id, TESTS[200].id
    results = RESULTS | {
        failed: Result("22222222", 3.0, "failed"),
        deferred: Result("22222222", 3.0, "deferred"),
    }
    for number in range(COUNT):
        one = plan(number, results=results)
        assert one.ids.index(failed) < one.ids.index(deferred)
        assert one.again == [failed, deferred]


def test_never_run_tests_wait_for_their_slice() -> None:
    results = RESULTS | {test.id: Result(NEVER, 0.0) for test in TESTS[:300]}
    ids = [id for number in range(COUNT) for id in plan(number, results=results).ids]
    assert sorted(ids) == sorted(test.id for test in TESTS)


def test_tests_beyond_the_capacity_are_deferred_by_name_and_not_dropped() -> None:
    longest = max(result.seconds for result in RESULTS.values())
    whole, part = plan(3), plan(3, capacity=longest)
    assert sum(RESULTS[id].seconds for id in part.ids) <= longest
    assert part.deferred
    assert sorted([*part.ids, *part.deferred]) == sorted(whole.ids)


def test_urgent_tests_leave_most_of_the_slice_to_its_own_tests() -> None:
    new = [Test(f"tests/n/test_n.py::test_n[{n}]", "tests/n/test_n.py") for n in range(500)]
    results = RESULTS | {new[0].id: Result("11111111", 10.0)}
    later = dict.fromkeys([test.id for test in new], results[new[0].id])
    alone = set(plan(3, [*TESTS, *new], RESULTS | later).ids)
    one = plan(3, [*TESTS, *new], results, capacity=1200.0)
    assert alone <= {*one.ids, *one.deferred}
    assert sum(10.0 for id in one.ids if id not in alone) <= 400.0
    assert len(one.new) >= 40
    assert [id for id in one.deferred if "test_n.py" in id]


def test_test_longer_than_a_slice_is_named_and_in_no_slice() -> None:
    results = RESULTS | {TESTS[0].id: Result("11111111", LAST_START - 60.0)}
    plans = [plan(n, results=results, capacity=1200.0) for n in range(COUNT)]
    assert all(one.too_long == [TESTS[0].id] for one in plans)
    assert not any(TESTS[0].id in one.ids for one in plans)


def test_case_without_result_is_estimated_from_its_function_then_from_its_file() -> None:
    ids = ["a.py::f[1]", "a.py::f[2]", "a.py::g", "b.py::h"]
    results = {ids[0]: Result("11111111", 30.0)}
    assert estimate_seconds(ids, results) == dict(zip(ids, [30.0, 30.0, 30.0, 30.0], strict=True))
    results["b.py::k"] = Result("11111111", 2.0)
    assert estimate_seconds(ids, results)["b.py::h"] == 2.0
    results["a.py::f[2]"] = Result("11111111", 0.1, "skipped: no ray")
    assert estimate_seconds(ids, results)["a.py::f[2]"] == 0.1


def test_one_new_result_moves_few_tests_to_other_slices() -> None:
    before = {id: n for n in range(COUNT) for id in plan(n).ids}
    results = RESULTS | {TESTS[500].id: Result("22222222", RESULTS[TESTS[500].id].seconds + 30)}
    after = {id: n for n in range(COUNT) for id in plan(n, results=results).ids}
    moved = sum(before[id] != after[id] for id in before)
    assert moved < 0.15 * len(TESTS)


def test_vanished_and_new_tests_are_reported() -> None:
    tests = [Test("a.py::test_a", "a.py"), Test("a.py::test_b", "a.py")]
    results = {"a.py::test_a": Result("11111111", 1.0), "a.py::test_c": Result("11111111", 1.0)}
    assert compare_entries(tests, results, skipped_files={}) == (["a.py::test_b"], ["a.py::test_c"])


def test_tests_of_a_file_that_is_skipped_here_have_not_vanished() -> None:
    results = {"a.py::test_c": Result("11111111", 1.0)}
    assert compare_entries([], results, skipped_files={"a.py": "could not import 'ray'"}) == (
        [],
        [],
    )


def test_recorded_seconds_of_all_tests_fit_into_the_slices() -> None:
    results = read_results(PATH)
    seconds = [s for s in estimate_seconds(list(results), results).values() if s <= LONGEST]
    assert sum(seconds) / COUNT <= CAPACITY
