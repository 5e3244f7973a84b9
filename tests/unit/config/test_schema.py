"""Pins the table of keys: what is made of classes says the same as the classes; all mistakes of a tree are
found in one pass; and what modules yet to be imported may add is left for later, but nothing else is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from titanlite.config import schema, toml
from titanlite.config.component import Component, ConfigError
from titanlite.config.schema import Node, convert, describe
from titanlite.contrib.torchtitan_keys import CONVERTED, NO_COUNTERPART, RENAMED


@dataclass(frozen=True, kw_only=True)
class Tool(Component):
    """A kind."""

    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Saw(Tool, name="saw"):
    """A choice with a required key."""

    teeth: int


@dataclass(frozen=True, kw_only=True)
class Info:
    """The section that names modules."""

    imports: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A section."""

    height: int = 90
    wood: Literal["oak", "pine"] = "oak"
    open: bool = True
    limit: float | None = None
    sizes: tuple[int, ...] = ()
    corner: tuple[float, float] = (0.0, 0.0)
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.height < 0:
            raise ConfigError(f"{self.height} is below 0", "height")


@dataclass(frozen=True, kw_only=True)
class Shop:
    """The schema of these tests."""

    job: Info = field(default_factory=Info)
    bench: Bench = field(default_factory=Bench)
    tool: Tool = field(default_factory=lambda: Saw(teeth=9))
    spares: list[Tool] = field(default_factory=list)
    shelf: Bench = field(default_factory=Bench)


@pytest.fixture
def table() -> Node:
    """The schema as it comes from a file."""
    return json.loads(json.dumps(describe(Shop, docs=True)))


def complaints(table: Node, *overrides: str, **options: bool) -> list[tuple[str, str]]:
    """Key and message of every mistake in what a command line says."""
    _, errors = convert(table, toml.read(None, overrides)[0], **options)
    return [(error.key, str(error)) for error in errors]


def test_a_table_says_what_the_classes_say(table):
    bench = table["keys"]["bench"]["keys"]
    assert bench["height"] == {"type": "int", "default": "90", "doc": ""}
    assert bench["wood"] == {"type": "literal", "values": ["oak", "pine"], "default": '"oak"', "doc": ""}
    assert bench["limit"] == {"type": "float", "optional": True, "doc": ""}
    assert table["keys"]["tool"]["default"] == "saw"
    assert table["keys"]["tool"]["choices"]["saw"]["keys"]["teeth"]["required"]
    without_docs = describe(Shop)
    assert convert(without_docs, {}) == convert(table, {})


def test_every_mistake_is_found_in_one_pass(table):
    wrong = [
        "--bench.heigth=1",
        "--bench.wood=oka",
        "--tool.name=swa",
        "--spares=[{ name = 'saw' }]",
        "--x=1",
    ]
    assert complaints(table, *wrong) == [
        (
            "bench.heigth",
            "unknown key 'heigth'; did you mean 'height'? (known: corner, height, limit, notes, open, sizes, "
            "wood)",
        ),
        ("bench.wood", "'oka' is not allowed; did you mean 'oak'? (known: oak, pine)"),
        ("tool.name", "unknown tool 'swa'; did you mean 'saw'? (known: saw)"),
        ("spares.0", "missing required key 'teeth'"),
        ("x", "unknown key 'x' (known: bench, job, shelf, spares, tool)"),
    ]


def test_a_report_has_a_line_for_each_in_the_order_of_the_file_then_of_the_command_line(tmp_path):
    path = tmp_path / "shop.toml"
    path.write_text("[tool]\nname = 'saw'\nteeth = 1.5\n[bench]\nopen = 'no'\n")
    with pytest.raises(ConfigError) as e:
        toml.build(Shop, *toml.read(path, ["--bench.height=x"]))
    assert str(e.value).splitlines() == [
        f"{path}:3: tool.teeth: expected an integer, got 1.5",
        f"{path}:5: bench.open: expected true or false, got 'no'",
        "command line, --bench.height: expected an integer, got 'x'",
    ]
    assert [error.key for error in e.value.errors] == ["tool.teeth", "bench.open", "bench.height"]


def test_what_classes_refuse_is_reported_together_too():
    overrides = ["--bench.height=-1", "--shelf.height=-2"]
    with pytest.raises(ConfigError) as e:
        toml.build(Shop, *toml.read(None, overrides))
    assert str(e.value).splitlines() == [
        "command line, --bench.height: -1 is below 0",
        "command line, --shelf.height: -2 is below 0",
    ]


def test_what_imports_may_add_is_left_for_later_and_nothing_else(table):
    wrong = ["--tool.name=hammer", "--tool.length=x", "--spares.0.name=axe", "--bench.heigth=1"]
    errors = complaints(table, *wrong, choices_follow=True)
    assert [key for key, _ in errors] == ["bench.heigth"]
    errors = complaints(table, "--tool.name=saw", "--tool.length=1", "--tool.teeth=2", choices_follow=True)
    assert not errors, "the reason may be an import that fails"
    errors = complaints(table, "--tool.name=saw", "--tool.length=1", "--tool.teeth=2")
    assert [key for key, _ in errors] == ["tool.length"]


