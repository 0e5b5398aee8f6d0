"""The subject of vision-language models whose images, or tiles of images, have equal sizes.

Legend: b rows, s positions, i images or tiles of a row, n image features of a row, d hidden.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
from ed_infra.enums import TaskType
from ed_infra.inputs import Features, Inputs
from ed_infra.testing import require_torch

from ed_models.body.unpadded import TileGrids
from ed_models.conformance.subjects import B, Cases, S, Subject

#: Positions of the first tokens of the images of each row: three images, one, none, and two. The
#: calls of the checks with caches, and the documents of packed rows, cut no image in two.
_STARTS = ((1, 14, 19), (14,), (), (5, 14))
#: Number of tokens of the prompt, for models whose prompt tokens attend to later ones, and of the
#: tokens of each row in each step over pages, of which the first contains the prompt.
_PROMPT = 11
PROMPT_COUNTS = ((11, 13, 11, 12), (1, 11, 13, 1), (12, 0, 0, 11))


class ImageTextSubject(Subject):
    """A vision-language model whose rows contain 3, 1, 0 and 2 images."""

    task = TaskType.IMAGE_TEXT_TO_TEXT
    pad = (0, 5, 0, 3)

    def __init__(self, model_type: str, row: str, module_class: type[Any], cases: Cases):
        super().__init__(model_type, row, module_class, cases)
        self.images = self.place_media(module_class, cases.image_features)
        self.types: dict[str, np.ndarray] = {}
        if getattr(module_class, "reads_ahead", None) == "prompt":
            self.page_counts, self.prompt_length = PROMPT_COUNTS, _PROMPT
            is_completion = np.broadcast_to(np.arange(S) >= _PROMPT, (B, S))
            self.types = {"token_type_ids": is_completion.astype(np.int32)}

    def place_media(self, module_class: type[Any], length: int) -> dict[str, np.ndarray]:
        """Write the placeholder tokens of images of `length` features, and return the arrays of the
        images."""
        for number, starts in enumerate(_STARTS):
            for start in starts:
                self.ids[number, start : start + length] = self.image_token
        vision = self.fields["vision_config"]
        shape = B, max(map(len, _STARTS)), 3, vision["image_size"], vision["image_size"]
        pixels = np.random.default_rng(1).normal(size=shape)
        real = np.arange(shape[1]) < np.array([len(starts) for starts in _STARTS])[:, None]
        pixels *= real[:, :, None, None, None]
        images: dict[str, np.ndarray] = {"pixel_values": pixels.astype(np.float32)}
        if "pixel_attention_mask" in module_class.input_names:
            areas = np.broadcast_to(real[:, :, None, None], (*shape[:2], *shape[3:]))
            mask = areas.astype(np.int32)
            side = shape[-1]
            mask[0, 1, side // 2 :] = 0  # padding below one image, and at the right of another
            mask[3, 0, :, side - side // 4 :] = 0
            images["pixel_attention_mask"] = mask
        return images

    @property
    def image_token(self) -> int:
        """Id of the placeholder token of a feature."""
        names = ("image_token_index", "image_token_id", "audio_token_id", "audio_token_index")
        return next(self.fields[name] for name in names if name in self.fields)

    @property
    def vocab_size(self) -> int:
        """Number of tokens that are not image tokens."""
        return self.image_token

    @functools.cached_property
    def features(self) -> Features:
        """The image features of all rows."""
        encoded = self.model.encode(Inputs(self.images))
        return Features.at(encoded.embeddings, jnp.asarray(self.ids == self.image_token))

    def inputs(self, rows: slice = slice(None), at: slice = slice(None)) -> dict[str, Any]:
        features = Features(self.features.values[rows], self.features.index[rows, at])
        types = {name: x[rows, at] for name, x in self.types.items()}
        return {**super().inputs(rows, at), "features": features, **types}

    def flat(self, at: np.ndarray) -> dict[str, Any]:
        b, n, d = self.features.values.shape
        index = np.asarray(self.features.index)
        index = np.where(index < 0, -1, index + n * np.arange(b)[:, None]).reshape(-1)
        index = np.where(at < 0, -1, index[at])
        features = Features(self.features.values.reshape(1, b * n, d), jnp.asarray(index)[None])
        types = {name: x.reshape(-1)[at][None] for name, x in self.types.items()}
        return {**super().flat(at), "features": features, **types}

    def step(self, at: np.ndarray) -> dict[str, Any]:
        return {name: x for name, x in self.flat(at).items() if name not in self.types}

    def build_full_inputs(self) -> dict[str, Any]:
        return {"input_ids": self.ids, **self.images, **self.types}

    def prompts(self) -> dict[str, Any]:
        return {**super().prompts(), **self.images}

    # Hugging Face's model.

    def torch_inputs(self) -> list[dict[str, Any]]:
        (inputs,) = super().torch_inputs()
        return [self.with_images(inputs)]

    def torch_prompts(self) -> list[dict[str, Any]]:
        (inputs,) = self.torch_inputs()
        if self.types:
            inputs["token_type_ids"] = require_torch().zeros_like(inputs["input_ids"])
        return [inputs]

    def torch_loss(self) -> Any:
        torch = require_torch()
        ids = torch.tensor(self.ids, dtype=torch.long)
        return self.torch_model(**self.with_images({"input_ids": ids}), labels=ids).loss

    def with_images(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of Hugging Face's model with the images of all rows."""
        torch = require_torch()
        if len(self.images) > 1:  # `transformers` reads rows of tiles
            inputs = {**inputs, **{name: torch.tensor(x) for name, x in self.images.items()}}
        else:
            (name, rows), *_ = self.images.items()
            real = [row[: len(starts)] for row, starts in zip(rows, _STARTS, strict=True)]
            inputs = {**inputs, name: torch.tensor(np.concatenate(real))}
        if "token_type_ids" in inspect.signature(self.torch_model.forward).parameters:
            types = torch.tensor(self.types.get("token_type_ids", self.ids == self.image_token))
            inputs["token_type_ids"] = types.long()
        return inputs


