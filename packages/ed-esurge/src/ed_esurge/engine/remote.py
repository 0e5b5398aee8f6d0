"""`RemoteRunner`: the runner of a replica on devices of other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from ed_models.adapters.values import Adapter
from ed_models.modalities.items import EncoderItems
from ed_models.protocol import LanguageModel
from tqdm import tqdm

from ed_esurge.core.plan import StepPlan
from ed_esurge.runner.protocol import Runner, RunnerWeights
from ed_esurge.runner.result import StepResult
from ed_esurge.runner.weights import Leaf, NewWeights
from ed_esurge.sampling import PoolingParams, SamplingParams


class RemoteWeights:
    """The weights of a remote replica. They are present exactly when the local weights are.

    The remote process executes the same commands, so changes have no effect here.
    """

    def __init__(self, local: RunnerWeights) -> None:
        self._local = local

    @property
    def there(self) -> bool:
        return self._local.there

    def check_weights(self, new: NewWeights) -> list[Leaf]:
        return self._local.check_weights(new)

    def are_finite(self) -> bool:
        return True

    def replace(self, new: NewWeights, *, copy: bool = True) -> None:
        pass

    def drop(self) -> None:
        pass

    def to_host(self) -> None:
        pass

    def from_host(self) -> None:
        pass


class RemotePages:
    """Pages in the host memory of a remote replica, of which this process stores nothing."""

    bytes_saved = bytes_loaded = 0

    def __init__(self, places: int) -> None:
        self.places = places


class RemoteRunner:
    """Implements `Runner` for a replica that another process runs.

    The steps return empty results. `Replicas` replaces them by the results of the other process.

    Args:
        local: a runner of this process with the same sizes.
    """

    num_traces = num_pending = 0

    def __init__(self, local: Runner) -> None:
        self._local = local
        self.host = None if local.host is None else RemotePages(local.host.places)
        self.weights = RemoteWeights(local.weights)
        self.allocated = True

    @property
    def model(self) -> LanguageModel:
        return self._local.model

    @property
    def items(self) -> EncoderItems | None:
        return self._local.items

    @property
    def num_pages(self) -> Mapping[str, int]:
        return self._local.num_pages

    @property
    def num_states(self) -> int | None:
        return self._local.num_states

    @property
    def vocab_size(self) -> int:
        return self._local.vocab_size

    @property
    def max_logprobs(self) -> int:
        return self._local.max_logprobs

    def memory_bytes(self) -> int:
        return 0

    def describe(self) -> str:
        return self._local.describe()

    def allocate(self) -> None:
        self.allocated = True

    def free(self) -> None:
        self.allocated = False

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(plan, None, ())

    def hold(self, params: SamplingParams | PoolingParams) -> None:
        return None

    def load_adapter(self, number: int, place: int, adapter: Adapter) -> None:
        pass

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        pass

    def compile_first(self, progress: tqdm[NoReturn]) -> None:
        pass

    def stop_compiling(self, *, wait: bool = True) -> None:
        pass
