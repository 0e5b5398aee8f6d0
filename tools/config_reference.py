"""Write docs/config_reference.md: the names of EasyDeL's pages, and the tests of their effects.

    uv run python -m tools.config_reference            rewrite the page
    uv run python -m tools.config_reference --check    exit 1 if the page is outdated

`DOCUMENTED` lists the names. The marker `pytest.mark.proves("name", ...)` of a test lists the names
that it tests; the tool reads the markers from the sources and runs no test. A name without a test
is in `LATER`, with the part of the project that will use it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from ed_data.config import Mixture
from ed_infra.config.fields import FIELDS, canonical_field
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tools import pages, yaml_reference
from tools.workspace import ROOT

PAGE = ROOT / "docs/config_reference.md"

#: Heading -> the names that EasyDeL's pages document.
DOCUMENTED: dict[str, str] = {
    "Parameters of `EasyDeLBaseConfig`": """
        sharding_axis_dims sharding_dcn_axis_dims sharding_axis_names attn_mechanism
        decode_attn_mechanism blocksize_k blocksize_q blocksize_b moe_tiling_size_batch
        moe_tiling_size_seqlen moe_tiling_size_dim partition_axis use_sharded_kv_caching
        use_sharding_constraint backend platform easy_method bits scan_ring_attention
        scan_attention_layers use_scan_mlp scan_mlp_chunk_size sequence_axis_name
        gradient_checkpointing gradient_checkpointing_targets precompute_masks
        kv_cache_quantization_config quantization_config kv_cache_sharding_sequence_axis_name
        flash_attention_backward_pass_impl attn_dtype kvdtype attn_softmax_dtype fcm_max_ratio
        fcm_min_ratio hardware_abstraction pallas_m_block_size pallas_k_block_size
        pallas_n_block_size moe_method moe_force_xla_gmm use_expert_tensor_mode
        use_ring_of_experts fsdp_is_ep_bound sp_is_ep_bound operation_configs
        EasyDeLBaseConfig(**kwargs) UserWarning
        attention_mechanism gradient_checkpointing_policy use_hardware_abstraction
        hidden_size num_attention_heads rope_theta rope_scaling max_position_embeddings""",
    "Methods and properties of `EasyDeLBaseConfig`": """
        add_basic_configurations add_basic_configurations(**kwargs) attach_custom_arguments
        auto_expert_mesh create_mesh create_mesh(sharding_axis_dims)
        create_mesh(sharding_axis_names) create_mesh(sharding_dcn_axis_dims)
        create_mesh(process_is_granule) create_mesh(should_sort_granules_by_key)
        create_mesh(allow_split_physical_axes) create_mesh(backend) create_mesh(axis_dims)
        create_mesh(axis_names) expert_abstract_mesh expert_mesh from_pretrained
        from_pretrained(pretrained_model_name_or_path) from_pretrained(cache_dir)
        from_pretrained(force_download) from_pretrained(resume_download)
        from_pretrained(proxies) from_pretrained(local_files_only) from_pretrained(token)
        from_pretrained(revision) from_pretrained(return_unused_kwargs)
        from_pretrained(subfolder) from_pretrained(**kwargs) get_axis_dims get_axis_names
        get_backend get_basic_causal_mask get_basic_causal_mask(max_length)
        get_basic_causal_mask(dtype) get_basic_frequencies get_basic_frequencies(head_size)
        get_basic_frequencies(rotary_dim) get_basic_frequencies(base)
        get_basic_frequencies(max_position_embeddings) get_basic_inv_frequencies
        get_basic_inv_frequencies(head_size) get_basic_inv_frequencies(rotary_dim)
        get_basic_inv_frequencies(base) get_basic_inv_frequencies(partial_rotary_factor)
        get_basic_rope get_basic_rope(dtype) get_basic_rope(head_size)
        get_basic_rope(rotary_dim) get_basic_rope(is_neox_style) get_basic_rope(base)
        get_basic_rope(max_position_embeddings) get_fcm_mask get_fcm_mask(batch_size)
        get_fcm_mask(seq_length) get_fcm_mask(deterministic) get_fcm_mask(key)
        get_fcm_mask(shape) get_fcm_mask(fcm_ratio) get_mask_details get_partition_rules
        get_partition_rules(fully_sharded) granted_freq_max_position_embedding
        granted_mask_max_position_embedding jax_mesh mesh partition_manager
        PartitionManager.resolve read_basics_from_config save_pretrained
        save_pretrained(save_directory) save_pretrained(push_to_hub) set_model_mesh to_dict
        to_diff_dict to_json_file to_json_file(json_file_path) to_json_file(use_diff)""",
    "Other classes and functions": """
        EasyDeLBaseConfigDict EasyMethod EasyMethod.from_dict EasyMethod.from_json
        EasyMethod.replace EasyMethod.to_dict EasyMethod.to_json extract_commit_hash
        extract_commit_hash(resolved_file) extract_commit_hash(commit_hash) set_attrs_smartly
        set_attrs_smartly(attr_name) set_attrs_smartly(default) set_attrs_smartly(new_attr)
        ModuleCaches AttnMaskDetail BaseOperationConfig EasyDeLQuantizationConfig PartitionAxis
        EasyDeLBackends EasyDeLPlatforms EasyDeLGradientCheckPointers
        AVAILABLE_ATTENTION_MECHANISMS AVAILABLE_GRADIENT_CHECKPOINT_TARGETS
        AVAILABLE_MOE_METHODS""",
    "Models, states and the registry, as the overview names them": """
        register_config register_module MaskInfo EasyDeLBaseModule EasyDeLBaseModule.__call__
        compute_loss model.config graphdef graphstate _get_partition_rules EasyGenerationMixin
        generate prepare_inputs_for_generation init_operations_cache EasyBridgeMixin
        AutoEasyDeLModelForCausalLM.from_pretrained
        AutoEasyDeLModelForCausalLM.from_pretrained(dtype)
        AutoEasyDeLModelForCausalLM.from_pretrained(auto_shard_model) model.save_pretrained
        push_to_hub model.to_state EasyDeLState EasyDeLState.create EasyDeLState.init_tx
        EasyDeLState.apply_gradients EasyDeLState.save_state EasyDeLState.load_state
        EasyDeLState.shard_state EasyDeLState.gather_state easydel.infra""",
}

#: Name -> the part that will use it. Setting one of these fields causes a warning.
LATER: dict[str, str] = {
    **dict.fromkeys(
        (
            *("hardware_abstraction", "pallas_m_block_size", "pallas_k_block_size"),
            "pallas_n_block_size",
        ),
        "kernels of matrix products",
    ),
    **dict.fromkeys(
        ("moe_tiling_size_batch", "moe_tiling_size_dim", "moe_tiling_size_seqlen"),
        "kernels of experts",
    ),
}


def mixture_keys() -> dict[str, FieldInfo]:
    """Return every key of the section `mixture` of a run file, including nested sections."""

    def keys(title: str, model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in model.model_fields.items():
            yield f"{title}.{name}", field
            inside = yaml_reference.find_option_class(field.annotation)
            if (
                inside is not None and name != "eval_informs"
            ):  # eval_informs has the keys of informs
                yield from keys(f"{title}.{name}", inside)

    return dict(keys("mixture", Mixture))


def names() -> list[str]:
    """Return every documented name, in the order of the page."""
    documented = [name for listed in DOCUMENTED.values() for name in listed.split()]
    return [*documented, *mixture_keys()]


def proofs() -> dict[str, list[str]]:
    """Return name -> its tests, as `path::test`, from the markers in the sources."""
    found: dict[str, list[str]] = {}
    for file in sorted(
        (*ROOT.glob("packages/*/tests/test_*.py"), *ROOT.glob("tests/**/test_*.py"))
    ):
        source = file.read_text(encoding="utf-8")
        if "proves(" not in source:
            continue
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                test = f"{file.relative_to(ROOT).as_posix()}::{function.name}"
                for name in (n for d in function.decorator_list for n in _marked(d)):
                    tests = found.setdefault(name, [])
                    if test not in tests:
                        tests.append(test)
    return found


def _marked(decorator: ast.expr) -> list[str]:
    """Return the arguments of every `proves(...)` in a decorator, including parameters."""
    marks = (
        node
        for node in ast.walk(decorator)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "proves"
    )
    return [
        argument.value
        for mark in marks
        for argument in mark.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]


def page() -> str:
    """Return the new page."""
    proven = proofs()
    lines = [
        "# The configuration, name by name",
        "",
        "Generated by `tools/config_reference.py`. Each row is a parameter, method, property or",
        "class of EasyDeL's pages, or a key of the data, with the test of its effect: a program,",
        "a sharding, an output, a file or an error changes. A test that only reads a value back",
        "is not sufficient.",
        "",
        f"{len(names())} names. {len(LATER)} names have no effect yet; their rows name the part",
        "of the project that will use them. Setting such a field causes a warning.",
    ]
    for heading, listed in DOCUMENTED.items():
        fields = heading.startswith("Parameters")
        head = "| name | default | meaning | proof |" if fields else "| name | proof |"
        lines += ["", f"## {heading}", "", head, "| --- " * (head.count("|") - 1) + "|"]
        for name in listed.split():
            cells = [f"`{name}`", *(_field(name) if fields else ()), _proof(name, proven)]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Keys of the section `mixture` of a run file", ""]
    lines += ["| key | type | default | proof |", "| --- " * 4 + "|"]
    for name, field in mixture_keys().items():
        about = [
            yaml_reference.describe_type(field.annotation),
            yaml_reference.describe_default(field),
        ]
        lines.append(f"| {' | '.join([f'`{name}`', *about, _proof(name, proven)])} |")
    return "\n".join(lines) + "\n"


def _field(name: str) -> tuple[str, str]:
    """Return default and meaning of an execution field, or empty strings for other names."""
    field = FIELDS.get(canonical_field(name))
    if field is None:
        return "", ""
    default = "see `PartitionAxis`" if name == "partition_axis" else f"`{field.default!r}`"
    meaning = field.doc if name == field.name else f"another name of `{field.name}`: {field.doc}"
    return default, meaning.replace("|", "\\|")


def _proof(name: str, proven: dict[str, list[str]]) -> str:
    if name in LATER:
        return f"later: {LATER[name]}"
    tests = proven.get(name, ())
    links = []
    for test in tests[:2]:
        path, function = test.split("::")
        links.append(f"[{function}](../{path})")
    return ", ".join(links) or "**missing**"


if __name__ == "__main__":
    sys.exit(pages.main("config_reference", PAGE, page))
