"""A LoRA adapter in place of a model: the adapter names its base, which is loaded first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from ed_infra.errors import CheckpointError, ConfigError
from ed_infra.package_files import RUN_FOLDERS

if TYPE_CHECKING:
    from ed_models.protocol import LanguageModel
    from flax import nnx

_SETTINGS, _MODEL, _TOKENIZER = "adapter_config.json", "config.json", "tokenizer_config.json"


class AdapterFolder(NamedTuple):
    """A folder with an adapter, and the base that it names.

    Attributes:
        path: the folder.
        base: directory, hub id or address of the base.
        revision: branch, tag or commit of the base.
    """

    path: Path
    base: str
    revision: str | None

    @property
    def tokenizer(self) -> str | None:
        """The folder, if it contains a tokenizer."""
        return str(self.path) if (self.path / _TOKENIZER).is_file() else None

    def resolve_base(self) -> Path:
        """Return the directory with the settings of the base.

        Raises:
            CheckpointError: the base is not there.
        """
        from ed_models.checkpoints import hub

        try:
            return hub.resolve(self.base, weights=False, revision=self.revision)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.path / _SETTINGS} names the base model {self.base!r}: {error}. Change "
                "base_model_name_or_path in this file, or merge the adapter: elarge merge BASE "
                "ADAPTER TARGET"
            ) from None

    def attach(self, model: LanguageModel) -> LanguageModel:
        """Return the base with the adapter on its layers.

        Raises:
            EasyDeLError: the adapter does not fit the base.
        """
        from ed_models.adapters.peft import load_adapter

        adapted = load_adapter(cast("nnx.Module", model), self.path)
        return cast("LanguageModel", adapted).shard_model()


def find_adapter(folder: Path) -> AdapterFolder | None:
    """Return the adapter of a folder, or of the folder of a run; None for a model.

    Raises:
        EasyDeLError: the settings of the adapter cannot be read, or name no base.
    """
    if (folder / _MODEL).is_file():
        return None
    paths = (folder, folder / RUN_FOLDERS[1])
    path = next((one for one in paths if (one / _SETTINGS).is_file()), None)
    if path is None:
        return None
    from ed_models.adapters.peft_settings import read_adapter_settings

    settings = read_adapter_settings(path / _SETTINGS)
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(base, str) or not base or not isinstance(revision, str | None):
        raise ConfigError(
            f"{path / _SETTINGS} names no base model: write its directory or hub id in "
            "base_model_name_or_path"
        )
    return AdapterFolder(path, base, revision or None)
