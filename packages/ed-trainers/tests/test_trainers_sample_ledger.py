"""The ledger of samples keeps complete records through torn writes, and refuses other runs."""

import math

import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_trainers.online.sample_ledger import SampleLedger, SamplePart
from ed_trainers.rollout import Sampled, SampleRequest
from hypothesis import given
from hypothesis import strategies as st

IDENTITY = {"seed": 3}
REQUEST = SampleRequest(0, [[5, 6], [7]], 2, {"temperature": 1.0}, [1, 2, 3, 4], [{}, {}])


def finished(place):
    """Return a sample whose tokens come from two versions of the weights."""
    return Sampled([place, 9], [-0.5, -1.25 * place], 2, versions=((2, 1), (3, 1)))


def write_all(path):
    """Write a ledger with all kinds of records; return the end of each record."""
    ledger, ends = SampleLedger(path, IDENTITY), []
    ends.append(ledger.position)
    writes = [
        lambda: ledger.issue(REQUEST),
        lambda: ledger.add_part((0, 1), SamplePart([1], [-0.5], 2)),
    ]
    writes += [lambda place=place: ledger.finish((0, place), finished(place)) for place in range(4)]
    writes += [lambda place=place: ledger.score((0, place), [1.0, math.nan]) for place in range(4)]
    writes.append(lambda: ledger.consume(0, 0))
    for write in writes:
        write()
        ends.append(ledger.position)
    ledger.close()
    return ends


@pytest.mark.nightly
def test_ledger_cut_at_every_byte_keeps_each_complete_record(tmp_path):
    ends = write_all(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    reader = SampleLedger(tmp_path / "whole", IDENTITY)
    records = list(reader.records())
    reader.close()
    path = tmp_path / "cut"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        ledger = SampleLedger(path, IDENTITY)
        complete = max((n for n, end in enumerate(ends, 1) if end <= size), default=1)
        assert list(ledger.records()) == records[:complete]
        if size >= ends[0]:
            assert ledger.cut == size - ends[complete - 1]
        ledger.finish((7, 0), finished(1))  # a new record follows the last complete one
        ledger.close()
        again = SampleLedger(path, IDENTITY)
        assert again.is_finished((7, 0)) and len(list(again.records())) == complete + 1
        again.close()


@given(st.data())
def test_changed_byte_ends_the_ledger_before_its_record(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("ledger")
    ends = write_all(folder / "ledger")
    changed = bytearray((folder / "ledger").read_bytes())
    at = data.draw(st.integers(ends[0], len(changed) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    (folder / "ledger").write_bytes(changed)
    ledger = SampleLedger(folder / "ledger", IDENTITY)
    assert ledger.position == (kept := max(end for end in ends if end <= at))
    assert (folder / f"ledger.cut-at-{kept}").read_bytes() == bytes(changed[kept:])
    with pytest.raises(CheckpointError, match="restore a copy"):
        ledger.check_position(ends[-1])
    ledger.close()


def test_reopened_ledger_returns_equal_samples_and_ignores_second_records(tmp_path):
    write_all(tmp_path / "ledger")
    ledger = SampleLedger(tmp_path / "ledger", IDENTITY)
    size = ledger.position
    sample = ledger.sample((0, 3))
    assert (sample.token_ids, sample.logprobs) == ([3, 9], [-0.5, -3.75])
    assert sample.versions == ((2, 1), (3, 1)) and sample.rewards[0] == 1
    assert not ledger.issue(REQUEST)
    ledger.finish((0, 3), finished(8))
    ledger.score((0, 3), [5.0])
    ledger.consume(0, 0)
    assert ledger.position == size and ledger.consumed == {0: 0} and ledger.parts((0, 1)) == []
    with pytest.raises(CheckpointError, match="step 0"):
        ledger.consume(0, 4)
    other = SampleRequest(0, [[5, 6], [8]], 2, {"temperature": 1.0}, [1, 2, 3, 4], [{}, {}])
    with pytest.raises(CheckpointError, match="other prompts"):
        ledger.issue(other)
    with pytest.raises(ConfigError, match="in use"):
        SampleLedger(tmp_path / "ledger", IDENTITY)
    ledger.close()
    with pytest.raises(ConfigError, match="seed 3, now it is 4"):
        SampleLedger(tmp_path / "ledger", {"seed": 4})
