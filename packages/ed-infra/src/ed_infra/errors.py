"""Error classes and suggestions. A message contains the value, the constraint and a solution."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

#: Maximum characters of a message. Messages quote files, which may contain names of any length.
MAX_MESSAGE = 2**15


def shorten_message(text: str, most: int = MAX_MESSAGE) -> str:
    """Return a text, or the beginning and the end of a text longer than `most` characters."""
    if len(text) <= most:
        return text
    end = most // 4
    begin = most - end
    return f"{text[:begin]} [{len(text) - begin - end} characters are left out] {text[-end:]}"


class EasyDeLError(Exception):
    """Base class of the errors of this project. A long message is shortened."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(shorten_message(a) if isinstance(a, str) else a for a in arguments))


class ConfigError(EasyDeLError, ValueError):
    """A value of a configuration is unknown, has the wrong type, or contradicts another value.

    Attributes:
        field: The key to change. The YAML runner reports its line.
    """

    def __init__(self, message: str, *, field: str | None = None):
        super().__init__(message)
        self.field = field


class KeywordError(ConfigError, TypeError):
    """A call has an unknown keyword."""


class MeshError(ConfigError):
    """A device mesh does not match the devices, or a specification does not match the mesh."""


class RegistryError(ConfigError):
    """A model type, task or trainer is not registered."""


class CheckpointError(EasyDeLError, ValueError):
    """A checkpoint is missing, incomplete, or does not match the model.

    Attributes:
        field: The key to change. The YAML runner reports its line.
    """

    def __init__(self, message: str, *, field: str | None = None):
        super().__init__(message)
        self.field = field


def refuse_keywords(
    call: str,
    keywords: Iterable[str],
    known_keywords: Iterable[str],
    instead: Mapping[str, str] | None = None,
) -> None:
    """Refuse unknown keywords of a call that passes its keywords on.

    Args:
        call: name of the public function.
        keywords: the keywords.
        known_keywords: all allowed keywords.
        instead: Other name -> what to write instead.

    Raises:
        KeywordError: a keyword is unknown.
    """
    known_keywords = list(known_keywords)
    for name in keywords:
        if name not in known_keywords:
            hint = (instead or {}).get(name)
            hint = f"; {hint}" if hint else did_you_mean(name, known_keywords)
            listing = ", ".join(sorted(known_keywords))
            raise KeywordError(f"{call} has no keyword {name!r}{hint} (known: {listing})")


#: Longer names get no suggestion: the time of a comparison is quadratic in the length.
MAX_COMPARED = 64


def did_you_mean(name: str, known_names: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, or an empty string.

    A name is near if it differs by at most two edits (more in long names), or if its words are
    among the words of the known name, or the reverse: `decay_steps` and `num_decay_steps`,
    `packing` and `pack_tokens`. The comparison ignores case.
    """
    near_names = list_near_names(name, known_names)
    return f"; did you mean {near_names[0]!r}?" if near_names else ""


def list_near_names(name: str, known_names: Iterable[str]) -> list[str]:
    """Return the known names that are near a name (see `did_you_mean`), the nearest first."""
    if len(name) > MAX_COMPARED:
        return []
    spelling = {str(k).lower(): str(k) for k in known_names}
    query = str(name).lower()
    similar = difflib.get_close_matches(query, spelling, n=8, cutoff=0.5)
    close_names = [k for k in similar if _is_near(query, k)]
    # The sort is stable: the most similar of equals stays first.
    close_names.sort(key=partial(edits, query))
    return [spelling[one] for one in close_names]


def edits(a: str, b: str) -> int:
    """Return the least number of edits from `a` to `b`.

    An edit replaces, inserts or removes a character, or swaps two neighbors.
    """
    previous_row, row = list[int](), list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous_row, last, row = row, previous_row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous_row[j] + 1, row[j - 1] + 1, previous_row[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]


def _is_near(a: str, b: str) -> bool:
    if 2 * edits(a, b) <= min(max(4, len(a) // 4), len(a)):
        return True
    few, many = sorted((_WORD.findall(a), _WORD.findall(b)), key=len)
    return bool(few) and all(any(_same_word(x, y) for y in many) for x in few)


_WORD = re.compile(r"[a-z0-9]+")


def _same_word(x: str, y: str) -> bool:
    shorter, longer = sorted((x, y), key=len)
    return shorter == longer or (len(shorter) > 2 and longer.startswith(shorter))


def unknown_name(kind: str, name: object, known_names: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name.

    Args:
        kind: Description of the name (`"attention mechanism"`).
        name: The unknown name.
        known_names: All allowed names.
    """
    known_names = sorted({str(k) for k in known_names})
    listing = ", ".join(known_names)
    return ConfigError(
        f"unknown {kind} {name!r}{did_you_mean(str(name), known_names)} (known: {listing})"
    )


def describe_missing_path(path: str) -> str:
    """Return where a path leaves the existing folders, as the end of a sentence.

    The result is `"; there is no 'gpro' in runs; did you mean 'grpo'?"`. It is empty for a path
    that exists, and for a name such as `ORGANIZATION/MODEL` whose first part is no folder here.
    """
    try:
        return _find_missing_part(Path(path).expanduser().parts)
    except (OSError, RuntimeError, ValueError):  # no file can have this name
        return ""


def _find_missing_part(parts: tuple[str, ...]) -> str:
    place = Path()
    for depth, part in enumerate(parts):
        if (place / part).exists():
            place /= part
            continue
        if depth == 0 and len(parts) < 3:
            return ""
        names = [entry.name for entry in place.iterdir()] if place.is_dir() else []
        folder = "the working directory" if place == Path() else str(place)
        return f"; there is no {part!r} in {folder}{did_you_mean(part, names)}"
    return ""
