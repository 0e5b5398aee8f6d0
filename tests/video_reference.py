"""The video processors of transformers without torchvision: their rules for frames and sizes."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any
from unittest import mock

_TORCHVISION = "torchvision.transforms.v2.functional"


def load_video_processor(name: str, **settings: object) -> Any:
    """Return a video processor of transformers whose `resize` returns the height and width.

    The modules of these processors import torchvision, whose functions only decode and resize.

    Args:
        name: `Qwen2VLVideoProcessor` or `Qwen3VLVideoProcessor`.
        settings: replace those of the class.
    """
    import transformers.image_processing_backends as backends
    import transformers.video_processing_utils  # noqa: F401  imported without the stand-in

    package = {"Qwen2VLVideoProcessor": "qwen2_vl", "Qwen3VLVideoProcessor": "qwen3_vl"}[name]
    path = f"transformers.models.{package}.video_processing_{package}"
    parts = _TORCHVISION.split(".")
    stand_ins = {".".join(parts[:n]): ModuleType("stand_in") for n in range(1, len(parts) + 1)}
    for parent, child in zip(stand_ins, [*stand_ins][1:], strict=False):
        setattr(stand_ins[parent], child.rpartition(".")[2], stand_ins[child])
    with mock.patch.dict(sys.modules, {} if "torchvision" in sys.modules else stand_ins):
        kind = getattr(importlib.import_module(path), name)

    def resize(_: object, image: object, size: Any, **options: object) -> tuple[int, int]:
        return size.height, size.width

    stand_in = mock.patch.object(backends.TorchvisionBackend, "resize", resize)
    reference = object.__new__(type(name, (kind,), {"resize": stand_in(kind.resize)}))
    for key, value in {"num_frames": None, **settings}.items():
        setattr(reference, key, value)
    return reference
