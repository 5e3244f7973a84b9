"""Pins titanlite.config.reference: every key of a schema appears with its type, default and docstring, once
as terminal help and once as Markdown, and the trainer's own schema leaves no key without a docstring.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from titanlite.config import reference, toml
from titanlite.config.component import Component, ConfigError
from titanlite.config.schema import describe, field_docs


@dataclass(frozen=True, kw_only=True)
class Engine(Component):
    """Kind: what drives it."""

    power: int = 5
    """Power in kW."""


@dataclass(frozen=True, kw_only=True)
class Steam(Engine, name="steam"):
    """Steam engine.

    Slow to start.
    """

    fuel: Literal["coal", "wood"] = "coal"
    """What is burnt
    in it."""


@dataclass(frozen=True, kw_only=True)
class Diesel(Engine, name="diesel"):
    """Diesel engine."""


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One wheel."""

    radius: float
    """Radius in m."""


@dataclass(frozen=True, kw_only=True)
class Body:
    """The body."""

    label: str = "a | b"
    """Painted on the side."""
    doors: list[int] = field(default_factory=lambda: [1, 2])
    """Their numbers."""
    seats: list[int] = field(default_factory=list)
    """Where one sits."""
    extras: dict[str, Any] = field(default_factory=dict)
    """The rest."""
    lit: bool = True
    wheel: Wheel = field(default_factory=lambda: Wheel(radius=0.5))
    derived: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True)
class Vehicle:
    """The schema of these tests."""

    body: Body = field(default_factory=Body)
    engine: Engine
    wheels: list[Wheel] = field(default_factory=list)
    helpers: list[Engine] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Roof:
    """A section with a key that may be left out."""

    height: int | None = None
    """Height in m."""


@dataclass(frozen=True, kw_only=True)
class Shed:
    """A schema with only that section."""

    roof: Roof = field(default_factory=Roof)


def help_text(schema: type) -> str:
    return reference.help_text(reference.sections(describe(schema, docs=True)))


@pytest.fixture
def sections() -> dict[tuple[str, str], reference.Section]:
    return {(s.path, s.choice): s for s in reference.sections(describe(Vehicle, docs=True))}


def test_sections_come_in_the_order_of_the_fields(sections):
    assert list(sections) == [
        ("body", ""),
        ("body.wheel", ""),
        ("engine", "diesel"),
        ("engine", "steam"),
        ("[wheels]", ""),
        ("[helpers]", "diesel"),
        ("[helpers]", "steam"),
    ]


def test_keys_have_type_default_and_docstring(sections):
    keys = {key.name: (key.type, key.default, key.doc) for key in sections["body", ""].keys}
    assert keys == {
        "label": ("str", '"a | b"', "Painted on the side."),
        "doors": ("list[int]", "[\n    1,\n    2,\n]", "Their numbers."),
        "seats": ("list[int]", "[]", "Where one sits."),
        "extras": ("dict[str, Any]", "{}", "The rest."),
        "lit": ("bool", "true", ""),
    }


def test_choices_have_the_keys_of_their_kind(sections):
    keys = sections["engine", "steam"].keys
    assert [(key.name, key.type, key.default) for key in keys] == [
        ("power", "int", "5"),
        ("fuel", '"coal" | "wood"', '"coal"'),
    ]
    assert keys[0].doc == "Power in kW."
    assert keys[1].doc == "What is burnt\nin it."


def test_a_required_key_has_no_default(sections):
    assert [(key.name, key.default) for key in sections["[wheels]", ""].keys] == [("radius", "")]


def test_field_docs_of_a_subclass_include_its_base():
    assert field_docs(Steam) == {"power": "Power in kW.", "fuel": "What is burnt\nin it."}


def test_help_text_can_be_typed_as_it_stands():
    text = help_text(Vehicle)
    assert '[engine]  (name = "steam")  Steam engine.' in text.splitlines()
    assert '  --engine.fuel="coal"   <"coal" | "wood">' in text.splitlines()
    assert "      What is burnt in it." in text.splitlines()
    assert "  --wheels.0.radius=(required)   <float>" in text.splitlines()
    assert "  --body.lit=true   <bool>" in text.splitlines()


def test_a_key_that_may_be_left_out_is_not_called_required():
    line = next(line for line in help_text(Shed).splitlines() if "--roof.height" in line)
    assert "required" not in line
    assert line.endswith("<int | None>")


