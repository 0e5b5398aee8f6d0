"""Bounds of configuration values: numbers are finite, and sizes are plausible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ed_infra.errors import ConfigError

#: Field -> largest size. Each bound is at least ten times the largest published value. A larger
#: size means a damaged or hostile file, and building such a model would exhaust time or memory.
LARGEST = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "n_routed_experts": 2**16,
    "head_dim": 2**16,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "vocab_size": 2**26,
    "max_position_embeddings": 2**31 - 1,
}
_SMALLEST_BOUND = min(LARGEST.values())
#: Fields whose upper limit may be infinite: Mamba-2 does not limit its time steps by default.
_MAY_BE_INFINITE = frozenset({"time_step_limit"})


def check_plausible(name: str, value: object, aliases: Mapping[str, str]) -> None:
    """Raise an error for an implausible number.

    Args:
        name: The name of the field.
        value: The value, of any type; numbers inside of mappings and sequences count.
        aliases: Hugging Face's name of a field -> the name that the configuration's class uses.

    Raises:
        ConfigError: A number is NaN or infinite, or a size is larger than the bound of `LARGEST`.
    """
    for path, number in _numbers(name, value):
        allowed = math.isinf(number) and name in _MAY_BE_INFINITE
        if not (math.isfinite(number) or allowed):
            raise ConfigError(f"{path} = {number} must be a finite number", field=name)
    if isinstance(value, int) and value > _SMALLEST_BOUND:
        common = next((n for n, target_name in aliases.items() if target_name == name), name)
        if value > LARGEST.get(common, value):
            raise ConfigError(
                f"{name} = {value} is invalid: no model is that large, and at most "
                f"{LARGEST[common]} is allowed; check the value, or replace the damaged file",
                field=name,
            )


def _numbers(path: str, value: object) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(f"{path}.{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            if not isinstance(inner, int | str):
                yield from _numbers(f"{path}[{index}]", inner)
