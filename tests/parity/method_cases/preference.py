"""Compare methods of preference pairs with TRL's trainers."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

from tests.parity.method_cases import harness


def dpo(loss_type: str | tuple[str, ...], **options: Any) -> dict[str, float]:
    """Compare `dpo` with `trl.DPOTrainer`."""
    path, base = harness.folder(0), harness.folder(1)
    ours = harness.trainer_of(
        "dpo",
        harness.our_model(path),
        {"reference": harness.our_model(base)},
        loss_type=loss_type,
        **options,
    )
    chosen, rejected = zip(*harness.pairs(), strict=True)
    with tempfile.TemporaryDirectory() as directory:
        trainer, model = build_dpo(directory, loss_type, options)
        loss = trainer.compute_loss(model.train(), harness.answer_tensors([*chosen, *rejected]))
        theirs = harness.their_outcome(model, loss, trainer._metrics["train"])
    return harness.errors(harness.our_outcome(ours, harness.packed_pairs()), theirs)


def build_dpo(
    directory: str, loss_type: str | tuple[str, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Return a trainer of TRL and its model."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    smoothing = options.get("label_smoothing", 1e-3 if loss_type == "exo_pair" else 0.0)
    arguments = harness.config_of(
        DPOConfig,
        directory,
        loss_type=[loss_type] if isinstance(loss_type, str) else list(loss_type),
        **{**options, "label_smoothing": smoothing},
    )
    model = harness.hf_model(harness.folder(0))
    trainer = DPOTrainer(
        model=model,
        ref_model=harness.hf_model(harness.folder(1)),
        args=arguments,
        train_dataset=Dataset.from_list(harness.text_pairs()),
        processing_class=harness.tokenizer(),
    )
    return trainer, model


def answer_sides() -> dict[str, Any]:
    """Return the tensors that the collators of `trl.experimental` create from the pairs."""
    batch = {}
    for side, documents in zip(
        ("chosen", "rejected"), zip(*harness.pairs(), strict=True), strict=True
    ):
        tensors = harness.answer_tensors(list(documents))
        mask = tensors.pop("completion_mask")
        batch |= {f"{side}_{name}": tensor for name, tensor in tensors.items()}
        batch[f"{side}_labels"] = tensors["input_ids"].masked_fill(mask == 0, -100)
    return batch


def orpo(beta: float) -> dict[str, float]:
    """Compare `orpo` with `trl.experimental.orpo.ORPOTrainer`."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return experimental(ORPOTrainer, ORPOConfig, "orpo", {"beta": beta}, {"beta": beta})


def cpo(**options: Any) -> dict[str, float]:
    """Compare `cpo` with `trl.experimental.cpo.CPOTrainer`."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return experimental(CPOTrainer, CPOConfig, "cpo", options, options)


def simpo(**options: Any) -> dict[str, float]:
    """Compare `simpo` with `trl.experimental.cpo.CPOTrainer` and its settings for SimPO."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    theirs = {**options, "loss_type": "simpo", "cpo_alpha": 0.0}
    return experimental(CPOTrainer, CPOConfig, "simpo", options, theirs)


def experimental(
    trainer_class: Any, config_class: Any, method: str, ours: dict[str, Any], theirs: dict[str, Any]
) -> dict[str, float]:
    """Compare a method of pairs without a reference with a trainer of `trl.experimental`."""
    from datasets import Dataset

    path = harness.folder(0)
    with tempfile.TemporaryDirectory() as directory:
        model = harness.hf_model(path)
        trainer = trainer_class(
            model=model,
            args=harness.config_of(config_class, directory, **theirs),
            train_dataset=Dataset.from_list(harness.text_pairs()),
            processing_class=harness.tokenizer(),
        )
        loss, metrics = trainer.get_batch_loss_metrics(model.train(), answer_sides())
        wanted = harness.their_outcome(model, loss, metrics)
    return harness.errors(
        harness.our_outcome(
            harness.trainer_of(method, harness.our_model(path), **ours), harness.packed_pairs()
        ),
        wanted,
    )


def tpo(**options: Any) -> dict[str, float]:
    """Compare `tpo` with `trl.experimental.tpo.TPOTrainer`."""
    documents, batch = triples(options)
    with tempfile.TemporaryDirectory() as directory:
        trainer, model = build_tpo(directory, options)
        loss = trainer.compute_loss(model.train(), harness.answer_tensors(documents))
        theirs = harness.their_outcome(model, loss, trainer._metrics["train"])
    ours = harness.trainer_of("tpo", harness.our_model(harness.folder(0)), **options)
    return harness.errors(harness.our_outcome(ours, batch), theirs)


