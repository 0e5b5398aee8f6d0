"""Methods that tie a module to Hugging Face directories and the hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Self

import huggingface_hub
import jax

from ed_models import hub


class EasyBridgeMixin:
    """`from_pretrained`, `save_pretrained` and `push_to_hub`; the work is in `ed_models.hub`."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> Self:
        """Load this class from a directory or a hub repository.

        Options and errors are those of `ed_models.hub.from_pretrained`.
        """
        return hub.from_pretrained(name_or_path, cls, **options)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        tokenizer: Any = None,
        max_shard_size: int | str = "5GB",
        dtype: Any = None,
    ) -> None:
        """Write config, weights, generation settings and tokenizer as `transformers` reads them.

        See `ed_models.saving.save` for the arguments.
        """
        hub.save(
            self, save_directory, tokenizer=tokenizer, max_shard_size=max_shard_size, dtype=dtype
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: Any = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload model",
        max_shard_size: int | str = "5GB",
        dtype: Any = None,
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
