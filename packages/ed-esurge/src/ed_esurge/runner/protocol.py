"""`Runner`: what an engine loop calls to execute its plans.

`ModelRunner` runs a decoder on local devices, `EncoderRunner` an encoder, and
`ed_esurge.engine.remote.RemoteRunner` represents a runner of another process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn, Protocol

from ed_models.adapters.values import Adapter
from ed_models.modalities.items import EncoderItems
from ed_models.protocol import LanguageModel
from tqdm import tqdm

from ed_esurge.core.plan import StepPlan
from ed_esurge.grammars.store import Grammar
from ed_esurge.runner.buckets import StepShape
from ed_esurge.runner.result import StepResult
from ed_esurge.runner.weights import Leaf, NewWeights
from ed_esurge.sampling import PoolingParams, SamplingParams


class RunnerWeights(Protocol):
    """The served weights; see `ed_esurge.runner.weights.ServedWeights`."""

    @property
    def there(self) -> bool:
        """Whether the weights are on the device."""
        ...

    def check_weights(self, new: NewWeights) -> list[Leaf]:
        """Return the leaves of new weights. Raise ConfigError if they do not match the model."""
        ...

    def replace(self, new: NewWeights, *, copy: bool = True) -> None:
        """Replace the weights."""
        ...

    def are_finite(self) -> bool:
        """Return whether all weights are finite."""
        ...

    def drop(self) -> None:
        """Release the weights."""
        ...

    def to_host(self) -> None:
        """Move the weights to host memory."""
        ...

    def from_host(self) -> None:
        """Move the weights back to the device."""
        ...


class PagesInHostMemory(Protocol):
    """Pages that the prefix cache evicted; see `ed_esurge.runner.host_pages.HostMemory`."""

    @property
    def places(self) -> int:
        """Number of places of each group of layers."""
        ...

    @property
    def bytes_saved(self) -> int:
        """Bytes copied from the device since the start."""
        ...

    @property
    def bytes_loaded(self) -> int:
        """Bytes copied to the device since the start."""
        ...


class Runner(Protocol):
    """Executes plans. All methods are called by one thread."""

    @property
    def model(self) -> LanguageModel:
        """The model without its arrays."""
        ...

    @property
    def items(self) -> EncoderItems | None:
        """The items of the model's encoder; None for other models."""
        ...

    @property
    def weights(self) -> RunnerWeights:
        """The served weights."""
        ...

    @property
    def host(self) -> PagesInHostMemory | None:
        """Pages in host memory; None = not used."""
        ...

    @property
    def num_pages(self) -> Mapping[str, int]:
        """Number of pages of each group's pool."""
        ...

    @property
    def num_states(self) -> int | None:
        """Number of saved recurrent states; None = states are not saved."""
        ...

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary."""
        ...

    @property
    def max_logprobs(self) -> int:
        """Number of alternatives that a step returns."""
        ...

    @property
    def num_traces(self) -> int:
        """Number of traces, which is constant after all functions are compiled."""
        ...

    @property
    def num_pending(self) -> int:
        """Number of functions that a background thread has not compiled yet."""
        ...

    def stop_compiling(self, *, wait: bool = True) -> None:
        """Stop the background thread after the function in work.

        Args:
            wait: whether to wait for this function.
        """
        ...

    def memory_bytes(self) -> int:
        """Return the bytes of weights, adapter slots, pages and states over all devices."""
        ...

    def describe(self) -> str:
        """Return the sizes of the memory and the number of shapes, for the log."""
        ...

    @property
    def allocated(self) -> bool:
        """Whether the device memory of sequences is allocated."""
        ...

    def allocate(self) -> None:
        """Allocate the device memory of sequences."""
        ...

    def free(self) -> None:
        """Free the device memory of sequences."""
        ...

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Compile all functions for serving and update the progress bar."""
        ...

    def compile_first(self, progress: tqdm[NoReturn]) -> StepShape | None:
        """Compile one generic shape, and the other functions in a background thread.

        Returns:
            the shape that limits the steps until then; None if all functions are compiled.
        """
        ...

    def hold(self, params: SamplingParams | PoolingParams) -> Grammar | None:
        """Return the grammar of a request, which exists as long as the caller holds it."""
        ...

    def load_adapter(self, number: int, place: int, adapter: Adapter) -> None:
        """Write a LoRA adapter to a slot."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Start a step and return without waiting for the device.

        Raises:
            RequestError: a sequence cannot be prepared. Nothing was computed.
        """
        ...
