"""Copies of the state in the memory of the hosts, from which a run continues after a lost process.

Each process writes one file per copy to its own folder, which is on a file system in memory. The
file contains the shards of its devices, and the shards that only the next process has. So every
shard of the state is on two hosts, and a copy survives the loss of one host. Threads write the
files; a file gets its name when it is complete, and has a checksum that the reader compares.

The reader may have other processes and another mesh: the processes first exchange which shards
they have, and then the shards.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.distributed import gather_bytes
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ed_trainers.state import EasyDeLState, changing
from ed_trainers.stored.arrays import Wanted, flat_abstract, flat_arrays, from_flat

_SUFFIX = ".copy"
#: Number of newest copies that stay: one may be incomplete.
_KEPT = 2
#: Bytes of the shards that travel together.
_GROUP = 1 << 28
#: Length of the field with the length of the header.
_LENGTH = 8

#: Start and end of a shard along each dimension.
ShardBounds = tuple[tuple[int, int], ...]


class _Shard(NamedTuple):
    """The place of a shard: the name of its array, and its part of the array."""

    name: str
    span: ShardBounds


class _Unshared(NamedTuple):
    """An array of which one process alone has a shard, with the place of each device's shard."""

    name: str
    array: jax.Array
    spans: Mapping[Any, ShardBounds]


class MemoryCopies:
    """The copies of one run in the memory of the hosts.

    All processes of the run call the methods together.

    Args:
        directory: folder of this process, on a file system in memory.
        say: prints a message.
    """

    def __init__(self, directory: Path, say: Callable[[str], None] = print):
        self._directory, self._say = directory, say
        self._pool = ThreadPoolExecutor(1, "memory-copy")
        self._writing: Future[None] | None = None
        self._plan: _CopyPlan | None = None

    def save(self, step: int, state: EasyDeLState, *, run: Mapping[str, Any]) -> None:
        """Start to write a copy, and return when the caller may donate the arrays of the state.

        Args:
            step: number of updates.
            state: the state; its frozen weights are not copied.
            run: JSON values of the run, as in a checkpoint.
        """
        self.wait()
        arrays = flat_arrays(changing(state))
        if self._plan is None:
            self._plan = _CopyPlan(arrays)
        shards = [*self._plan.copy_shards(arrays)]
        self._writing = self._pool.submit(self._write, step, dict(run), shards)

    def _write(
        self, step: int, run: dict[str, Any], shards: list[tuple[_Shard, np.ndarray]]
    ) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        entries, crc = [], 0
        for shard, array in shards:
            crc = zlib.crc32(_bytes(array), crc)
            entries.append([shard.name, shard.span, str(array.dtype), array.nbytes])
        header = json.dumps({"run": run, "shards": entries, "crc": crc}).encode()
        part = self._directory / f"{step}.part"
        with part.open("wb") as file:
            file.write(len(header).to_bytes(_LENGTH, "little"))
            file.write(header)
            for _, array in shards:
                file.write(_bytes(array))
        part.replace(self._directory / f"{step}{_SUFFIX}")
        for old in self.steps()[:-_KEPT]:
            (self._directory / f"{old}{_SUFFIX}").unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Return the steps of the copies in the folder of this process, oldest first."""
        names = [path.stem for path in self._directory.glob(f"*{_SUFFIX}")]
        return sorted(int(name) for name in names if name.isdecimal())

    def wait(self) -> None:
        """Wait until the started copy is complete, or report that it could not be written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except OSError as error:
            self._say(
                f"a copy of the state could not be written to {self._directory} ({error}): the run "
                "goes on, and continues from an earlier copy or checkpoint if it loses a process"
            )
            for part in self._directory.glob("*.part"):
                part.unlink(missing_ok=True)

    def close(self) -> None:
        """Wait, and end the thread."""
        self.wait()
        self._pool.shutdown()

    def restore_newest(
        self, state: EasyDeLState, *, after_step: int
    ) -> tuple[int, EasyDeLState, dict[str, Any]] | None:
        """Read the newest copy whose shards the processes have completely.

        Args:
            state: structure, shapes, dtypes and shardings of the result, and the frozen weights.
            after_step: only copies of later steps are read.

        Returns:
            `(step, state, run of the copy)`, or None without such a copy.
        """
        abstract_arrays = flat_abstract(changing(state))
        local_copies: dict[int, _CopyFile] = {}
        for step in self.steps():
            copy = (
                _CopyFile.read(self._directory / f"{step}{_SUFFIX}") if step > after_step else None
            )
            if copy is not None and copy.fits(abstract_arrays):
                local_copies[step] = copy
        inventory = {step: [*copy.shards] for step, copy in local_copies.items()}
        replies = gather_bytes(json.dumps(inventory).encode())
        # Which processes have the shards of each copy.
        holders: dict[int, dict[_Shard, list[int]]] = defaultdict(lambda: defaultdict(list))
        for process, reply in enumerate(replies):
            for step, shards in json.loads(reply).items():
                for name, span in shards:
                    holders[int(step)][_Shard(name, _span(span))].append(process)
        for step in sorted(holders, reverse=True):
            if not _is_whole(holders[step], abstract_arrays):
                continue
            arrays = _exchange_arrays(local_copies.get(step), holders[step], abstract_arrays)
            frozen = {k: v for k, v in flat_arrays(state).items() if k not in abstract_arrays}
            facts = gather_bytes(
                json.dumps(local_copies[step].run if step in local_copies else None).encode()
            )
            run = next(fact for fact in map(json.loads, facts) if fact is not None)
            return step, from_flat(state, {**frozen, **arrays}), run
        return None