class AudioTextSubject(ImageTextSubject):
    """An audio-language model, whose rows contain recordings in the places of images."""

    task = TaskType.ANY_TO_ANY

    def place_media(self, module_class: type[Any], length: int) -> dict[str, np.ndarray]:
        for number, starts in enumerate(_STARTS):
            for start in starts:
                self.ids[number, start : start + length] = self.image_token
        audio = self.fields["audio_config"]
        shape = audio["num_mel_bins"], 2 * audio["max_source_positions"]
        sounds = np.random.default_rng(1).normal(size=(B, max(map(len, _STARTS)), *shape))
        real = np.arange(sounds.shape[1]) < np.array([len(starts) for starts in _STARTS])[:, None]
        sounds = {"input_features": (sounds * real[:, :, None, None]).astype(np.float32)}
        if "feature_attention_mask" not in module_class.input_names:
            return sounds
        # Every second recording has two features.
        short = np.arange(real.size).reshape(real.shape) % 2 == 1
        count = np.where(short, shape[1] * 2 // length, shape[1]) * real
        for number, starts in enumerate(_STARTS):
            for place, start in enumerate(starts):
                if short[number, place]:
                    self.ids[number, start + 2 : start + length] = 7
        mask = np.arange(shape[1]) < count[..., None]
        return {**sounds, "feature_attention_mask": mask.astype(np.int32)}

    def with_images(self, inputs: dict[str, Any]) -> dict[str, Any]:
        torch, recordings = require_torch(), {}
        for name, rows in self.images.items():
            real = [row[: len(starts)] for row, starts in zip(rows, _STARTS, strict=True)]
            recordings[name] = torch.tensor(np.concatenate(real))
        return {**inputs, **recordings}


#: Heights and widths of the images of each row, and the first tokens of the images: three images
#: whose grids have only padding, one, none, and two.
_SIZES = (((2, 40), (1, 60), (2, 50)), ((16, 8),), (), ((3, 48), (8, 16)))
_PLACES = ((1, 6, 14), (6,), (), (4, 9))


class TileGridSubject(ImageTextSubject):
    """A vision-language model that splits images into a grid of tiles."""

    @property
    def grids(self) -> TileGrids:
        """The grids of the model, which is not created for them."""
        vision, options = self.fields["vision_config"], dict[str, Any]()
        if (ratio := self.fields.get("vision_aspect_ratio")) is not None:  # LLaVA-OneVision
            options = {"limit": int(ratio.removeprefix("anyres_max_")), "may_be_whole": True}
        resolutions = self.fields["image_grid_pinpoints"]
        return TileGrids.of(resolutions, vision["image_size"], vision["patch_size"], **options)

    def tiles_of_row(self, number: int) -> list[tuple[int, int]]:
        """Return the numbers of tiles and of features of the images of a row."""
        # LLaVA-OneVision makes no grids of several images.
        without_grid = self.grids.may_be_whole and len(_SIZES[number]) > 1
        return [self.grids.sizes(*size, without_grid=without_grid) for size in _SIZES[number]]

    def place_media(self, module_class: type[Any], length: int) -> dict[str, np.ndarray]:
        grids, most = self.grids, max(map(len, _SIZES))
        sizes, counts = np.zeros((B, most, 2), np.int32), np.zeros(B, int)
        for number, (row_sizes, starts) in enumerate(zip(_SIZES, _PLACES, strict=True)):
            sizes[number, : len(row_sizes)] = np.reshape(row_sizes, (-1, 2))
            for start, (tiles, features) in zip(starts, self.tiles_of_row(number), strict=True):
                counts[number] += tiles
                self.ids[number, start : start + features] = self.image_token
        shape = B, counts.max(), 3, grids.tile, grids.tile
        pixels = np.random.default_rng(1).normal(size=shape)
        pixels *= (np.arange(counts.max()) < counts[:, None])[:, :, None, None, None]
        image_grids = grids.best(sizes)
        if grids.may_be_whole:
            image_grids[[len(row_sizes) > 1 for row_sizes in _SIZES]] = 0
        images = {"pixel_values": pixels.astype(np.float32), "image_sizes": sizes}
        return {**images, "image_grids": image_grids}

    def with_images(self, inputs: dict[str, Any]) -> dict[str, Any]:
        torch, images = require_torch(), list[np.ndarray]()
        for number in range(B):
            first = 0
            for tiles, _ in self.tiles_of_row(number):
                images.append(self.images["pixel_values"][number, first : first + tiles])
                first += tiles
        most = max(map(len, images))
        padded = [np.pad(x, ((0, most - len(x)), (0, 0), (0, 0), (0, 0))) for x in images]
        if self.grids.may_be_whole:
            counts = [len(row_sizes) for row_sizes in _SIZES if row_sizes]
            inputs = {**inputs, "batch_num_images": torch.tensor(counts)}
        return {
            **inputs,
            "pixel_values": torch.tensor(np.stack(padded)),
            "image_sizes": torch.tensor([size for row_sizes in _SIZES for size in row_sizes]),
        }
