"""The loop of an engine: one over the whole mesh, or one for each replica that the mesh holds."""

from __future__ import annotations

from typing import cast

from ed_infra.slices import slices_of
from ed_models.protocol import LanguageModel
from ed_models.replicas import on_mesh
from flax import nnx
from jax.sharding import Mesh

from ed_esurge.config import EngineConfig
from ed_esurge.engine.hosts import LeadingLoop, over_processes
from ed_esurge.engine.loop import EngineLoop
from ed_esurge.engine.replicas import Replicas
from ed_esurge.engine.setup import Setup
from ed_esurge.model import drafting, served_model, with_places
from ed_esurge.runner.guides import Grammars
from ed_esurge.tokenizer import Tokenizer

Loop = EngineLoop | Replicas


def loop_over(
    model: LanguageModel,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    draft: LanguageModel | None,
) -> Loop:
    """Make what executes the commands of an engine; nothing is compiled yet.

    Args:
        model: as the user gave it, on its whole mesh.
        grammars: of structured outputs.
        draft: the user's own draft model.

    Raises:
        ConfigError: see `Setup`; or the mesh has no axis `data_parallelism_axis`.
    """
    model = served_model(model)
    draft = drafting(config, draft, model)
    meshes = replica_meshes(model, config)
    if len(meshes) == 1:
        return _loop(model, config, tokenizer, grammars, draft)
    # On a CPU the replicas share the memory that the option bounds.
    config = config.replace(cpu_cache_gib=config.cpu_cache_gib / len(meshes))
    return Replicas(
        [
            _loop(_placed(model, mesh), config, tokenizer, grammars, draft and _placed(draft, mesh))
            for mesh in meshes
        ]
    )


def replica_meshes(model: LanguageModel, config: EngineConfig) -> list[Mesh]:
    """The mesh of each replica.

    Raises:
        MeshError: the mesh has no axis of the name that the user gave.
    """
    mesh, axis = model.config.mesh, config.data_parallelism_axis
    asked = "data_parallelism_axis" in config.model_fields_set
    if axis is None or (axis not in mesh.axis_names and not asked):
        return [mesh]
    return slices_of(mesh, axis) if mesh.shape.get(axis) != 1 else [mesh]


def _placed(model: LanguageModel, mesh: Mesh) -> LanguageModel:
    return cast(LanguageModel, on_mesh(cast(nnx.Module, model), mesh))


def _loop(
    model: LanguageModel,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    draft: LanguageModel | None,
) -> EngineLoop:
    model = with_places(model, config)
    setup = Setup.resolve(model, config, draft)
    runner = setup.runner(grammars)
    return (LeadingLoop if over_processes(model) else EngineLoop)(
        setup.scheduler(runner),
        runner,
        tokenizer,
        max_loras=config.max_loras,
        seed=config.seed,
        overlap=config.overlap_execution,
    )
