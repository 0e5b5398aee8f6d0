"""Construction of an engine's loop: one over the whole mesh, or one for each replica."""

from __future__ import annotations

from typing import TypeVar, cast

import jax
from ed_infra.errors import ConfigError
from ed_infra.sharding.submesh import slices_of
from ed_models.base.replicas import on_mesh
from ed_models.protocol import LanguageModel
from flax import nnx
from jax.sharding import Mesh

from ed_esurge.config import EngineConfig
from ed_esurge.engine.loop import EngineLoop
from ed_esurge.engine.remote import FarRunner, SharedLoop, SharedReplicas, agreed
from ed_esurge.engine.replicas import Replicas
from ed_esurge.engine.setup import Setup
from ed_esurge.engine.transport import LeadingLoop, over_processes, processes_of
from ed_esurge.grammars.store import Grammars
from ed_esurge.model import drafting, served_model, with_places
from ed_esurge.runner.model_runner import ModelRunner
from ed_esurge.tokenizer import Tokenizer

Loop = EngineLoop | Replicas
LoopT = TypeVar("LoopT", bound=EngineLoop)


def loop_over(
    model: LanguageModel,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    draft: LanguageModel | None,
) -> Loop:
    """Create the loop of an engine. Nothing is compiled.

    Args:
        model: the user's model on its whole mesh.
        config: the engine's options.
        tokenizer: tokenizer of the outputs, if any.
        grammars: compiler of structured outputs, if any.
        draft: the user's draft model, if any.

    Raises:
        ConfigError: see `Setup`; or the mesh has no axis `data_parallelism_axis`.
    """
    model = served_model(model)
    draft = drafting(config, draft, model)
    meshes = replica_meshes(model, config)

    def loop(kind: type[LoopT], setup: Setup, runner: ModelRunner) -> LoopT:
        return kind(
            setup.scheduler(runner),
            runner,
            tokenizer,
            max_loras=config.max_loras,
            seed=config.seed,
            overlap=config.overlap_execution,
            ahead=config.async_scheduling,
        )

    shared = over_processes(model)
    if len(meshes) == 1:
        setup = Setup.resolve(with_places(model, config), config, draft)
        sizes = agreed(lambda: [setup.pool_sizes()]) if shared else None
        kind = LeadingLoop if shared else EngineLoop
        return loop(kind, setup, setup.runner(grammars, sizes))
    if shared and draft is not None:
        raise ConfigError(
            "a draft model cannot propose for replicas that lie on several processes, which would "
            "not see its proposals: use the method ngram, or data_parallelism_axis null"
        )
    if shared and config.kv_offloading_size is not None:
        raise ConfigError(
            "kv_offloading_size is for an engine of one process, and the replicas of this one lie "
            "on several: leave the option out"
        )
    here = [mesh for mesh in meshes if jax.process_index() in processes_of(mesh)]
    # These options limit host memory, which the replicas share.
    offloaded = config.kv_offloading_size
    own = config.replace(
        cpu_cache_gib=config.cpu_cache_gib / len(here),
        kv_offloading_size=offloaded and offloaded / len(here),
    )
    setups = {
        mesh: Setup.resolve(
            with_places(_placed(model, mesh), own), own, draft and _placed(draft, mesh)
        )
        for mesh in here
    }
    if not shared:
        return Replicas([loop(EngineLoop, one, one.runner(grammars)) for one in setups.values()])
    sizes = agreed(lambda: [setup.pool_sizes() for setup in setups.values()])
    runners = {mesh: setup.runner(grammars, sizes) for mesh, setup in setups.items()}
    like, near = next(iter(setups.values())), next(iter(runners.values()))
    loops = [
        loop(SharedLoop, setups.get(mesh, like), runners.get(mesh) or FarRunner(near))
        for mesh in meshes
    ]
    return SharedReplicas(loops, meshes)


def replica_meshes(model: LanguageModel, config: EngineConfig) -> list[Mesh]:
    """Return the mesh of each replica.

    Raises:
        MeshError: the mesh does not have the axis that the user set.
    """
    mesh, axis = model.config.mesh, config.data_parallelism_axis
    asked = "data_parallelism_axis" in config.model_fields_set
    if axis is None or (axis not in mesh.axis_names and not asked):
        return [mesh]
    return slices_of(mesh, axis) if mesh.shape.get(axis) != 1 else [mesh]


def _placed(model: LanguageModel, mesh: Mesh) -> LanguageModel:
    return cast(LanguageModel, on_mesh(cast(nnx.Module, model), mesh))
