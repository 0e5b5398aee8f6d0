"""The subject of vision-language models over packed patches.

Legend: b rows, s positions, i images of a row, p patches of a row, f numbers of a patch, n features
of a row, d hidden, m patches along the side of a block.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from ed_infra.enums import TaskType
from ed_infra.inputs import Features, Inputs
from ed_infra.rope.grids import grid_positions
from ed_infra.testing import require_torch

from ed_models.body.image_rows import feature_counts, padded_rows
from ed_models.conformance.subjects import Cases, Subject

if TYPE_CHECKING:
    from transformers import PreTrainedModel


#: Blocks along height and width of the images of each row: three images, one, none, and two.
_IMAGES = (((2, 2), (1, 2), (3, 1)), ((2, 3),), (), ((1, 1), (5, 2)))
#: Documents of a packed row: number of the row, and of its first tokens.
_DOCUMENTS = ((0, 20), (2, 11), (1, 14))


class PatchedImageTextSubject(Subject):
    """A vision-language model whose rows contain 3, 1, 0 and 2 images of different sizes."""

    task = TaskType.IMAGE_TEXT_TO_TEXT
    pad = (0, 5, 0, 3)
    #: The default number of frames of a patch.
    frames = 2
    #: Blocks and first tokens of the images of each row; no first tokens = one after another.
    blocks: tuple[tuple[tuple[int, int], ...], ...] = _IMAGES
    starts: tuple[tuple[int, ...], ...] | None = None

    def __init__(self, model_type: str, row: str, module_class: type[Any], cases: Cases):
        super().__init__(model_type, row, module_class, cases)
        self.image_token: int = self.fields["image_token_id"]
        vision = self.fields["vision_config"]
        merge: int = vision.get("spatial_merge_size", vision.get("pooling_kernel_size", 2))
        frames = vision.get("temporal_patch_size", type(self).frames)
        numbers = 3 * frames * vision["patch_size"] ** 2
        rng, rows = np.random.default_rng(1), []
        for number, sizes in enumerate(self.blocks):
            grids = np.array([(1, h * merge, w * merge) for h, w in sizes], np.int32).reshape(-1, 3)
            rows.append((rng.normal(size=(grids.prod(axis=1).sum(), numbers)), grids))
            start = max(self.pad) + 1
            for image, count in enumerate(feature_counts(grids, merge).tolist()):
                start = start if self.starts is None else self.starts[number][image]
                self.ids[number, start : start + count] = self.image_token
                start += count + 1
        self.images = padded_rows(rows, numbers, merge)
        grids = self.images["image_grid_thw"] // np.array([1, merge, merge])
        self.positions = grid_positions(self.placeholders, np.ones_like(self.ids), grids)

    @property
    def vocab_size(self) -> int:
        """Number of tokens that are not image tokens."""
        return self.fields["image_token_id"]

    @property
    def has_axes(self) -> bool:
        """Whether tokens have positions on three axes."""
        return self.model.patch_form.has_axes

    @property
    def placeholders(self) -> np.ndarray:
        """Which tokens are features of images."""
        return self.ids == self.image_token

    @functools.cached_property
    def features(self) -> Features:
        """The image features of all rows."""
        arrays = Inputs({name: jnp.asarray(x) for name, x in self.images.items()})
        encoded = self.model.encode(arrays)
        return Features.at(encoded.embeddings, jnp.asarray(self.placeholders))

    def inputs(self, rows: slice = slice(None), at: slice = slice(None)) -> dict[str, Any]:
        features = Features(self.features.values[rows], self.features.index[rows, at])
        arguments = {**super().inputs(rows, at), "features": features}
        if self.has_axes:
            arguments["position_ids"] = jnp.asarray(self.positions[:, rows, at])
        return arguments

    def flat(self, at: np.ndarray) -> dict[str, Any]:
        b, n, d = self.features.values.shape
        index = np.asarray(self.features.index)
        index = np.where(index < 0, -1, index + n * np.arange(b)[:, None]).reshape(-1)
        index = np.where(at < 0, -1, index[at])
        features = Features(self.features.values.reshape(1, b * n, d), jnp.asarray(index)[None])
        arguments = {**super().flat(at), "features": features}
        if self.has_axes:
            arguments["position_ids"] = jnp.asarray(self.positions.reshape(3, 1, -1)[:, :, at])
        return arguments

    def build_full_inputs(self) -> dict[str, Any]:
        return {"input_ids": self.ids, **self.images}

    def build_row_inputs(self, row: int) -> dict[str, Any]:
        images = {name: x[row : row + 1] for name, x in self.images.items()}
        return {"input_ids": self.ids[row : row + 1, self.pad[row] :], **images}

    def documents(self) -> tuple[dict[str, Any], list[tuple[np.ndarray, dict[str, Any]]]]:
        grids, pixels = self.images["image_grid_thw"], self.images["pixel_values"]
        ids, segments, parts, documents, start = (
            np.zeros(48, np.int32),
            np.zeros(48, np.int32),
            [],
            [],
            0,
        )
        for number, (row, length) in enumerate(_DOCUMENTS, 1):
            at = np.arange(start, start + length)
            start += length
            ids[at], segments[at] = self.ids[row, :length], number
            parts.append((pixels[row, : grids[row].prod(axis=1).sum()], _drop_padding(grids[row])))
            document_images = {name: x[row : row + 1] for name, x in self.images.items()}
            documents.append(
                (at, {"input_ids": self.ids[row : row + 1, :length], **document_images})
            )
        merge = self.model.patch_form.merge
        packed_arrays = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        packed = padded_rows([(packed_arrays[0], packed_arrays[1])], pixels.shape[-1], merge)
        return {"input_ids": ids[None], "segment_ids": segments[None], **packed}, documents

    def prompts(self) -> dict[str, Any]:
        return {**super().prompts(), **self.pack_images()}

    def pack_images(self) -> dict[str, np.ndarray]:
        """Return the arrays of all images as processors do, [p, f] and [i, 3]."""
        grids, pixels = self.images["image_grid_thw"], self.images["pixel_values"]
        counts = grids.prod(axis=2).sum(axis=1)
        patches = [row[:count] for row, count in zip(pixels, counts, strict=True)]
        return {
            "pixel_values": np.concatenate(patches),
            "image_grid_thw": np.concatenate([_drop_padding(row) for row in grids]),
        }

    def torch_inputs(self) -> list[dict[str, Any]]:
        torch = require_torch()
        images = {name: torch.tensor(x) for name, x in self.pack_images().items()}
        images["image_grid_thw"] = images["image_grid_thw"].long()
        (inputs,) = super().torch_inputs()
        if self.has_axes:
            images["mm_token_type_ids"] = (inputs["input_ids"] == self.image_token).int()
        return [{**inputs, **images}]

    def torch_outputs(self, model: PreTrainedModel) -> np.ndarray:
        (inputs,) = self.torch_inputs()
        with require_torch().no_grad():
            return self.output(model(**inputs, use_cache=False)).float().numpy()

    def torch_loss(self) -> Any:
        (inputs,) = self.torch_inputs()
        del inputs["attention_mask"]
        return self.torch_model(**inputs, labels=inputs["input_ids"], use_cache=False).loss


class RasterImageTextSubject(PatchedImageTextSubject):
    """A model whose processor returns patches row by row."""

    frames = 1

    def torch_inputs(self) -> list[dict[str, Any]]:
        torch = require_torch()
        (inputs,) = super().torch_inputs()
        side, merge = self.fields["vision_config"]["patch_size"], self.model.patch_form.merge
        patches, image_rows, first = self.pack_images()["pixel_values"], [], 0
        for _, h, w in self.pack_images()["image_grid_thw"].tolist():
            image_patches = patches[first : first + h * w]
            first += h * w
            rows = image_patches.reshape(h // merge, w // merge, merge, merge, -1).swapaxes(1, 2)
            image_rows.append(rows.reshape(h * w, 3, side, side))
        return [{**inputs, "pixel_values": torch.tensor(np.concatenate(image_rows))}]


class PlacedImageTextSubject(RasterImageTextSubject):
    """A model whose processor returns padded patches with their places. The calls of the checks cut
    no image in two, because the tokens of an image may attend to each other."""

    blocks = ((2, 2), (1, 2), (3, 1)), ((2, 3),), (), ((1, 1), (5, 2))
    starts = (1, 6, 14), (5,), (), (4, 13)

    @functools.cached_property
    def torch_model(self) -> Any:
        model = super().torch_model
        for name, bound in model.named_buffers():
            if name.endswith(("_min", "_max")):  # random bounds would replace all values
                bound.fill_(-0.5 if name.endswith("_min") else 0.5)
        return model

    def torch_inputs(self) -> list[dict[str, Any]]:
        torch = require_torch()
        (inputs,) = super().torch_inputs()
        grids, patches = inputs.pop("image_grid_thw").numpy(), inputs["pixel_values"].flatten(1)
        counts, merge = grids.prod(axis=1), self.model.patch_form.merge
        pixels = np.zeros((len(grids), merge**2 + counts.max(), patches.shape[1]), np.float32)
        places, first = np.full((*pixels.shape[:2], 2), -1), 0
        for image, (_, h, w) in enumerate(grids.tolist()):
            pixels[image, : h * w] = patches[first : first + h * w]
            row, column = np.divmod(np.arange(h * w), w)
            places[image, : h * w] = np.stack([column, row], axis=1)
            first += h * w
        types = (inputs["input_ids"] == self.image_token).int()
        arrays = {"pixel_values": torch.tensor(pixels), "image_position_ids": torch.tensor(places)}
        return [{**inputs, **arrays, "mm_token_type_ids": types}]


def _drop_padding(grids: np.ndarray) -> np.ndarray:
    """Return the grids of a row without padding."""
    return grids[grids.prod(axis=1) > 0]
