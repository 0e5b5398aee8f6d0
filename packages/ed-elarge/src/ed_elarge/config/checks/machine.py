"""Checks of a run on this machine: files, folders, functions and ports.

The result of `normalize` does not depend on the machine; these checks do. They need milliseconds
and import neither jax nor transformers nor modules of the user. `--dry-run`, `validate` and every
run start with them. `ed_elarge.config.table` assigns them to sections and actions.
"""

from __future__ import annotations

import glob
import math
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ed_data.checks import check_names
from ed_data.config import FILE_TYPES, Inform
from ed_infra.chats import read_chat_template
from ed_infra.errors import (
    CheckpointError,
    ConfigError,
    describe_missing_path,
    did_you_mean,
    unknown_name,
)
from ed_infra.package_files import find_package_file, is_package_address
from ed_infra.specs import KEPT_CODES
from ed_models.checkpoints.orbax_arrays import find_orbax_config, find_orbax_item
from ed_trainers import user_code
from ed_trainers.environments import (
    ADAPTERS,
    check_environment_name,
    environment_class,
    find_environment_faults,
    split_entry,
)
from ed_trainers.options.online import RewardedArguments, RewardName, SelfPlayArguments
from ed_trainers.rewards import check_name, wrong_settings
from ed_trainers.rewards.rules import RULES
from pydantic import ValidationError

from ed_elarge.config import architectures
from ed_elarge.config.local_paths import exists, expand_path, is_file, is_folder
from ed_elarge.config.run_config import Action, RunConfig
from ed_elarge.config.sections import OtherModelSection
from ed_elarge.errors import Problem, ValuePath

#: Variables of launchers with several processes, whose devices form one mesh.
_SEVERAL_HOSTS = (
    "COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_ADDRESS",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_NTASKS",
    "TPU_WORKER_HOSTNAMES",
)
_GPU_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


# Checks of sections; paths start at the sections.


def check_model(run: RunConfig) -> Iterator[Problem]:
    """Check the directories of the model and its tokenizer; hub ids are checked when loading."""
    section = run.model
    if section is None:
        return
    tokenizer = section.tokenizer_section
    if tokenizer.name_or_path is not None:
        path = ("model", "tokenizer")
        if not isinstance(section.tokenizer, str):
            path += ("name_or_path",)
        yield from _model_directory(path, tokenizer.name_or_path, _TOKENIZER_FILES)
    if tokenizer.chat_template is not None:
        try:
            read_chat_template(tokenizer.chat_template)
        except ConfigError as error:
            yield Problem(("model", "tokenizer", "chat_template"), str(error))
    if section.name_or_path is None:
        return
    path = ("model", "name_or_path")
    yield from _model_directory(path, section.name_or_path, ("config.json",))
    yield from _kept_codes(run, section.name_or_path)
    config, model_types = run.known_model, architectures.list_architectures()
    if config is not None and config.get("model_type") not in model_types:
        problem = unknown_name("model type", config.get("model_type"), model_types)
        yield Problem(path, f"in its config.json: {problem}")


def other_model(run: RunConfig, section: str) -> Iterator[Problem]:
    """Check the directory of the model of a role, such as the reference model."""
    other_section = run.sections[section]
    assert other_section is None or isinstance(other_section, OtherModelSection)
    yield from _other_model(section, other_section)


def adapter(run: RunConfig) -> Iterator[Problem]:
    """Check the directory of the adapters; hub ids are checked when loading."""
    if run.lora is not None and run.lora.name_or_path is not None:
        path = ("lora", "name_or_path")
        yield from _model_directory(path, run.lora.name_or_path, ("adapter_config.json",))


def check_data(run: RunConfig) -> Iterator[Problem]:
    """Check files and functions of the data; remote files (`gs://…`) are not accessed."""
    mixture = run.mixture
    if mixture is None:
        return
    for key in ("informs", "eval_informs"):
        for i, inform in enumerate(getattr(mixture, key)):
            for name, message in _check_inform(inform):
                yield Problem(("mixture", key, i, name), message)
    yield from _first_rows(run)
    for path, place in (
        (("cache_dir",), mixture.cache_dir),
        (("save", "path"), mixture.save.path if mixture.save is not None else None),
    ):
        if place is not None and (message := _without_place(place)):
            yield Problem(("mixture", *path), message)
    if mixture.cache_dir is not None and "://" not in mixture.cache_dir:
        for message in _unwritable(Path(mixture.cache_dir)):
            yield Problem(("mixture", "cache_dir"), message)
    if mixture.save is not None and "://" not in mixture.save.path:
        for message in _unwritable(Path(mixture.save.path).parent):
            yield Problem(("mixture", "save", "path"), message)


