"""`SyncedReference`: trainers whose reference may follow the learner (`sync_ref_model`)."""

from __future__ import annotations

from collections.abc import Mapping

from ed_infra.errors import ConfigError
from ed_models.adapters.lora import has_lora
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.contract import Frozen
from ed_trainers.options.sync import SyncArguments
from ed_trainers.roles.frozen import Following
from ed_trainers.state import EasyDeLState
from ed_trainers.trainer import Trainer

REFERENCE = "reference"


class SyncedReference(Trainer):
    """A trainer whose state holds the reference's weights, where these follow the learner's.

    Raises:
        ConfigError: the learner has adapters, or the reference is no model like the learner.
    """

    arguments: SyncArguments
    # Of a trainer that has no state; steps of a running training overwrite the arrays.
    _reference: nnx.State | None = None

    def adopt(self, state: EasyDeLState) -> None:
        """See `Trainer.adopt`; a reference that follows comes along."""
        super().adopt(state)
        self._reference = state.reference

    def learned(self) -> nnx.State:
        """The learner's parameters that the reference follows: all that learn."""
        return self._first_state().graphstate

    def _first_state(self) -> EasyDeLState:
        return self.beside_reference(super()._first_state())

    def beside_reference(self, state: EasyDeLState) -> EasyDeLState:
        """Return a state with the weights of a reference that follows, if it has none yet."""
        if self._reference is None or state.reference is not None:
            return state
        return state.replace(reference=self._reference)

    def _freeze(self, models: Mapping[str, LanguageModel]) -> Frozen:
        arguments = self.arguments
        if not arguments.sync_ref_model:
            return super()._freeze(models)
        if has_lora(self._model):
            raise ConfigError(
                "sync_ref_model moves the reference's weights, and a model with adapters has its "
                "own base for a reference, which stays: leave sync_ref_model out, or train "
                "without adapters"
            )
        placed = {name: self.on_mesh(name, m) for name, m in self.frozen_of(models).items()}
        following = Following(
            REFERENCE,
            placed[REFERENCE],
            self.learned(),
            alpha=arguments.ref_model_mixup_alpha,
            every=arguments.ref_model_sync_steps,
            present=self._present,
        )
        self._reference = following.begin
        if self._state is not None:
            self._state = self.beside_reference(self._state)
        return Frozen(placed, self._model, following)

    def _present(self) -> nnx.State:
        """The weights that the reference has now."""
        state = self.state
        reference = self._reference if state is None else state.reference
        assert reference is not None, "the state is made with it"
        return reference
