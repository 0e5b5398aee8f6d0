"""The task of the worker process that decodes videos, see `ed_esurge.children.worker`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
from ed_models.checkpoints.clips import (
    ClipError,
    ClipFacts,
    ClipFrames,
    ClipLimits,
    ClipPlan,
    Sampling,
    import_decoders,
    open_clip,
)

from ed_esurge.children.messages import RefusedError, SendAnswer
from ed_esurge.children.worker import run_worker

# Kinds of messages: the plan as JSON, and the RGB values of the frames in order.
PLAN, FRAMES = b"C", b"F"


def _work(data: bytes, options: dict[str, Any], say: SendAnswer) -> None:
    """Decode the frames of a video that a model reads.

    Args:
        options: `sampling` and `limits`, the fields of `Sampling` and `ClipLimits`.

    Raises:
        RefusedError: the video cannot be decoded, or exceeds a limit.
    """
    try:
        clip = open_clip(data, ClipLimits(**options["limits"]))
        plan = clip.plan(Sampling(**options["sampling"]))
        say(PLAN, write_plan(plan))
        for frame in clip.resize_frames(plan):
            say(FRAMES, np.ascontiguousarray(frame).data)
    except ClipError as error:
        raise RefusedError(str(error)) from None


def write_plan(plan: ClipPlan) -> bytes:
    """Return a plan as JSON."""
    return json.dumps({**plan._asdict(), "facts": asdict(plan.facts)}).encode()


def build_frames(plan: bytes, pixels: bytes | bytearray) -> ClipFrames:
    """Return the frames of a plan that `write_plan` returned.

    Raises:
        ValueError: the numbers of planned and of written pixels differ.
    """
    fields = json.loads(plan)
    shape = len(fields["indices"]), fields["height"], fields["width"], 3
    frames = np.frombuffer(pixels, np.uint8).reshape(shape)
    return ClipFrames(frames, ClipFacts(**fields["facts"]), fields["indices"])


if __name__ == "__main__":
    run_worker(import_decoders, _work)
