"""Decisions of an elastic run: which members start, and when a run ends."""

from __future__ import annotations

import random

import pytest
from ed_elarge.exits import BAD_INPUT
from ed_elarge.launch.membership import STOPPED, Begin, Finish, Membership, StartPhase, Tell

ALL = (0, 1, 2, 3)


def started(restarts: int = 3) -> Membership:
    """A run of four members, of which at least two must remain."""
    made = Membership(4, least=2, restarts=restarts)
    assert [made.handle_join(member) for member in (2, 0, 3)] == [[], [], []]
    assert made.handle_join(1) == [Begin(ALL)]
    return made


def test_lost_member_leaves_and_a_returned_one_joins_after_the_others_saved() -> None:
    run = started()
    assert run.handle_loss(1, "gone") == [Tell(0, "kill"), Tell(2, "kill"), Tell(3, "kill")]
    assert run.handle_end(0, -9, 10) == run.handle_end(3, 1, 10) == []
    assert run.handle_end(2, -9, 10) == [Begin((0, 2, 3))]
    assert run.failures == "member 1 was lost (gone)"
    assert run.handle_join(1) == [Tell(0, "stop"), Tell(2, "stop"), Tell(3, "stop")]
    assert run.handle_end(0, STOPPED, 10) == run.handle_end(2, STOPPED, 10) == []
    assert run.handle_end(3, STOPPED, 10) == [Begin(ALL)]
    for member in (0, 1, 2):
        assert run.handle_end(member, 0, 20) == []
    assert run.handle_end(3, 0, 20) == [Finish(0)]


def test_killed_process_starts_again_on_its_member() -> None:
    run = started()
    assert len(run.handle_end(2, -9, 10)) == 3
    assert run.handle_end(0, -9, 10) == run.handle_end(1, -9, 10) == []
    assert run.handle_end(3, -9, 10) == [Begin(ALL)]


def fail(run: Membership, code: int, newest: int) -> list[object]:
    """Let the process of member 0 fail; return the actions after all have ended."""
    run.handle_end(0, code, newest)
    run.handle_end(1, -9, newest)
    run.handle_end(2, -9, newest)
    return [*run.handle_end(3, -9, newest)]


def test_starts_without_a_new_copy_are_limited() -> None:
    run = started(restarts=2)
    for newest in (10, 20, 20):
        assert fail(run, 1, newest) == [Begin(ALL)]
    assert fail(run, 1, 20) == [Finish(1, "the process of member 0 ended with exit code 1")]


def test_invalid_run_file_ends_the_run_at_once() -> None:
    assert fail(started(), BAD_INPUT, -1)[0].code == BAD_INPUT  # type: ignore[attr-defined]
    assert fail(started(), BAD_INPUT, 10) == [Begin(ALL)]


def test_run_waits_for_its_smallest_number_of_members() -> None:
    run = started()
    run.handle_loss(0, "gone"), run.handle_loss(1, "gone"), run.handle_loss(2, "gone")
    assert run.handle_end(3, -9, 10) == []
    assert run.phase is StartPhase.WAITING
    assert run.handle_join(1) == [Begin((1, 3))]
    run.handle_loss(1, "gone")
    assert run.handle_end(3, -9, 10) == []
    (finish,) = run.give_up_waiting()
    assert finish == Finish(1, "1 of at least 2 members are connected")


def test_user_stops_the_run() -> None:
    run = started()
    assert run.stop(kill=False) == [Tell(member, "stop") for member in ALL]
    for member in (0, 1, 2):
        assert run.handle_end(member, STOPPED, 10) == []
    assert run.handle_end(3, STOPPED, 10) == [Finish(0)]


@pytest.mark.parametrize("seed", range(20))
def test_random_losses_never_start_a_running_or_an_absent_member(seed: int) -> None:
    choose = random.Random(seed)
    run = Membership(4, least=1, restarts=10**9)
    present: set[int] = set()
    running: set[int] = set()
    asked: dict[int, str] = {}
    begun, newest = 0, 0
    for _ in range(2000):
        member = choose.randrange(4)
        if member not in present:
            present.add(member)
            actions = run.handle_join(member)
        elif member in running and choose.random() < 0.8:
            running.discard(member)
            newest += 1
            code = {"stop": STOPPED, "kill": -9}.get(asked.pop(member, ""), -9)
            actions = run.handle_end(member, code, newest)
        else:
            present.discard(member)
            running.discard(member)
            asked.pop(member, None)
            actions = run.handle_loss(member, "gone")
        for action in actions:
            if isinstance(action, Begin):
                assert not running and set(action.members) <= present and action.members
                running, begun = set(action.members), begun + 1
                asked.clear()
            elif isinstance(action, Tell):
                assert action.member in running
                asked[action.member] = action.request
            else:
                raise AssertionError(action)
        assert run.absent == set(range(4)) - present
    assert begun == run.starts > 50
