"""Messages between the processes of one engine: exact, free of code, and authenticated."""

from __future__ import annotations

import dataclasses
import pickle
from typing import get_args

import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
from ed_esurge.core import commands
from ed_esurge.engine.channel import Channel, ForgedMessageError
from ed_esurge.engine.wire import WireError, decode_message, encode_message
from ed_esurge.runner.result import NotFinite
from ed_esurge.sampling import PoolingParams, SamplingParams, StructuredOutputs
from ed_infra.errors import EasyDeLError
from ed_infra.specs import LoraSpec
from ed_models.adapters.values import LayerAdapter

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)
PARAMS = SamplingParams(
    temperature=0.5,
    seed=-(2**63),
    stop="end",
    logit_bias={3: 1.5},
    stop_token_ids=[3, 4],
    structured_outputs=StructuredOutputs(choice=("a", "b")),
)
COMMANDS = [
    commands.Add(
        "a",
        [1, 2, 3],
        PARAMS,
        7,
        frozenset({2, 1}),
        ((1, 2), (3,)),
        ("end",),
        priority=-1,
        prompt="é",
        salt=b"\x00\xff",
        adapter=2,
        arrival_time=1.25,
    ),
    commands.Add("b", [1], PoolingParams(pooling="mean")),
    commands.Abort("a"),
    commands.Pause(free_pages=False),
    commands.Resume(),
    commands.Sleep(keep_weights=False),
    commands.WakeUp(),
    commands.UpdateWeights([ARRAY, jnp.ones((2,), jnp.bfloat16), np.float32(3)[None][0:0]]),
    commands.DropWeights(),
    commands.ResetPrefixCache(),
    commands.StorePages(),
    commands.LoadAdapter("x", {"q": LayerAdapter(LoraSpec(rank=3), ARRAY, ARRAY.T)}, "path"),
    commands.UnloadAdapter("x"),
]


def same(one, other):
    if isinstance(one, np.ndarray) or hasattr(one, "sharding"):
        assert np.asarray(one).dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), other)
    elif dataclasses.is_dataclass(one):
        assert type(one) is type(other)
        for field in dataclasses.fields(one):
            same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, list | tuple):
        assert type(one) is type(other)
        for mine, theirs in zip(one, other, strict=True):
            same(mine, theirs)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            same(one[name], other[name])
    else:
        assert one == other
        assert type(one) is type(other)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: type(one).__name__)
def test_wire_commands_round_trip_unchanged(command):
    same(command, decode_message(encode_message(command)))


def test_examples_cover_every_command():
    assert {type(one) for one in COMMANDS} == set(get_args(commands.Command))


def test_wire_preserves_the_set_fields_of_params():
    received = decode_message(encode_message(PARAMS))
    assert received == PARAMS
    assert received.model_fields_set == PARAMS.model_fields_set


def test_errors_keep_their_text():
    sent = [NotFinite(), EasyDeLError("no room"), RuntimeError("broken")]
    first, *others = decode_message(encode_message(sent))
    assert isinstance(first, NotFinite)
    assert [str(one) for one in others] == ["no room", "RuntimeError('broken')"]


class Evil:
    def __reduce__(self):
        return print, ("a pickle ran code",)


@pytest.mark.parametrize("value", [Evil(), np.array([Evil()]), {1, 2}, object])
def test_unsupported_objects_cannot_be_sent(value):
    with pytest.raises(TypeError):
        encode_message(value)


def head(value, arrays=b""):
    packed = msgpack.packb(value)
    return len(packed).to_bytes(8, "big") + packed + arrays


def extension(code, value):
    return msgpack.ExtType(code, msgpack.packb(value))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        pickle.dumps(Evil()),
        (2**40).to_bytes(8, "big") + b"\x01",
        head(extension(2, ["Evil", {}])),
        head(extension(2, ["Abort", {"request_id": "a", "more": 1}])),
        head(extension(2, ["LoraSpec", {"rank": -1}])),
        head(extension(3, ["object", [1], 0]), bytes(8)),
        head(extension(3, ["float32", [10], 0]), bytes(8)),
        head(extension(3, ["float32", [-2, -1], 0]), bytes(8)),
        head(extension(9, [])),
        encode_message(COMMANDS)[:-3],
    ],
)
def test_invalid_messages_are_rejected(data, capsys):
    with pytest.raises(WireError):
        decode_message(data)
    assert capsys.readouterr().out == ""


def test_small_floats_keep_their_type():
    sent = np.array([1, 2, 3], ml_dtypes.float8_e4m3fn)
    received = decode_message(encode_message(sent))
    assert received.dtype == sent.dtype
    np.testing.assert_array_equal(received.astype(np.float32), sent.astype(np.float32))


# ---- the channel


class Network:
    """Two simulated processes: process 0 sends to a list that process 1 reads."""

    def __init__(self, secrets=(b"s", b"s")):
        self.sent: list[bytes] = []
        self.read = 0
        self.first = Channel(secrets[0], 0, self.send, lambda data: [data, self.other])
        self.second = Channel(secrets[1], 1, self.receive, lambda data: [self.other, data])
        self.other = b""

    def send(self, data):
        self.sent.append(data)
        return data

    def receive(self, _):
        self.read += 1
        return self.sent[self.read - 1]


def test_messages_arrive_in_order():
    network = Network()
    for message in (b"one", b"", b"three" * 1000):
        network.first.broadcast(message)
    assert [network.second.broadcast() for _ in range(3)] == [b"one", b"", b"three" * 1000]


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: [sent[0][:-1] + b"!", sent[1]],
        lambda sent: [b"x" + sent[0][1:], sent[1]],
        lambda sent: [sent[1], sent[0]],
        lambda sent: [b"", sent[1]],
    ],
    ids=["changed content", "changed code", "changed order", "empty"],
)
def test_modified_message_is_rejected(change):
    network = Network()
    network.first.broadcast(b"one")
    network.first.broadcast(b"two")
    network.sent[1:] = change(network.sent[1:])
    with pytest.raises(ForgedMessageError, match="ESURGE_CLUSTER_SECRET"):
        network.second.broadcast()


def test_repeated_message_is_rejected():
    network = Network()
    network.first.broadcast(b"one")
    network.second.broadcast()
    network.sent.append(network.sent[-1])
    with pytest.raises(ForgedMessageError):
        network.second.broadcast()


def test_processes_with_different_secrets_reject_messages():
    network = Network((b"one", b"other"))
    network.first.broadcast(b"a")
    with pytest.raises(ForgedMessageError):
        network.second.broadcast()


def test_message_is_valid_for_its_sender_only():
    network = Network()
    own: list[bytes] = []
    network.first._gather = lambda data: own.append(data) or [data, data]
    with pytest.raises(ForgedMessageError, match="process 1"):
        network.first.gather(b"a")
