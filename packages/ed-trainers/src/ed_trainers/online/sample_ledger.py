"""`SampleLedger`: the durable, append-only record of the samples of an asynchronous run, one file.

The ledger answers three questions after any process was killed: which prompts were issued, which
samples are finished, and which step consumed them. A sample is identified by the number of its
generation and by its place in the generation.

    issued    the prompts, seeds and settings of a generation, before an engine receives them
    part      tokens of an unfinished sample: of one version of the weights, or of an environment
    finished  all tokens of a sample, with log-probabilities and versions of the weights
    scored    the rewards of a sample
    consumed  the step that trains on a generation; written and synchronized before the step

A record has a length, a checksum over its offset and content, and its content in msgpack. A record
that a crash left incomplete is cut off when the ledger is opened. This loses nothing: a checkpoint
contains the position of the ledger, all records before the position are on the disk, and the steps
after a checkpoint are repeated. The bytes that are cut off are copied to
`samples.ledger.cut-at-OFFSET`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
from ed_infra.errors import CheckpointError, ConfigError

from ed_trainers.rollout import Sampled, SampleRequest

#: Name of the file in the directory of a run.
LEDGER = "samples.ledger"
#: Number of a generation, and place of a sample in the generation.
SampleKey = tuple[int, int]
#: Version of tokens that an environment wrote.
GIVEN = -1

_MAGIC = b"EasyDeL sample ledger 1\n"
_HEAD = struct.Struct("<I8s")
#: Maximum size of a record in bytes.
_LARGEST = 2**30


class SamplePart(NamedTuple):
    """Consecutive tokens of an unfinished sample.

    Attributes:
        tokens: the tokens.
        logprobs: their log-probabilities; 0 for tokens of an environment.
        version: version of the weights, or `GIVEN`.
        ends: whether the tokens end a message of the model, to which an environment replies.
        experts: experts of all tokens so far, prompt included, see `Sampled.experts`; None: not
            recorded.
        masks: see `Sampled.masks`.
    """

    tokens: list[int]
    logprobs: list[float]
    version: int
    ends: bool = False
    experts: np.ndarray | None = None
    masks: Sequence[np.ndarray] | None = None


def build_sample(
    parts: Sequence[SamplePart], *, ended: bool, reward: float | None = None
) -> Sampled:
    """Return a finished sample from its parts.

    Args:
        parts: all tokens of the sample, in order.
        ended: see `Sampled.ended`.
        reward: reward of the environment.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[tuple[int, int]] = []
    given_spans: list[tuple[int, int]] = []
    for part in parts:
        count = len(part.tokens)
        if part.version == GIVEN:
            given_spans.append((len(tokens), count))
        elif versions and versions[-1][0] == part.version:
            versions[-1] = part.version, versions[-1][1] + count
        else:
            versions.append((part.version, count))
        tokens += part.tokens
        logprobs += part.logprobs
    rewards = None if reward is None else [reward]
    first = versions[0][0]
    experts = [part.experts for part in parts if part.experts is not None]
    masks = None
    if any(part.masks is not None for part in parts):
        nothing = np.zeros(0, np.int32)
        masks = [m for part in parts for m in part.masks or [nothing] * len(part.tokens)]
    return Sampled(
        *(tokens, logprobs, first, ended, tuple(versions), tuple(given_spans), rewards),
        experts=experts[-1] if experts else None,
        masks=masks,
    )


