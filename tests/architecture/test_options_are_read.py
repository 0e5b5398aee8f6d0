"""Every field of the options that the documents name is read by code, or is a listed exception.

The classes are those of `ed_elarge.config.table` with their nested classes, and the configurations
of `ed_infra`. A field that no code reads would be parsed and ignored.
"""

from __future__ import annotations

import dataclasses
import re
import typing

import pydantic
import pytest
from ed_elarge.config.table import ACTIONS, SECTIONS
from ed_infra import specs
from ed_infra.config.fields import FIELDS, OPERATIONS, WITHOUT_EFFECT, ExecutionFields, find_remarks
from ed_infra.sharding.axes import PartitionAxis, find_idle_axes

from tools.workspace import packages

#: Field without a reader -> how it acts.
ACTS_OTHERWISE = {
    "from_torch": "only true is accepted",
    "mask_max_position_embeddings": "ed_infra.config.documented reads it by its name",
    "freq_max_position_embeddings": "ed_infra.config.documented reads it by its name",
    **WITHOUT_EFFECT,
}
#: A module with the names of all fields.
TABLE = "config/typed_dict.py"


def option_classes() -> list[type[pydantic.BaseModel]]:
    """Return the classes of sections and actions, and the classes of their fields."""
    found: dict[type[pydantic.BaseModel], None] = {}

    def add(annotation: object) -> None:
        is_class = isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)
        if is_class and annotation not in found:
            found[annotation] = None
            for field in annotation.model_fields.values():
                add(field.annotation)
        for part in typing.get_args(annotation):
            add(part)

    for section in SECTIONS.values():
        for cls in section.classes().values():
            add(cls)
    for action in ACTIONS.values():
        add(action.options)
    return list(found)


def read_names() -> set[str]:
    """Return every attribute, and every text that is a name, in the code of the packages."""
    names: set[str] = set()
    for package in packages():
        for file in (package.folder / "src").rglob("*.py"):
            if not file.as_posix().endswith(TABLE):
                text = file.read_text(encoding="utf-8")
                names.update(re.findall(r"(?<=\w|\)|\])\.([a-z]\w*)", text))
    return names


def test_every_documented_option_is_read_by_code() -> None:
    names = read_names()
    fields = {name: cls.__name__ for cls in option_classes() for name in cls.model_fields}
    configs = (specs.EasyDeLQuantizationConfig, specs.BaseOperationConfig, specs.AttnMaskDetail)
    fields |= {field.name: cls.__name__ for cls in configs for field in dataclasses.fields(cls)}
    fields |= dict.fromkeys(FIELDS, "EasyDeLBaseConfig")
    assert len(fields) > 400
    unread = {name: cls for name, cls in fields.items() if name not in names}
    unlisted = {name: cls for name, cls in unread.items() if name not in ACTS_OTHERWISE}
    assert not unlisted, f"no code reads {unlisted}: give each field an effect, or refuse it"
    assert not set(ACTS_OTHERWISE) - set(unread), "these fields are read: remove them from the list"


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_field_without_an_effect_says_what_to_set_instead(name: str) -> None:
    default = FIELDS[name].default
    value = not default if isinstance(default, bool) else default + 1
    [(path, assignment, remark)] = find_remarks({name: value})
    assert path == (name,) and assignment == f"{name} = {value!r}"
    assert remark.startswith("has no effect: ")
    assert "omit it" in remark or "set " in remark


def test_fields_of_the_default_configuration_have_no_remarks() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(ExecutionFields)}
    assert not list(find_remarks(defaults)) and not list(find_remarks({}))
    assert not list(find_idle_axes(PartitionAxis(), constrained=False))
    assert "vanilla" not in OPERATIONS
