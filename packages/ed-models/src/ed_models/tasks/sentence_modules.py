"""The modules of an embedding checkpoint of sentence-transformers after the transformer.

`modules.json` lists the modules. Each module has a folder, such as `1_Pooling` or `2_Dense`
(https://sbert.net/docs/package_reference/sentence_transformer).

Legend: d inputs, e outputs of a dense layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from ed_infra.errors import CheckpointError
from ed_layers.activations import activation
from flax import nnx
from jaxtyping import Array, Float

from ed_models.checkpoints.checks import MODULES_NAME
from ed_models.checkpoints.filling import SeparateParam
from ed_models.checkpoints.pickled_files import open_tensors
from ed_models.checkpoints.tensor_files import is_finite
from ed_models.tasks.pooling import Pooling, PoolingMode, unit

# Mode -> key of the configuration of a pooling module. Modes in this order have one key each;
# other combinations are written as a list.
_KEYS: dict[PoolingMode, str] = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
# Our activation -> class of torch.
_ACTIVATIONS = {
    "identity": "torch.nn.modules.linear.Identity",
    "tanh": "torch.nn.modules.activation.Tanh",
    "relu": "torch.nn.modules.activation.ReLU",
    "gelu": "torch.nn.modules.activation.GELU",
    "silu": "torch.nn.modules.activation.SiLU",
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
}
# Vectors of a text in the features of sentence-transformers.
_VECTORS = "sentence_embedding"


class Dense(nnx.Module):
    """A linear layer and an activation, in float32; optionally with a residual connection.

    Args:
        kernel: float32 [d, e].
        bias: float32 [e], or None.
        residual: float32 [d, e], the projection of the residual; None = no projection.
        activation: a name of `ed_layers.activations`, or "identity".
        use_residual: whether the input, or its projection, is added to the output.
    """

    def __init__(
        self,
        kernel: np.ndarray,
        bias: np.ndarray | None = None,
        residual: np.ndarray | None = None,
        *,
        activation: str = "tanh",
        use_residual: bool = False,
    ):
        self.kernel = SeparateParam(kernel, axes=(None, None))
        self.bias = None if bias is None else SeparateParam(bias, axes=(None,))
        self.residual = None if residual is None else SeparateParam(residual, axes=(None, None))
        self.activation, self.use_residual = activation, use_residual

    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows e"]:
        """Return the vectors after the layer."""
        out = x @ self.kernel[...]
        if self.bias is not None:
            out = out + self.bias[...]
        if self.activation != "identity":
            out = activation(self.activation)(out)
        if not self.use_residual:
            return out
        return out + (x if self.residual is None else x @ self.residual[...])

    @property
    def features(self) -> int:
        """Number of outputs, e."""
        return self.kernel.shape[1]

    @classmethod
    def read(cls, folder: Path, inputs: int, *, allow_pickle: bool, check_finite: bool) -> Dense:
        """Read a dense layer from its folder.

        Args:
            folder: a folder such as `2_Dense`.
            inputs: size of the vectors of the module before, d.
            allow_pickle, check_finite: see `ed_models.checkpoints.hub.from_pretrained`.

        Raises:
            CheckpointError: a file is damaged, a setting is unsupported, or the shapes do not fit.
        """
        path = folder / "config.json"
        settings = _object(path)
        for name in ("module_input_name", "module_output_name"):
            if settings.get(name) not in (None, _VECTORS):
                raise CheckpointError(
                    f"{path} has {name}={settings[name]!r}; only {_VECTORS!r} is supported"
                )
        torch_class = settings.get("activation_function", _ACTIVATIONS["tanh"])
        activations = {name.rpartition(".")[2]: ours for ours, name in _ACTIVATIONS.items()}
        stem, _, name = str(torch_class).rpartition(".")
        if not stem.startswith("torch.") or name not in activations:
            raise CheckpointError(
                f"{path} has activation_function={torch_class!r}; supported classes: "
                f"{', '.join(_ACTIVATIONS.values())}"
            )
        d, e = inputs, settings.get("out_features")
        if settings.get("in_features") != d or not isinstance(e, int) or e < 1:
            raise CheckpointError(
                f"{path} maps {settings.get('in_features')} to {e} features, but its input has "
                f"{inputs} features"
            )
        use_residual = bool(settings.get("use_residual", False))
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (e, d)}
        if settings.get("bias", True):
            shapes["linear.bias"] = (e,)
        if use_residual and d != e:
            shapes["residual.weight"] = (e, d)
        values = _tensors(folder, shapes, allow_pickle=allow_pickle, check_finite=check_finite)
        residual = values.get("residual.weight")
        return cls(
            values["linear.weight"].T,
            values.get("linear.bias"),
            None if residual is None else residual.T,
            activation=activations[name],
            use_residual=use_residual,
        )

    def settings(self) -> dict[str, Any]:
        """Return the content of `config.json`."""
        d, e = self.kernel.shape
        residual = {"use_residual": True} if self.use_residual else {}
        return {
            "in_features": d,
            "out_features": e,
            "bias": self.bias is not None,
            "activation_function": _ACTIVATIONS[self.activation],
            **residual,
        }

    def tensors(self) -> dict[str, jax.Array]:
        """Return the weights under their names in the file."""
        values = {"linear.weight": self.kernel[...].T}
        if self.bias is not None:
            values["linear.bias"] = self.bias[...]
        if self.residual is not None:
            values["residual.weight"] = self.residual[...].T
        return values


class Normalize(nnx.Module):
    """A normalization of vectors to length one, in front of a dense layer."""

    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        """Return the vectors, scaled to length one."""
        return unit(x)


#: A module after the pooling.
Transform = Dense | Normalize


@dataclass(frozen=True)
class SentenceModules:
    """The modules of a checkpoint.

    Attributes:
        pooling: the pooling method; `normalize` is set if the last module is a normalization.
        include_prompt: whether the tokens of a prompt are pooled.
        transforms: the modules between the pooling and the last normalization.
    """

    pooling: Pooling
    include_prompt: bool = True
    transforms: Sequence[Transform] = ()

    @classmethod
    def read(
        cls, directory: Path, *, allow_pickle: bool = False, check_finite: bool = True
    ) -> SentenceModules | None:
        """Read the modules of a checkpoint; return None without `modules.json`.

        Raises:
            CheckpointError: the files are damaged, or list unsupported modules.
        """
        path = directory / MODULES_NAME
        if not path.is_file():
            return None
        try:
            listed = [(m["type"].rpartition(".")[2], m["path"]) for m in _json(path)]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is no list of modules ({error!r})") from error
        kinds = [kind for kind, _ in listed]
        if kinds[:2] != ["Transformer", "Pooling"] or {*kinds[2:]} - {"Dense", "Normalize"}:
            raise CheckpointError(
                f"{path} lists the modules {', '.join(kinds)}; an embedding model here is a "
                "Transformer, a Pooling, and any number of Dense and Normalize modules"
            )
        names = [Path(name) for _, name in listed]
        if any(name.is_absolute() or ".." in name.parts for name in names):
            raise CheckpointError(f"{path} has a path outside of the checkpoint")
        pooling_path = directory / names[1] / "config.json"
        settings = _object(pooling_path)
        modes = _modes(pooling_path, settings)
        size = settings.get("embedding_dimension", settings.get("word_embedding_dimension"))
        transforms: list[Transform] = []
        features = size * len(modes) if isinstance(size, int) else 0
        for kind, name in zip(kinds[2:], names[2:], strict=True):
            if kind == "Normalize":
                transforms.append(Normalize())
                continue
            options = {"allow_pickle": allow_pickle, "check_finite": check_finite}
            layer = Dense.read(directory / name, features, **options)
            transforms.append(layer)
            features = layer.features
        normalize = bool(transforms) and isinstance(transforms[-1], Normalize)
        while transforms and isinstance(transforms[-1], Normalize):
            transforms.pop()
        include = bool(settings.get("include_prompt", True))
        return cls(Pooling.of(modes, normalize), include, transforms)

    def folders(self) -> dict[str, str | Transform]:
        """Return folder -> module, or the name of a module without weights, in order."""
        last = ["Normalize"] if self.pooling.normalize else []
        modules: list[str | Transform] = ["Transformer", "Pooling", *self.transforms, *last]
        kinds = [m if isinstance(m, str) else type(m).__name__ for m in modules]
        return {
            f"{place}_{kind}" if place else "": module
            for place, (kind, module) in enumerate(zip(kinds, modules, strict=True))
        }

    def write(self, directory: Path, features: int) -> None:
        """Write the files of the modules without their weights.

        Args:
            directory: the directory of the checkpoint.
            features: size of the hidden states.
        """
        modules = []
        for place, folder in enumerate(self.folders()):
            kind = folder.partition("_")[2] or "Transformer"
            name = f"sentence_transformers.models.{kind}"
            modules.append({"idx": place, "name": str(place), "path": folder, "type": name})
        _write(directory / MODULES_NAME, modules)
        settings: dict[str, Any] = {"word_embedding_dimension": features}
        modes = self.pooling.modes
        if modes == tuple(mode for mode in _KEYS if mode in modes):
            settings |= {key: mode in modes for mode, key in _KEYS.items()}
        else:
            settings["pooling_mode"] = list(modes)
        settings["include_prompt"] = self.include_prompt
        _write(directory / "1_Pooling/config.json", settings)
        for folder, module in self.folders().items():
            if isinstance(module, Dense):
                _write(directory / folder / "config.json", module.settings())

    def tensors(self) -> dict[str, Mapping[str, jax.Array]]:
        """Return folder -> name -> array of the weights."""
        folders = self.folders().items()
        return {folder: module.tensors() for folder, module in folders if isinstance(module, Dense)}


def _modes(path: Path, settings: Mapping[str, Any]) -> list[PoolingMode]:
    named = settings.get("pooling_mode")  # newer files have one field
    if named is None:
        named = [mode for mode, key in _KEYS.items() if settings.get(key)]
    modes = [named] if isinstance(named, str) else named
    if not isinstance(modes, list) or not modes or not all(mode in _KEYS for mode in modes):
        raise CheckpointError(
            f"{path} has the pooling modes {modes}; these modes are supported: {', '.join(_KEYS)}"
        )
    return cast(list[PoolingMode], modes)


def _tensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], *, allow_pickle: bool, check_finite: bool
) -> dict[str, np.ndarray]:
    """Return the tensors of a folder in float32."""
    files = open_tensors(folder, allow_pickle=allow_pickle)
    file_shapes = {name: tuple(entry.shape) for name, entry in files.items()}
    if file_shapes != dict(shapes):
        raise CheckpointError(f"{folder} has the tensors {file_shapes}, but needs {dict(shapes)}")
    values = {name: files.read(name) for name in shapes}
    for name, value in values.items():
        if check_finite and not is_finite(value):
            raise CheckpointError(f"{folder}: {name} has NaN or infinite numbers")
    return {name: np.asarray(value, np.float32) for name, value in values.items()}


def _object(path: Path) -> dict[str, Any]:
    content = _json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return content


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