class SampleLedger:
    """Reads and appends the records of one run. Thread-safe.

    Args:
        path: the file; created if it does not exist.
        identity: values that must be the same in every start of the run, as JSON values.

    Raises:
        ConfigError: another process writes the file, the file is no ledger, or belongs to a run
            with another identity.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]):
        self.path = path
        self._lock = threading.RLock()
        self._issued: dict[int, int] = {}
        self._parts: dict[SampleKey, list[int]] = {}
        self._finished: dict[SampleKey, int] = {}
        self._scored: dict[SampleKey, int] = {}
        self._consumed: dict[int, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise ConfigError(f"{path} is in use by another run: stop that run first") from None
        #: Number of bytes that a crash had left incomplete.
        self.cut = 0
        self._end = self._read(dict(identity))
        self._synchronized = self._end

    # --- writing ---

    def issue(self, request: SampleRequest) -> bool:
        """Record the prompts of a generation; return False if they are recorded already.

        Raises:
            CheckpointError: the generation is recorded with other prompts or settings.
        """
        content = {
            "prompts": [_pack_values(ids, np.int32) for ids in request.prompts],
            "copies": request.copies,
            "seeds": list(request.seeds),
            "params": dict(request.params),
        }
        with self._lock:
            at = self._issued.get(request.number)
            if at is None:
                self._issued[request.number] = self._append("issued", request.number, content)
                return True
            if self._record(at)[2] != msgpack.unpackb(_pack(content)):
                raise CheckpointError(
                    f"generation {request.number} of {self.path} has other prompts or settings of "
                    "the sampling than this run: change them back, or use another save_directory "
                    "(resume_if_possible=False moves this run aside)"
                )
            return False

    def add_part(self, key: SampleKey, part: SamplePart) -> None:
        """Record further tokens of an unfinished sample."""
        content = {
            "place": key[1],
            "tokens": _pack_values(part.tokens, np.int32),
            "logprobs": _pack_values(part.logprobs, np.float32),
            "version": part.version,
            "ends": part.ends,
            **_packed_records(part),
        }
        with self._lock:
            self._parts.setdefault(key, []).append(self._append("part", key[0], content))

    def finish(self, key: SampleKey, sampled: Sampled) -> None:
        """Record a finished sample, with the reward of its environment in `rewards`, if any.

        A second record of a sample is ignored.
        """
        content = {
            "place": key[1],
            "tokens": _pack_values(sampled.token_ids, np.int32),
            "logprobs": _pack_values(sampled.logprobs, np.float32),
            "versions": [list(run) for run in sampled.versions],
            "given": [list(run) for run in sampled.given],
            "ended": sampled.ended,
            "rewards": _pack_values(sampled.rewards or (), np.float32),
            **_packed_records(sampled),
        }
        with self._lock:
            if key not in self._finished:
                self._finished[key] = self._append("finished", key[0], content)
                self._parts.pop(key, None)

    def score(self, key: SampleKey, rewards: Sequence[float]) -> None:
        """Record the rewards of a sample, NaN for none; a second record is ignored."""
        with self._lock:
            if key not in self._scored:
                content = {"place": key[1], "rewards": _pack_values(rewards, np.float32)}
                self._scored[key] = self._append("scored", key[0], content)

    def consume(self, number: int, step: int) -> None:
        """Record that a step trains on a generation, and write all records to the disk.

        A step that is repeated after a crash consumes the same generation again: one record stays.

        Raises:
            CheckpointError: another step consumed the generation.
        """
        with self._lock:
            consumed_step = self._consumed.get(number)
            if consumed_step is None:
                self._append("consumed", number, {"step": step})
                self._consumed[number] = step
            elif consumed_step != step:
                raise CheckpointError(
                    f"generation {number} of {self.path} belongs to step {consumed_step}, and this "
                    "run "
                    f"trains it at step {step}: the options of the run have changed"
                )
            self.sync()

    def sync(self) -> None:
        """Write all records to the disk."""
        with self._lock:
            if self._synchronized < self._end:
                os.fdatasync(self._file)
                self._synchronized = self._end

    def close(self) -> None:
        """Write all records to the disk, and close the file."""
        with self._lock:
            if self._file >= 0:
                self.sync()
                os.close(self._file)
                self._file = -1

    # --- reading ---

    @property
    def position(self) -> int:
        """The end of the ledger in bytes, for a checkpoint."""
        return self._end

    def check_position(self, position: int) -> None:
        """Check that the ledger has all records that a checkpoint needs.

        Raises:
            CheckpointError: records are missing or damaged.
        """
        if position > self._end:
            raise CheckpointError(
                f"{self.path} has {self._end} valid bytes, and the checkpoint needs {position}: "
                "the file was replaced or damaged; restore a copy, or use another save_directory"
            )

    @property
    def consumed(self) -> dict[int, int]:
        """Number of each consumed generation, and its step."""
        return dict(self._consumed)

    def size(self, number: int) -> int:
        """Return the number of samples of an issued generation."""
        with self._lock:
            return len(self._record(self._issued[number])[2]["seeds"])

    def is_finished(self, key: SampleKey) -> bool:
        """Whether a sample has all its tokens."""
        return key in self._finished

    def is_scored(self, key: SampleKey) -> bool:
        """Whether a sample has its rewards."""
        return key in self._scored

    def sample(self, key: SampleKey) -> Sampled:
        """Return a finished sample, with its rewards: of the functions, then of an environment."""
        with self._lock:
            content = self._record(self._finished[key])[2]
            rewards = content["rewards"]
            if key in self._scored:
                rewards = self._record(self._scored[key])[2]["rewards"] + rewards
        return Sampled(
            _ints(content["tokens"]),
            np.frombuffer(content["logprobs"], np.float32).tolist(),
            content["versions"][0][0],
            content["ended"],
            versions=tuple((int(v), int(n)) for v, n in content["versions"]),
            given=tuple((int(a), int(n)) for a, n in content["given"]),
            rewards=np.frombuffer(rewards, np.float32).tolist() or None,
            experts=_experts(content),
            masks=_masks(content),
        )

    def parts(self, key: SampleKey) -> list[SamplePart]:
        """Return the recorded parts of an unfinished sample."""
        with self._lock:
            records = [self._record(at)[2] for at in self._parts.get(key, ())]
        return [
            SamplePart(
                _ints(content["tokens"]),
                np.frombuffer(content["logprobs"], np.float32).tolist(),
                content["version"],
                content["ends"],
                _experts(content),
                _masks(content),
            )
            for content in records
        ]

    def records(self) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield kind, number of the generation, and content of every record, in order."""
        at = len(_MAGIC)
        while at < self._end:
            payload = self._payload(at)
            assert payload is not None, "checked when the ledger was opened"
            yield _unpack_record(payload)
            at += _HEAD.size + len(payload)

    # --- the file ---

    def _append(self, kind: str, number: int, content: Mapping[str, Any]) -> int:
        payload = _pack([kind, number, content])
        if len(payload) > _LARGEST:
            raise ConfigError(
                f"a record of generation {number} has {len(payload)} bytes, and at most {_LARGEST} "
                "fit: use fewer prompts per generation"
            )
        at = self._end
        data = memoryview(_HEAD.pack(len(payload), _checksum(at, payload)) + payload)
        while data:
            data = data[os.pwrite(self._file, data, self._end) :]
            self._end = at + _HEAD.size + len(payload) - len(data)
        return at

    def _record(self, at: int) -> tuple[str, int, dict[str, Any]]:
        payload = self._payload(at)
        if payload is None:
            raise CheckpointError(f"the record at byte {at} of {self.path} is damaged")
        return _unpack_record(payload)

    def _payload(self, at: int) -> bytes | None:
        """Return the content of a record; None if the record is incomplete or damaged."""
        head = os.pread(self._file, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        size, checksum = _HEAD.unpack(head)
        if size > _LARGEST:
            return None
        payload = os.pread(self._file, size, at + _HEAD.size)
        return payload if len(payload) == size and _checksum(at, payload) == checksum else None

    def _read(self, identity: dict[str, Any]) -> int:
        """Read all records, cut off an incomplete record, and return the end of the ledger."""
        size = os.fstat(self._file).st_size
        begin = os.pread(self._file, len(_MAGIC), 0)
        if not _MAGIC.startswith(begin):
            raise ConfigError(f"{self.path} is no ledger of samples: move it away")
        at = len(_MAGIC)
        while (payload := self._payload(at)) is not None:
            self._index(at, *_unpack_record(payload), identity)
            at += _HEAD.size + len(payload)
        if len(begin) < len(_MAGIC) or at == len(_MAGIC):  # new, or cut in its first record
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, _MAGIC, 0)
            self._end = len(_MAGIC)
            self._append("run", 0, identity)
            os.fsync(self._file)
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
            return self._end
        self.cut = size - at
        if self.cut:
            self._keep(at)
            os.ftruncate(self._file, at)
            os.fsync(self._file)
        return at

    def _keep(self, at: int) -> None:
        """Copy the bytes from `at` on to a file of their own: they may be more than one record."""
        with self.path.with_name(f"{self.path.name}.cut-at-{at}").open("wb") as file:
            file.write(os.pread(self._file, self.cut, at))
            file.flush()
            os.fsync(file.fileno())

    def _index(
        self, at: int, kind: str, number: int, content: dict[str, Any], identity: dict[str, Any]
    ) -> None:
        key = number, content.get("place", 0)
        if kind == "run":
            changed = [name for name in identity if content.get(name) != identity[name]]
            if changed:
                name = changed[0]
                raise ConfigError(
                    f"{self.path} belongs to a run with {name} {content.get(name)!r}, now it is "
                    f"{identity[name]!r}: change it back, or use another save_directory "
                    "(resume_if_possible=False moves this run aside)"
                )
        elif kind == "issued":
            self._issued[number] = at
        elif kind == "part":
            self._parts.setdefault(key, []).append(at)
        elif kind == "finished":
            self._finished[key] = at
            self._parts.pop(key, None)
        elif kind == "scored":
            self._scored[key] = at
        elif kind == "consumed":
            self._consumed[number] = content["step"]


