"""`EasyDeLState`: the parameters of a model, and the state of its optimizer."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.rules import Rules
from ed_models.adapters.lora import has_lora
from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.mtp import MTP
from ed_models.protocol import LanguageModel
from flax import nnx, struct
from jax.typing import DTypeLike

from ed_trainers.optimizers import (
    SCHEDULED,
    apply_updates,
    build_optimizer,
    build_schedule,
    check_rules,
    get_ema_params,
    gradient_point,
)
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import DECAYING
from ed_trainers.placement import replicate_sharding, shardings_like
from ed_trainers.rollout import changing_variables
from ed_trainers.stored.arrays import flat_abstract, flat_arrays, from_flat
from ed_trainers.stored.saved import load_arrays, model_facts, save_arrays, saved_facts

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _InstanceOrClass(Generic[_P, _R]):
    """A method that receives the instance, or the class if it is called on the class."""

    def __init__(self, function: Callable[Concatenate[Any, _P], _R]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[_P, _R]:
        return partial(self._function, owner if instance is None else instance)


class EasyDeLState(struct.PyTreeNode):
    """All values that one optimizer step reads and writes; a pytree.

    Attributes:
        step: number of updates, int32 scalar.
        graphstate: the trained parameters, which the optimizer updates.
        graphother: the model's other variables, including frozen parameters.
        opt_state: state of `tx` for `graphstate`; None before `init_tx`.
        graphdef: structure of the model (static).
        tx: the optimizer (static).
        reference: weights of a reference model that follows the parameters; see `following`.
    """

    step: jax.Array
    graphstate: nnx.State
    graphother: nnx.State
    opt_state: optax.OptState | None
    graphdef: nnx.GraphDef = struct.field(pytree_node=False)
    tx: optax.GradientTransformation | None = struct.field(pytree_node=False, default=None)
    reference: nnx.State | None = None

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
        """Create a state from a model, or from the three parts of a model.

        Args:
            model: a module; exclusive with the three parts.
            trainable: pairs (pattern, whether the parameter is trained) over parameter names. The
                first match decides; a parameter without a match is frozen. Without pairs, every
                parameter is trained.
            tx: optimizer.
            opt_state: existing state of the optimizer.
            init_opt_state: whether to create the optimizer state, sharded like the parameters.
            step: number of previous updates.

        Raises:
            ConfigError: both or neither of model and parts are given; a pattern matches no
                parameter, or no parameter is trained; `init_opt_state` without `tx`, or together
                with `opt_state`.
        """
        parts = (graphdef, graphstate, graphother)
        if (model is None) == all(part is None for part in parts):
            raise ConfigError("pass either model, or graphdef, graphstate and graphother")
        if model is not None:
            graphdef, graphstate, graphother = split_model(model, trainable)
        elif graphdef is None or graphstate is None or graphother is None:
            raise ConfigError("graphdef, graphstate and graphother come together")
        elif trainable:
            raise ConfigError("trainable requires a model; graphstate has only trained parameters")
        if init_opt_state and opt_state is not None:
            raise ConfigError("init_opt_state creates the optimizer state: omit opt_state")
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
        """Return the state with a new optimizer state, created sharded.

        Raises:
            ConfigError: there is no optimizer.
        """
        tx = tx or self.tx
        if tx is None:
            raise ConfigError("there is no optimizer: pass tx")
        shapes = jax.eval_shape(tx.init, self.graphstate)
        out = shardings_like(shapes, self.graphstate)
        opt_state = jax.jit(tx.init, out_shardings=out)(self.graphstate)
        return self.replace(tx=tx, opt_state=opt_state)

    def abstract(self, tx: optax.GradientTransformation) -> EasyDeLState:
        """Return shapes, dtypes and shardings of the state with an optimizer, without creating
        arrays."""
        shapes = jax.eval_shape(tx.init, self.graphstate)
        opt_state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings_like(shapes, self.graphstate),
        )
        abstract_state = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            self.replace(opt_state=None),
        )
        return abstract_state.replace(tx=tx, opt_state=opt_state)

    def apply_gradients(self, *, grads: nnx.State, value: jax.Array | None = None) -> EasyDeLState:
        """Apply one optimizer step; traceable.

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

    def at_step(self, step: int) -> EasyDeLState:
        """Return the state with another number of updates, which its schedule counts too.

        The moments of the optimizer, and their own counters, stay.
        """

        def set_count(node: object) -> object:
            if not isinstance(node, SCHEDULED):
                return node
            return node._replace(count=jnp.full_like(node.count, step))

        def is_scheduled(node: object) -> bool:
            return isinstance(node, SCHEDULED)

        opt_state = jax.tree.map(set_count, self.opt_state, is_leaf=is_scheduled)
        return self.replace(step=_scalar_like(self.graphstate, step), opt_state=opt_state)

    @property
    def gradient_point(self) -> nnx.State:
        """The parameters for the next gradient: `graphstate`, unless the optimizer averages."""
        return gradient_point(self.graphstate, self.opt_state)

    def get_ema_state(self) -> EasyDeLState:
        """Return the state with the mean of its parameters (`ema_decay`) instead of the parameters.

        Without a mean in the optimizer, the state is returned unchanged.
        """
        if self.opt_state is None:
            return self
        return self.replace(graphstate=get_ema_params(self.graphstate, self.opt_state))

    @property
    def model(self) -> LanguageModel:
        """The module, which shares the state's arrays."""
        return self.merge(self.graphstate)

    def merge(self, tree: nnx.State) -> LanguageModel:
        """Return the module with other parameters, a tree like `graphstate`."""
        return nnx.merge(self.graphdef, tree, self.graphother)

    def merge_to_state(self, tree: nnx.State) -> EasyDeLState:
        """Return the state with other parameters, a tree like `graphstate`."""
        return self.replace(graphstate=tree)

    @property
    def size(self) -> int:
        """Size of all arrays in bytes, over all devices; each array is counted once."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def shardings(self) -> EasyDeLState:
        """The sharding of each leaf, in a tree like the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self)

    def save_state(self, directory: str | Path, *, save_optimizer: bool = True) -> None:
        """Write the parameters and, by default, the optimizer state; blocking and atomic.

        The trainer's checkpoints also contain the loader's position; these files contain only the
        state. `state.model.save_pretrained` writes a directory for `transformers`.

        Raises:
            CheckpointError: the directory is not empty, or the disk is full.
        """
        saved = self if save_optimizer else self.replace(opt_state=None)
        facts = {
            "step": int(self.step),
            "optimizer": saved.opt_state is not None,
            "model": model_facts(self.model),
        }
        save_arrays(Path(directory), flat_arrays(saved), facts)

    @_InstanceOrClass
    def load_state(
        cls_or_self: EasyDeLState | type[EasyDeLState],
        directory: str | Path,
        *,
        tx: optax.GradientTransformation | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike | None = None,
    ) -> EasyDeLState:
        """Read the files of `save_state`, or a state or a run that EasyDeL saved.

        `state.load_state(directory)` reads into the shapes, dtypes and shardings of a state; the
        mesh may differ from the mesh of the saved state. `EasyDeLState.load_state(directory)`
        creates the model of the files first, on all devices of this machine.

        Args:
            directory: the directory.
            tx: optimizer of a new state, whose saved state is read. None: the new state has no
                optimizer. A state that exists has its own optimizer.
            dtype, param_dtype: dtype of activations and of the parameters; None = the stored ones,
                or those of the state that exists.

        Raises:
            CheckpointError: the directory is not a saved state, is damaged, or does not match.
            ConfigError: `tx` for a state that exists.
        """
        if dtype is not None or param_dtype is not None:
            state = cls_or_self.load_state(directory, tx=tx)
            return state.change_dtypes(dtype=dtype, param_dtype=param_dtype)
        path = Path(directory)
        if isinstance(cls_or_self, type):
            # Creates a model, and imports this module.
            return pkgutil.resolve_name("ed_trainers.convert:load_state")(path, tx)
        if tx is not None:
            raise ConfigError("tx is for EasyDeLState.load_state; this state has its optimizer")
        facts = saved_facts(path)
        template = cls_or_self if facts["optimizer"] else cls_or_self.replace(opt_state=None)
        if facts["optimizer"] and cls_or_self.opt_state is None:
            raise CheckpointError(f"{path} holds an optimizer state: call init_tx(tx) first")
        loaded = from_flat(template, load_arrays(path, flat_abstract(template)))
        return loaded if facts["optimizer"] else loaded.replace(opt_state=cls_or_self.opt_state)

    def change_dtypes(
        self, *, dtype: DTypeLike | None = None, param_dtype: DTypeLike | None = None
    ) -> EasyDeLState:
        """Return the state with other dtypes of its model; the optimizer state is unchanged.

        Args:
            dtype: dtype of activations; None = unchanged.
            param_dtype: dtype of the parameters; None = unchanged.
        """
        module = cast(EasyDeLBaseModule, self.model)
        changed_module = module.change_dtypes(dtype=dtype, param_dtype=param_dtype)
        paths = {path for path, _ in nnx.to_flat_state(self.graphstate)}
        graphdef, graphstate, graphother = nnx.split(
            changed_module, lambda path, variable: tuple(path) in paths, ...
        )
        return self.replace(graphdef=graphdef, graphstate=graphstate, graphother=graphother)

    def shard_state(self) -> EasyDeLState:
        """Return the state with every array placed by the model's configuration.

        Parameters follow the partition rules, and the optimizer state follows the parameters.
        """
        everything = nnx.state(cast(nnx.Module, self.model.shard_model()))
        placed = dict(nnx.to_flat_state(everything))

        def of(tree: nnx.State) -> nnx.State:
            return nnx.from_flat_state(
                [(path, placed[path]) for path, _ in nnx.to_flat_state(tree)]
            )

        graphstate = of(self.graphstate)
        opt_state, reference = self.opt_state, self.reference
        if opt_state is not None:
            opt_state = jax.device_put(opt_state, shardings_like(opt_state, graphstate))
        if reference is not None:
            reference = jax.device_put(reference, shardings_like(reference, graphstate))
        return self.replace(
            step=_scalar_like(graphstate, self.step),
            graphstate=graphstate,
            graphother=of(self.graphother),
            opt_state=opt_state,
            reference=reference,
        )

    def gather_state(self) -> EasyDeLState:
        """Return the state with a full copy of every array on each of its devices."""
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, replicate_sharding(leaf.sharding)), self
        )