def _first_rows(run: RunConfig) -> Iterator[Problem]:
    """Check the fields of the first row of local files that no function of the user changes."""
    if run.mixture is None or (run.trainer is None and not run.will("train")):
        return
    for path, message in check_names(run.mixture, run.schema, imports=False):
        yield Problem(("mixture", *path), message)


def save_directory(run: RunConfig) -> Iterator[Problem]:
    """Check the output directory of the trainer."""
    if run.trainer is not None:
        for message in _unwritable(run.directory):
            yield Problem(("trainer", "save_directory"), message)


def trackers(run: RunConfig) -> Iterator[Problem]:
    """Check that the trackers of `trainer.report_to` are installed."""
    for number, name in enumerate(run.trainer.report_to if run.trainer is not None else ()):
        if run.will("train") and find_spec(name) is None:
            message = f"{name} is not installed: pip install 'ed-trainers[{name}]', or omit it"
            yield Problem(("trainer", "report_to", number), message)


def environment(run: RunConfig) -> Iterator[Problem]:
    """Check that the class of the environment exists."""
    if run.environment is None:
        return
    of_trainer = getattr(run.trainer, "environment", None) is not None
    path = ("trainer" if of_trainer else "asynchronous", "environment")
    name, settings = split_entry(run.environment)
    yield from _check_code_name(run, path, name, check_environment_name)
    if name in ADAPTERS:
        for setting, message in find_environment_faults(
            name, environment_class(name, ()), settings
        ):
            yield Problem((*path, name, *([setting] if setting else [])), message)


def tools(run: RunConfig) -> Iterator[Problem]:
    """Check that the functions of the tools exist."""
    for i, name in enumerate(getattr(run.trainer, "tools", ())):
        if not isinstance(name, str):
            for place, message in find_wrong_mcp_options(name["mcp"]):
                yield Problem(("trainer", "tools", i, "mcp", *place), message)
            continue
        spec = user_code.find_reward_module(name, (run.folder,))
        missing = user_code.why_not_found(name, (run.folder,))
        messages = [missing] if spec is None else _without_attribute(spec, name)
        yield from (Problem(("trainer", "tools", i), message) for message in messages)


