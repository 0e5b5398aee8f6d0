"""`EasyDeLState`: a model's parameters together with what training adds to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.paths import normalize
from ed_infra.rules import Rules
from ed_models.protocol import LanguageModel
from flax import nnx, struct

from ed_trainers.optimizers import apply_updates, gradient_point
from ed_trainers.placement import replicated, shardings_like

_STATE_FILE = "state.json"

T = TypeVar("T")


class EasyDeLState(struct.PyTreeNode):
    """Everything that one optimizer step reads and writes; a pytree.

    Attributes:
        step: number of updates done, int32 scalar.
        graphstate: the parameters that learn: what the optimizer sees.
        graphother: the model's other variables, frozen parameters among them.
        opt_state: state of `tx` for `graphstate`; None before `init_tx`.
        graphdef: structure of the model (static).
        tx: the optimizer (static).
    """

    step: jax.Array
    graphstate: nnx.State
    graphother: nnx.State
    opt_state: optax.OptState | None
    graphdef: nnx.GraphDef = struct.field(pytree_node=False)
    tx: optax.GradientTransformation | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls,
        *,
        model: LanguageModel | None = None,
        trainable: Iterable[tuple[str, bool]] = (),
        graphdef: nnx.GraphDef | None = None,
        graphstate: nnx.State | None = None,
        graphother: nnx.State | None = None,
        tx: optax.GradientTransformation | None = None,
        opt_state: optax.OptState | None = None,
        init_opt_state: bool = False,
        step: int = 0,
    ) -> EasyDeLState:
        """Build a state from a model, or from the three parts of one.

        Args:
            model: a module; exclusive with the three parts.
            trainable: pairs (pattern, whether it learns) over the names of the model's parameters;
                the first that matches decides, and a parameter that none matches does not learn.
                Without pairs every parameter learns.
            tx: optimizer.
            opt_state: its state, if there is one already.
            init_opt_state: make a fresh one, sharded as the parameters are.
            step: updates done so far.

        Raises:
            ConfigError: model and parts together or neither; a pattern matches no parameter, or no
                parameter learns; `init_opt_state` without `tx`, or together with `opt_state`.
        """
        parts = (graphdef, graphstate, graphother)
        if (model is None) == all(part is None for part in parts):
            raise ConfigError("give either model, or graphdef, graphstate and graphother")
        if model is not None:
            graphdef, graphstate, graphother = split_model(model, trainable)
        elif graphdef is None or graphstate is None or graphother is None:
            raise ConfigError("graphdef, graphstate and graphother come together")
        elif trainable:
            raise ConfigError("trainable splits a model: graphstate says already what learns")
        if init_opt_state and opt_state is not None:
            raise ConfigError("init_opt_state makes a new optimizer state: do not give opt_state")
        state = cls(
            step=_scalar_like(graphstate, step),
            graphstate=graphstate,
            graphother=graphother,
            opt_state=opt_state,
            graphdef=graphdef,
            tx=tx,
        )
        return state.init_tx() if init_opt_state else state

    def init_tx(self, tx: optax.GradientTransformation | None = None) -> EasyDeLState:
        """Return the state with a fresh optimizer state, created sharded.

        Raises:
            ConfigError: there is no optimizer.
        """
        tx = tx or self.tx
        if tx is None:
            raise ConfigError("there is no optimizer: give tx")
        shapes = jax.eval_shape(tx.init, self.graphstate)
        out = shardings_like(shapes, self.graphstate)
        opt_state = jax.jit(tx.init, out_shardings=out)(self.graphstate)
        return self.replace(tx=tx, opt_state=opt_state)

    def abstract(self, tx: optax.GradientTransformation) -> EasyDeLState:
        """Return shapes, dtypes and shardings of the state with an optimizer, without making it."""
        shapes = jax.eval_shape(tx.init, self.graphstate)
        opt_state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings_like(shapes, self.graphstate),
        )
        rest = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self.replace(opt_state=None),
        )
        return rest.replace(tx=tx, opt_state=opt_state)

    def apply_gradients(self, *, grads: nnx.State, value: jax.Array | None = None) -> EasyDeLState:
        """Take one optimizer step; traceable.

        Args:
            grads: gradients at `gradient_point`, a tree like `graphstate`.
            value: the loss, for an optimizer that skips bad steps.

        Raises:
            ConfigError: the optimizer state is missing.
        """
        if self.tx is None or self.opt_state is None:
            raise ConfigError("the state has no optimizer: call init_tx(tx) first")
        tx = optax.with_extra_args_support(self.tx)
        updates, opt_state = tx.update(grads, self.opt_state, self.graphstate, value=value)
        graphstate = apply_updates(self.graphstate, updates, opt_state)
        return self.replace(step=self.step + 1, graphstate=graphstate, opt_state=opt_state)

    @property
    def gradient_point(self) -> nnx.State:
        """Where the next gradient is to be taken: `graphstate`, unless the optimizer averages."""
        return gradient_point(self.graphstate, self.opt_state)

    @property
    def model(self) -> LanguageModel:
        """The module, sharing the state's arrays."""
        return self.merge(self.graphstate)

    def merge(self, tree: nnx.State) -> LanguageModel:
        """Return the module with other parameters, a tree like `graphstate`."""
        return nnx.merge(self.graphdef, tree, self.graphother)

    def merge_to_state(self, tree: nnx.State) -> EasyDeLState:
        """Return the state with other parameters, a tree like `graphstate`."""
        return self.replace(graphstate=tree)

    @property
    def size(self) -> int:
        """Bytes of all arrays, over all devices, each counted once."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def shardings(self) -> EasyDeLState:
        """The sharding of each leaf, in a tree like the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self)

    def save_state(self, directory: str | Path, *, save_optimizer: bool = True) -> None:
        """Write parameters and, unless told otherwise, the optimizer's state; blocking, atomic.

        The trainer's own checkpoints also hold the loader's position; these hold the state alone.
        For a directory that `transformers` reads, use `state.model.save_pretrained`.

        Raises:
            CheckpointError: the directory already holds something.
        """
        import orbax.checkpoint as ocp

        path = Path(directory).absolute()
        if path.exists() and any(path.iterdir()):
            raise CheckpointError(f"{path} is not empty: save into a new directory")
        saved = self if save_optimizer else self.replace(opt_state=None)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path / "arrays", flat_arrays(saved), force=True)
            checkpointer.wait_until_finished()
        if jax.process_index() == 0:
            facts = {"step": int(self.step), "optimizer": saved.opt_state is not None}
            (path / _STATE_FILE).write_text(json.dumps(facts) + "\n")

    def load_state(self, directory: str | Path) -> EasyDeLState:
        """Read what `save_state` wrote, in the shapes, dtypes and shardings of this state.

        The mesh may be another than the one it was saved from.

        Raises:
            CheckpointError: the directory is no saved state, or does not fit.
        """
        import orbax.checkpoint as ocp

        path = Path(directory).absolute()
        try:
            facts = json.loads((path / _STATE_FILE).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} holds no complete saved state ({error})") from error
        template = self if facts["optimizer"] else self.replace(opt_state=None)
        if facts["optimizer"] and self.opt_state is None:
            raise CheckpointError(f"{path} holds an optimizer state: call init_tx(tx) first")
        wanted = flat_abstract(template)
        with ocp.StandardCheckpointer() as checkpointer:
            check_fit(wanted, checkpointer.metadata(path / "arrays").item_metadata.tree, str(path))
            arrays = checkpointer.restore(path / "arrays", wanted)
        loaded = from_flat(template, arrays)
        return loaded if facts["optimizer"] else loaded.replace(opt_state=self.opt_state)


