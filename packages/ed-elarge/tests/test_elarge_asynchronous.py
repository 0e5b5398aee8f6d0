"""Connections of asynchronous runs are authenticated, and the section rejects what cannot work."""

import json
import socket
import threading

import numpy as np
import pytest
from ed_elarge.config.checks import machine
from ed_elarge.errors import InputError
from ed_elarge.model import eLargeModel
from ed_esurge.engine.channel import ForgedMessageError
from ed_esurge.engine.connection import Connection, ConnectionLost
from ed_trainers.online.sample_ledger import GIVEN, SamplePart, build_sample


def ends(first=b"one", second=b"one"):
    """Return both ends of a connection, or their errors, for the secrets of both ends."""
    left, right = socket.socketpair()
    found = {}

    class Plain:
        """A stream without the options of TCP."""

        def __init__(self, stream):
            self.stream = stream

        def setsockopt(self, *values):
            return None

        def __getattr__(self, name):
            return getattr(self.stream, name)

    secrets = {"trainer": first, "worker": second}

    def connect(name, stream):
        try:
            found[name] = Connection(
                Plain(stream), accepted=name == "trainer", secret=secrets[name]
            )
        except (ForgedMessageError, ConnectionLost) as error:
            found[name] = error
            stream.close()

    threads = [
        threading.Thread(target=connect, args=(name, stream))
        for name, stream in (("trainer", left), ("worker", right))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found["trainer"], found["worker"], left, right


def test_messages_arrive_in_both_directions_with_equal_arrays():
    trainer, worker, _, _ = ends()
    sent = {"do": "weights", "arrays": {"a/b": np.arange(6, dtype=np.float32).reshape(2, 3)}}
    trainer.send(sent)
    worker.send([1, "two", None])
    got = worker.receive()
    assert got["do"] == "weights" and trainer.receive() == [1, "two", None]
    np.testing.assert_array_equal(got["arrays"]["a/b"], sent["arrays"]["a/b"])
    trainer.close()
    with pytest.raises(ConnectionLost):
        worker.receive()


def test_end_with_another_secret_and_forged_messages_are_rejected():
    trainer, worker, _, _ = ends(second=b"two")
    assert isinstance(trainer, ForgedMessageError | ConnectionLost)
    assert isinstance(worker, ForgedMessageError | ConnectionLost)
    assert any(isinstance(end, ForgedMessageError) for end in (trainer, worker))
    trainer, worker, left, _ = ends()
    left.sendall((40).to_bytes(8, "big") + bytes(40))
    with pytest.raises(ForgedMessageError):
        worker.receive()


def test_joined_parts_count_versions_of_sampled_tokens_and_mark_given_ones():
    parts = [
        SamplePart([1, 2], [-1.0, -2.0], 3),
        SamplePart([4], [-1.5], 3, True),
        SamplePart([7, 8], [0.0, 0.0], GIVEN),
        SamplePart([9], [-0.5], 5, True),
    ]
    sample = build_sample(parts, ended=True, reward=0.5)
    assert sample.token_ids == [1, 2, 4, 7, 8, 9]
    assert (sample.versions, sample.given) == (((3, 3), (5, 1)), ((3, 2),))
    assert (sample.weights_version, sample.rewards) == (3, [0.5])


@pytest.mark.parametrize(
    ("trainer", "section", "message"),
    [
        ({"trainer_type": "sft"}, {}, "samples no completions"),
        ({"trainer_type": "rloo", "reward_functions": "exact"}, {}, "does not correct them"),
        (
            {"trainer_type": "grpo", "importance_sampling_correction": "none"},
            {"max_staleness": 1},
            "does not correct them",
        ),
        ({"trainer_type": "grpo"}, {"listen": "nowhere"}, "listen"),
        (
            {"trainer_type": "grpo", "environment": "nowhere.py:Tool"},
            {"environment": "other.py:Tool"},
            r"differs from trainer.environment \(nowhere.py:Tool\): keep one",
        ),
    ],
)
def test_section_that_cannot_work_is_an_error(trainer, section, message):
    config = {
        "model": {"name_or_path": "somewhere"},
        "mixture": {"informs": [{"data_files": "rows.jsonl", "content_field": "prompt"}]},
        "trainer": {"reward_functions": "exact", **trainer}
        if trainer["trainer_type"] != "sft"
        else trainer,
        "asynchronous": section,
    }
    with pytest.raises(InputError, match=message):
        eLargeModel(config).config  # noqa: B018 - checks the sections


def test_environments_of_all_methods_are_found_beside_the_run_file(tmp_path):
    (tmp_path / "tools.py").write_text("class Tool:\n    ...\n")
    config = {
        "model": {"name_or_path": "somewhere"},
        "mixture": {"informs": [{"data_files": "rows.jsonl", "content_field": "prompt"}]},
        "trainer": {"trainer_type": "gkd", "lmbda": 1, "environment": "tools.py:Other"},
        "teacher_model": {"name_or_path": "elsewhere"},
        "actions": ["train"],
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config))
    (problem,) = machine.environment(eLargeModel(file).config)
    assert problem.path == ("trainer", "environment")
    assert "Other" in problem.message
    file.write_text(json.dumps(config).replace("Other", "Tool"))
    assert not list(machine.environment(eLargeModel(file).config))
