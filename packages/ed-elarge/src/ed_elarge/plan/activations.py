"""Values that one token needs in one layer, by the names of `ed_layers.context.named`. No jax.

Legend: d hidden, h heads, g kv heads, k head dim, f intermediate, e experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ed_infra.parameter_names import split_runs

from ed_elarge.plan.mesh import PlanMesh
from ed_elarge.plan.tensors import ModelShapes


@dataclass(frozen=True)
class LayerValues:
    """Numbers of values of one token on one device, in the average layer.

    Attributes:
        d: values of the residual stream.
        q, kv: values of the queries, and of the keys (as many as of the values).
        f: values between the products of the feed-forward layer; with experts, of all experts that
            a token uses.
        gated: whether the feed-forward layer has a gate.
        heads: number of query heads.
        normed: whether queries and keys have norms.
        experts: number of experts that a token uses; 0 = no layer has experts.
        norms: where the norms of the stream are: "before" attention and feed-forward, "after" them,
            "both", or "parallel" (one norm, whose result both read).
        bodies: number of layers whose backward passes the compiler may overlap: those of one
            iteration of the loop over layers, and layers between two loops.
    """

    d: float
    q: float
    kv: float
    f: float
    gated: bool
    heads: float
    normed: bool = False
    experts: int = 0
    norms: Literal["before", "after", "both", "parallel"] = "before"
    bodies: int = 1

    @classmethod
    def of(cls, shapes: ModelShapes, mesh: PlanMesh) -> LayerValues:
        """Return the values of a model on a mesh."""
        tp = mesh.ways(mesh.axis.head_axis)
        inner = mesh.ways(mesh.axis.mlp_intermediate_axis)
        ways = {n: max(1, w) for n, w in (("q", tp), ("f", inner))}
        kv_ways = mesh.ways(mesh.axis.kv_head_axis)
        kv = shapes.kv_heads * shapes.head_dim
        f, gated = _inner(shapes)
        return cls(
            d=shapes.hidden,
            q=shapes.heads * shapes.head_dim / ways["q"],
            kv=kv / (kv_ways if kv % kv_ways == 0 else 1),
            f=f / ways["f"],
            gated=gated,
            heads=shapes.heads / ways["q"],
            normed=any(".q_norm." in tensor.name for tensor in shapes.tensors),
            experts=int(shapes.config.get("num_experts_per_tok") or 1)
            if any(tensor.axes[:1] == ("expert",) for tensor in shapes.tensors)
            else 0,
            norms=_norms(shapes),
            bodies=_bodies(shapes),
        )

    def count_saved_values(self, policy: str, targets: tuple[str, ...]) -> float:
        """Return the values that the forward pass keeps for the backward pass, per token.

        The input of the layer is always kept. See `ed_layers.depth.remat`.
        """
        products = self.q + 2 * self.kv + (2 if self.gated else 1) * self.f + self.d
        everything = self.everything
        if policy == "":
            return everything
        if policy == "nothing_saveable" or policy.startswith("save_and_offload"):
            return self.d
        if policy == "everything_saveable":
            return everything
        if policy == "offload_dot_with_no_batch_dims":
            return self.d
        if "dots" in policy:
            return self.d + products
        sizes = self.get_named_sizes()
        if policy in ("save_only_these_names", "save_from_both_policies"):
            base = products if policy == "save_from_both_policies" else 0.0
            return self.d + base + sum(sizes.get(name, 0.0) for name in targets)
        dropped = {
            "mlp_notsaveable": _MLP,
            "attn_notsaveable": _ATTENTION,
            "mlp_attn_notsaveable": (*_MLP, *_ATTENTION),
        }.get(policy, targets)
        return max(self.d, everything - sum(sizes.get(name, 0.0) for name in dropped))

    @property
    def everything(self) -> float:
        """Values that are kept without a policy: the arguments of products and of attention.

        The input, two normed values and the residual; rotated queries, keys, values and the output
        of attention; gate, up and their product. Norms after a product keep its result, and experts
        the rows of their tokens.
        """
        stream = {"before": 4, "after": 4, "both": 6, "parallel": 2}[self.norms] + self.experts
        attention = 3 * self.q + 2 * self.kv + self.heads
        if self.normed and self.norms == "after":
            attention += self.q + self.kv
        return stream * self.d + attention + (3 if self.gated else 2) * self.f

    def get_named_sizes(self) -> dict[str, float]:
        """Return the values of each name."""
        return {
            "normed_input": 2 * self.d,
            "attn_query": self.q,
            "attn_key": self.kv,
            "attn_value": self.kv,
            "attn_output": self.q,
            "attn_dense": self.d,
            "residual": self.d,
            "mlp_gate": self.f,
            "mlp_up": self.f,
            "mlp_down": self.d,
            "mlp_output": self.d,
        }


_MLP = ("mlp_gate", "mlp_up", "mlp_down", "mlp_output")
_ATTENTION = ("attn_query", "attn_key", "attn_value", "attn_weights", "attn_dense", "attn_output")


def _norms(shapes: ModelShapes) -> Literal["before", "after", "both", "parallel"]:
    """Return where the norms with the size of the stream are."""
    names = {
        tensor.name.split(".")[-2]
        for tensor in shapes.tensors
        if tensor.shape == (shapes.hidden,) and tensor.name.endswith("norm.weight")
        if ".layers." in tensor.name and ".self_attn." not in tensor.name
    }
    if len(names) == 1:
        return "parallel"
    if len(names) == 4:
        return "both"
    return "after" if names and not any(name.startswith("input") for name in names) else "before"


def _bodies(shapes: ModelShapes) -> int:
    """Return the largest number of layers in one iteration, plus those alone between loops."""
    rotated = shapes.config.get("no_rope_layers")
    if rotated is None:  # SmolLM3: by default, every n-th layer rotates nothing
        every = shapes.config.get("no_rope_layer_interval")
        rotated = [not every or (i + 1) % every > 0 for i in range(shapes.layers)]
    windows = [cache.window for cache in shapes.caches]
    kinds = [*zip(windows, map(bool, rotated), strict=False)]
    runs = split_runs(kinds) if len(kinds) == shapes.layers else ()
    between = sum(run.length == 1 for run in runs[:-1])
    return max((run.period for run in runs), default=1) + between


def _inner(shapes: ModelShapes) -> tuple[float, bool]:
    """Return the values between the products of the feed-forward layers, as the mean of layers."""
    total, gated, layers = 0.0, False, 0
    per_token = int(shapes.config.get("num_experts_per_tok") or 1)
    for tensor in shapes.tensors:
        if not tensor.name.endswith(("mlp.up_proj.kernel", "experts.up_proj.kernel")) and not (
            tensor.name.endswith("shared_experts.up_proj.kernel")
        ):
            gated |= tensor.name.endswith("gate_proj.kernel")
            continue
        uses = per_token if tensor.axes[:1] == ("expert",) else 1
        total += tensor.layers * uses * tensor.shape[-1]
        layers = max(layers, tensor.layers)
    if not total:
        return float(shapes.config.get("intermediate_size") or 4 * shapes.hidden), True
    return total / shapes.layers, gated
