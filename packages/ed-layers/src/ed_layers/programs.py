"""The folder of the compiled programs of a model, which later processes load."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ed_infra.compilation.cache import IMPORTED
from ed_infra.compilation.fingerprint import NoFingerprintError, fingerprint
from ed_infra.compilation.private_files import UntrustedFileError, user_key
from ed_infra.compilation.programs import Programs
from ed_infra.config.base import EasyDeLBaseConfig
from ed_infra.logging import get_logger, once
from ed_infra.sharding.placement import ShardedConfig

from ed_layers import native
from ed_layers.attention.kernels import kernels

logger = get_logger(__name__)


def open_programs(
    config: ShardedConfig, home: Path | None, parts: object, packages: Sequence[str]
) -> Programs[Any] | None:
    """Return the stored programs of a model, or None if compiled programs are not stored.

    Args:
        config: configuration of the model; the programs run on its mesh.
        home: folder of all programs of this kind; None: programs are not stored.
        parts: all data that determines the programs.
        packages: packages whose sources determine the programs.
    """
    if home is None:
        return None
    with native.chosen_by(config) if isinstance(config, EasyDeLBaseConfig) else nullcontext():
        kernels_in_use = native.describe()  # XLA requires them when a program is loaded
    try:
        name = fingerprint(parts, kernels_in_use, kernels(), packages=packages, imported=IMPORTED)
        key = user_key(home.parent)
    except (NoFingerprintError, OSError, UntrustedFileError) as error:
        once(logger, f"compiled programs are kept by jax alone: {error}")
        return None
    programs = Programs[Any](home / name, list(config.mesh.devices.flat), key)
    return programs if programs.usable else None