def _pack(value: object) -> bytes:
    packed = msgpack.packb(value)
    assert packed is not None, "msgpack returns None for streams only"
    return packed


def _unpack_record(payload: bytes) -> tuple[str, int, dict[str, Any]]:
    kind, number, content = msgpack.unpackb(payload)
    return kind, number, content


def _pack_values(values: Sequence[float] | np.ndarray, kind: type[np.generic]) -> bytes:
    return np.asarray(values, kind).tobytes()


def _packed_records(of: SamplePart | Sampled) -> dict[str, Any]:
    """Return the fields of a record for experts and masks; nothing without them."""
    packed_fields: dict[str, Any] = {}
    if of.experts is not None:
        packed_fields["experts"] = [list(of.experts.shape), _pack_values(of.experts, np.int16)]
    if of.masks is not None:
        counts = [len(mask) for mask in of.masks]
        mask_tokens = np.concatenate([np.zeros(0, np.int32), *of.masks])
        packed_fields["masks"] = [
            _pack_values(counts, np.int32),
            _pack_values(mask_tokens, np.int32),
        ]
    return packed_fields


def _experts(content: Mapping[str, Any]) -> np.ndarray | None:
    """Return the experts of a record, int16 [tokens, layers, k]; None without experts."""
    if "experts" not in content:
        return None
    shape, data = content["experts"]
    return np.frombuffer(data, np.int16).reshape(shape)


def _masks(content: Mapping[str, Any]) -> list[np.ndarray] | None:
    """Return the masks of a record; None without masks."""
    if "masks" not in content:
        return None
    counts, mask_tokens = (np.frombuffer(data, np.int32) for data in content["masks"])
    return np.split(mask_tokens, np.cumsum(counts)[:-1]) if len(counts) else []


def _ints(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def _checksum(at: int, payload: bytes) -> bytes:
    return hashlib.blake2b(at.to_bytes(8, "little") + payload, digest_size=8).digest()
