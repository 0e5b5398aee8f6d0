"""`EasyDeLBaseConfig`: a Hugging Face configuration with execution fields.

A family's configuration inherits the architecture fields from the Hugging Face class:

    class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
        model_type = "llama"

transformers 5 converts every subclass to a dataclass, which does not call the `__init__` of a base
class. Fields are therefore annotated. A class may also define `__init__(self, ..., **kwargs)` and
call `super().__init__(**kwargs)`.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from transformers import PretrainedConfig

from ed_infra import registry
from ed_infra.config import documented
from ed_infra.config.fields import (
    FIELD_ALIASES,
    FIELDS,
    canonical_field,
    check_together,
    find_remarks,
    normalize_fields,
)
from ed_infra.config.files import StoredConfig, reading_file
from ed_infra.config.frozen import MeshRecipe, Runtime, freeze, thaw
from ed_infra.config.subclass import (
    architecture_value,
    as_config_error,
    check_keywords,
    inherit_architecture,
    is_complete,
    known_names,
    outside,
    set_bare_fields,
    share_table_of_names,
)
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.logging import get_logger, once
from ed_infra.rope.parameters import check_parameters
from ed_infra.sharding.axes import total_sizes
from ed_infra.sharding.mesh import create_mesh
from ed_infra.sharding.partition import PartitionManager
from ed_infra.specs import FORMAT_OF_BITS, EasyDeLQuantizationConfig, to_json

logger = get_logger(__name__)
share_table_of_names()

_MISSING = object()
_MESH_FIELDS = ("sharding_axis_dims", "sharding_axis_names", "sharding_dcn_axis_dims", "backend")


class EasyDeLBaseConfig(StoredConfig):
    """Base class of all configurations: Hugging Face's fields and `ed_infra.config.fields`.

    The constructor raises `ConfigError` for unknown keywords and invalid values. A configuration
    that is read from a file keeps unknown keys, and `save_pretrained` writes them again.

    A module seals its configuration: assigning to a field then raises an error, because compiled
    functions depend on the value. `replace(name=value)` returns a changed copy.
    """

    model_type: ClassVar[str] = ""
    #: Keywords beyond the fields: `is_causal: false` makes a decoder an encoder; a family lists
    #: those that its `__post_init__` reads.
    known_keywords: ClassVar[frozenset[str]] = frozenset({"is_causal"})
    #: Classes of nested configurations by field. Other nested configurations have the registered
    #: class of their model type.
    nested_configs: ClassVar[Mapping[str, type]] = {}

    if TYPE_CHECKING:  # transformers declares these fields in its classes, with wider types
        text_config: EasyDeLBaseConfig = cast("EasyDeLBaseConfig", None)
        vision_config: EasyDeLBaseConfig = cast("EasyDeLBaseConfig", None)
        audio_config: EasyDeLBaseConfig = cast("EasyDeLBaseConfig", None)

        def validate(self) -> None: ...

    def __init_subclass__(cls, *args: object, **kwargs: Any) -> None:
        inherit_architecture(cls)
        super().__init_subclass__(*args, **kwargs)
        # A dataclass that defines __eq__ has no __hash__.
        cls.__eq__ = EasyDeLBaseConfig.__eq__
        cls.__hash__ = EasyDeLBaseConfig.__hash__

    def __post_init__(self, **kwargs: Any) -> None:
        for name in (name for name in FIELD_ALIASES if name in kwargs):
            field, value = FIELD_ALIASES[name], kwargs.pop(name)
            if getattr(self, field) not in (FIELDS[field].default, normalize_fields(field, value)):
                raise ConfigError(f"{name!r} is another name of {field!r}: keep one of the two")
            setattr(self, field, value)
        if not reading_file.get():
            check_keywords(type(self), kwargs)
        for values in (kwargs, self.__dict__):
            for name in ("rope_parameters", "rope_scaling"):
                if isinstance(values.get(name), Mapping):
                    self._check_rope(values[name])
                    values[name] = thaw(dict(values[name]))  # transformers changes it
        set_bare_fields(type(self), self.__dict__, kwargs)
        try:
            super().__post_init__(**kwargs)
        except ValueError:
            self._check_nested_types({**self.__dict__, **kwargs})
            raise
        self._nest()
        self._settle()
        if is_complete(type(self)):
            with as_config_error(type(self)):
                self.validate()

    def _check_nested_types(self, fields: Mapping[str, Any]) -> None:
        """Raise a `RegistryError` for a nested configuration with an unregistered model type."""
        for name, value in fields.items():
            nested = isinstance(value, Mapping) and name not in self.nested_configs
            if nested and isinstance(model_type := value.get("model_type"), str):
                registry.get_config(model_type)

    def _nest(self) -> None:
        """Convert the nested configurations that `transformers` created."""
        for name, value in list(self.__dict__.items()):
            if isinstance(value, PretrainedConfig) and not isinstance(value, EasyDeLBaseConfig):
                cls = self.nested_configs.get(name)
                if cls is None and not value.model_type:
                    continue  # a part of this configuration, such as MPT's `attn_config`
                cls = cls or registry.get_config(value.model_type)
                self.__dict__[name] = cls.from_dict(value.to_dict())

    def _settle(self) -> None:
        """Check the configuration, expand shorthands, and warn about fields without effect."""
        self._check(names=not reading_file.get())
        if self.bits is not None and self.quantization_config is None:
            self.quantization_config = EasyDeLQuantizationConfig(FORMAT_OF_BITS[self.bits])
        if self.use_sharded_kv_caching and self.kv_cache_quantization_config is not None:
            warnings.warn(
                "kv_cache_quantization_config with use_sharded_kv_caching: each shard of the cache "
                "keeps separate scales, which costs memory; turn one of the two off",
                UserWarning,
                stacklevel=outside(),
            )
        self._warn_of_values()

    def _warn_of_values(self) -> None:
        """Warn once about each value that has no effect, or another effect than it says."""
        values = {name: getattr(self, name) for name in FIELDS}
        for _, assignment, remark in find_remarks(values):
            once(logger, f"{assignment} {remark}")

    def _check(self, names: bool) -> None:
        """Raise ConfigError for contradicting values and for values that were changed in place."""
        check_together({name: getattr(self, name) for name in FIELDS})
        self._check_rope(self.__dict__.get("rope_parameters"), names)

    def _check_rope(self, parameters: object, names: bool | None = None) -> None:
        if isinstance(parameters, Mapping):
            names = not reading_file.get() if names is None else names
            ignored_keys = self.ignore_keys_at_rope_validation
            check_parameters(parameters, names=names, known_names=ignored_keys)

    # --- attributes -------------------------------------------------------------------------------

    def __setattr__(self, key: str, value: object) -> None:
        key = canonical_field(key)
        if key in FIELDS:
            value = normalize_fields(key, value)
        elif key == "rope_parameters" and self.__dict__.get("_post_init_done"):
            self._check_rope(value)
        else:
            value = architecture_value(type(self), key, value, from_file=reading_file.get())
        if not key.startswith("_") and self.is_sealed:
            current = getattr(self, key, _MISSING)
            if current is value or current == value:
                return
            raise ConfigError(
                f"{type(self).__name__}.{key} cannot be changed: a model was built from this "
                f"configuration. Make a new one with config.replace({key}={value!r})"
            )
        with as_config_error(type(self)):
            super().__setattr__(key, value)

    def __getattr__(self, name: str) -> Any:
        field = FIELD_ALIASES.get(name)
        if field is None:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self, field)

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies: `rope_parameters["rope_theta"]`."""
        theta = (self.__dict__.get("rope_parameters") or {}).get("rope_theta")
        if theta is None:
            raise AttributeError("rope_theta: rope_parameters holds none for the whole model")
        return theta

    @rope_theta.setter
    def rope_theta(self, value: float) -> None:
        parameters = dict(self.__dict__.get("rope_parameters") or {})
        self.rope_parameters = {**parameters, "rope_theta": value}

    def compute_dtype(self, name: str, default: DTypeLike = jnp.float32) -> np.dtype:
        """Return the jax dtype of a dtype field.

        Args:
            name: `"attn_dtype"`, `"kvdtype"` or `"attn_softmax_dtype"`.
            default: The computation dtype of the model, for an unset field (`kvdtype` falls back to
                `attn_dtype` first).
        """
        value = getattr(self, name)
        if value is None and name == "kvdtype":
            value = self.attn_dtype
        return jnp.dtype(default if value is None else value)

    def attach_custom_arguments(self, **kwargs: object) -> None:
        """Attach custom values, which are saved and loaded with the configuration.

        Raises:
            ConfigError: A name is already a field, or a value is not serializable as JSON.
        """
        field_names = known_names(type(self))
        for name, value in kwargs.items():
            if name in field_names:
                raise ConfigError(f"{name!r} is a field of {type(self).__name__}: assign to it")
            to_json(value)
            setattr(self, name, value)

    def read_basics_from_config(self, config: EasyDeLBaseConfig) -> None:
        """Copy all execution fields, and an explicitly set mesh, from another configuration."""
        for name in FIELDS:
            setattr(self, name, getattr(config, name))
        if config._own.custom:
            self.set_model_mesh(config.mesh)

    def add_basic_configurations(self, **kwargs: object) -> None:
        """Set execution fields in this configuration and in nested configurations.

        Args:
            kwargs: Execution fields (`ed_infra.config.fields`) or their aliases, and architecture
                fields of this class. A field with the value `NOT_GIVEN` is not changed.

        Raises:
            ConfigError: A name is no field. Use `attach_custom_arguments` for custom values.
        """
        values = {n: value for n, value in kwargs.items() if value is not documented.NOT_GIVEN}
        field_names = known_names(type(self))
        for name in values:
            if name not in field_names:
                raise ConfigError(
                    f"unknown execution field {name!r}{did_you_mean(name, field_names)}"
                )
        execution = {n: value for n, value in values.items() if canonical_field(n) in FIELDS}
        for name, value in values.items():
            setattr(self, name, value)
        for inner in list(self.__dict__.values()):
            if isinstance(inner, EasyDeLBaseConfig):
                inner.add_basic_configurations(**execution)

    # --- placement --------------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The device mesh: set explicitly, or created from the sharding fields."""
        runtime = self._own
        if runtime.mesh is None and runtime.custom:
            runtime.mesh = runtime.custom.build()
        elif runtime.mesh is None:
            dims, names, slices, backend = (getattr(self, name) for name in _MESH_FIELDS)
            runtime.mesh = create_mesh(dims, names, slices, backend=backend)
        return runtime.mesh

    def set_model_mesh(self, mesh: Mesh) -> None:
        """Use this mesh instead of a mesh from the sharding fields.

        Raises:
            ConfigError: A model was built from this configuration on another mesh, or
                `partition_axis` does not match the names of the axes.
        """
        runtime = self._own
        lost = runtime.mesh is None and runtime.custom  # pickled in another process
        if self.is_sealed and runtime.mesh != mesh and not lost:
            raise ConfigError(
                "the mesh cannot be changed: a model was built from this configuration. "
                "Set it on config.replace(), and build a model from that"
            )
        self.partition_axis.on(mesh.axis_names, mesh.shape)
        runtime.mesh, runtime.custom = mesh, MeshRecipe.of(mesh)

    @property
    def partition_manager(self) -> PartitionManager:
        """Resolves logical axes to partition specs, by `partition_axis` with the mesh's names.

        A `sequence_axis_name` other than the default replaces the sequence-parallel axis.
        `kv_cache_sharding_sequence_axis_name` replaces the axis of the keys' sequence in decoding.
        """
        custom = self._own.custom
        if custom:
            axis = self.partition_axis.on(custom.names, custom.shape)
        else:
            sizes = total_sizes(self.sharding_axis_dims, self.sharding_dcn_axis_dims)
            axis = self.partition_axis.on(self.sharding_axis_names, sizes)
        if self.sequence_axis_name != FIELDS["sequence_axis_name"].default:
            axis = axis.rename_axis(axis.sequence_parallel_axis, self.sequence_axis_name)
        cache = self.kv_cache_sharding_sequence_axis_name
        if cache != FIELDS["kv_cache_sharding_sequence_axis_name"].default:
            axis = dataclasses.replace(axis, decode_key_sequence_axis=cache)
        return PartitionManager(axis, tuple(documented.expert_axes(self, axis)))

    def get_partition_rules(
        self, fully_sharded: bool = True
    ) -> tuple[tuple[str, PartitionSpec], ...] | None:
        """Return (regular expression, `PartitionSpec`) pairs, or None for unregistered model types.

        The rules follow from the logical axes of the parameters, so a family does not override this
        method. A custom class may return its own rules: patterns over canonical names, of which the
        first match decides.

        Args:
            fully_sharded: Whether to include the fully-sharded axis.
        """
        return registry.partition_rules(self, fully_sharded)

    def own_partition_rules(self) -> tuple[tuple[str, PartitionSpec], ...] | None:
        """Return `get_partition_rules()` if the class overrides it, otherwise None."""
        overridden = type(self).get_partition_rules is not EasyDeLBaseConfig.get_partition_rules
        return self.get_partition_rules() if overridden else None

    # --- sealing, copies, equality ----------------------------------------------------------------

    @property
    def _own(self) -> Runtime:
        return self.__dict__.setdefault("_runtime", Runtime())

    @property
    def is_sealed(self) -> bool:
        """Whether a module uses this configuration, which is therefore immutable."""
        runtime = self.__dict__.get("_runtime")
        return runtime is not None and runtime.sealed

    def seal(self) -> Self:
        """Make the configuration and nested configurations immutable, and return it.

        The execution fields also apply to nested configurations.
        """
        if not self.is_sealed:
            self._check(names=False)  # unknown names may come from a file
            self._warn_of_values()
            for name, value in list(self.__dict__.items()):
                if isinstance(value, EasyDeLBaseConfig):
                    value.read_basics_from_config(self)
                    value.seal()
                elif not name.startswith("_"):
                    self.__dict__[name] = freeze(value)
            self._own.key = self._canonical_json()
            self._own.sealed = True
        return self

    def replace(self, **changes: object) -> Self:
        """Return an unsealed, validated copy with some changed fields.

        Derived values (`head_dim`) are not computed again. A mesh from `set_model_mesh` is kept
        unless the sharding axes change.

        Raises:
            ConfigError: A name is not a field, or a value is invalid.
        """
        copied_values = {
            name: value
            for name, value in self.__dict__.items()
            if name in FIELDS or isinstance(value, PretrainedConfig)
        }
        copies = {
            name: value.replace() if isinstance(value, EasyDeLBaseConfig) else copy.deepcopy(value)
            for name, value in copied_values.items()
        }
        data = {**self.to_dict(), **copies}
        result = type(self).from_dict(data, **changes)
        result._commit_hash = getattr(self, "_commit_hash", None)  # not in to_dict
        if all(getattr(self, name) == getattr(result, name) for name in _MESH_FIELDS):
            result._own.mesh, result._own.custom = self._own.mesh, self._own.custom
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        for name, value in self.__dict__.items():
            result.__dict__[name] = copy.deepcopy(value, memo)
        if result.is_sealed:  # copies of frozen values are plain
            result._own.sealed = False
            result.seal()
        return result

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_sealed:
            self._own.sealed = False
            self.seal()

    def _canonical_json(self) -> str:
        data = self.to_dict()
        for name in ("transformers_version", "_name_or_path"):
            data.pop(name, None)
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    def _key(self) -> str:
        return self._own.key if self.is_sealed and self._own.key else self._canonical_json()

    def __hash__(self) -> int:
        return hash((type(self).__qualname__, self._key()))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, EasyDeLBaseConfig)
        return self._own.custom == other._own.custom and self._key() == other._key()

    # --- methods of EasyDeL's guide ---------------------------------------------------------------

    jax_mesh = documented.jax_mesh
    create_mesh = staticmethod(documented.create_mesh)
    expert_mesh = property(documented.expert_mesh)
    auto_expert_mesh = property(documented.auto_expert_mesh)
    expert_abstract_mesh = property(documented.expert_abstract_mesh)
    get_axis_dims = documented.get_axis_dims
    get_axis_names = documented.get_axis_names
    get_backend = documented.get_backend
    get_mask_details = documented.get_mask_details
    granted_freq_max_position_embedding = property(documented.granted_freq_max_position_embedding)
    granted_mask_max_position_embedding = property(documented.granted_mask_max_position_embedding)
    get_basic_inv_frequencies = documented.get_basic_inv_frequencies
    get_basic_frequencies = documented.get_basic_frequencies
    get_basic_rope = documented.get_basic_rope
    get_basic_causal_mask = documented.get_basic_causal_mask
    get_fcm_mask = documented.get_fcm_mask
