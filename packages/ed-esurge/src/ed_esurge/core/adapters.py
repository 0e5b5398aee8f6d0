"""Table of the loaded LoRA adapters."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from ed_infra.errors import ConfigError, unknown_name


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """A loaded adapter.

    Attributes:
        name: name of the adapter in requests.
        number: number that is never reused, from 1; used in prefix-cache keys and plans.
        place: index of the adapter on the device, 1 to `max_loras`.
        rank: maximum rank over the layers.
        source: description of the origin, for users; None = from memory.
        dora: whether the adapter uses DoRA, which depends on the weights of the model.
    """

    name: str
    number: int
    place: int
    rank: int
    source: str | None = None
    dora: bool = False


class AdapterTable:
    """The loaded adapters by name.

    An unloaded adapter has no name, so that new requests cannot use it. Its place becomes free when
    no unfinished request uses it.

    Args:
        places: number of places.
    """

    def __init__(self, places: int) -> None:
        self.places = places
        self._loaded: dict[str, LoadedAdapter] = {}
        self._held: dict[int, int] = {}  # place -> number of its last adapter
        self._numbers = 0

    def __iter__(self) -> Iterator[LoadedAdapter]:
        return iter(list(self._loaded.values()))

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter with a name.

        Raises:
            ConfigError: no adapter with this name is loaded.
        """
        loaded = self._loaded.get(name)
        if loaded is None:
            self._check_places()
            raise unknown_name("LoRA adapter", name, [*self._loaded] or ["none is loaded"])
        return loaded

    def knows(self, number: int) -> bool:
        """Return whether the adapter with a number is loaded."""
        return any(loaded.number == number for loaded in self._loaded.values())

    def check_new(self, name: str) -> None:
        """Raise ConfigError if no adapter can be loaded under a name."""
        self._check_places()
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of an adapter is a text, got {name!r}")
        if name in self._loaded:
            raise ConfigError(f"a LoRA adapter {name!r} is loaded: unload it first")

    def add(
        self,
        name: str,
        rank: int,
        source: str | None,
        used: Container[int],
        *,
        dora: bool = False,
    ) -> LoadedAdapter:
        """Assign a place to a new adapter.

        Args:
            name: name of the adapter.
            rank: maximum rank over the layers.
            source: description of the origin, for users.
            used: numbers of the adapters that unfinished requests use.
            dora: whether the adapter uses DoRA.

        Raises:
            ConfigError: the name is in use, or no place is free.
        """
        self.check_new(name)
        self._numbers += 1  # failed attempts count, so that tables in all processes agree
        names = {loaded.place for loaded in self._loaded.values()}
        used_places = {place for place, number in self._held.items() if number in used}
        place = next((p for p in range(1, self.places + 1) if p not in names | used_places), None)
        if place is None:
            waiting = len(used_places - names)
            still = f", and {waiting} that were unloaded are still in use" if waiting else ""
            raise ConfigError(
                f"max_loras {self.places} adapters are loaded ({', '.join(self._loaded)}){still}: "
                "unload one, or build the engine with more"
            )
        loaded = LoadedAdapter(name, self._numbers, place, rank, source, dora)
        self._loaded[name], self._held[place] = loaded, loaded.number
        return loaded

    def remove(self, name: str) -> None:
        """Remove an adapter.

        Raises:
            ConfigError: no adapter with this name is loaded.
        """
        self.find(name)
        del self._loaded[name]

    def _check_places(self) -> None:
        if not self.places:
            raise ConfigError(
                "this engine serves no LoRA adapters: build it with max_loras, how many can be "
                "loaded at the same time"
            )
