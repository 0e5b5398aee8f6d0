"""A small decoder layer for the tests of depth and remat: attention, MLP, and what layers vary in.

Legend: b batch, s sequence, d hidden, h heads.
"""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import parameter_names
from ed_infra.masks import MaskInfo
from ed_infra.outputs import LayerReport, Metric
from ed_layers import Ctx, GatedMLP, Mechanism, RMSNorm, Stack, attend, rope_tables
from ed_layers.context import ALL_LAYERS, name_activation
from ed_layers.depth.remat import Remat
from ed_layers.parts import Parts
from ed_layers.projections.linear import Linear
from flax import nnx

B, S, D, H = 2, 12, 16, 2
INIT = jax.nn.initializers.normal(0.3)
CONFIG = SimpleNamespace(
    hidden_size=D, hidden_act="silu", initializer_range=0.3, use_scan_mlp=False
)
X = np.random.default_rng(0).normal(size=(B, S, D)).astype(np.float32)

#: How often a layer was traced.
TRACED: list[object] = []


class Layer(nnx.Module):
    """Attention and MLP.

    Args:
        window: of this layer, static.
        windows: of each layer, read by the traced index; 0 = none.
        router: reports an update that other layers do not have, and is wider.
    """

    def __init__(self, rngs, *, mechanism="vanilla", window=None, windows=None, router=False):
        linear = {"axes": ("embed", "heads"), "kernel_init": INIT, "rngs": rngs}
        self.norm = RMSNorm(D)
        self.q, self.k, self.v, self.o = (Linear(D, D, **linear) for _ in range(4))
        width = (3 if router else 2) * D
        self.mlp = GatedMLP(Parts(CONFIG, rngs), width)
        self.mechanism = Mechanism(mechanism)
        self.window, self.windows, self.router = window, windows, router

    def __call__(self, x, ctx, cache, layer):
        TRACED.append(layer)
        normed = name_activation(self.norm(x), "normed_input")
        parts = zip((self.q, self.k, self.v), ("attn_query", "attn_key", "attn_value"), strict=True)
        q, k, v = (
            name_activation(linear(normed).reshape(*x.shape[:2], H, -1), name)
            for linear, name in parts
        )
        window = self.window if self.windows is None else jnp.asarray(self.windows)[layer]
        told = {"cache": cache, "layer": layer, "window": window, "mechanism": self.mechanism}
        out, cache = attend(q, k, v, ctx.mask_info, **told)
        out = name_activation(out, "attn_output")
        x = x + name_activation(self.o(out.reshape(x.shape)), "attn_dense")
        x = x + self.mlp(self.norm(x), ctx)
        loads = {"load": jnp.mean(x, axis=(0, 2))} if self.router else {}
        return x, cache, LayerReport({}, {"size": Metric.of(jnp.max(x))}, loads)


def stack(num_layers=4, *, scan=True, policy="", targets=(), vary=None, **depth) -> Stack:
    """A stack; `vary(i)` gives the arguments of layer i, `depth` those of the Stack.

    Its weights are a function of their canonical names: the same ones in any storage.
    """
    vary = vary or (lambda i: {})
    made = nnx.eval_shape(
        lambda: Stack(
            lambda i, rngs: Layer(rngs, **vary(i)),
            num_layers,
            scan=scan,
            remat=Remat(policy, tuple(targets)),
            rngs=nnx.Rngs(0),
            **depth,
        )
    )
    graphdef, state = nnx.split(made)
    for path, leaf in nnx.to_flat_state(state):
        shape = leaf.get_value().shape
        one = shape[1:] if parameter_names.is_stacked(path) else shape
        values = [weight(name, one) for name in parameter_names.canonical(path)]
        leaf.set_value(jnp.asarray(np.reshape(values, shape)))
    return nnx.merge(graphdef, state)


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers that the name seeds."""
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    return (values * 0.2 + (len(shape) == 1)).astype(np.float32)


def context(mask_info: MaskInfo | None = None, mode="train") -> Ctx:
    """The context of the layers, without rotary positions."""
    positions = jnp.zeros((B, S), jnp.int32)
    rope = rope_tables(positions, jnp.ones(D // H // 2), 1.0)
    return Ctx(positions, {ALL_LAYERS: rope}, mask_info or MaskInfo.full(B, S), mode=mode)


def objective(of: Stack):
    """The loss as a function of the state, and the state."""
    graphdef, state = nnx.split(of)

    def loss(state):
        x, _, report, _ = nnx.merge(graphdef, state)(jnp.asarray(X), context())
        return jnp.mean(x**2) + report.metrics["size"].sum / 100

    return loss, state


def gradients(of: Stack) -> dict[str, np.ndarray]:
    """Gradient of the loss by canonical names of parameters, one array per layer."""
    loss, state = objective(of)
    flat = nnx.to_flat_state(jax.jit(jax.grad(loss))(state))
    found = {}
    for path, leaf in flat:
        value, names = np.asarray(leaf.get_value()), parameter_names.canonical(path)
        stacked = parameter_names.is_stacked(path)
        found.update({n: value[i] if stacked else value for i, n in enumerate(names)})
    return found


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance=1e-6):
    """Equal names, and values to a share of each array's largest."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(value).max() > 0, name
        assert_near(got[name], value, tolerance)


def assert_near(got, expected, tolerance=1e-5):
    """Equal to a share of the largest value."""
    worst = np.abs(np.asarray(got) - np.asarray(expected)).max()
    assert worst <= tolerance * np.abs(expected).max(), worst