class _CopyPlan:
    """The shards that a process copies: those of its own devices, and those of the process before
    it that no other process has."""

    def __init__(self, arrays: Mapping[str, jax.Array]):
        self._shards: dict[str, list[tuple[int, ShardBounds]]] = {}  # numbers of addressable shards
        self._groups: list[_Group] = []
        process_index, unshared_arrays = jax.process_index(), []
        for name, array in arrays.items():
            spans = {
                device: _get_span(index, array.shape)
                for device, index in array.sharding.devices_indices_map(array.shape).items()
            }
            seen: dict[ShardBounds, int] = {}
            for number, shard in enumerate(array.addressable_shards):
                seen.setdefault(spans[shard.device], number)
            self._shards[name] = [(number, span) for span, number in seen.items()]
            processes = defaultdict(set)
            for device, span in spans.items():
                processes[span].add(device.process_index)
            if any(len(those) == 1 for those in processes.values()) and jax.process_count() > 1:
                unshared_arrays.append(_Unshared(name, array, spans))
        for group in _group_arrays(unshared_arrays):
            self._groups.append(_Group(group, process_index))

    def copy_shards(self, arrays: Mapping[str, jax.Array]) -> Iterator[tuple[_Shard, np.ndarray]]:
        """Yield the shards of this process's file."""
        seen = set()
        for name, local_spans in self._shards.items():
            for number, span in local_spans:
                seen.add((name, span))
                data = arrays[name].addressable_shards[number].data
                yield _Shard(name, span), np.array(data)
        for group in self._groups:
            for shard, array in group.receive_shards(arrays):
                if shard not in seen:
                    seen.add(shard)
                    yield shard, array


class _Group:
    """Arrays of one dtype and mesh whose shards move to the next process in one collective."""

    def __init__(self, members: Sequence[_Unshared], process_index: int):
        self._names = [member.name for member in members]
        sharding = members[0].array.sharding
        assert isinstance(sharding, NamedSharding)
        mesh = sharding.mesh
        assert isinstance(mesh, Mesh)
        devices = [*mesh.devices.flat]
        order = sorted(range(len(devices)), key=lambda i: (devices[i].process_index, i))
        counts = defaultdict(int)
        for device in devices:
            counts[device.process_index] += 1
        distance = max(counts.values())
        pairs = tuple((order[i - distance], order[i]) for i in range(len(order)))
        specs = tuple(cast(NamedSharding, member.array.sharding).spec for member in members)
        self._move = _mover(mesh, specs, pairs)
        sources = {devices[to]: devices[of] for of, to in pairs}
        #: For each local device, the shards that it receives, in order.
        self._parts: dict[Any, list[ShardBounds]] = {
            device: [member.spans[sources[device]] for member in members]
            for device in devices
            if device.process_index == process_index
        }

    def receive_shards(
        self, arrays: Mapping[str, jax.Array]
    ) -> Iterator[tuple[_Shard, np.ndarray]]:
        """Yield the shards of the process before this one."""
        moved = self._move(*(arrays[name] for name in self._names))
        for shard in moved.addressable_shards:
            flat, begin = np.array(shard.data), 0
            for name, span in zip(self._names, self._parts[shard.device], strict=True):
                shape = tuple(stop - start for start, stop in span)
                end = begin + math.prod(shape)
                yield _Shard(name, span), flat[begin:end].reshape(shape)
                begin = end


def _group_arrays(arrays: Sequence[_Unshared]) -> Iterator[list[_Unshared]]:
    """Yield arrays of equal dtype and mesh, of limited size together."""
    kinds = defaultdict(list)
    for member in arrays:
        kinds[member.array.dtype, cast(NamedSharding, member.array.sharding).mesh].append(member)
    for members in kinds.values():
        group, size = [], 0
        for member in members:
            member_size = member.array.addressable_shards[0].data.nbytes
            if group and size + member_size > _GROUP:
                yield group
                group, size = [], 0
            group.append(member)
            size += member_size
        yield group


