"""A reference that follows the learner has the weights of TRL's synchronization callback."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.testing import require_torch
from ed_trainers.roles.frozen import Following
from flax import nnx
from safetensors.numpy import load_file

require_torch()
pytest.importorskip("trl")

from tests.parity.method_cases import harness  # noqa: E402 - imports torch inside


@pytest.mark.nightly
def test_reference_sync_matches_trl(tmp_path) -> None:
    from trl.trainer.callbacks import SyncRefModelCallback

    learner, reference = (harness.our_model(harness.folder(seed)) for seed in (0, 1))
    own, other = (harness.hf_model(harness.folder(seed)) for seed in (0, 1))
    learned = learner.split_module()[1]
    following = Following(
        "reference", reference, learned, alpha=0.6, every=2, present=lambda: learned
    )
    now = following.begin
    for step in range(1, 7):
        now = jax.jit(following.update_reference)(now, learned, jnp.asarray(step))
        if step % 2 == 0:
            SyncRefModelCallback._sync_target_model(own, other, 0.6)
    nnx.update(reference, now)
    reference.save_pretrained(tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    wanted = {name: p.detach().numpy() for name, p in other.named_parameters()}
    assert arrays.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(arrays[name], array, rtol=1e-6, atol=1e-7, err_msg=name)