def find_wrong_mcp_options(options: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the place and the message of each wrong option of an MCP server.

    Args:
        options: `command` with `args` and `env`, or `url` with `headers`; `allowed_tools` and
            `timeout`.
    """
    from ed_esurge.server.mcp_servers import McpServerOptions

    # The approval of calls belongs to the requests of a server, which training does not have.
    names = [name for name in McpServerOptions.model_fields if name != "require_approval"]
    unknown = [name for name in options if name not in names]
    for name in unknown:
        yield (name,), str(unknown_name("option of an MCP server", name, names))
    if unknown:
        return
    try:
        McpServerOptions.model_validate(options)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            yield tuple(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")


def reward_functions(run: RunConfig) -> Iterator[Problem]:
    """Check the reward functions and the judge: rules, entry points, and modules of functions."""
    trainer = run.trainer
    entries: list[tuple[ValuePath, RewardName]] = []
    if isinstance(trainer, RewardedArguments):
        functions = enumerate(trainer.reward_functions)
        entries = [(("trainer", "reward_functions", i), entry) for i, entry in functions]
    if isinstance(trainer, SelfPlayArguments) and trainer.judge is not None:
        entries.append((("trainer", "judge"), trainer.judge))
    for path, entry in entries:
        name, settings = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        yield from _check_code_name(run, path, name, check_name)
        if name in RULES:
            for setting, message in wrong_settings(name, RULES[name], settings):
                yield Problem((*path, name, *([setting] if setting else [])), message)


def local_tasks(run: RunConfig) -> Iterator[Problem]:
    """Check that the files of local tasks exist; remote files (`gs://…`) are not accessed."""
    for i, task in enumerate(run.eval.local_tasks if run.eval is not None else ()):
        for key, files in task.files().items():
            for file in files:
                if "://" not in file and not glob.glob(file) and not exists(file):
                    problem = f"{file} does not exist"
                    yield Problem(("eval", "local_tasks", i, key), problem)


def include_path(run: RunConfig) -> Iterator[Problem]:
    """Check the directories with task files."""
    for i, directory in enumerate(run.eval.include_path):
        if not is_folder(directory):
            yield Problem(("eval", "include_path", i), f"no such directory: {directory}")


def device_warnings(run: RunConfig) -> Iterator[Problem]:
    """Yield a warning if the mesh needs more devices than this machine has, or does not divide."""
    count = count_local_devices(run.platform.backend if run.platform is not None else None)
    if run.sharding is None or count is None:
        return
    fields = run.config_fields()
    _, slices = fields.get("sharding_dcn_axis_dims", (None, run.sharding.dcn_axis_dims))
    default = ("sharding", "axis_dims"), run.sharding.axis_dims
    path, dims = fields.get("sharding_axis_dims", default)
    if slices is not None:
        return
    fixed = math.prod(dim for dim in dims if dim != -1)
    if fixed > count or (-1 in dims and count % fixed):
        ways = "a multiple of " if -1 in dims else ""
        message = (
            f"{list(dims)} needs {ways}{fixed} devices, and this machine has {count}: change the "
            "sizes, or run on other hosts"
        )
        yield Problem(path, message)


def count_local_devices(backend: str | None) -> int | None:
    """Return the number of devices that jax will find, without jax; None for several hosts."""
    if any(os.environ.get(name) for name in _SEVERAL_HOSTS):
        return None
    first = (backend or os.environ.get("JAX_PLATFORMS") or "").partition(",")[0]
    if first in ("", "gpu", "cuda") and any(
        map(find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))
    ):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        files = len(glob.glob("/dev/nvidia[0-9]*"))
        gpus = files if visible is None else len([v for v in visible.split(",") if v.strip()])
        if gpus:
            return gpus
    tpus = len(glob.glob("/dev/accel*")) if find_spec("libtpu") is not None else 0
    if first in ("", "tpu") and tpus:
        return tpus
    if first not in ("", "cpu"):
        return None
    flags = re.search(
        r"xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    return int(flags[1] if flags else os.environ.get("JAX_NUM_CPU_DEVICES") or 1)


# Checks of actions; paths start at their parameters.


def check_serve(run: RunConfig, action: Action) -> Iterator[Problem]:
    """Check that the port is free and that the files exist."""
    options = action.options
    if options.replicated and any(one.name == "train" for one in run.actions):
        message = "replicas load a saved model: serve the trained model with a run file of its own"
        yield Problem(("data_parallel_size",), message)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            is_host_error = isinstance(error, (socket.gaierror, UnicodeError))
            yield Problem(
                ("host",) if is_host_error or "port" not in options.model_fields_set else ("port",),
                f"cannot listen on {options.host}:{options.port} ({reason}): choose another "
                + ("host" if is_host_error else "port, or 0"),
            )
    for key in ("ssl_keyfile", "ssl_certfile", "api_key_file", "mcp_config"):
        file = getattr(options, key)
        if file is not None and not is_file(file):
            yield Problem((key,), f"no such file: {file}")
    folders: list[tuple[ValuePath, str]] = [
        (("lora_modules", name), path) for name, path in options.lora_modules.items()
    ]
    if isinstance(options.model_directory, str):
        folders.append((("model_directory",), str(expand_path(options.model_directory))))
    for key_path, folder in folders:
        if not is_folder(folder):
            yield Problem(key_path, f"no such folder: {folder}")


def written_file(run: RunConfig, action: Action) -> Iterator[Problem]:
    """Check the output file of the action."""
    name = "path" if hasattr(action.options, "path") else "output_path"
    path = getattr(action.options, name)
    if path is not None:
        for message in _unwritable(Path(path).parent):
            yield Problem((name,), message)
        if is_folder(path):
            yield Problem((name,), f"{path} is a folder: set the path of a file")


def check_recordings(run: RunConfig, action: Action) -> Iterator[Problem]:
    """Check that the recordings of the action exist."""
    for i, file in enumerate(action.options.files):
        if "://" not in file and not is_file(expand_path(file)):
            yield Problem(("files", i), f"there is no recording {file}: correct the path")


# Files, functions and folders.


def _other_model(name: str, section: OtherModelSection | None) -> Iterator[Problem]:
    if section is not None:
        yield from _model_directory((name, "name_or_path"), section.name_or_path, ("config.json",))


def _kept_codes(run: RunConfig, value: str) -> Iterator[Problem]:
    """Check that a run which keeps the codes of a GGUF file has one."""
    form = run.weight_format
    method = form.quantization_method if form is not None else ""
    directory = expand_path(value)
    if method in KEPT_CODES and not (directory.name.endswith(".gguf") or _has_gguf_file(directory)):
        yield Problem(
            ("quantization", "model", "quantization_method"),
            f"{method} keeps the codes of a GGUF file, and model.name_or_path is none: name a "
            "file that ends with .gguf, or select another format",
        )


def _has_gguf_file(directory: Path) -> bool:
    return any(directory.glob("*.gguf"))


def _model_directory(path: ValuePath, value: str, needed: tuple[str, ...]) -> Iterator[Problem]:
    if is_package_address(value):
        try:
            find_package_file(value)
        except CheckpointError as error:
            yield Problem(path, str(error))
            return
    directory = expand_path(value)
    is_gguf = directory.name.endswith(".gguf")
    if is_gguf and (is_file(directory) or _HUB_ID.fullmatch(value.rpartition("/")[0])):
        return
    if is_folder(directory):
        if _has_gguf_file(directory):
            return
        item = find_orbax_item(directory) if "config.json" in needed else None
        if item is not None and find_orbax_config(item) is not None:
            return
        if not any((directory / name).exists() for name in needed):
            yield Problem(path, f"the directory contains no {' or '.join(needed)}")
    elif not _HUB_ID.fullmatch(value):
        missing = describe_missing_path(value)
        yield Problem(path, f"no such directory, and a hub id is ORGANIZATION/NAME{missing}")


def _check_inform(inform: Inform) -> Iterator[tuple[str, str]]:
    """Yield `(key, message)` for each missing file or function of an inform."""
    if inform.kind == "python":
        yield from (("data_files", m) for m in _not_importable(str(inform.data_files)))
    for file in inform.files if inform.kind in FILE_TYPES else ():
        if message := _without_place(file):
            yield "data_files", message
        elif "://" not in file and not _exists(file):
            yield "data_files", f"no such file: {file}"
    for key in ("format_callback", "preprocessing_fn"):
        address = getattr(inform, key)
        if isinstance(address, str):
            yield from ((key, message) for message in _not_importable(address))


def _without_place(address: str) -> str:
    """Return why an address such as `s3://` names nothing, or an empty string."""
    scheme, sign, bucket_path = address.partition("://")
    if sign and scheme != "file" and not bucket_path.strip("/"):
        return f"{address!r} names no bucket: write {scheme}://BUCKET/PATH"
    return ""


def _exists(file: str) -> bool:
    path = expand_path(file)
    return exists(path) or bool(glob.glob(str(path), recursive=True))


def _not_importable(address: str) -> Iterator[str]:
    """Yield why an address of a function cannot be imported, from the source of the module."""
    module = address.rpartition(":")[0]
    is_file = user_code.is_file_address(address)
    spec = user_code.find_reward_module(address) if is_file else _spec(module)
    if spec is None:
        yield f"no such file: {module}" if is_file else f"there is no module {module!r}"
    else:
        yield from _without_attribute(spec, address)


def _check_code_name(
    run: RunConfig, path: ValuePath, name: str, check_name: Callable[[str], None]
) -> Iterator[Problem]:
    """Yield why there is no code `path/file.py:NAME` or `module:NAME`, or no registered name.

    Args:
        path: place of the name, which starts at the sections.
        check_name: raises ConfigError for a name that is not registered.
    """
    if ":" in name:
        spec = user_code.find_reward_module(name, (run.folder,))
        missing = user_code.why_not_found(name, (run.folder,))
        messages = [missing] if spec is None else _without_attribute(spec, name)
        yield from (Problem(path, message) for message in messages)
        return
    try:
        check_name(name)
    except ConfigError as error:
        yield Problem(path, str(error))


def _without_attribute(spec: ModuleSpec, address: str) -> Iterator[str]:
    """Yield why a module lacks an attribute, from the source of the module."""
    if spec.origin is not None and spec.origin.endswith(".py"):
        source = Path(spec.origin).read_text("utf-8", errors="replace")
        module, _, attribute = address.rpartition(":")
        name = attribute.partition(".")[0]
        dynamic = re.search(r"^[^'\"#]*(import \*|def __getattr__|globals\()", source, re.MULTILINE)
        if not dynamic and not re.search(rf"\b{re.escape(name)}\b", source):
            names = re.findall(r"^(?:async def |def |class )?(\w+) *[(:=]", source, re.MULTILINE)
            yield f"the module {module!r} has no {name!r}{did_you_mean(name, names)}"


def _spec(module: str) -> ModuleSpec | None:
    """Find a module without importing its packages."""
    top, *submodules = module.split(".")
    try:
        spec = find_spec(top)
    except ValueError:
        return None
    for part in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return None
        top = f"{top}.{part}"
        spec = PathFinder.find_spec(top, list(spec.submodule_search_locations))
    return spec


def _unwritable(directory: Path) -> Iterator[str]:
    """Yield why a folder, which may not exist yet, is not writable."""
    try:
        existing = directory
        while not exists(existing) and existing != existing.parent:
            existing = existing.parent
    except OSError as error:
        yield f"cannot create the folder {directory}: {error.strerror}"
        return
    if not is_folder(existing):
        yield f"cannot create the folder {directory}: {existing} is a file"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"cannot write to {directory}: {existing} belongs to another user"
