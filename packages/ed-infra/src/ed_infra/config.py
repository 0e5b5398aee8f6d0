"""`EasyDeLBaseConfig`: a Hugging Face configuration that also says how the model runs.

A family's configuration reuses the Hugging Face class for what the model computes:

    class LlamaConfig(EasyDeLBaseConfig, transformers.LlamaConfig):
        model_type = "llama"

transformers 5 turns every subclass into a dataclass, so fields are annotated, never set by a base
`__init__`, which such a subclass would not call. A class with an `__init__(self, ..., **kwargs)` of
its own that calls `super().__init__(**kwargs)` works too.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax.sharding import Mesh
from transformers import GenerationConfig, PretrainedConfig

from ed_infra import mesh as meshes
from ed_infra.config_class import inherit_architecture
from ed_infra.enums import EasyDeLBackends
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.fields import FIELD_ALIASES, FIELDS, ExecutionFields, canonical_field, normalize
from ed_infra.frozen import freeze, thaw
from ed_infra.partition import PartitionManager
from ed_infra.specs import AttnMaskDetail, EasyDeLQuantizationConfig, to_json

#: Key of config.json under which execution fields are saved, apart from Hugging Face's own.
SECTION = "easydel"

#: Architecture fields that a subclass without a Hugging Face class knows, and their defaults.
BARE_FIELDS: dict[str, Any] = {
    "hidden_size": None,
    "num_attention_heads": None,
    "head_dim": None,
    "max_position_embeddings": None,
    "rope_parameters": None,
}

# Keywords that transformers reads out of **kwargs in one place or another.
_COMMON = frozenset(
    {
        "name_or_path",
        "_name_or_path",
        "_commit_hash",
        "num_labels",
        "torch_dtype",
        "output_attentions",
        "attn_implementation",
        "experts_implementation",
        "per_layer_config",
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "tie_word_embeddings",
        "use_cache",
    }
)
_MISSING = object()
_reading_file: contextvars.ContextVar[bool] = contextvars.ContextVar("reading_file", default=False)


class _Runtime:
    """What a configuration holds besides its values: never saved, never compared as a field."""

    def __init__(self, sealed: bool = False, mesh: Mesh | None = None, explicit: bool = False):
        self.sealed = sealed
        self.mesh = mesh
        self.explicit_mesh = explicit
        self.key: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Runtime:
        return _Runtime(self.sealed, self.mesh, self.explicit_mesh)

    __copy__ = lambda self: self.__deepcopy__({})  # noqa: E731

    def __reduce__(self) -> tuple[Any, ...]:
        return _Runtime, (self.sealed,)  # devices do not travel to another process


class EasyDeLBaseConfig(ExecutionFields, PretrainedConfig):
    """Base of all configurations: the fields of `ed_infra.fields` beside Hugging Face's.

    Construction raises `ConfigError` for a keyword that is neither a field nor known to
    transformers, and for a value that a field does not allow. Files read from disk keep the keys
    that are unknown here, and `save_pretrained` writes them back.

    A module seals the configuration it is built from: assigning to a field is then an error, since
    compiled functions would not follow. `replace(name=value)` makes a changed copy.
    """

    model_type: ClassVar[str] = ""
    #: Keywords that a family's `__post_init__` reads beyond its fields.
    known_keywords: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, *args: Any, **kwargs: Any) -> None:
        inherit_architecture(cls, EasyDeLBaseConfig)
        super().__init_subclass__(*args, **kwargs)
        # A dataclass with its own __eq__ loses its __hash__.
        cls.__eq__ = EasyDeLBaseConfig.__eq__  # type: ignore[method-assign]
        cls.__hash__ = EasyDeLBaseConfig.__hash__  # type: ignore[method-assign]

    def __post_init__(self, **kwargs: Any) -> None:
        for name in (name for name in FIELD_ALIASES if name in kwargs):
            field, value = FIELD_ALIASES[name], kwargs.pop(name)
            if getattr(self, field) not in (FIELDS[field].default, normalize(field, value)):
                raise ConfigError(f"{name!r} is another name of {field!r}, given too: keep one")
            setattr(self, field, value)
        if not _reading_file.get():
            self._check_keywords(kwargs)
        if not _architecture_classes(type(self)):
            self._set_bare_fields(kwargs)
        for name in ("rope_parameters", "rope_scaling"):  # transformers writes into them
            if isinstance(kwargs.get(name), Mapping):
                kwargs[name] = thaw(dict(kwargs[name]))
        if isinstance(self.__dict__.get("rope_parameters"), Mapping):
            self.__dict__["rope_parameters"] = thaw(dict(self.__dict__["rope_parameters"]))
        super().__post_init__(**kwargs)
        self._settle()
        if _architecture_classes(type(self)):  # a class with its own __init__ is not complete yet
            with _as_config_error(type(self)):
                self.validate()

    def _set_bare_fields(self, kwargs: dict[str, Any]) -> None:
        """Set the architecture fields that a class without a Hugging Face class knows."""
        for name, default in BARE_FIELDS.items():
            if name in kwargs:
                self.__dict__[name] = kwargs.pop(name)
            elif name not in self.__dict__ and not hasattr(type(self), name):
                self.__dict__[name] = default
        rope = kwargs.get("rope_scaling") or self.__dict__.get("rope_parameters") or {}
        trained = rope.get("original_max_position_embeddings")
        if trained and self.__dict__.get("max_position_embeddings", 0) is None:
            self.__dict__["max_position_embeddings"] = int(trained * (rope.get("factor") or 1))

    def _check_keywords(self, kwargs: Mapping[str, Any]) -> None:
        known = known_names(type(self))
        for name in kwargs:
            if name in known:
                continue
            if name in GenerationConfig._get_default_generation_params():
                raise ConfigError(
                    f"{type(self).__name__} got {name!r}, which says how to generate, not what the "
                    "model is: put it into a GenerationConfig, or give it to generate()"
                )
            raise ConfigError(
                f"{type(self).__name__} got an unknown field {name!r}{did_you_mean(name, known)} "
                "(for values of your own: config.attach_custom_arguments(...))"
            )

    def _settle(self) -> None:
        """Check what involves more than one field, and expand shorthands."""
        if self.bits is not None and self.quantization_config is None:
            formats = {4: "nf4", 8: "int8"}
            if self.bits not in formats:
                raise ConfigError(
                    f"bits = {self.bits}: 4 (nf4), 8 (int8), or a quantization_config"
                )
            self.quantization_config = EasyDeLQuantizationConfig(formats[self.bits])
        names = self.sharding_axis_names
        for field in ("sharding_axis_dims", "sharding_dcn_axis_dims"):
            dims = getattr(self, field)
            if dims is not None and len(dims) != len(names):
                raise ConfigError(
                    f"{field} = {dims} has {len(dims)} sizes for {len(names)} axes {names}"
                )
        if not 0.0 <= self.fcm_min_ratio <= max(self.fcm_max_ratio, self.fcm_min_ratio) <= 1.0:
            raise ConfigError(
                f"fcm_min_ratio = {self.fcm_min_ratio}, fcm_max_ratio = {self.fcm_max_ratio}: "
                "both lie between 0 and 1"
            )

    # --- attributes -------------------------------------------------------------------------------

    def __setattr__(self, key: str, value: Any) -> None:
        key = canonical_field(key)
        if key in FIELDS:
            value = normalize(key, value)
        if not key.startswith("_") and self.is_sealed:
            current = getattr(self, key, _MISSING)
            if current is value or current == value:
                return
            raise ConfigError(
                f"{type(self).__name__}.{key} cannot be changed: a model was built from this "
                f"configuration. Make a new one with config.replace({key}={value!r})"
            )
        with _as_config_error(type(self)):
            super().__setattr__(key, value)

    def __getattr__(self, name: str) -> Any:
        field = FIELD_ALIASES.get(name)
        if field is None:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(self, field)

    @property
    def _own(self) -> _Runtime:
        return self.__dict__.setdefault("_runtime", _Runtime())

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

    def compute_dtype(self, name: str, default: Any = jnp.float32) -> Any:
        """Return the jax dtype that a dtype field stands for.

        Args:
            name: `"attn_dtype"`, `"kvdtype"` or `"attn_softmax_dtype"`.
            default: what the model computes in; an unset field follows it (`kvdtype` follows
                `attn_dtype` first).
        """
        value = getattr(self, name)
        if value is None and name == "kvdtype":
            value = self.attn_dtype
        return jnp.dtype(default if value is None else value)

    def attach_custom_arguments(self, **kwargs: Any) -> None:
        """Attach values of your own; they are saved and read with the configuration.

        Raises:
            ConfigError: a name is a field already, or a value has no JSON form.
        """
        known = known_names(type(self))
        for name, value in kwargs.items():
            if name in known:
                raise ConfigError(f"{name!r} is a field of {type(self).__name__}: assign to it")
            to_json(value)
            setattr(self, name, value)

    def read_basics_from_config(self, config: EasyDeLBaseConfig) -> None:
        """Copy all execution fields from another configuration."""
        for name in FIELDS:
            setattr(self, name, getattr(config, name))

    def add_basic_configurations(self, **kwargs: Any) -> None:
        """Set execution fields, here and in the configurations nested in this one."""
        for name, value in kwargs.items():
            if canonical_field(name) not in FIELDS:
                hint = did_you_mean(name, [*FIELDS, *FIELD_ALIASES])
                raise ConfigError(f"unknown execution field {name!r}{hint}")
            setattr(self, name, value)
        for value in list(self.__dict__.values()):
            if isinstance(value, EasyDeLBaseConfig):
                value.add_basic_configurations(**kwargs)

    # --- sealing, copies, equality ----------------------------------------------------------------

    @property
    def is_sealed(self) -> bool:
        """Whether a module holds this configuration, so that it cannot change."""
        runtime = self.__dict__.get("_runtime")
        return runtime is not None and runtime.sealed

    def seal(self) -> Self:
        """Make the configuration and what it nests immutable; returns it. Sealing twice is fine."""
        if not self.is_sealed:
            for name, value in list(self.__dict__.items()):
                if isinstance(value, EasyDeLBaseConfig):
                    value.seal()
                elif not name.startswith("_"):
                    self.__dict__[name] = freeze(value)
            self._own.key = self._canonical_json()
            self._own.sealed = True
        return self

    def replace(self, **changes: Any) -> Self:
        """Return an unsealed copy with some fields changed, checked like a new configuration.

        Values that the first construction derived from others (`head_dim`) stay as they are unless
        given too. A mesh set by `set_model_mesh` is kept unless the sharding axes change.

        Raises:
            ConfigError: a name is not a field, or a value is not allowed.
        """
        kept = {
            name: value
            for name, value in self.__dict__.items()
            if name in FIELDS or isinstance(value, PretrainedConfig)
        }
        data = {**self.to_dict(), **{name: copy.deepcopy(value) for name, value in kept.items()}}
        result = type(self).from_dict(data, **changes)
        axes = ("sharding_axis_dims", "sharding_axis_names", "sharding_dcn_axis_dims", "backend")
        if all(getattr(self, name) == getattr(result, name) for name in axes):
            result._own.mesh = self._own.mesh
            result._own.explicit_mesh = self._own.explicit_mesh
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
        mine = self._own.mesh if self._own.explicit_mesh else None
        theirs = other._own.mesh if other._own.explicit_mesh else None
        return mine == theirs and self._key() == other._key()

    # --- mesh and sharding ------------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh:
        """The device mesh, made from the sharding fields on first use."""
        if self._own.mesh is None:
            self._own.mesh = meshes.create_mesh(
                self.sharding_axis_dims,
                self.sharding_axis_names,
                self.sharding_dcn_axis_dims,
                backend=self.backend,
            )
        return self._own.mesh

    def set_model_mesh(self, mesh: Mesh) -> None:
        """Use this mesh instead of making one from the sharding fields."""
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
        backend: str | None = None,
        *,
        axis_dims: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> Mesh:
        """Make a mesh; see `ed_infra.mesh.create_mesh`. `axis_*` are aliases."""
        pairs = {
            "sharding_axis_dims": (sharding_axis_dims, axis_dims, (1, -1, 1, 1, 1)),
            "sharding_axis_names": (sharding_axis_names, axis_names, meshes.AXIS_NAMES),
        }
        chosen = []
        for name, (value, alias, default) in pairs.items():
            if value is not None and alias is not None:
                raise ConfigError(f"create_mesh got {name} and its alias: keep one")
            chosen.append(next(v for v in (value, alias, default) if v is not None))
        return meshes.create_mesh(*chosen, sharding_dcn_axis_dims, backend=backend)

    @property
    def partition_manager(self) -> PartitionManager:
        """Resolves names of axes into partition specs."""
        return PartitionManager(self.partition_axis)

    def get_partition_rules(self, fully_sharded: bool = True) -> Any:
        """Return (regular expression, `PartitionSpec`) pairs, or None to derive the sharding.

        A family does not override this: parameters say their logical axes where they are made, and
        `ed_infra.sharding.partition_rules` shows the rules that follow. Rules returned by a class
        of yours are used instead, matched against canonical names, the first match deciding.
        """
        return None

    def get_axis_dims(self) -> Sequence[int]:
        """Return `sharding_axis_dims`."""
        return self.sharding_axis_dims

    def get_axis_names(self) -> Sequence[str]:
        """Return `sharding_axis_names`."""
        return self.sharding_axis_names

    def get_backend(self) -> str:
        """Return the backend, or jax's default one where none is set."""
        import jax

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

    # --- files ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, execution fields among them."""
        data = super().to_dict()
        data.pop("_runtime", None)
        return {name: to_json(value) for name, value in data.items()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is saved: Hugging Face's keys, and changed execution fields in a section."""
        data = super().to_diff_dict()
        data = {name: to_json(value) for name, value in data.items()}
        section = {}
        for name, field in FIELDS.items():
            value = data.pop(name, None)
            if (
                name == "quantization_config"
                and isinstance(value, dict)
                and "quant_method" in value
            ):
                data[name] = value  # of the checkpoint, and read by transformers
            elif value != to_json(field.default):
                section[name] = value
        if section:
            data[SECTION] = section
        return data

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Make a configuration of the keys of a file, with fields given as keywords on top.

        Keys of `config_dict` that are not known are kept; keywords are checked.

        Raises:
            ConfigError: a keyword is unknown, or a value is not allowed.
        """
        unused_wanted = kwargs.pop("return_unused_kwargs", False)
        for name in ("_from_auto", "_from_pipeline"):
            kwargs.pop(name, None)
        data = dict(config_dict)
        section = dict(data.pop(SECTION, None) or {})
        for name in section:
            if name not in FIELDS:
                hint = did_you_mean(name, FIELDS)
                raise ConfigError(f"config.json: unknown key {name!r} in {SECTION!r}{hint}")
        data.update(section)
        data.pop("model_type", None)
        known = known_names(cls) | set(data)
        unused = {name: value for name, value in kwargs.items() if name not in known}
        if unused and not unused_wanted:
            name = next(iter(unused))
            raise ConfigError(f"{cls.__name__} has no field {name!r}{did_you_mean(name, known)}")
        _merge(cls, data, {k: v for k, v in kwargs.items() if k not in unused})
        token = _reading_file.set(True)
        try:
            config = cls(**data)
        finally:
            _reading_file.reset(token)
        return (config, unused) if unused_wanted else config

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike) -> Self:
        """Make a configuration of a JSON file."""
        return cls.from_dict(cls._dict_from_json_file(json_file))


EasyDeLBaseConfigDict = dict[str, Any]


def _architecture_classes(cls: type) -> list[type]:
    """Hugging Face classes, other than the common base, that a configuration builds on."""
    return [
        base
        for base in cls.__mro__
        if issubclass(base, PretrainedConfig)
        and base is not PretrainedConfig
        and not issubclass(base, EasyDeLBaseConfig)
    ]


def known_names(cls: type[EasyDeLBaseConfig]) -> set[str]:
    """Return every keyword that a configuration class knows."""
    import inspect

    names = {f.name for f in dataclasses.fields(cls)} | _COMMON | set(FIELD_ALIASES)
    names |= set(cls.known_keywords) | set(cls.attribute_map)
    if not _architecture_classes(cls):
        names |= set(BARE_FIELDS)
    for base in cls.__mro__:
        for method in ("__init__", "__post_init__"):
            function = base.__dict__.get(method)
            if function is not None and issubclass(base, PretrainedConfig):
                function = inspect.unwrap(function)
                names |= {
                    p.name
                    for p in inspect.signature(function).parameters.values()
                    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
                }
    return names - {"self"}


def _merge(cls: type[EasyDeLBaseConfig], data: dict[str, Any], changes: dict[str, Any]) -> None:
    """Put `changes` over `data`, where old and new spellings of a field may meet."""
    rope = thaw(dict(changes.get("rope_parameters", data.get("rope_parameters")) or {}))
    if changes.get("rope_scaling"):
        rope = {"rope_theta": rope.get("rope_theta"), **changes["rope_scaling"]}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in changes:
            rope[name] = changes[name]
    for name, value in changes.items():
        if name in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
            data.pop(name, None)
            if name in {f.name for f in dataclasses.fields(cls)}:
                data[name] = value
            continue
        field = cls.attribute_map.get(canonical_field(name), canonical_field(name))
        data.pop(name, None)
        data[field] = value
    if rope:
        data["rope_parameters"] = {k: v for k, v in rope.items() if v is not None}


@contextlib.contextmanager
def _as_config_error(cls: type) -> Iterator[None]:
    """Turn transformers' validation errors into ours."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except StrictDataclassError as error:
        raise ConfigError(f"{cls.__name__}: {error}") from None


__all__ = ["BARE_FIELDS", "SECTION", "EasyDeLBackends", "EasyDeLBaseConfig", "known_names"]
