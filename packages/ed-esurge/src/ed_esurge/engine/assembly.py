"""Construction of an engine's loop: one over the whole mesh, or one for each replica.

A replica has a copy of the model on its part of the mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.sharding.mesh import part_on, split_mesh
from ed_layers.attention.mechanism import change_configurations
from ed_models.protocol import LanguageModel
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ed_esurge.config import NOTHING, EngineConfig, Records
from ed_esurge.engine.encoder_setup import EncoderSetup
from ed_esurge.engine.loop import EngineLoop
from ed_esurge.engine.remote import RemoteRunner
from ed_esurge.engine.replicas import Replicas
from ed_esurge.engine.setup import Setup
from ed_esurge.engine.transport import MultiProcess, SingleProcess, Transport
from ed_esurge.grammars.store import Grammars
from ed_esurge.model import (
    get_processes,
    is_encoder,
    over_processes,
    served_model,
    with_places,
)
from ed_esurge.runner.drafts import resolve_draft
from ed_esurge.runner.protocol import Runner
from ed_esurge.tokenizer import Tokenizer

Loop = EngineLoop | Replicas


def loop_over(
    model: LanguageModel,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    draft: LanguageModel | None,
    *,
    records: Records = NOTHING,
) -> tuple[Loop, Transport]:
    """Create the loop and the transport of an engine. Nothing is compiled.

    Args:
        model: the user's model on its whole mesh.
        config: the engine's options.
        tokenizer: tokenizer of the outputs, if any.
        grammars: compiler of structured outputs, if any.
        draft: the user's draft model, if any.
        records: what outputs contain in addition.

    Raises:
        ConfigError: see `Setup`; or the mesh has no axis `data_parallelism_axis`.
    """
    model = served_model(model)
    draft = resolve_draft(config, draft, model)
    meshes = replica_meshes(model, config)
    shared = over_processes(model)
    transport: Transport = MultiProcess() if shared else SingleProcess()

    def resolve_setup(model: LanguageModel, config: EngineConfig, draft: LanguageModel | None):
        if is_encoder(model):
            if any(records):
                raise ConfigError(
                    f"{type(model).__name__} samples no tokens, so nothing can be recorded: omit "
                    "records"
                )
            return EncoderSetup.resolve(model, config)
        return Setup.resolve(with_places(model, config), config, draft, records=records)

    # The next plan of a remote replica contains proposals that arrive after its step.
    overlap = config.overlap_execution and (draft is None or not shared or len(meshes) == 1)

    def loop(setup: Setup | EncoderSetup, runner: Runner) -> EngineLoop:
        return EngineLoop(
            setup.scheduler(runner),
            runner,
            tokenizer,
            transport,
            max_loras=config.max_loras,
            seed=config.seed,
            overlap=overlap,
            ahead=config.async_scheduling,
        )

    if len(meshes) == 1:
        setup = resolve_setup(model, config, draft)
        sizes = _gather_pool_sizes(lambda: [setup.pool_sizes()], transport) if shared else None
        return _connect_loop(loop(setup, setup.runner(grammars, sizes)), transport)
    local_meshes = [
        mesh for mesh in meshes if transport.process in get_processes(mesh) or not shared
    ]
    # These options limit host memory, which the replicas share. The number of places in host
    # memory is part of the plans, so it is the same in all processes.
    most_here = max(Counter(one for mesh in meshes for one in get_processes(mesh)).values())
    offloaded = config.kv_offloading_size
    replica_config = config.replace(
        cpu_cache_gib=config.cpu_cache_gib / len(local_meshes),
        kv_offloading_size=offloaded and offloaded / most_here,
    )
    setups = {
        mesh: resolve_setup(
            _place_model(model, mesh), replica_config, draft and _place_model(draft, mesh)
        )
        for mesh in local_meshes
    }
    if not shared:
        loops = [loop(setup, setup.runner(grammars)) for setup in setups.values()]
        return Replicas(loops, transport), transport
    sizes = _gather_pool_sizes(lambda: [setup.pool_sizes() for setup in setups.values()], transport)
    runners = {mesh: setup.runner(grammars, sizes) for mesh, setup in setups.items()}
    like, local = next(iter(setups.values())), next(iter(runners.values()))
    loops = [
        loop(setups.get(mesh, like), runners.get(mesh) or RemoteRunner(local)) for mesh in meshes
    ]
    owners = [get_processes(mesh) for mesh in meshes]
    return _connect_loop(Replicas(loops, transport, owners), transport)


def _connect_loop(loop: Loop, transport: Transport) -> tuple[Loop, Transport]:
    if isinstance(transport, MultiProcess):
        transport.settle = loop.wait
    return loop, transport


def _gather_pool_sizes(
    sizes: Callable[[], Sequence[dict[str, int]]], transport: Transport
) -> dict[str, int]:
    """Return the minimum of the pool sizes over all processes. A collective operation.

    Args:
        sizes: function that returns group -> pages for each replica of this process.
        transport: connection to the other processes.

    Raises:
        ConfigError: a process has too little memory; all processes raise the error.
    """
    try:
        local: list[dict[str, int]] | str = list(sizes())
    except ConfigError as error:
        local = str(error)
    pools: list[dict[str, int]] = []
    for received in transport.gather(local):
        if isinstance(received, str):
            raise ConfigError(received)
        pools += received
    return {name: min(pool[name] for pool in pools) for name in pools[0]}


def replica_meshes(model: LanguageModel, config: EngineConfig) -> list[Mesh]:
    """Return the mesh of each replica.

    Raises:
        MeshError: the mesh does not have the axis that the user set.
    """
    mesh, axis = model.config.mesh, config.data_parallelism_axis
    is_set = "data_parallelism_axis" in config.model_fields_set
    if axis is None or (axis not in mesh.axis_names and not is_set):
        return [mesh]
    return split_mesh(mesh, axis) if mesh.shape.get(axis) != 1 else [mesh]


def _place_model(model: LanguageModel, mesh: Mesh) -> LanguageModel:
    return cast(LanguageModel, place_on_mesh(cast(nnx.Module, model), mesh))


M = TypeVar("M", bound=nnx.Module)


def place_on_mesh(model: M, mesh: Mesh) -> M:
    """Return a copy of a model on another mesh with the same axes.

    Arrays with shards on the devices of `mesh` are shared with `model`, so a slice of the model's
    mesh costs no memory. Other arrays are copied.

    Args:
        model: a model on any mesh.
        mesh: the new mesh, with the axis names of the model's mesh.

    Returns:
        A model with separate configurations.

    Raises:
        ConfigError: the configuration does not allow the mesh.
    """
    graphdef, state = nnx.split(model)
    copy = nnx.merge(graphdef, jax.tree.map(lambda x: _move_array(x, mesh), state))
    change_configurations(copy, lambda config: _replace_mesh(config, mesh))
    return copy


def _move_array(array: jax.Array, mesh: Mesh) -> jax.Array:
    old = array.sharding if isinstance(array, jax.Array) else None
    spec = old.spec if isinstance(old, NamedSharding) else PartitionSpec()
    sharding = NamedSharding(mesh, spec)
    return jax.device_put(part_on(array, sharding) if old is not None else array, sharding)


def _replace_mesh(config: EasyDeLBaseConfig, mesh: Mesh) -> EasyDeLBaseConfig:
    """Return a copy of a configuration and its nested configurations with a mesh."""
    copy = config.replace()
    nested = [one for one in copy.__dict__.values() if isinstance(one, EasyDeLBaseConfig)]
    for one in (copy, *nested):
        one.set_model_mesh(mesh)
    return copy
