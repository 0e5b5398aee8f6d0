"""Parameters that are stored outside of the weight files of a model."""

from __future__ import annotations

from flax import nnx


class SeparateParam(nnx.Param):
    """A parameter in a weight file of its own, such as `2_Dense/model.safetensors`.

    The weight rules of the model do not apply to the parameter.
    """
