"""Log-probabilities of the reference, computed before training and stored by answer.

The key of an answer is a digest of its tokens and of the mask of the counted tokens. It does not
depend on the epoch, the order or the packing.

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
from ed_infra.inputs import Inputs
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.contract import Batch
from ed_trainers.losses.pairs import get_slots
from ed_trainers.losses.scoring import target_logps
from ed_trainers.losses.segments import Answers
from ed_trainers.placement import TOKENS, Placement, pad_rows
from ed_trainers.stored.arrays import read_npz

#: The file, in the directory of the run.
REFERENCE_FILE = "reference_log_probs.npz"
#: Arrays of a prepared batch that the reference reads.
INPUTS = (
    "input_ids",
    "segment_ids",
    "position_ids",
    "decoder_input_ids",
    "decoder_segment_ids",
    "decoder_position_ids",
    "targets",
    "weights",
)


class ReferenceLogps:
    """Stored log-probabilities of answers under a model, which can be released afterwards.

    Args:
        model: the reference.
        placement: puts rows on the devices.
        chunk: number of tokens whose logits exist at the same time; None uses the default of the
            loss.
        path: the file of the log-probabilities. An existing file is used if its reference matches.
        rows: number of rows per forward pass.
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
        graphdef, params, other_variables = model.split_module()
        self._leaves: tuple[nnx.State, nnx.State] | None = (params, other_variables)
        self._known: dict[bytes, float] = {}
        self._saved = 0
        self._of = _checksum(params)

        @jax.jit
        def score(params: nnx.State, other_variables: nnx.State, batch: Batch) -> jax.Array:
            reference: LanguageModel = nnx.merge(graphdef, params, other_variables)
            _, logps = target_logps(reference, batch, None, placement=placement, chunk=chunk)
            return Answers.of(logps, batch["weights"], get_slots(batch)).logps

        self._score = score
        # With several processes the file might exist for some of them only, which would block.
        if jax.process_count() == 1:
            self._load()

    def __call__(self, rows: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the log-probability of each answer of prepared rows [r, s], by slot, float32.

        Raises:
            ConfigError: an answer is unknown, and the reference was released.
        """
        answer_digests = _answers(rows)
        if any(digest not in self._known for _, _, digest in answer_digests):
            self._learn(rows, answer_digests)
        logps = np.zeros(rows["targets"].shape, np.float32)
        for row, slot, digest in answer_digests:
            logps[row, slot] = self._known[digest]
        return logps

    def let_go(self) -> None:
        """Write the log-probabilities to disk, and release the reference."""
        if jax.process_index() == 0 and len(self._known) > self._saved:
            self._save()
        self._leaves = None

    def _learn(
        self, rows: Mapping[str, np.ndarray], answer_digests: list[tuple[int, int, bytes]]
    ) -> None:
        if self._leaves is None:
            raise ConfigError(
                "precompute_ref_log_probs: these answers are not in the data of the run, and the "
                "reference is no longer in memory: evaluate them without the option"
            )
        scored = []
        for start in range(0, len(rows["input_ids"]), self._rows):
            piece = {name: array[start : start + self._rows] for name, array in rows.items()}
            inputs = Inputs(piece, {"targets": TOKENS, "weights": TOKENS})
            placed = self._placement.place(pad_rows(inputs, self._rows), stacked=False)
            scored.append(jax.device_get(self._score(*self._leaves, placed)))
        values = np.concatenate(scored)
        for row, slot, digest in answer_digests:
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
    """Return row, slot and digest of every answer of rows [r, s].

    The digest of an encoder-decoder covers the tokens of the encoder and of the decoder.
    """
    sequences = [(rows["input_ids"], rows["segment_ids"])]
    if "decoder_input_ids" in rows:
        sequences.append((rows["decoder_input_ids"], rows["decoder_segment_ids"]))
    answer_digests = []
    for row, weights in enumerate(rows["weights"]):
        last = sequences[-1][1][row]
        for segment in range(1, int(last.max(initial=0)) + 1):
            content = b"".join(
                ids[row][segments[row] == segment].astype("<i4").tobytes()
                for ids, segments in sequences
            )
            if len(sequences) > 1:  # the last target is no input of the decoder
                content += rows["targets"][row][last == segment].astype("<i4").tobytes()
            content += (weights[last == segment] > 0).tobytes()
            answer_digests.append(
                (row, segment - 1, hashlib.blake2b(content, digest_size=16).digest())
            )
    return answer_digests


def _checksum(params: nnx.State) -> list[float]:
    """Return sums over the parameters, which identify the model."""
    sums = [
        (jnp.sum(x, dtype=jnp.float32), jnp.sum(jnp.abs(x), dtype=jnp.float32))
        for x in jax.tree.leaves(params)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    return [float(value) for value in np.asarray(jax.device_get(sums)).reshape(-1)]
