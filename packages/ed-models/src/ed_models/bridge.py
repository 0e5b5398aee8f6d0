"""Methods that tie a module to Hugging Face directories and the hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Self

import huggingface_hub
import jax
from ed_infra.config import EasyDeLBaseConfig
from jax.typing import DTypeLike

from ed_models import hub
from ed_models.saving import Tokenizer, save


class EasyBridgeMixin:
    """`from_pretrained`, `save_pretrained` and `push_to_hub` of a module that has a config."""

    config: EasyDeLBaseConfig
    # Text of the checkpoint's generation_config.json: kept for saving, read for special tokens.
    generation_json: str | None = None

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> Self:
        """Load this class from a directory or a hub repository.

        `ed_models.hub.from_pretrained` lists the options and errors.
        """
        return hub.from_pretrained(name_or_path, cls, **options)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        tokenizer: Tokenizer | None = None,
        max_shard_size: int | str = "5GB",
        dtype: DTypeLike | None = None,
    ) -> None:
        """Write config, weights, generation settings and tokenizer as `transformers` reads them.

        See `ed_models.saving.save` for the arguments.
        """
        save(self, save_directory, tokenizer=tokenizer, max_shard_size=max_shard_size, dtype=dtype)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: Tokenizer | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload model",
        max_shard_size: int | str = "5GB",
        dtype: DTypeLike | None = None,
    ) -> str:
        """Save to a hub repository, made if it is not there; returns the address of the commit."""
        api = huggingface_hub.HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "model"
            self.save_pretrained(
                target, tokenizer=tokenizer, max_shard_size=max_shard_size, dtype=dtype
            )
            if jax.process_index() != 0:
                return f"{repo_id} (uploaded by process 0)"
            repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            commit = api.upload_folder(
                repo_id=repo, folder_path=target, revision=revision, commit_message=commit_message
            )
        return str(commit)