def test_one_section_with_its_choices_and_what_is_inside():
    vehicle = describe(Vehicle, docs=True)
    chosen = [[(s.path, s.choice) for s in reference.section(vehicle, name)] for name in ("body", "helpers")]
    assert chosen == [[("body", ""), ("body.wheel", "")], [("[helpers]", "diesel"), ("[helpers]", "steam")]]
    with pytest.raises(
        ConfigError, match=r"no section 'bdoy'; did you mean 'body'\? \(known: body, b"
    ) as refused:
        reference.section(vehicle, "bdoy")
    assert "]" not in re.search(r"known: (.*)\)", str(refused.value))[1]


@pytest.mark.parametrize("name", ["wheels.radius", "wheels.0.radius", "--wheels.radius"])
def test_one_key_of_a_section(name):
    vehicle = describe(Vehicle, docs=True)
    (wheels,) = reference.section(vehicle, name)
    assert (wheels.path, [key.name for key in wheels.keys]) == ("[wheels]", ["radius"])
    with pytest.raises(ConfigError, match=r"no section 'wheels.radios'; did you mean 'wheels.radius'\?"):
        reference.section(vehicle, "wheels.radios")


def test_markdown_escapes_bars_and_keeps_a_row_on_a_line():
    lines = reference.markdown(describe(Vehicle, docs=True)).splitlines()
    assert '## `[engine]` name = "steam"' in lines
    assert "## `[[wheels]]`" in lines
    assert '| `label` | str | `"a \\| b"` | Painted on the side. |' in lines
    assert "| `doors` | list[int] | `[ 1, 2, ]` | Their numbers. |" in lines
    assert "| `radius` | float | required | Radius in m. |" in lines
    assert '| `fuel` | "coal" \\| "wood" | `"coal"` | What is burnt in it. |' in lines
    assert lines.count("| `power` | int | `5` | Power in kW. |") == 1
    assert 'As with name = "diesel": `power`.' in lines


def test_every_row_of_a_markdown_table_has_four_cells():
    rows = [
        line for line in reference.markdown(describe(Vehicle, docs=True)).splitlines() if line.startswith("|")
    ]
    assert len(rows) > 10
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}


def test_every_key_of_the_trainer_is_documented():
    from titanlite.job import Job

    sections = list(reference.sections(describe(Job, docs=True)))
    bare = [f"{s.path}.{key.name}" for s in sections for key in s.keys if not key.doc]
    assert not bare, "these keys have no docstring under them"
    assert not [s.path for s in sections if not s.doc], "these sections have no docstring"


# Lists of tables, which have sections of their own.
TABLES = {"sources", "validation_sources", "batch_ramp", "param_groups", "schedules", "tasks", "sinks",
          "extra"}  # fmt: skip


def test_the_help_of_the_trainer_names_every_key_of_a_resolved_job():
    from titanlite.job import load_job

    job = load_job(
        None,
        ["--model.name=llama3", "--model.flavor=debug", "--data.sources=[{ name = 'python_stdlib' }]"],
    )
    text = help_text(type(job))
    for section, table in toml.as_tree(job).items():
        for key in (k for k in table if k not in TABLES):
            picks = key == ("backend" if section == "attention" else "name")
            assert picks or f"--{section}.{key}=" in text, f"{section}.{key}"
    assert "--data.sources.0.weight=1.0" in text


class Cargo(Component):
    """Kind: what is carried."""


@dataclass(frozen=True, kw_only=True)
class Live(Cargo, name="live"):
    """Animals."""

    only = "front"
    food: Engine
    """What drives the feeder."""


@dataclass(frozen=True, kw_only=True)
class Coal(Cargo, name="coal"):
    """Coal."""


@dataclass(frozen=True, kw_only=True)
class Truck:
    """A truck."""

    front: list[Cargo]
    """In front."""
    rear: list[Cargo]
    """Behind."""


def test_a_choice_that_other_keys_refuse_is_listed_under_its_own_key() -> None:
    schema = describe(Truck, docs=True)
    paths = {(section.path, section.choice) for section in reference.sections(schema)}
    engines = {("[front].food", "steam"), ("[front].food", "diesel")}
    assert paths == {("[front]", "live"), ("[front]", "coal"), ("[rear]", "coal"), *engines}
    page = reference.markdown(schema)
    assert '## `[[front]]` name = "live"' in page
    assert '## `[front.food]` name = "steam"' in page
    lines = page.splitlines()
    assert lines[lines.index('## `[[rear]]` name = "coal"') + 2] == 'The same as `[[front]]` name = "coal".'
    assert "| `food` | table | required | What drives the feeder. |" in page
