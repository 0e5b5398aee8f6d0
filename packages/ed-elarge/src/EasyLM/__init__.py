"""The import paths of EasyLM's documentation; `ed_elarge.easylm` has the classes and commands."""

from ed_elarge.import_paths import add_modules, write_command

_LLAMA = "from ed_elarge.easylm import LLaMAModel"
#: Package -> its commands for `python -m`; `ed_elarge.easylm.commands` has their functions.
_COMMANDS: dict[str, str] = {
    "EasyLM.models.llama": "convert_easylm_to_hf convert_hf_to_easylm llama_serve llama_train",
    "EasyLM.scripts": (
        "benchmark_attention convert_checkpoint diff_checkpoint lm_eval_harness lm_eval_json"
    ),
}

#: Module path -> source.
SOURCES: dict[str, str] = {
    "EasyLM.bpt": "from ed_elarge.easylm.blockwise import blockwise_attn, blockwise_ffn",
    "EasyLM.checkpoint": "from ed_elarge.easylm import CheckpointManager",
    "EasyLM.data": "from ed_elarge.easylm import DataProcessor",
    "EasyLM.jax_utils": (
        "from ed_elarge.easylm.jax_utils import JaxRNG, average_metrics, "
        "cross_entropy_loss_and_accuracy, float_tensor_to_dtype, float_to_dtype, "
        "get_float_dtype_by_name, get_jax_mesh, get_metrics, get_weight_decay_mask, global_norm, "
        "init_rng, make_shard_and_gather_fns, match_partition_rules, named_tree_map, next_rng, "
        "set_random_seed, tree_apply"
    ),
    "EasyLM.models": "",
    "EasyLM.models.llama": _LLAMA,
    "EasyLM.models.llama.llama_model": _LLAMA,
    "EasyLM.optimizers": "from ed_elarge.easylm import create_optimizer",
    "EasyLM.scripts": "",
    "EasyLM.serving": "from ed_elarge.easylm import ModelServer",
    **{
        f"{package}.{name}": write_command("ed_elarge.easylm.commands", name)
        for package, names in _COMMANDS.items()
        for name in names.split()
    },
}

add_modules(SOURCES)
