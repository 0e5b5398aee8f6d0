"""The checks of the conformance suite.

Legend: b rows, s positions, v vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import parameter_names
from ed_infra.testing import require_torch
from ed_layers.cache import RaggedBatch
from flax import nnx
from jax.typing import ArrayLike

from ed_models.checkpoints.loading import weight_map
from ed_models.conformance.subjects import B, S, Subject, forward
from ed_models.weights.rules import renamer

OURS = 2e-5  # usual bound for two programs of this project
MESHES = ((1, 8, 1, 1, 1), (2, 2, 1, 2, 1), (1, 1, 2, 2, 2))


def parity(subject: Subject) -> float:
    """Compare the outputs of left-padded rows with Hugging Face's."""
    ours = subject.output(forward(subject.model, **subject.build_padded_inputs()))
    real = subject.real
    return _check_difference(
        np.asarray(ours)[real], subject.reference_logits[real], subject.bound, "logits"
    )


def _gradients(subject: Subject) -> float:
    """Compare the loss and the gradients of every parameter with Hugging Face's."""
    torch = require_torch()
    from transformers.core_model_loading import revert_weight_conversion

    model = subject.torch_model
    theirs = subject.torch_loss()
    # A tied matrix has several names.
    named = model.named_parameters(remove_duplicate=False)
    params = {name: p for name, p in named if p.requires_grad}
    torch_grads = torch.autograd.grad(theirs, list(params.values()), allow_unused=True)
    grads = {n: g for n, g in zip(params, torch_grads, strict=True) if g is not None and g.numel()}
    # A checkpoint has a tensor per expert, the module has one tensor for all experts.
    grads = revert_weight_conversion(model, grads)
    graphdef, params, graphother = subject.model.split_module()

    def loss(params: object) -> jax.Array:
        module = nnx.merge(graphdef, params, graphother)
        if hasattr(module, "compute_loss"):
            return module.compute_loss(**subject.training())[0].loss
        return jnp.mean(jnp.square(subject.output(module(**subject.training()))))

    ours, ours_grads = jax.jit(jax.value_and_grad(loss))(params)
    worst = _check_difference(np.asarray(ours), theirs.detach().numpy(), subject.bound, "the loss")
    by_name = _per_layer(ours_grads)
    table = weight_map(subject.module_class, ours_grads, subject.model.config)
    # transformers writes some tensors under other names than published checkpoints have.
    rename = renamer(getattr(subject.module_class, "OTHER_NAMES", {}))
    renamed_grads = {rename(name): g for name, g in grads.items() if name not in table.hf_shapes}
    grads |= {name: g for name, g in renamed_grads.items() if name in table.hf_shapes}
    # Some gradients are zero in exact arithmetic, such as that of the bias of keys without
    # positions. Their rounding errors are about float32's epsilon times the largest gradient.
    largest = max(float(g.abs().max()) for g in grads.values())
    bound = subject.cases.gradients
    least = subject.zero_gradient * float(np.finfo(np.float32).eps) * largest / bound
    for name in table.hf_shapes:
        # Parameters that only select, such as an index of keys, have no gradient.
        expected = grads[name].numpy() if name in grads else np.zeros(table.hf_shapes[name])
        got = table.save(name, lambda ours, at: by_name[ours][at])
        scale = max(float(np.abs(expected).max()), least)
        worst = max(
            worst, _check_difference(got / scale, expected / scale, bound, f"gradient of {name}")
        )
    return worst


def _generation(subject: Subject) -> float:
    """Compare 32 greedy tokens from padded rows with Hugging Face's."""
    make, theirs = subject.torch_model.generate, []
    for row in subject.torch_prompts():
        out = make(**row, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0)
        theirs += list(out.numpy()[:, -32:])
    ours = subject.model.generate(**subject.prompts(), max_new_tokens=32, eos_token_id=[])
    # min_new_tokens excludes the end token in transformers: compare up to our first end token.
    for row, (got, expected) in enumerate(zip(ours.sequences[:, -32:], theirs, strict=True)):
        ends = np.flatnonzero(got == subject.fields["eos_token_id"])
        n = ends[0] if len(ends) else len(got)
        assert (got[:n] == expected[:n]).all(), f"row {row}: got {got[:n]}, expected {expected[:n]}"
    return 0.0


