"""`ImageFeatures`: the outputs of a frozen vision encoder in host memory, by the content of images.

A batch receives the embeddings of its images instead of the images, so the steps of later epochs
run no encoder. Each image is encoded alone, in the shapes for which the engine compiles the encoder
(`ed_models.modalities.items`).

Legend: b rows, s positions, n features of the images of a row, d size of a feature.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.content import content_key
from ed_infra.errors import ConfigError
from ed_infra.inputs import GRID, IMAGE_FEATURES, TIMES, Inputs
from ed_infra.parameter_names import normalize_parameter_name
from ed_layers.updated import Updated
from ed_models.modalities.items import (
    ItemArrays,
    batch_of_one,
    build_encoder_items,
    get_modality,
    used_items,
)
from ed_models.protocol import LanguageModel
from flax import nnx
from jaxtyping import Float

from ed_trainers.rollout import Weights
from ed_trainers.state import EasyDeLState

OPTION = "image_feature_cache_gib"
#: Smallest number of features of a row; larger numbers are rounded up to powers of two, so that a
#: run compiles few steps.
_SMALLEST = 16
#: Most parameter names in an error message.
_SHOWN = 3

Path = tuple[str | int, ...]
ImageArray = Float[np.ndarray, "n d"]


class ByteCache:
    """Arrays by key, of which the least recently used are dropped beyond a number of bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.nbytes = most, 0
        self._kept: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def get(self, key: bytes) -> np.ndarray | None:
        """Return an array; None if the cache does not hold the array."""
        array = self._kept.get(key)
        if array is not None:
            self._kept.move_to_end(key)
        return array

    def put(self, key: bytes, array: np.ndarray) -> None:
        """Keep a new array. An array of more bytes than the cache may hold is not kept."""
        if array.nbytes > self.most:
            return
        self._kept[key] = array
        self.nbytes += array.nbytes
        while self.nbytes > self.most:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes


class ImageFeatures:
    """Replaces the images of batches by the outputs of a model's encoder.

    Args:
        model: the trained model.
        state: its state before training, which determines the trained parameters.
        frozen: the models by role that read the same batches.
        weights: returns the present weights of the model.
        most: maximum number of bytes of the kept outputs.

    Raises:
        ConfigError: the model reads no images, training changes the encoder, a frozen model has
            another encoder, or the run has several processes.

    Attributes:
        encoded: number of images that the encoder computed since the start.
    """

    def __init__(
        self,
        model: LanguageModel,
        state: EasyDeLState,
        frozen: Mapping[str, LanguageModel],
        weights: Callable[[], Weights],
        most: int,
    ) -> None:
        if IMAGE_FEATURES not in model.input_names:
            raise ConfigError(
                f"{OPTION} keeps the features of images, and {type(model).__name__} does not "
                "insert features of images into a text: omit the option"
            )
        if jax.process_count() > 1:
            raise ConfigError(
                f"{OPTION} requires one process, and this run has {jax.process_count()}: the "
                "processes would encode different images. Omit the option"
            )
        config = model.config
        items = build_encoder_items(model, config.get_text_config().max_position_embeddings)
        modality = get_modality(model)
        assert items is not None, "the model reads images"
        assert modality is not None, "the model reads images"
        self._items = items
        self._tokens = cast(Any, model).placeholder_tokens
        # The numbers of patches and the times of frames determine the positions of tokens.
        self._dropped = {*modality.names, *modality.convertible} - {GRID, TIMES}
        self._weights, self._cache, self.encoded = weights, ByteCache(most), 0
        self._encode = jax.jit(lambda values, inputs: self._embeddings(values, inputs))
        self._graphdef = state.graphdef
        read, shape = self._read(state)
        self._dtype = np.dtype(shape.dtype)
        _check_frozen(read, state)
        for role, frozen_model in frozen.items():
            _check_same(role, frozen_model, read)

    def __call__(self, batch: Inputs[np.ndarray]) -> Inputs[np.ndarray]:
        """Return a batch with `image_features` [b, n, d] instead of the arrays of images.

        Args:
            batch: `input_ids` [b, s], or [b, 2, s] for pairs, and the arrays of images.

        Raises:
            ConfigError: a row has another number of placeholder tokens than of features.
        """
        tokens = np.asarray(batch["input_ids"])
        lead = tokens.shape[:-1]
        images = {
            name: np.asarray(batch[name]).reshape(-1, *batch[name].shape[len(lead) :])
            for name in self._dropped | {GRID}
            if name in batch
        }
        if not images:
            return batch
        rows = self._rows(tokens.reshape(-1, tokens.shape[-1]), images)
        longest = max(_SMALLEST, *(sum(map(len, row)) for row in rows))
        size = 1 << (longest - 1).bit_length()
        values = np.zeros((len(rows), size, self._items.features), self._dtype)
        for row, parts in zip(values, rows, strict=True):
            if parts:
                row[: sum(map(len, parts))] = np.concatenate(parts)
        arrays = {name: array for name, array in batch.items() if name not in self._dropped}
        arrays[IMAGE_FEATURES] = values.reshape(*lead, size, -1)
        axes = (*batch.get_logical_axes("input_ids")[:-1], None, None)
        return Inputs(arrays, {**batch.declared, IMAGE_FEATURES: axes})

    def _rows(self, tokens: np.ndarray, images: ItemArrays) -> list[list[ImageArray]]:
        """Return the features of each image of each row. New images are encoded."""
        counts = np.sum(np.isin(tokens, self._tokens), axis=1)
        rows: list[list[tuple[bytes, int]]] = []
        features_by_key: dict[bytes, np.ndarray] = {}
        coming: dict[bytes, jax.Array] = {}
        state: nnx.State | None = None
        for number, count in enumerate(counts.tolist()):
            row = {name: array[number] for name, array in images.items()}
            rows.append([])
            for arrays, length in used_items(self._items, row, count, self._tokens):
                key = content_key(arrays, length)
                rows[-1].append((key, length))
                if key in features_by_key or key in coming:
                    continue
                cached_features = self._cache.get(key)
                if cached_features is not None:
                    features_by_key[key] = cached_features
                    continue
                state = self._weights().state if state is None else state
                inputs = batch_of_one(self._items.pad_item(arrays))
                coming[key] = self._encode(state, inputs)
        lengths = {key: length for row in rows for key, length in row}
        for key, values in coming.items():
            # A copy, because a part of an array would keep the memory of the padding.
            features_by_key[key] = np.asarray(values)[: lengths[key]].copy()
            self._cache.put(key, features_by_key[key])
        self.encoded += len(coming)
        return [[features_by_key[key] for key, _ in row] for row in rows]

    def _embeddings(self, state: nnx.State, inputs: Inputs) -> jax.Array:
        model: LanguageModel = nnx.merge(self._graphdef, state)
        return model.encode(inputs).embeddings[0]

    def _read(self, state: EasyDeLState) -> tuple[dict[Path, jax.Array], jax.ShapeDtypeStruct]:
        """Return the arrays of the model that the encoder reads, and its abstract output."""
        full = nnx.merge_state(state.graphstate, state.graphother)
        placed, treedef = jax.tree_util.tree_flatten_with_path(full)
        inputs = batch_of_one(self._items.pad_item(self._items.examples()[0]))

        def embeddings(leaves: list[jax.Array]) -> jax.Array:
            return self._embeddings(jax.tree.unflatten(treedef, leaves), inputs)

        traced, shape = jax.make_jaxpr(embeddings, return_shape=True)([x for _, x in placed])
        used = {id(value) for step in traced.jaxpr.eqns for value in step.invars}
        pairs = zip(placed, traced.jaxpr.invars, strict=True)
        return {
            normalize_parameter_name(path): x for (path, x), value in pairs if id(value) in used
        }, shape


