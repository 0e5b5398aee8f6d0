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
import copy
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from huggingface_hub.errors import StrictDataclassError
from transformers import GenerationConfig, PretrainedConfig

from ed_infra.config_attributes import NOT_GIVEN, extract_commit_hash, set_attrs_smartly
from ed_infra.config_class import (
    BARE_FIELDS,
    architecture_classes,
    inherit_architecture,
    known_names,
)
from ed_infra.config_dict import EasyDeLBaseConfigDict
from ed_infra.config_files import FileMethods, reading_file
from ed_infra.config_positions import PositionMethods
from ed_infra.errors import ConfigError, did_you_mean
from ed_infra.fields import (
    FIELD_ALIASES,
    FIELDS,
    OPERATIONS,
    WITHOUT_EFFECT,
    canonical_field,
    normalize,
)
from ed_infra.frozen import freeze, thaw
from ed_infra.logging import get_logger, once
from ed_infra.specs import EasyDeLQuantizationConfig, to_json

__all__ = [
    "NOT_GIVEN",
    "EasyDeLBaseConfig",
    "EasyDeLBaseConfigDict",
    "extract_commit_hash",
    "known_names",
    "set_attrs_smartly",
]

logger = get_logger(__name__)

_MISSING = object()
_AXIS_FIELDS = {
    name: FIELDS[name].default
    for name in ("sequence_axis_name", "kv_cache_sharding_sequence_axis_name")
}


class EasyDeLBaseConfig(PositionMethods, FileMethods, PretrainedConfig):
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
        inherit_architecture(cls)
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
        if not reading_file.get():
            self._check_keywords(kwargs)
        if not architecture_classes(type(self)):
            self._set_bare_fields(kwargs)
        for name in ("rope_parameters", "rope_scaling"):  # transformers writes into them
            if isinstance(kwargs.get(name), Mapping):
                kwargs[name] = thaw(dict(kwargs[name]))
        if isinstance(self.__dict__.get("rope_parameters"), Mapping):
            self.__dict__["rope_parameters"] = thaw(dict(self.__dict__["rope_parameters"]))
        super().__post_init__(**kwargs)
        self._settle()
        if architecture_classes(type(self)):  # a class with its own __init__ is not complete yet
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
        if self.use_sharded_kv_caching and self.kv_cache_quantization_config is not None:
            warnings.warn(
                "kv_cache_quantization_config with use_sharded_kv_caching: each shard of the cache "
                "keeps scales of its own, which costs memory; turn one of the two off",
                UserWarning,
                stacklevel=_outside(),
            )
        for name in sorted(WITHOUT_EFFECT):
            if getattr(self, name) != FIELDS[name].default:
                value = getattr(self, name)
                once(logger, f"{name} = {value!r} has no effect in this version of EasyDeL")
        for operation in sorted(set(self.operation_configs or ()) - OPERATIONS):
            once(
                logger, f"operation_configs[{operation!r}] has no effect in this version of EasyDeL"
            )
        names = self.sharding_axis_names
        for field in ("sharding_axis_dims", "sharding_dcn_axis_dims"):
            dims = getattr(self, field)
            if dims is not None and len(dims) != len(names):
                raise ConfigError(
                    f"{field} = {dims} has {len(dims)} sizes for {len(names)} axes {names}"
                )
        for field, default in _AXIS_FIELDS.items():
            value = getattr(self, field)
            for axis in (value,) if isinstance(value, str) else value:
                if axis not in names and value != default:
                    hint = did_you_mean(axis, names)
                    raise ConfigError(f"{field}: the mesh has no axis {axis!r}{hint} ({names})")
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
        """Copy all execution fields from another configuration, and a mesh that was set on it."""
        for name in FIELDS:
            setattr(self, name, getattr(config, name))
        if config._own.explicit_mesh:
            self.set_model_mesh(config.mesh)

    def add_basic_configurations(self, **kwargs: Any) -> None:
        """Set execution fields, here and in the configurations nested in this one.

        Args:
            kwargs: fields of `ed_infra.fields`, or their aliases; architecture fields of this class
                (set here only). A value of `NOT_GIVEN` leaves the field as it is.

        Raises:
            ConfigError: a name is no field; values of your own go to `attach_custom_arguments`.
        """
        given = {name: value for name, value in kwargs.items() if value is not NOT_GIVEN}
        known = known_names(type(self))
        for name in given:
            if name not in known:
                raise ConfigError(f"unknown execution field {name!r}{did_you_mean(name, known)}")
        execution = {n: value for n, value in given.items() if canonical_field(n) in FIELDS}
        for name, value in given.items():
            setattr(self, name, value)
        for value in list(self.__dict__.values()):
            if isinstance(value, EasyDeLBaseConfig):
                value.add_basic_configurations(**execution)

    # --- sealing, copies, equality ----------------------------------------------------------------

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


def _outside() -> int:
    """Stack level of the code that made the configuration, for a warning from two calls down."""
    level, frame = 1, sys._getframe(2)
    while frame is not None and (
        frame.f_globals.get("__name__", "").split(".")[0]
        in ("ed_infra", "transformers", "huggingface_hub")
        or frame.f_code.co_filename == "<string>"
    ):
        level, frame = level + 1, frame.f_back
    return level + 1


@contextlib.contextmanager
def _as_config_error(cls: type) -> Iterator[None]:
    """Turn transformers' validation errors into ours."""
    try:
        yield
    except StrictDataclassError as error:
        raise ConfigError(f"{cls.__name__}: {_cause(error)}") from None


def _cause(error: BaseException) -> str:
    inner = error.__cause__ or error
    field = getattr(error, "field", None)
    return f"{field}: {inner}" if field else str(inner)
