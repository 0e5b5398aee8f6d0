"""Data sets of other programs as entries of `mixture.informs`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from ed_infra.errors import ConfigError

from ed_elarge.migration.conversion import Conversion, split_names

#: Suffixes of files with rows.
_FILES = (".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst")
_BUILDERS = {"json": "json", "parquet": "parquet", "csv": "csv", "arrow": "arrow", "text": "txt"}
#: Begin of a `type` of Axolotl's preference data -> names of its fields here.
_PAIR_FIELDS = {
    "chatml.argilla": {"instruction": "prompt", "chosen_response": "chosen"},
    "chatml.intel": {"question": "prompt"},
    "chatml.icr": {"input": "prompt"},
    "llama3.argilla": {"instruction": "prompt", "chosen_response": "chosen"},
    "llama3.intel": {"question": "prompt"},
    "llama3.icr": {"input": "prompt"},
    "chat_template.default": {"messages": "prompt"},
}
#: Styles of Axolotl with a text of their own around instruction and answer.
_STYLES = ("alpaca", "alpaca_w_system", "alpaca_chat", "pygmalion", "metharme", "orcamini")


def build_source(
    conversion: Conversion, where: str, entry: Mapping[str, object]
) -> dict[str, object]:
    """Return an inform with the location of a data set: files, or an id of the hub.

    Args:
        conversion: the conversion.
        where: the keys of the entry, for messages.
        entry: keys `path`, `data_files`, `ds_type`, `name`, `split`, `data_dir`, `revision`.
    """
    path, files = str(entry.get("path") or ""), entry.get("data_files")
    inform: dict[str, object] = {}
    if path in _BUILDERS:
        inform = {"type": _BUILDERS[path], "data_files": files}
        if not files:
            inform["data_files"] = "ROWS.jsonl"
            conversion.changes[where] = f"{path} names no file: set data_files"
    elif path.endswith(_FILES) or (conversion.folder / path).is_dir() or path.startswith("."):
        inform = {"data_files": path}
        kind = entry.get("ds_type")
        if kind:
            inform["type"] = _BUILDERS.get(str(kind), str(kind))
    elif "/" in path:
        inform = {"type": path}
        if files:
            inform = {"type": "huggingface", "data_files": path}
            conversion.changes[where] = f"data_files of the data set {path}: download the files"
    else:
        inform = {"type": "huggingface", "data_files": path}
    if entry.get("name") and "data_files" not in inform:
        inform["dataset_split_name"] = entry["name"]
    for key in ("revision", "data_dir", "shards", "skip", "fraction"):
        if entry.get(key):
            conversion.changes[f"{where}.{key}"] = "no counterpart: download and cut the data"
    _put_split(conversion, where, inform, str(entry.get("split") or "train"))
    return inform


def _put_split(conversion: Conversion, where: str, inform: dict[str, object], split: str) -> None:
    """Set the split of an inform; `train[:1000]` also limits the rows."""
    parts = re.fullmatch(r"(\w+)(?:\[:(\d+)\])?", split)
    if parts is None:
        conversion.changes[f"{where}.split"] = f"{split}: use num_rows, or write the rows to a file"
        return
    name, count = parts.groups()
    if name != "train" and inform.get("type") not in (*_BUILDERS.values(), None):
        inform["split"] = name
    if count is not None:
        inform["num_rows"] = int(count)


def convert_axolotl_sources(conversion: Conversion, key: str, value: object) -> list[object]:
    """Return the informs of a list of data sets of Axolotl."""
    informs: list[object] = []
    for number, entry in enumerate(value if isinstance(value, list) else [value]):
        if not isinstance(entry, Mapping):
            entry = {"path": str(entry)}
        where = f"{key}[{number}]"
        inform = build_source(conversion, where, entry)
        _put_axolotl_type(conversion, where, entry, inform)
        informs.append(inform)
    return informs


def _put_axolotl_type(
    conversion: Conversion, where: str, entry: Mapping[str, object], inform: dict[str, object]
) -> None:
    kind = entry.get("type")
    fields: dict[str, str] = {}
    name = kind if isinstance(kind, str) else ""
    rewarded = conversion.method in ("reward", "prm", "grpo")
    if isinstance(kind, Mapping):
        _read_user_type(conversion, where, kind, fields)
    elif conversion.method in ("dpo", "orpo", "simpo", "kto") or rewarded:
        if conversion.method == "grpo" and name:
            conversion.changes[f"{where}.type"] = (
                f"{name} is a function of a row: set format_callback: module:function, which "
                "returns a row with prompt"
            )
        fields |= _PAIR_FIELDS.get(name, {})
        if name.endswith(".argilla"):
            fields["rejected_response"] = "rejected"
        if name.startswith("chat_template"):
            fields = {}
            messages = str(entry.get("field_messages") or "messages")
            if conversion.method in ("dpo", "simpo"):
                fields[messages] = "prompt"
        for ours in ("chosen", "rejected"):
            if entry.get(f"field_{ours}"):
                fields[str(entry[f"field_{ours}"])] = ours
    elif name in ("completion", "pretrain", "", "completion_logprobs"):
        inform["content_field"] = entry.get("field") or entry.get("text_column") or "text"
    elif name.startswith(("chat_template", "sharegpt", "messages")):
        _put_chat_fields(conversion, where, entry, inform, fields, name)
    elif name.split(".")[0] in _STYLES:
        inform["format"] = "alpaca"
        if name == "alpaca_chat.load_qa":
            del inform["format"]
            fields |= {"question": "prompt", "answer": "completion"}
        conversion.changes[f"{where}.type"] = (
            f"{name} writes instructions in words of its own; here they become chats in the chat "
            "template of the model. For the same words, set format_callback: module:function, "
            "which returns prompt and completion"
        )
    else:
        conversion.changes[f"{where}.type"] = (
            f"{name} has no counterpart: set format_callback: module:function, which returns "
            "prompt and completion, or messages"
        )
    renamed = {old: new for old, new in fields.items() if old != new}
    if renamed:
        inform["format_fields"] = renamed


def _read_user_type(
    conversion: Conversion, where: str, kind: Mapping[str, object], fields: dict[str, str]
) -> None:
    """Read a `type` that is a mapping of fields."""
    places = {
        "field_instruction": "prompt",
        "field_prompt": "prompt",
        "field_output": "completion",
        "field_completion": "completion",
        "field_chosen": "chosen",
        "field_rejected": "rejected",
        "field_label": "label",
    }
    for key, value in kind.items():
        plain = {"{instruction}", "{prompt}", "{chosen}", "{rejected}", "{completion}"}
        if key in places:
            fields[str(value)] = places[key]
        elif value and str(value) not in plain and key not in ("field_system", "field_input"):
            conversion.changes[f"{where}.type.{key}"] = (
                "a text around the fields: set format_callback: module:function, which returns "
                "prompt and completion"
            )


def _put_chat_fields(
    conversion: Conversion,
    where: str,
    entry: Mapping[str, object],
    inform: dict[str, object],
    fields: dict[str, str],
    name: str,
) -> None:
    mapping = entry.get("message_property_mappings")
    names = dict(mapping) if isinstance(mapping, Mapping) else {}
    for ours, key in (("role", "message_field_role"), ("content", "message_field_content")):
        if entry.get(key):
            names[ours] = entry[key]
    role, content = names.pop("role", "role"), names.pop("content", "content")
    default = "conversations" if name.startswith("sharegpt") else "messages"
    messages = str(entry.get("field_messages") or default)
    if (role, content) == ("from", "value") or name.startswith("sharegpt"):
        inform["format"] = "sharegpt"
        fields[messages] = "conversations"
    else:
        inform["content_field"] = messages
        if (role, content) != ("role", "content"):
            conversion.changes[f"{where}.message_property_mappings"] = (
                f"messages have {role} and {content}: set format_callback: module:function, which "
                "returns messages with role and content"
            )
    roles = entry.get("roles_to_train")
    if roles is not None and split_names(roles) not in (
        ["assistant"],
        ["gpt"],
        ["assistant", "gpt"],
    ):
        conversion.changes[f"{where}.roles_to_train"] = (
            "the loss covers the answers of the assistant, or the whole chat"
        )
    if entry.get("train_on_eos") in ("all", "none"):
        conversion.changes[f"{where}.train_on_eos"] = (
            "the loss covers the end of each answer of the assistant"
        )
    for key in ("roles", "message_field_training", "message_field_training_detail"):
        if entry.get(key) and not (key == "roles" and inform.get("format") == "sharegpt"):
            conversion.changes[f"{where}.{key}"] = "set format_callback: module:function"
    if not conversion.read_flag("train_on_inputs") and roles != []:
        conversion.put("mixture.tokenization.assistant_only_loss", True, f"{where}.type {name}")


def read_dataset_info(conversion: Conversion) -> Mapping[str, object]:
    """Return `dataset_info.json` of LLaMA-Factory, or an empty mapping if it is not there.

    Raises:
        ConfigError: the file is no JSON object.
    """
    folder = str(conversion.source.get("dataset_dir") or "data")
    for parent in (Path(), conversion.folder):
        path = parent / folder / "dataset_info.json"
        if path.is_file():
            try:
                info = json.loads(path.read_text("utf-8"))
            except ValueError as error:
                raise ConfigError(f"{path} is no JSON: {error}") from None
            if not isinstance(info, dict):
                raise ConfigError(f"{path} must have an object of data sets")
            return info
    return {}


def convert_llama_factory_sources(conversion: Conversion, key: str, value: object) -> list[object]:
    """Return the informs of names of `dataset_info.json`."""
    info, folder = (
        read_dataset_info(conversion),
        str(conversion.source.get("dataset_dir") or "data"),
    )
    informs: list[object] = []
    for name in split_names(value):
        entry = info.get(name)
        if folder == "ONLINE":
            informs.append(build_source(conversion, key, {"path": name}))
            continue
        if not isinstance(entry, Mapping):
            conversion.changes[f"{key} {name}"] = (
                f"{folder}/dataset_info.json has no entry {name} here: set data_files and fields"
            )
            informs.append({"data_files": f"{folder}/{name}.json"})
            continue
        informs.append(_convert_registered(conversion, f"{key} {name}", entry, folder))
    limit = conversion.source.get("max_samples")
    for inform in informs:
        if limit and isinstance(inform, dict):
            inform["num_rows"] = conversion.read_count("max_samples", 1)
    return informs


def _convert_registered(
    conversion: Conversion, where: str, entry: Mapping[str, object], folder: str
) -> dict[str, object]:
    hub = entry.get("hf_hub_url")
    location: dict[str, object] = {"path": hub, "name": entry.get("subset")}
    if not hub:
        location = {"path": f"{folder}/{entry.get('file_name') or entry.get('script_url')}"}
    inform = build_source(conversion, where, {**location, "split": entry.get("split")})
    if entry.get("num_samples"):
        inform["num_rows"] = entry["num_samples"]
    columns = entry.get("columns")
    names = dict(columns) if isinstance(columns, Mapping) else {}
    tags = entry.get("tags")
    roles = dict(tags) if isinstance(tags, Mapping) else {}
    formatting, fields = entry.get("formatting", "alpaca"), dict[str, str]()
    places = {"chosen": "chosen", "rejected": "rejected", "kto_tag": "label", "images": "images"}
    if formatting == "alpaca":
        places |= {"prompt": "instruction", "query": "input", "response": "output"}
        places |= {"system": "system", "history": "history"}
        if conversion.method == "sft" and conversion.source.get("stage") == "pt":
            inform["content_field"] = names.get("prompt", "text")
            places = {}
        else:
            inform["format"] = "alpaca"
    elif formatting == "openai" or roles.get("role_tag") == "role":
        if conversion.method == "sft":
            inform["content_field"] = names.get("messages", "messages")
        else:
            places["messages"] = "prompt" if conversion.method != "kto" else "messages"
        if roles.get("content_tag", "content") != "content":
            conversion.changes[f"{where}.tags"] = "set format_callback: module:function"
    else:
        inform["format"] = "llava" if "images" in names else "sharegpt"
        places |= {"messages": "conversations", "system": "system"}
        if any(
            roles.get(tag, name) != name
            for tag, name in (("role_tag", "from"), ("content_tag", "value"))
        ):
            conversion.changes[f"{where}.tags"] = "set format_callback: module:function"
    for key, column in names.items():
        if key in places and column != places[key]:
            fields[str(column)] = places[key]
        elif key in ("videos", "audios"):
            conversion.changes[f"{where}.columns.{key}"] = "see the fields of mixture.informs"
    if fields:
        inform["format_fields"] = fields
    return inform