def _check_frozen(read: Mapping[Path, jax.Array], state: EasyDeLState) -> None:
    """Check that training changes no array that the encoder reads, and that none is an adapter."""
    flat = nnx.to_flat_state(state.graphother)
    moving = {
        normalize_parameter_name(path) for path, variable in flat if isinstance(variable, Updated)
    }
    moving |= {normalize_parameter_name(path) for path, _ in nnx.to_flat_state(state.graphstate)}
    changed = sorted(".".join(map(str, path)) for path in read if path in moving)
    if changed:
        name_list = ", ".join(changed[:_SHOWN]) + (", ..." if len(changed) > _SHOWN else "")
        raise ConfigError(
            f"{OPTION} keeps outputs of the vision encoder, and training changes {len(changed)} of "
            f"its {len(read)} parameters ({name_list}), so the kept outputs would be out of date: "
            "freeze the vision tower and the projector by trainable_rules, omit them from the "
            "targets of adapters, or omit the option"
        )
    adapters = {
        normalize_parameter_name(path)
        for path, variable in flat
        if isinstance(variable, nnx.LoRAParam)
    }
    if adapter_names := sorted(".".join(map(str, path)) for path in read if path in adapters):
        raise ConfigError(
            f"{OPTION} keeps outputs of the vision encoder, and the encoder has adapters that are "
            f"not trained ({adapter_names[0]}), which a reference without adapters would read, "
            "too: merge "
            "these adapters into the model, or omit the option"
        )


def _check_same(role: str, model: LanguageModel, read: Mapping[Path, jax.Array]) -> None:
    """Check that a frozen model that reads images has the encoder of the trained model."""
    if IMAGE_FEATURES not in model.input_names:
        return
    placed = jax.tree_util.tree_flatten_with_path(nnx.state(cast(nnx.Module, model)))[0]
    model_arrays = {normalize_parameter_name(path): array for path, array in placed}
    for path, array in read.items():
        model_array = model_arrays.get(path)
        if (
            model_array is None
            or model_array.shape != array.shape
            or not bool(jnp.array_equal(model_array, array))
        ):
            raise ConfigError(
                f"{OPTION} keeps outputs of the vision encoder of the trained model, and the "
                f"encoder of the frozen model {role!r} differs in {'.'.join(map(str, path))}: use "
                f"a {role} with the same encoder, or omit the option"
            )
