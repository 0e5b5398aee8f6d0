"""Keys at the top of files of other programs, and their places in a run file.

`elarge FILE --dry-run` prints the place of each key of such a file, and `elarge init --from FILE`
converts the file. The pages of docs/migrate list the keys. The tables of `ed_elarge.migration` have
a rule for each key of a program; `ed_trainers.options.other_names` has the keys of trainers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ed_trainers.arguments import ARGUMENTS
from ed_trainers.options.other_names import EQUIVALENT

if TYPE_CHECKING:
    from ed_elarge.migration.conversion import Conversion, KeyRule

#: Sections in their order in a file.
_ORDER = ("model", "reference_model", "teacher_model", "reward_model", "quantization", "lora")
_ORDER += ("loader", "platform", "sharding", "base_config", "mixture", "esurge", "trainer")


def list_rule_places() -> list[dict[str, str]]:
    """Return the place of each key with a rule, for each program."""
    # Imported here, because files of this project need no rules.
    from ed_elarge.migration.axolotl import AXOLOTL_RULES
    from ed_elarge.migration.llama_factory import LLAMA_FACTORY_RULES
    from ed_elarge.migration.trl_files import TRL_RULES

    tables = (AXOLOTL_RULES, TRL_RULES, LLAMA_FACTORY_RULES)
    return [{key: rule.place for key, rule in table.items()} for table in tables]


def place(key: str) -> str | None:
    """Return the place of a key of another program's file, or None if the key is unknown.

    Options of a trainer, and the names in `ed_trainers.options.other_names`, are known too.
    """
    for options in ARGUMENTS.values():
        if key in options.model_fields or key in options.ALIASES:
            return f"trainer.{options.ALIASES.get(key, key)}"
    text = EQUIVALENT.get(key)
    if text is not None and re.split(r"[:;, ]", text)[0] in _OPTIONS:
        return f"trainer.{text}"
    return text if text is not None else _find_rule_place(key)


def _find_rule_place(key: str) -> str | None:
    for places in list_rule_places():
        if key in places:
            return places[key]
    return None


#: Every option of a trainer, with its other spellings.
_OPTIONS = {
    name for options in ARGUMENTS.values() for name in (*options.model_fields, *options.ALIASES)
}


def convert_keys(
    conversion: Conversion,
    rules: Mapping[str, KeyRule],
    finish: Callable[[Conversion], None],
) -> None:
    """Convert all keys of the source of a conversion.

    Args:
        conversion: the conversion.
        rules: key -> its rule.
        finish: sets values that depend on several keys, and the defaults of the program.
    """
    for key, value in conversion.source.items():
        rule = rules.get(key)
        if rule is not None:
            rule.convert(conversion, key, value)
        else:
            _describe_unmapped(conversion, key, value)
    finish(conversion)
    if conversion.values.get("trainer.max_training_steps"):
        conversion.values.pop("trainer.num_train_epochs", None)


def _describe_unmapped(conversion: Conversion, key: str, value: object) -> None:
    # Imported here, because files of this project need no conversion.
    from ed_elarge.migration.conversion import parse_yaml_number

    sentence = place(key)
    if value in (False, ""):
        conversion.omitted[key] = f"{value!r} changes nothing"
    elif sentence is None:
        conversion.changes[key] = "an unknown key: see docs/yaml.md"
    elif re.fullmatch(r"trainer\.\w+", sentence):  # an option with the same meaning
        conversion.put(sentence, parse_yaml_number(value), key)
    elif sentence.startswith("omit it") and "no counterpart" not in sentence:
        conversion.omitted[key] = sentence.removeprefix("omit it: ")
    else:
        conversion.changes[key] = sentence.removeprefix("omit it: ")


def build_run_sections(conversion: Conversion) -> dict[str, object]:
    """Return the sections of the run file."""
    sections: dict[str, object] = {}
    for path, value in conversion.values.items():
        holder = sections
        *parents, name = path.split(".")
        for parent in parents:
            child = holder.setdefault(parent, {})
            assert isinstance(child, dict), path
            holder = child
        holder[name] = value
    trainer = sections.get("trainer", {})
    assert isinstance(trainer, dict)
    sections["trainer"] = {"trainer_type": conversion.method, **trainer}
    return {name: sections[name] for name in _ORDER if name in sections}