def select_parameters(
    model: LanguageModel, arguments: TrainingArguments
) -> Sequence[tuple[str, bool]]:
    """Return the pairs that select the trained parameters; () = the default of the model.

    Without a loss of the MTP layer, weight decay alone would change the layer.
    """
    rules = arguments.trained_parameters
    if arguments.trains_mtp:
        check_mtp_layer(model)
    has_layer = hasattr(model, MTP) and not has_lora(cast(nnx.Module, model))
    if rules or arguments.trains_mtp or not has_layer:
        return rules
    return ((rf"^{MTP}\.", False), ("", True))


def check_mtp_layer(model: LanguageModel) -> None:
    """Check that a model has an MTP layer that can be trained.

    Raises:
        ConfigError: the model has no layer, or has adapters, which are trained alone.
    """
    if not hasattr(model, MTP):
        raise ConfigError(
            f"draft and mtp_loss_weight train the MTP layer, and this {type(model).__name__} was "
            "loaded without it: load the model with mtp_head='stored', or with mtp_head='new' if "
            "the checkpoint has no tensors mtp.*"
        )
    if has_lora(cast(nnx.Module, model)):
        raise ConfigError(
            "draft and mtp_loss_weight train the MTP layer, and a model with adapters trains only "
            "these: omit the adapters, and train the layer alone with trainable_rules "
            "[['^mtp', true]]"
        )


