"""Log-probabilities of the reference, computed ahead and kept: by answer, whatever row it is in.

An answer is known by the digest of its tokens and of which of them count, so every epoch, order and
packing finds it again.

Legend: r rows, s positions, and slots of segments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.losses.scoring import target_logps
from ed_trainers.losses.segments import Answers
from ed_trainers.placement import Placement, pad_rows
from ed_trainers.stored.npz import read_npz

#: The file beside the checkpoints.
FILE = "reference_log_probs.npz"
_INPUTS = ("input_ids", "segment_ids", "position_ids", "targets", "weights")


class ReferenceLogps:
    """Answers' log-probabilities under a model that need not stay in memory.

    Args:
        model: the reference.
        placement: puts rows on the devices.
        chunk: tokens whose logits exist at once; None lets the loss choose.
        path: where they are kept; what is there is taken if it is of the same reference.
        rows: rows that go through the model at once.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        placement: Placement,
        chunk: int | None,
        path: Path,
        rows: int,
    ):
        self._path, self._placement, self._rows = path, placement, rows
        graphdef, params, other = model.split_module()
        self._leaves: tuple[nnx.State, nnx.State] | None = (params, other)
        self._known: dict[bytes, float] = {}
        self._saved = 0
        self._of = _checksum(params)

        @jax.jit
        def score(params: nnx.State, other: nnx.State, batch: dict[str, jax.Array]) -> jax.Array:
            reference: LanguageModel = nnx.merge(graphdef, params, other)
            _, logps = target_logps(reference, batch, None, placement=placement, chunk=chunk)
            return Answers.of(logps, batch["weights"], batch["segment_ids"]).logps

        self._score = score
        # Several processes could disagree about the file, and one would wait for the others.
        if jax.process_count() == 1:
            self._load()

    def __call__(self, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the log-probability of each answer of prepared rows [r, s], by slot, float32.

        Raises:
            ConfigError: an answer is not known, and the reference was let go.
        """
        found = _answers(rows)
        if any(digest not in self._known for _, _, digest in found):
            self._learn(rows, found)
        logps = np.zeros(rows["input_ids"].shape, np.float32)
        for row, slot, digest in found:
            logps[row, slot] = self._known[digest]
        return logps

    def let_go(self) -> None:
        """Keep what is known on disk, and free the reference."""
        if jax.process_index() == 0 and len(self._known) > self._saved:
            self._save()
        self._leaves = None

    def _learn(self, rows: Mapping[str, np.ndarray], found: list[tuple[int, int, bytes]]) -> None:
        if self._leaves is None:
            raise ConfigError(
                "precompute_ref_log_probs: these answers are of other data than the run's, and the "
                "reference is not in memory any more: evaluate them without the option"
            )
        scored = []
        for start in range(0, len(rows["input_ids"]), self._rows):
            piece = {name: rows[name][start : start + self._rows] for name in _INPUTS}
            placed = self._placement.place(pad_rows(piece, self._rows), stacked=False)
            scored.append(jax.device_get(self._score(*self._leaves, placed)))
        values = np.concatenate(scored)
        for row, slot, digest in found:
            self._known[digest] = float(values[row, slot])

    def _load(self) -> None:
        if not self._path.is_file():
            return
        saved = read_npz(self._path, str(self._path))
        if saved["reference"].tolist() != self._of:
            return
        digests = saved["digests"].tobytes()
        for i, value in enumerate(saved["values"].tolist()):
            self._known[digests[16 * i : 16 * i + 16]] = value
        self._saved = len(self._known)

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f"{self._path.name}.new")
        with part.open("wb") as file:
            np.savez(
                file,
                reference=np.asarray(self._of),
                digests=np.frombuffer(b"".join(self._known), np.uint8),
                values=np.fromiter(self._known.values(), np.float32),
            )
        part.replace(self._path)
        self._saved = len(self._known)


def _answers(rows: Mapping[str, np.ndarray]) -> list[tuple[int, int, bytes]]:
    """Row, slot and digest of every answer of rows [r, s]."""
    found = []
    for row, (ids, segments, weights) in enumerate(
        zip(rows["input_ids"], rows["segment_ids"], rows["weights"], strict=True)
    ):
        for segment in range(1, int(segments.max(initial=0)) + 1):
            here = segments == segment
            what = ids[here].astype("<i4").tobytes() + (weights[here] > 0).tobytes()
            found.append((row, segment - 1, hashlib.blake2b(what, digest_size=16).digest()))
    return found


def _checksum(params: nnx.State) -> list[float]:
    """A few numbers that another model would not have."""
    sums = [
        (jnp.sum(x, dtype=jnp.float32), jnp.sum(jnp.abs(x), dtype=jnp.float32))
        for x in jax.tree.leaves(params)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return [float(value) for value in np.asarray(jax.device_get(sums)).reshape(-1)]