@lru_cache(maxsize=256)
def _mover(
    mesh: Mesh, specs: tuple[PartitionSpec, ...], pairs: tuple[tuple[int, int], ...]
) -> Callable[..., jax.Array]:
    """Return a function that moves the shards of arrays between devices, as one flat array each."""
    axes = mesh.axis_names

    def move_shards(*shards: jax.Array) -> jax.Array:
        flat = jnp.concatenate([shard.reshape(-1) for shard in shards])
        # One collective: a CPU runs several ones of a program in any order, and can wait forever.
        return jax.lax.ppermute(flat, axes, pairs)

    return jax.jit(
        jax.shard_map(
            move_shards, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(axes), check_vma=False
        )
    )


class _CopyFile(NamedTuple):
    """A file of one process: its shards, and the run."""

    path: Path
    run: dict[str, Any]
    shards: dict[_Shard, tuple[np.dtype, int, int]]  # with begin and size of the bytes

    @classmethod
    def read(cls, path: Path) -> _CopyFile | None:
        """Return the file, or None if it is damaged."""
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH), "little")
                header = json.loads(file.read(length))
                crc = 0
                while piece := file.read(1 << 22):
                    crc = zlib.crc32(piece, crc)
            if crc != header["crc"]:
                return None
            shards, begin = {}, _LENGTH + length
            for name, span, dtype, size in header["shards"]:
                shards[_Shard(name, _span(span))] = jnp.dtype(dtype), begin, size
                begin += size
            return cls(path, header["run"], shards)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, MemoryError):
            return None

    def fits(self, abstract_arrays: Wanted) -> bool:
        """Return whether the shards belong to arrays of these names, shapes and dtypes."""
        for shard, (dtype, _, _) in self.shards.items():
            leaf = abstract_arrays.get(shard.name)
            if leaf is None or leaf.dtype != dtype or len(leaf.shape) != len(shard.span):
                return False
        return True

    def array(self, shard: _Shard) -> np.ndarray:
        """Return a shard."""
        dtype, begin, size = self.shards[shard]
        shape = [stop - start for start, stop in shard.span]
        return np.fromfile(self.path, np.uint8, size, offset=begin).view(dtype).reshape(shape)


def _is_whole(there: Mapping[_Shard, Sequence[int]], abstract_arrays: Wanted) -> bool:
    """Return whether shards, which do not overlap, cover the wanted arrays."""
    sizes: dict[str, int] = defaultdict(int)
    for name, span in there:
        sizes[name] += math.prod(stop - start for start, stop in span)
    return all(sizes[name] == math.prod(leaf.shape) for name, leaf in abstract_arrays.items())


def _exchange_arrays(
    local_copy: _CopyFile | None, holders: Mapping[_Shard, Sequence[int]], abstract_arrays: Wanted
) -> dict[str, jax.Array]:
    """Return the wanted arrays; the processes exchange the shards of a limited size at a time."""
    shards: dict[str, list[_Shard]] = defaultdict(list)
    for shard in sorted(holders):
        shards[shard.name].append(shard)
    arrays, group, size = {}, [], 0
    for name, leaf in abstract_arrays.items():
        group.append(name)
        size += math.prod(leaf.shape) * leaf.dtype.itemsize
        if size >= _GROUP or name == [*abstract_arrays][-1]:
            arrays.update(
                _exchanged_group(
                    local_copy, holders, {n: shards[n] for n in group}, abstract_arrays
                )
            )
            group, size = [], 0
    return arrays


def _exchanged_group(
    local_copy: _CopyFile | None,
    holders: Mapping[_Shard, Sequence[int]],
    shards: Mapping[str, Sequence[_Shard]],
    abstract_arrays: Wanted,
) -> dict[str, jax.Array]:
    process_index = jax.process_index()
    senders = {shard: min(holders[shard]) for those in shards.values() for shard in those}
    mine = [shard for shard, sender in senders.items() if sender == process_index]
    data = (
        b"".join(_bytes(local_copy.array(shard)) for shard in mine)
        if local_copy is not None
        else b""
    )
    # Few sizes, because each one compiles a collective.
    data += bytes((1 << max(len(data) - 1, 1).bit_length()) - len(data))
    replies = gather_bytes(data)
    begins, arrays = defaultdict(int), {}
    for name, those in shards.items():
        leaf = abstract_arrays[name]
        host_array = np.empty(leaf.shape, leaf.dtype)
        for shard in those:
            sender = senders[shard]
            place = tuple(slice(start, stop) for start, stop in shard.span)
            size = host_array[place].nbytes
            piece = replies[sender][begins[sender] : begins[sender] + size]
            host_array[place] = np.frombuffer(piece, leaf.dtype).reshape(host_array[place].shape)
            begins[sender] += size
        arrays[name] = jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda index, host_array=host_array: host_array[index]
        )
    return arrays


def _bytes(array: np.ndarray) -> memoryview | bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _get_span(index: tuple[slice, ...], shape: Sequence[int]) -> ShardBounds:
    spans = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return tuple((start, stop) for start, stop, _ in spans)


def _span(listed: Sequence[Sequence[int]]) -> ShardBounds:
    return tuple((int(start), int(stop)) for start, stop in listed)
