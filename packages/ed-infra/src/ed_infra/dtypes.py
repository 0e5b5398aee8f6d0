"""Names of dtypes as strings: option tables hold no jax type."""

from __future__ import annotations

from ed_infra.errors import ConfigError, did_you_mean

#: Every dtype that a configuration may name.
_DTYPES: tuple[str, ...] = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int8",
    "int4",
    "uint8",
    "uint4",
    "int16",
    "int32",
    "int64",
)

#: Abbreviation -> canonical name.
DTYPE_ALIASES: dict[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp64": "float64",
    "f64": "float64",
    "double": "float64",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "i8": "int8",
    "i4": "int4",
}


def canonical_dtype(value: object) -> str:
    """Return the canonical name of a dtype.

    Args:
        value: a name (`"bf16"`, `"float32"`), or a numpy, jax or torch dtype or scalar type.

    Raises:
        ConfigError: not a dtype that is known here.
    """
    dtype_name = getattr(value, "name", None)
    scalar_name = getattr(getattr(value, "dtype", None), "name", None)
    if isinstance(value, str):
        name = value
    elif isinstance(dtype_name, str):  # numpy.dtype
        name = dtype_name
    elif isinstance(scalar_name, str):  # jax.numpy.bfloat16
        name = scalar_name
    elif isinstance(value, type):  # numpy.float32, float
        name = value.__name__
    else:  # torch.float32
        name = str(value)
    spelling = name.strip().lower().rpartition(".")[2]
    spelling = DTYPE_ALIASES.get(spelling, spelling)
    if spelling not in _DTYPES:
        hint = did_you_mean(name, [*_DTYPES, *DTYPE_ALIASES])
        raise ConfigError(f"unknown dtype {name!r}{hint} (known: {', '.join(_DTYPES)})")
    return spelling


def canonical_float(value: object) -> str:
    """Return the canonical name of a floating-point dtype; see `canonical_dtype`.

    Raises:
        ConfigError: not a dtype that is known here, or one of integers.
    """
    name = canonical_dtype(value)
    if "float" not in name:
        floats = ", ".join(dtype for dtype in _DTYPES if "float" in dtype)
        raise ConfigError(f"{name!r} is not a floating-point dtype (those are {floats})")
    return name


def floating_dtype(option: str, value: object) -> str:
    """Return the canonical name of a floating-point dtype.

    Args:
        option: name of the option, for the error message.
        value: see `canonical_dtype`.

    Raises:
        ConfigError: the dtype is unknown or not a floating-point dtype.
    """
    name = canonical_dtype(value)
    if not name.startswith(("float", "bfloat")):
        raise ConfigError(
            f"{option} is {name}; it must be a floating-point dtype, such as 'bfloat16'"
        )
    return name
