"""The part of a configuration that says where things live: meshes and partition rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from ed_infra import mesh as meshes
from ed_infra.config_runtime import Held
from ed_infra.errors import ConfigError
from ed_infra.fields import FIELDS
from ed_infra.partition import PartitionManager
from ed_infra.specs import AttnMaskDetail


class MeshMethods(Held):
    """Methods of `EasyDeLBaseConfig` about devices."""

    @property
    def mesh(self) -> Mesh:
        """The device mesh, made from the sharding fields on first use."""
        own = self._own
        if own.mesh is None:
            own.mesh = meshes.create_mesh(
                self.sharding_axis_dims,
                self.sharding_axis_names,
                self.sharding_dcn_axis_dims,
                backend=self.backend,
            )
        return own.mesh

    def set_model_mesh(self, mesh: Mesh) -> None:
        """Use this mesh instead of making one from the sharding fields.

        Raises:
            ConfigError: a model was built from this configuration on another mesh.
        """
        if self.is_sealed and self._own.mesh != mesh:
            raise ConfigError(
                "the mesh cannot be changed: a model was built from this configuration. "
                "Set it on config.replace(), and build a model from that"
            )
        self._own.mesh = mesh
        self._own.explicit_mesh = True

    def jax_mesh(self) -> Mesh:
        """Return `mesh`."""
        return self.mesh

    @staticmethod
    def create_mesh(
        sharding_axis_dims: Sequence[int] | None = None,
        sharding_axis_names: Sequence[str] | None = None,
        sharding_dcn_axis_dims: Sequence[int] | None = None,
        process_is_granule: bool = False,
        should_sort_granules_by_key: bool = True,
        allow_split_physical_axes: bool = True,
        backend: str | None = None,
        *,
        axis_dims: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> Mesh:
        """Make a mesh; see `ed_infra.mesh.create_mesh`. `axis_dims`, `axis_names` are aliases."""
        for name, value, alias in (
            ("axis_dims", sharding_axis_dims, axis_dims),
            ("axis_names", sharding_axis_names, axis_names),
        ):
            if value is not None and alias is not None:
                raise ConfigError(f"create_mesh got sharding_{name} and {name}: keep one")
        dims = sharding_axis_dims if sharding_axis_dims is not None else axis_dims
        names = sharding_axis_names if sharding_axis_names is not None else axis_names
        return meshes.create_mesh(
            dims if dims is not None else (1, -1, 1, 1, 1),
            names if names is not None else meshes.AXIS_NAMES,
            sharding_dcn_axis_dims,
            backend=backend,
            process_is_granule=process_is_granule,
            should_sort_granules_by_key=should_sort_granules_by_key,
            allow_split_physical_axes=allow_split_physical_axes,
        )

    @property
    def expert_mesh(self) -> Mesh:
        """The devices as (dp, ep, tp), explicit axes: fsdp and sp folded into ep or dp.

        `fsdp_is_ep_bound` and `sp_is_ep_bound` say into which.
        """
        return self._expert_mesh(AxisType.Explicit)

    @property
    def auto_expert_mesh(self) -> Mesh:
        """`expert_mesh` with automatic axes."""
        return self._expert_mesh(AxisType.Auto)

    @property
    def expert_abstract_mesh(self) -> AbstractMesh:
        """`expert_mesh` without devices."""
        return self.expert_mesh.abstract_mesh

    def _expert_mesh(self, kind: AxisType) -> Mesh:
        mesh = self.mesh
        names = list(mesh.axis_names)
        if names != list(meshes.AXIS_NAMES):
            raise ConfigError(
                f"an expert mesh needs the axes {meshes.AXIS_NAMES}, and this mesh has {names}"
            )
        expert = ["fsdp"] * self.fsdp_is_ep_bound + ["ep"] + ["sp"] * self.sp_is_ep_bound
        data = [name for name in ("dp", "fsdp", "sp") if name not in expert]
        groups = [data, expert, ["tp"]]
        order = [names.index(name) for group in groups for name in group]
        shape = [int(np.prod([mesh.shape[name] for name in group])) for group in groups]
        devices = mesh.devices.transpose(order).reshape(shape)
        return Mesh(devices, ("dp", "ep", "tp"), axis_types=(kind,) * 3)

    @property
    def partition_manager(self) -> PartitionManager:
        """Resolves names of axes into partition specs.

        A `sequence_axis_name` other than the default takes the place of the sequence-parallel axis
        in `partition_axis`.
        """
        axis = self.partition_axis
        if self.sequence_axis_name != FIELDS["sequence_axis_name"].default:
            axis = axis.renamed(axis.sequence_parallel_axis, self.sequence_axis_name)
        return PartitionManager(axis)

    def get_partition_rules(self, fully_sharded: bool = True) -> Any:
        """Return (regular expression, `PartitionSpec`) pairs, or None for unregistered model types.

        A family does not override this: parameters say their logical axes where they are made, and
        these are the rules that follow. Rules returned by a class of yours are used instead: they
        are matched against canonical names, the first match deciding.

        Args:
            fully_sharded: False leaves out the fully-sharded axis.
        """
        from ed_infra.model_rules import model_rules

        return model_rules(self, fully_sharded)  # type: ignore[arg-type]

    def own_partition_rules(self) -> Any:
        """Return `get_partition_rules()` of a class that overrides it, else None."""
        overridden = type(self).get_partition_rules is not MeshMethods.get_partition_rules
        return self.get_partition_rules() if overridden else None

    def get_axis_dims(self) -> Sequence[int]:
        """Return `sharding_axis_dims`."""
        return self.sharding_axis_dims

    def get_axis_names(self) -> Sequence[str]:
        """Return `sharding_axis_names`."""
        return self.sharding_axis_names

    def get_backend(self) -> str:
        """Return the backend, or jax's default one where none is set."""
        return self.backend or jax.default_backend()

    def get_mask_details(self) -> dict[int, AttnMaskDetail] | None:
        """Return the attention pattern of each layer, or None where all layers see everything.

        Follows `layer_types` with `sliding_window` or `attention_chunk_size`, as transformers does.
        """
        kinds = getattr(self, "layer_types", None)
        if not kinds:
            return None
        sizes = {
            "sliding_attention": ("sliding", getattr(self, "sliding_window", None)),
            "chunked_attention": ("chunked", getattr(self, "attention_chunk_size", None)),
        }
        return {
            layer: AttnMaskDetail(*sizes[kind])
            if kind in sizes and sizes[kind][1]
            else AttnMaskDetail()
            for layer, kind in enumerate(kinds)
        }
