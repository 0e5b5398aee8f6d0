"""The images of a batch. Legend: b rows, c channels, h height, w width."""

from __future__ import annotations

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.sharding.axes import LogicalAxes
from jaxtyping import Float

from ed_trainers.batches import HostBatch

#: Logical axes of one image for each row.
IMAGE_AXES: LogicalAxes = ("batch", None, None, None)


def get_pixel_values(batch: HostBatch, method: str) -> Float[np.ndarray, "b c h w"]:
    """Return the image of each row.

    Args:
        batch: `pixel_values` [b, 1, c, h, w], as loaders return them, or [b, c, h, w].
        method: name of the method, for messages.

    Raises:
        ConfigError: the batch has no images, or several for a row.
    """
    if "pixel_values" not in batch:
        raise ConfigError(
            f"a batch for {method} has pixel_values, not only {', '.join(sorted(batch))}"
        )
    pixels = np.asarray(batch["pixel_values"], np.float32)
    if pixels.ndim == 5 and pixels.shape[1] == 1:
        pixels = pixels[:, 0]
    if pixels.ndim != 4:
        raise ConfigError(
            f"pixel_values of {method} have the shape {pixels.shape}: give one image for each row, "
            "[b, c, h, w] or [b, 1, c, h, w]"
        )
    return pixels