def split_model(
    model: LanguageModel, trainable: Iterable[tuple[str, bool]] = ()
) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Split a model into its structure, its trained parameters, and all other variables.

    See `EasyDeLState.create` for `trainable`. Only floating-point parameters (`nnx.Param`) can be
    trained, not codes of quantized weights or variables with their own update rule.

    Raises:
        ConfigError: a pattern matches no such parameter, or no parameter is trained.
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
            "no parameter is trained: at least one of the trainable rules must be true, such as "
            "['', true] at the end for all parameters that no other rule matches"
        )
    return graphdef, graphstate, graphother


def changing(state: EasyDeLState) -> EasyDeLState:
    """Return the state without the variables that no step changes: frozen weights and constants.

    The remaining variables of `graphother` have their own update rule.
    """
    if not isinstance(state.graphother, nnx.State):
        return state
    return state.replace(graphother=changing_variables(state.graphother))


def _scalar_like(tree: object, value: int | jax.Array) -> jax.Array:
    """Return an int32 scalar on all devices of the tree, so that one jit accepts both."""
    leaves = jax.tree.leaves(tree)
    scalar = jnp.asarray(value, jnp.int32)
    sharding = getattr(leaves[0], "sharding", None) if leaves else None
    return scalar if sharding is None else jax.device_put(scalar, replicate_sharding(sharding))


def create_optimizer(
    model: LanguageModel | EasyDeLState,
    arguments: TrainingArguments | None = None,
    *,
    total_steps: int | None = None,
) -> optax.GradientTransformation:
    """Create an optimizer for a model: schedule, weight decay and rates by rules, masters,
    clipping.

        tx = create_optimizer(model, TrainingArguments(optimizer="muon", max_training_steps=100))
        state = EasyDeLState.create(model=model, tx=tx, init_opt_state=True)
        state = state.apply_gradients(grads=grads)

    Args:
        model: a module, or the state of a module; every rule of the arguments must match a trained
            parameter.
        arguments: options; default: those of `TrainingArguments`.
        total_steps: number of updates of the whole run, for the schedule; default:
            `max_training_steps`.

    Raises:
        ConfigError: a rule matches no parameter, or the learning rate decays over an unknown number
            of steps.
    """
    arguments = TrainingArguments() if arguments is None else arguments
    params = (
        model.graphstate
        if isinstance(model, EasyDeLState)
        else split_model(model, select_parameters(model, arguments))[1]
    )
    check_rules(arguments, params)
    steps = arguments.max_training_steps if total_steps is None else total_steps
    if steps is None and arguments.scheduler in DECAYING:
        raise ConfigError(
            f"scheduler {arguments.scheduler!r} decays to the end of the run: pass total_steps, or "
            "set max_training_steps"
        )
    return build_optimizer(arguments, build_schedule(arguments, steps or 1))