def triples(options: dict[str, Any], seed: int = 0) -> tuple[list[harness.Answer], Any]:
    """Return the documents of TRL's batch of pairs with right answers, and the packed batch."""
    chosen, rejected = zip(*harness.pairs(seed=seed), strict=True)
    gold = [
        harness.Answer(one.prompt, other.answer)
        for one, (other, _) in zip(chosen, harness.pairs(seed=seed + 100), strict=True)
    ]
    documents = [*chosen, *rejected, *(gold if options.get("tpo_alpha", 1) else ())]
    return documents, {
        **harness.packed_pairs(seed=seed),
        **harness.packed(gold, 2, "reference"),
    }


def build_tpo(directory: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return a trainer of TRL and its model."""
    from datasets import Dataset
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    model = harness.hf_model(harness.folder(0))
    trainer = TPOTrainer(
        model=model,
        args=harness.config_of(TPOConfig, directory, **options),
        train_dataset=Dataset.from_list(
            [{**row, "reference": row["chosen"]} for row in harness.text_pairs()]
        ),
        processing_class=harness.tokenizer(),
    )
    return trainer, model


DPO: list[tuple[str, dict[str, Any]]] = [
    ("sigmoid", {}),
    ("sigmoid_norm", {"beta": 2.0}),
    ("hinge", {}),
    ("ipo", {}),
    ("robust", {"label_smoothing": 0.1}),
    ("exo_pair", {"label_smoothing": 0.1}),
    ("nca_pair", {}),
    ("bco_pair", {}),
    ("sppo_hard", {}),
    ("discopop", {}),
    ("apo_zero", {}),
    ("apo_down", {}),
    ("aot", {"label_smoothing": 0.1}),
    ("aot_unpaired", {}),
    ("sft", {}),
]
#: Name of a case -> the loss or the losses, and the options.
DPO_OPTIONS: dict[str, tuple[str | tuple[str, ...], dict[str, Any]]] = {
    "dpo forward divergence": ("sigmoid", {"f_divergence_type": "forward_kl"}),
    "dpo Jensen-Shannon divergence": ("ipo", {"f_divergence_type": "js_divergence"}),
    "dpo alpha divergence": (
        "sigmoid_norm",
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    ),
    "dpo long answers discounted": ("sigmoid", {"ld_alpha": 0.3}),
    "dpo long answers cut": ("ipo", {"ld_alpha": 0.0}),
    "dpo weighted pairs": ("sigmoid", {"use_weighting": True, "beta": 0.5}),
    "dpo several losses": (
        ("sigmoid", "bco_pair", "sft"),
        {"loss_weights": [0.8, 0.2, 1.0]},
    ),
    "dpo several weighted losses": (
        ("sigmoid_norm", "apo_zero"),
        {"use_weighting": True, "loss_weights": [0.5, 2.0], "ld_alpha": 0.5},
    ),
}
_TPO = "`trl.experimental.tpo.TPOTrainer`"
_CPO = "`trl.experimental.cpo.CPOTrainer`"
CASES = {
    **{
        f"dpo {loss}": harness.Case("`trl.DPOTrainer`", partial(dpo, loss, **options))
        for loss, options in DPO
    },
    **{
        name: harness.Case("`trl.DPOTrainer`", partial(dpo, loss, **options))
        for name, (loss, options) in DPO_OPTIONS.items()
    },
    "orpo": harness.Case("`trl.experimental.orpo.ORPOTrainer`", partial(orpo, 0.3)),
    "cpo sigmoid": harness.Case(_CPO, partial(cpo, loss_type="sigmoid", label_smoothing=0.1)),
    "cpo hinge": harness.Case(_CPO, partial(cpo, loss_type="hinge", cpo_alpha=0.5)),
    "cpo ipo": harness.Case(_CPO, partial(cpo, loss_type="ipo")),
    "cpo simpo": harness.Case(_CPO, partial(cpo, loss_type="simpo", simpo_gamma=0.4)),
    "cpo with shaped rewards": harness.Case(_CPO, partial(cpo, loss_type="sigmoid", alpha=0.02)),
    "tpo": harness.Case(_TPO, partial(tpo, beta=0.1, label_smoothing=0.1)),
    "tpo hinge": harness.Case(_TPO, partial(tpo, loss_type="hinge", beta=0.1, tpo_alpha=0.5)),
    "tpo ipo": harness.Case(_TPO, partial(tpo, loss_type="ipo", beta=0.2)),
    "tpo per token": harness.Case(_TPO, partial(tpo, loss_type="tpo-l", beta=2.0, tpo_alpha=0.0)),
    "simpo": harness.Case(_CPO, partial(simpo, beta=2.0, simpo_gamma=0.5)),
    "simpo with shaped rewards": harness.Case(_CPO, partial(simpo, beta=2.0, alpha=-0.25)),
}