def split_model(
    model: LanguageModel, trainable: Iterable[tuple[str, bool]] = ()
) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Take a model apart: structure, parameters that learn, all other variables.

    See `EasyDeLState.create` for `trainable`. Only parameters (`nnx.Param`) of floating numbers
    can learn: codes of quantized weights and variables with an update rule of their own cannot.

    Raises:
        ConfigError: a pattern matches no such parameter, or none learns.
    """
    rules = Rules(trainable, kind="trainable rule")
    if not rules:
        return model.split_module()

    def floating(path: Sequence[object], variable: nnx.Variable) -> bool:
        return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(variable))

    learns = nnx.All(nnx.Param, floating, rules.filter(False))
    graphdef, graphstate, graphother = nnx.split(model, learns, ...)
    rules.check_used()
    if not jax.tree.leaves(graphstate):
        raise ConfigError(
            "no parameter learns: the trainable rules need one that is true, such as "
            "['', true] at the end for all that no other rule matches"
        )
    return graphdef, graphstate, graphother


def _scalar_like(tree: object, value: int) -> jax.Array:
    """An int32 scalar on all devices of the tree, so that one jit takes both."""
    leaves = jax.tree.leaves(tree)
    scalar = jnp.asarray(value, jnp.int32)
    sharding = getattr(leaves[0], "sharding", None) if leaves else None
    return scalar if sharding is None else jax.device_put(scalar, replicated(sharding))


def leaf_names(tree: object) -> list[str]:
    """Name of each leaf in the order of `jax.tree.leaves`: its storage path, joined by `/`."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return ["/".join(str(part) for part in normalize(path)) for path in paths]


def flat_arrays(tree: object) -> dict[str, jax.Array]:
    """Return the leaves by name: the form in which they are saved, free of any class."""
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def flat_abstract(tree: object) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shape, dtype and sharding of each leaf by name."""
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in flat_arrays(tree).items()
    }


def from_flat(template: T, arrays: Mapping[str, jax.Array]) -> T:
    """Put arrays, by name, into the structure of `template`."""
    leaves = [arrays[name] for name in leaf_names(template)]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def check_fit(
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    saved: Mapping[str, Any],
    where: str,
    *,
    dtypes: bool = False,
) -> None:
    """Compare names and shapes, and dtypes if asked, of what is wanted with what was saved.

    Raises:
        CheckpointError: naming the first few differences.
    """
    problems = [f"{name} is missing" for name in wanted if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in wanted]
    problems += [
        f"{name} has shape {tuple(saved[name].shape)}, the model wants {tuple(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in saved and tuple(saved[name].shape) != tuple(leaf.shape)
    ]
    problems += [
        f"{name} is {saved[name].dtype}, the model wants {leaf.dtype}"
        for name, leaf in wanted.items()
        if dtypes and name in saved and saved[name].dtype != leaf.dtype
    ]
    if problems:
        listing = "; ".join(problems[:3])
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{where} does not fit this model and optimizer: {listing}{more}")