def cache(subject: Subject) -> float:
    """Compare a contiguous cache, filled in steps, with a forward pass without a cache."""
    model, at, parts = subject.model, 0, []
    length = encoder_length(subject)
    filled = model.init_cache(B, 32, **length)
    for n in (11, 1, 1, 11):  # the first and the last call share a program
        inputs = subject.inputs(at=slice(at, at + n))
        out = forward(model, "decode", **inputs, past_key_values=filled)
        filled, at = out.past_key_values, at + n
        parts.append(np.asarray(out.logits))
    return _check_difference(
        np.concatenate(parts, axis=1), subject.logits, subject.cases.ours, "logits"
    )


def encoder_length(subject: Subject) -> dict[str, int]:
    """Return the argument of `init_cache` for the positions of an encoder."""
    length = subject.encoder_length
    return {} if length is None else {"encoder_length": length}


def pages(subject: Subject) -> float:
    """Compare flat batches over pages, with prompt chunks and single tokens, with one forward."""
    model, page, width = subject.model, 4, 8
    filled = subject.paged_cache(B * width + 1, page)
    table = np.random.default_rng(1).permutation(B * width).reshape(B, width)
    done, got = np.zeros(B, int), [[] for _ in range(B)]
    for counts in subject.page_counts:
        places = [np.arange(done[row], done[row] + n) for row, n in enumerate(counts)]
        slots = [table[row, at // page] * page + at % page for row, at in enumerate(places)]
        done, ends = done + counts, np.cumsum([0, *counts])
        pad = 48 - ends[-1]
        ragged = RaggedBatch(
            cu_q_lens=jnp.asarray(ends, jnp.int32),
            kv_lens=jnp.asarray(done, jnp.int32),
            seq_of_token=jnp.asarray(np.repeat([*range(B), 0], [*counts, pad]), jnp.int32),
            slots={"full": jnp.asarray(np.r_[*slots, [10**6] * pad], jnp.int32)},
            page_table={"full": jnp.asarray(table, jnp.int32)},
            state_slots=jnp.arange(B, dtype=jnp.int32),
            num_seqs=jnp.asarray(B, jnp.int32),
            prompt_lens=jnp.full(B, subject.prompt_length, jnp.int32),
        )
        token_index = [row * S + at for row, at in enumerate(places)]
        inputs = subject.step(np.concatenate([*token_index, np.full(pad, -1)]))
        out = forward(model, "decode", **inputs, past_key_values=filled, ragged=ragged)
        filled = out.past_key_values
        for row in range(B):
            got[row].append(np.asarray(out.logits)[0, ends[row] : ends[row + 1]])
    return max(
        _check_difference(
            np.concatenate(got[row]),
            subject.logits[row],
            subject.cases.ours,
            f"logits of row {row}",
        )
        for row in range(B)
    )


def check_packing(subject: Subject) -> float:
    """Compare a packed row of several documents with each document alone."""
    row, documents = subject.documents()
    got = np.asarray(subject.output(forward(subject.model, **row)))
    worst = 0.0
    for number, (at, inputs) in enumerate(documents, start=1):
        document_logits = np.asarray(subject.output(forward(subject.model, **inputs)))
        worst = max(
            worst,
            _check_difference(
                got[0, at], document_logits[0], subject.cases.ours, f"logits of document {number}"
            ),
        )
    return worst


def padding(subject: Subject) -> float:
    """Compare a left-padded row with the row alone, with and without a cache."""
    model, row, worst = subject.model, 3, 0.0
    row_logits = np.asarray(subject.output(forward(model, **subject.build_row_inputs(row))))[0]
    caches: list[dict[str, Any]] = [{}]
    if "cache" in subject.checks:
        length = encoder_length(subject)
        caches.append({"past_key_values": model.init_cache(B, 32, **length)})
    for filled in caches:
        out = np.asarray(subject.output(forward(model, **subject.build_padded_inputs(), **filled)))
        got = out[row][subject.real[row]]
        worst = max(
            worst,
            _check_difference(got, row_logits, subject.cases.ours, "logits of the padded row"),
        )
    return worst


def layouts(subject: Subject) -> float:
    """Compare unrolled layers with scanned layers."""
    scanned_model = subject.load(scan_layers=subject.model.layout == "leaves")
    return _check_difference(
        np.asarray(subject.output(forward(scanned_model, **subject.build_full_inputs()))),
        subject.logits,
        subject.cases.ours,
        "logits",
    )


def meshes(subject: Subject) -> float:
    """Compare three meshes of eight devices with one device."""
    worst = 0.0
    for dims in MESHES:
        model = subject.load(dims)
        got = np.asarray(subject.output(forward(model, **subject.build_full_inputs())))
        worst = max(
            worst,
            _check_difference(got, subject.logits, subject.cases.ours, f"logits on mesh {dims}"),
        )
    return worst


def check_saving(subject: Subject) -> float:
    """Load a saved model in Hugging Face: bitwise equal tensors, none missing or unexpected."""
    require_torch()
    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        reloaded_model, report = subject.torch_class.from_pretrained(
            folder, output_loading_info=True
        )
    absent = set(report.pop("missing_keys"))
    missing = [name for name in absent if not subject.ignores(name)]
    assert not any([missing, *report.values()]), (missing, report)
    theirs = reloaded_model.state_dict()
    for name, value in subject.torch_model.state_dict().items():
        if name in absent:  # a tensor that the model does not use
            continue
        np.testing.assert_array_equal(theirs[name].numpy(), value.numpy(), err_msg=name)
    got = subject.torch_outputs(reloaded_model.eval())
    real = subject.real
    return _check_difference(
        got[real], subject.torch_logits[real], subject.saved_bound, "saved logits"
    )


Check = Callable[[Subject], float]

#: Checks that need torch and a model type of `transformers`.
AGAINST_TORCH: Mapping[str, Check] = {
    "parity": parity,
    "gradients": _gradients,
    "generation": _generation,
    "saved": check_saving,
}
CHECKS: Mapping[str, Check] = {
    **AGAINST_TORCH,
    "cache": cache,
    "pages": pages,
    "packed": check_packing,
    "padding": padding,
    "layouts": layouts,
    "meshes": meshes,
}
#: Fast checks, which the default test run executes for every family.
FAST = ("parity", "cache")


def _check_difference(got: np.ndarray, expected: ArrayLike, bound: float, label: str) -> float:
    """Return the largest difference.

    Raises:
        AssertionError: The shapes differ, or the difference exceeds the bound.
    """
    shapes = np.shape(got), np.shape(expected)
    assert shapes[0] == shapes[1], f"{label}: the shape is {shapes[0]}, expected {shapes[1]}"
    error = float(np.abs(got - np.asarray(expected)).max())
    assert error <= bound, (
        f"{label}: the largest difference is {error:.2e}, above the bound of {bound:.0e}"
    )
    return error


def _per_layer(state: nnx.State) -> dict[str, np.ndarray]:
    """Return the arrays of a state by canonical name."""
    arrays: dict[str, np.ndarray] = {}
    for path, variable in nnx.to_flat_state(state):
        value = np.asarray(variable.get_value())
        names = parameter_names.canonical(path)
        arrays |= dict(
            zip(names, value if parameter_names.is_stacked(path) else [value], strict=True)
        )
    return arrays
