"""The floating-point operations of a token, from the matrices of a model and its attention.

The formula is that of PaLM (Chowdhery et al. 2022, appendix B). A parameter of a matrix counts two
FLOPs of a token forward, two for the gradient of the input, and two for the gradient of the
parameter if it is trained. A position of the row counts four FLOPs forward and eight backward for
each feature of the heads. Recomputation in the backward pass does not count.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.parameter_names import canonical, normalize_parameter_name, parse_run
from ed_layers.quantization import QuantParam
from flax import nnx

_EXPERT, _VOCABULARY = "expert", "vocab"


class TokenFlops(NamedTuple):
    """What a token is multiplied with.

    Attributes:
        trained: number of trained parameters of matrices.
        frozen: number of the other parameters of matrices.
        width: number of features of all heads of all layers.
    """

    trained: float
    frozen: float
    width: int

    def count_forward(self, length: int) -> float:
        """Return the FLOPs of a token of a row of some tokens."""
        return 2.0 * (self.trained + self.frozen) + 4.0 * self.width * length

    def count_training(self, length: int) -> float:
        """Return the FLOPs of a token of a row of some tokens, with the backward pass."""
        return 6.0 * self.trained + 4.0 * self.frozen + 12.0 * self.width * length


class _Count(NamedTuple):
    """Parameters of one tree: of matrices, of tables of embeddings, and the number of heads."""

    matrices: float
    tables: float
    heads: int


def count_token_flops(
    trained: nnx.State, frozen: nnx.State | None, config: EasyDeLBaseConfig
) -> TokenFlops:
    """Count the parameters that a token meets.

    A token uses `num_experts_per_tok` experts. An embedding table does not count as a matrix,
    unless it is also the head.

    Args:
        trained: trained parameters.
        frozen: other parameters.
        config: configuration of the model, with layers, heads and experts.
    """
    # A configuration of a program of the user may lack the method of transformers.
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    counts = [_count_tree(tree, text) for tree in (trained, frozen or nnx.State({}))]
    has_head = any(count.heads for count in counts)
    sums = [count.matrices + (0.0 if has_head else count.tables) for count in counts]
    return TokenFlops(sums[0], sums[1], _get_attention_width(text))


def _count_tree(tree: nnx.State, config: object) -> _Count:
    matrices, tables, heads = 0.0, 0.0, 0
    flat = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )[0]
    for path, variable in flat:
        if not isinstance(variable, nnx.Param | QuantParam):
            continue
        shape = getattr(variable.get_value(), "shape", ())
        axes = tuple(variable.get_metadata().get("axes") or ())
        layers = sum(parse_run(key) is not None for key in normalize_parameter_name(path))
        experts = axes[:1] == (_EXPERT,)
        if len(shape) - layers - experts < 2:
            continue
        size = 1.0
        for n in shape:
            size *= n
        if experts:
            used = getattr(config, "num_experts_per_tok", None) or shape[layers]
            size *= min(used, shape[layers]) / shape[layers]
        if axes[:1] == (_VOCABULARY,) or canonical(path)[0].endswith("embedding"):
            tables += size
            continue
        heads += axes[-1:] == (_VOCABULARY,)
        matrices += size
    return _Count(matrices, tables, heads)


def _get_attention_width(config: object) -> int:
    """Return the number of features of all heads of all layers; 0 if the configuration lacks it."""
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    if not layers or not heads:
        return 0
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return int(layers * heads * size)
