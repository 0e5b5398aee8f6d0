"""Measurements continue when a contender fails, and tables name the failure."""

from __future__ import annotations

import math

from tools.bench.measure import Run, Timed, all_turns, table


def test_contender_that_fails_is_recorded_and_the_others_continue(capsys) -> None:
    calls = {"early": 0, "late": 0}

    def failing(name: str, after: int) -> Timed:
        calls[name] += 1
        if calls[name] > after:
            raise RuntimeError("no memory")
        return Timed(1.0)

    runs: dict[str, Run] = {
        "early": lambda: failing("early", 0),
        "late": lambda: failing("late", 2),
        "whole": lambda: Timed(2.0),
    }
    seconds = all_turns(runs, rounds=3)
    assert seconds["whole"] == [2.0] * 3
    assert all(len(seconds[name]) == 1 and math.isnan(seconds[name][0]) for name in calls)
    assert calls == {"early": 1, "late": 3}
    assert "early failed: RuntimeError: no memory" in capsys.readouterr().err
    rows = [[name, f"{min(times):.1f} ({times[0]:.1f})"] for name, times in seconds.items()]
    assert [line.split("|")[2].strip() for line in table(["", "s"], rows).splitlines()[2:]] == [
        "failed",
        "failed",
        "2.0 (2.0)",
    ]
