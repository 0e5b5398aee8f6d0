"""What a configuration holds besides its values: the seal, the mesh."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from ed_infra.fields import ExecutionFields


class Runtime:
    """Never saved, and no field.

    Attributes:
        sealed: whether a module holds the configuration.
        mesh: the mesh, once it was made or set.
        explicit_mesh: whether it was set, not made from the fields.
        key: canonical JSON of a sealed configuration.
    """

    def __init__(
        self, sealed: bool = False, mesh: Mesh | None = None, explicit_mesh: bool = False
    ) -> None:
        self.sealed = sealed
        self.mesh = mesh
        self.explicit_mesh = explicit_mesh
        self.key: str | None = None

    def __copy__(self) -> Runtime:
        return Runtime(self.sealed, self.mesh, self.explicit_mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        return self.__copy__()  # a mesh cannot be copied, and need not be

    def __reduce__(self) -> tuple[Any, ...]:
        return Runtime, (self.sealed,)  # devices do not travel to another process


class Held(ExecutionFields):
    """Access to the runtime part, for the classes that make up `EasyDeLBaseConfig`."""

    @property
    def _own(self) -> Runtime:
        return self.__dict__.setdefault("_runtime", Runtime())

    @property
    def is_sealed(self) -> bool:
        """Whether a module holds this configuration, so that it cannot change."""
        runtime = self.__dict__.get("_runtime")
        return runtime is not None and runtime.sealed
