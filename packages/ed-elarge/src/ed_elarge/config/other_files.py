"""Keys at the top of files of other programs, and their places in a run file.

`elarge FILE --dry-run` prints the place of each key of such a file, and `elarge init --from FILE`
converts the file. The pages of docs/migrate list the keys. The tables of `ed_elarge.migration` have
a rule for each key of a program; `ed_trainers.options.other_names` has the keys of trainers.
"""

from __future__ import annotations

import re

from ed_trainers.arguments import ARGUMENTS
from ed_trainers.options.other_names import EQUIVALENT


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