@pytest.mark.parametrize(("imports", "keys"), [(["m"], ["bench.x"]), ([], ["tool.name", "bench.x"])])
def test_a_check_leaves_choices_to_a_tree_that_imports(table, imports, keys):
    tree = {"job": {"imports": imports}, "tool": {"name": "hammer"}, "bench": {"x": 1}}
    with pytest.raises(ConfigError) as e:
        toml.check(table, tree, toml.read(None)[1])
    assert [error.key for error in e.value.errors] == keys


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--bench.height", "needs a value: an integer"),
        ("--bench.wood", "needs a value: one of oak, pine"),
        ("--bench.height='90'", "expected an integer, got '90'"),
        ("--tool=saw", "expected a table, got 'saw'; write tool.name=saw"),
        ("--tool=hammer", "expected a table, got 'hammer'"),
        ("--bench.height=4.5e0", "expected an integer, got 4.5"),
        ("--bench.height=3.0", "expected an integer, got 3.0"),
        ("--bench.height=1e30", "expected an integer, got 1e+30"),
        ("--bench.limit=.001", "expected a number, got '.001'"),
        ("--bench.sizes=3,4", "expected a list, got '3,4'; write --bench.sizes='[3, 4]'"),
        ("--bench.corner=[1,2,3]", "expected 2 values, got 3"),
        ("--bench.sizes=3", "expected a list, got 3; write --bench.sizes='[3]'"),
        ("--job.imports=[a,b]", "expected a list, got '[a,b]'; write --job.imports='[\"a\", \"b\"]'"),
        (
            "--spares.name=saw",
            "expected a list of tables: [[spares]] in a file, --spares.0.KEY=... on the command line",
        ),
        (
            "--teeth=3",
            "unknown key 'teeth'; did you mean 'tool.teeth'? (known: bench, job, shelf, spares, tool)",
        ),
        ("--wood=oak", "unknown key 'wood'; did you mean 'bench.wood' or 'shelf.wood'? (known: bench, job, "),
        ("--bench.teeth=3", "unknown key 'teeth'; did you mean 'tool.teeth'? (known: corner, height, "),
    ],
)
def test_messages_say_what_to_write(table, override, message):
    ((_, errors),) = complaints(table, override)
    assert errors.startswith(message)


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000), ("1.5E3", 1500), ("-1e0", -1)])
def test_an_integer_on_the_command_line_may_have_an_exponent(table, text, value):
    converted, errors = convert(table, toml.read(None, [f"--bench.height={text}"])[0])
    assert not errors
    assert (converted["bench"]["height"], type(converted["bench"]["height"])) == (value, int)


def test_a_key_of_several_components_names_them_in_a_list(table):
    saw = table["keys"]["tool"]["choices"]["saw"]
    table["keys"]["tool"]["choices"] |= {"axe": saw, "file": saw, "awl": {"type": "table", "keys": {}}}
    message = "unknown key 'teeth'; tool 'saw', 'axe' and 'file' have it"
    assert ("tool.teeth", message) in complaints(table, "--tool.name=awl", "--tool.teeth=3")


def test_hints_for_a_file_are_in_its_syntax(table):
    tree = {"bench": [{"height": 1}], "job": {"imports": "a"}, "tool": {"teeth": 3.0}}
    assert [str(error) for error in convert(table, tree)[1]] == [
        "expected a table, got [{'height': 1}]; write [bench], with one bracket",
        "expected a list, got 'a'; write [\"a\"]",
        "expected an integer, got 3.0",
    ]


def test_true_and_false_are_taken_as_people_write_them_on_the_command_line():
    for text, value in (("True", True), ("False", False), ("true", True), ("false", False)):
        shop = toml.build(Shop, *toml.read(None, [f"--bench.open={text}", f"--bench.notes.x={text}"]))
        assert (shop.bench.open, shop.bench.notes) == (value, {"x": value})


def test_the_keys_that_tell_a_torchtitan_file_are_such_keys():
    from titanlite.commands import TORCHTITAN
    from titanlite.job import Job

    theirs = [*RENAMED, *CONVERTED, *NO_COUNTERPART]
    for key in TORCHTITAN:
        assert any(known == key or known.startswith(f"{key}.") for known in theirs), key
        tree: dict[str, Any] = {"model": {"name": "llama3"}}
        *parents, leaf = key.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = {}
        assert key in {error.key for error in convert(describe(Job), tree)[1]}, f"{key} is titanlite's, too"


@pytest.mark.parametrize(
    ("field_type", "name"),
    [(Path, "Path"), (tuple[int, str], "tuple[int, str]"), (int | str, "int | str"), (list, "list")],
)
def test_a_field_of_an_unsupported_type_is_told_by_its_name(field_type: Any, name: str):
    own = make_dataclass("Own", [("target", field_type)], namespace={"__module__": "elsewhere"})
    with pytest.raises(ConfigError) as e:
        describe(own)
    assert str(e.value) == (
        f"elsewhere.Own.target: fields of type {name} are not supported (supported: {schema.FIELD_TYPES})"
    )
