"""Lists and mappings inside a sealed configuration: they read as before and refuse to change."""

from __future__ import annotations

from typing import Any, NoReturn

from ed_infra.errors import ConfigError


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "this value belongs to a configuration that a model holds and cannot be changed in place; "
        "make a new configuration with config.replace(name=value)"
    )


class FrozenDict(dict):
    """A `dict` that cannot change. Writing a value that is there already is allowed."""

    # transformers standardizes rope parameters each time it reads them, by writing equal values.
    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self or self[key] != value:
            _refuse()

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else _refuse()

    __delitem__ = clear = pop = popitem = update = __ior__ = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict:
        return thaw(self)

    __copy__ = copy = lambda self: dict(self)


class FrozenList(list):
    """A `list` that cannot change."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse  # type: ignore[assignment]
    append = extend = insert = pop = remove = clear = sort = reverse = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> list:
        return thaw(self)

    __copy__ = copy = lambda self: list(self)


def freeze(value: Any) -> Any:
    """Return `value` with every list and dict in it replaced by a frozen one."""
    if isinstance(value, dict):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list):
        return FrozenList(freeze(item) for item in value)
    return value


def thaw(value: Any) -> Any:
    """Return a plain copy of `value`, in which lists and dicts can change."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thaw(item) for item in value]
    return value
