"""Pins titanlite.config.toml: precedence, the forms of a command-line override, strict construction
(unknown keys, wrong types, unknown choices, each told with its place and the nearest valid name), and dump
as the inverse of load. Runs on a schema of its own, so that it says what the mechanism does whatever the
trainer's keys are.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.kinds import WRONG_KINDS
from titanlite.config import toml
from titanlite.config.component import Component, ConfigError
from titanlite.config.overrides import Word, plain_value, split_overrides, split_words


@dataclass(frozen=True, kw_only=True)
class Animal(Component, kind="pet"):
    """A kind."""

    legs: int = 4


@dataclass(frozen=True, kw_only=True)
class Cat(Animal, name="cat"):
    """A choice with a required key."""

    color: str


@dataclass(frozen=True, kw_only=True)
class Dog(Animal, name="dog"):
    """A choice with a checked key."""

    loudness: float = 1.0

    def __post_init__(self) -> None:
        if self.loudness < 0:
            raise ConfigError(f"{self.loudness} is below 0", "loudness")


@dataclass(frozen=True, kw_only=True)
class Garden:
    """A section with one key of each type."""

    size: int = 10
    slope: float = 0.5
    label: str = "back"
    open: bool = True
    style: Literal["wild", "formal"] = "wild"
    depth: Literal[1, 2] = 1
    limit: int | None = None
    plants: list[str] = field(default_factory=list)
    corners: tuple[int, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Farm:
    """The schema of these tests."""

    garden: Garden = field(default_factory=Garden)
    guard: Animal = field(default_factory=Dog)
    pet: Animal
    herd: list[Animal] = field(default_factory=list)


PET = '[pet]\nname = "cat"\ncolor = "red"\n'


@pytest.fixture
def load(tmp_path: Path):
    """`load(text, *overrides)`: the Farm of farm.toml with that text."""

    def load(text: str, *overrides: str) -> Farm:
        path = tmp_path / "farm.toml"
        path.write_text(text, encoding="utf-8")
        return toml.build(Farm, *toml.read(path, overrides))

    return load


@pytest.fixture
def complaint(load, tmp_path: Path):
    """`complaint(text, *overrides)`: the message of the ConfigError, the folder left out."""

    def complaint(text: str, *overrides: str) -> str:
        with pytest.raises(ConfigError) as e:
            load(text, *overrides)
        return str(e.value).replace(f"{tmp_path}/", "")

    return complaint


# ---- what a file gives


def test_defaults_where_the_file_is_silent(load):
    assert load(PET) == Farm(pet=Cat(color="red"))


def test_every_type_from_a_file(load):
    text = """
[garden]
size = 3
slope = 2
label = "8"
open = false
style = "formal"
depth = 2
limit = 7
plants = ["rose", "oak"]
corners = [1, 2]
notes = { a = 1, b = { c = [true] } }
"""
    garden = load(text + PET).garden
    assert garden == Garden(
        size=3,
        slope=2.0,
        label="8",
        open=False,
        style="formal",
        depth=2,
        limit=7,
        plants=["rose", "oak"],
        corners=(1, 2),
        notes={"a": 1, "b": {"c": [True]}},
    )
    assert type(garden.slope) is float, "an integer in a float's place becomes a float"


def test_a_choice_and_a_list_of_choices(load):
    farm = load(PET + '[[herd]]\nname = "dog"\n[[herd]]\nname = "cat"\ncolor = "black"\nlegs = 3\n')
    assert farm.herd == [Dog(), Cat(color="black", legs=3)]


def test_a_table_without_name_is_the_default_choice(load):
    assert load("[guard]\nloudness = 2.0\n" + PET).guard == Dog(loudness=2.0)


def test_a_kind_without_default_needs_a_name(complaint):
    assert complaint('[pet]\ncolor = "red"\n') == "farm.toml:1: pet: missing `name` (known: cat, dog)"


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        (["--garden.size=3"], "size", 3),
        (["--garden.size", "3"], "size", 3),
        (["--garden.slope", "-1"], "slope", -1.0),
        (["--garden.slope=1e-3"], "slope", 1e-3),
        (["--garden.label=125M"], "label", "125M"),
        (["--garden.label=7"], "label", "7"),
        (["--garden.label=true"], "label", "true"),
        (["--garden.label="], "label", ""),
        (["--garden.label=a=b"], "label", "a=b"),
        (["--garden.open"], "open", True),
        (["--garden.open=true"], "open", True),
        (["--garden.open=false"], "open", False),
        (["--garden.open", "false"], "open", False),
        (["--no-garden.open"], "open", False),
        (["--garden.style=formal"], "style", "formal"),
        (["--garden.depth=2"], "depth", 2),
        (["--garden.limit=9"], "limit", 9),
        (['--garden.plants=["a", "b"]'], "plants", ["a", "b"]),
        (["--garden.plants=[]"], "plants", []),
        (["--garden.plants.0=7", "--garden.plants.1=true"], "plants", ["7", "true"]),
        (["--garden.corners=[3, 4]"], "corners", (3, 4)),
        (["--garden.notes={ x = 1 }"], "notes", {"x": 1}),
        (["--garden.notes.x.y=1"], "notes", {"x": {"y": 1}}),
        (["--garden.notes.x=word"], "notes", {"x": "word"}),
    ],
)
def test_forms_of_an_override(load, arguments, key, expected):
    value = getattr(load(PET, *arguments).garden, key)
    assert value == expected
    assert type(value) is type(expected)


def test_a_flag_before_another_option_is_true(load):
    garden = load("[garden]\nopen = false\n" + PET, "--garden.open", "--garden.size=3").garden
    assert (garden.open, garden.size) == (True, 3)


def test_words_beside_options_stand_alone():
    argv = ["a", "--key", "1", "b", "--key=1", "c", "--no-key", "d", "--flag", "--no-key"]
    words, options = split_words(argv)
    assert words == ["a", "b", "c", "d"]
    assert options == ["--key", "1", "--key=1", "--no-key", "--flag", "--no-key"]
    assert dict(split_overrides(options)) == {"key": "false", "flag": "true"}


def test_dashes_in_an_option_are_underscores(load):
    with pytest.raises(ConfigError, match=r"--garden\.si_ze: unknown key 'si_ze'; did you mean 'size'\?"):
        load(PET, "--garden.si-ze=3")


def test_precedence_is_command_line_then_file_then_default(load):
    text = "[garden]\nsize = 20\nslope = 0.25\n" + PET
    garden = load(text, "--garden.size=30").garden
    assert (garden.size, garden.slope, garden.label) == (30, 0.25, "back")


def test_the_last_of_two_overrides_counts(load):
    assert load(PET, "--garden.size=1", "--garden.size=2").garden.size == 2


def test_overrides_reach_into_lists(load):
    text = PET + '[[herd]]\nname = "dog"\n[[herd]]\nname = "dog"\n'
    herd = load(text, "--herd.1.loudness=5", "--herd.2.name=cat", "--herd.2.color=blue").herd
    assert herd == [Dog(), Dog(loudness=5.0), Cat(color="blue")]


def test_overrides_fill_a_list_that_the_file_does_not_have(load):
    farm = load(
        PET, "--herd.0.name=dog", "--herd.1.name=dog", "--herd.1.loudness=5", "--garden.plants.0=rose"
    )
    assert farm.herd == [Dog(), Dog(loudness=5.0)]
    assert farm.garden.plants == ["rose"]


def test_an_override_may_replace_a_whole_list_of_tables(load):
    text = PET + '[[herd]]\nname = "dog"\n'
    assert load(text, '--herd=[{ name = "cat", color = "blue" }]').herd == [Cat(color="blue")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--garden={size=2}"], Garden(size=2, label="front", plants=["a"])),
        (["--garden={ label = 'x', plants = ['b'] }"], Garden(size=5, label="x", plants=["b"])),
        (["--garden={size=2}", "--garden.size=3"], Garden(size=3, label="front", plants=["a"])),
        (["--garden.size=3", "--garden={size=2}"], Garden(size=2, label="front", plants=["a"])),
        (["--garden.notes={ x = { y = 1 } }", "--garden.notes={ x = { z = 2 } }"],
         Garden(size=5, label="front", plants=["a"], notes={"x": {"y": 1, "z": 2}})),
        (["--garden={ notes = { 'a.txt' = 1 } }", "--garden={ notes = { 'b.txt' = 2, c.d = 3 } }"],
         Garden(size=5, label="front", plants=["a"], notes={"a.txt": 1, "b.txt": 2, "c": {"d": 3}})),
        (["--garden.label={size=2}"], Garden(size=5, label="{size=2}", plants=["a"])),
    ],
)  # fmt: skip
def test_a_table_is_merged_into_the_section(load, arguments, expected):
    text = "[garden]\nsize = 5\nlabel = 'front'\nplants = ['a']\n"
    assert load(text + PET, *arguments).garden == expected


def test_a_table_without_a_section_in_the_file_takes_further_keys(load):
    assert load(PET, "--garden={size=2}", "--garden.slope=1").garden == Garden(size=2, slope=1.0)


def test_a_mistake_in_a_merged_table_is_the_command_lines(complaint):
    text = "[garden]\nsize = 5\n" + PET
    assert complaint(text, "--garden={size='x'}").startswith(
        "command line, --garden.size: expected an integer, got 'x'"
    )
    assert complaint(text + "[guard]\nlegs = 'x'\n", "--guard={loudness=1}").startswith(
        "farm.toml:7: guard.legs:"
    )


def test_a_key_with_a_dot_is_located(tmp_path: Path):
    file = tmp_path / "farm.toml"
    file.write_text('[garden.notes]\n"a.txt" = 1\n')
    _, locator = toml.read(file, ['--garden.notes={ "b.txt" = 2 }'])
    for key, place in (("garden.notes.b.txt", "command line, --"), ("garden.notes.a.txt", f"{file}:2: ")):
        assert str(locator.located(ConfigError("wrong", key))) == f"{place}{key}: wrong"


def test_a_table_on_the_command_line_is_toml(load):
    assert load(PET, '--pet={ name = "cat", color = "blue" }').pet == Cat(color="blue")


def test_a_table_of_a_list_on_the_command_line_is_toml(load):
    text = PET + '[[herd]]\nname = "dog"\n'
    assert load(text, '--herd.0={ name = "cat", color = "blue" }').herd == [Cat(color="blue")]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pet.name=dog", "--herd.1.name=dog"],
        ["--pet={name='dog'}", "--herd.1={name='dog'}"],
        ["--pet.name=cat", "--pet.name=dog", "--herd.1.name=dog", "--herd.1.legs=4"],
    ],
)
def test_a_component_chosen_on_the_command_line_leaves_out_the_files_keys(tmp_path, arguments):
    path = tmp_path / "farm.toml"
    path.write_text(PET + "legs = 3\n" + '[[herd]]\nname = "dog"\n[[herd]]\nname = "cat"\ncolor = "blue"\n')
    tree, locator = toml.read(path, arguments)
    farm = toml.build(Farm, tree, locator)
    assert farm == Farm(pet=Dog(legs=3), herd=[Dog(), Dog()])
    left_out = "left out: pet 'dog', chosen on the command line, has no such key"
    assert locator.left_out == [f"{path}:3: pet.color: {left_out}", f"{path}:9: herd.1.color: {left_out}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "farm.toml:4: pet.colour: unknown key 'colour'"),
        (["--pet.name=cat"], "farm.toml:4: pet.colour: unknown key 'colour'"),  # as in the file
        (["--pet.name=dog"], "farm.toml:4: pet.colour: unknown key 'colour'"),  # the cat has none, either
        (["--pet.name=dog", "--pet.color=red"], "command line, --pet.color: unknown key 'color'"),
        (["--pet={name='dog', color='red'}"], "command line, --pet.color: unknown key 'color'"),
    ],
)
def test_other_unknown_keys_of_a_component_are_refused(complaint, arguments, message):
    text = PET if "color" in message else PET + "colour = 1\n"
    assert message in complaint(text, *arguments)


def test_without_a_file_everything_may_come_from_the_command_line():
    farm = toml.build(Farm, *toml.read(None, ["--pet.name=cat", "--pet.color=red"]))
    assert farm == Farm(pet=Cat(color="red"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["garden.size=3"], "command line: expected --section.key=value, got 'garden.size=3'"),
        (["-g", "3"], "command line: expected --section.key=value, got '-g'"),
        (["--garden.size=3", "4"], "command line: expected --section.key=value, got '4'"),
        (["--"], "command line: expected --section.key=value, got '--'"),
        (
            ["--no-garden.open=true"],
            "command line: --no-garden.open takes no value; write --garden.open=true",
        ),
        (
            ["--herd.3.legs=1"],
            "command line: --herd.3.legs: list entries are numbered from 0, without gaps",
        ),
        (["--herd.x.legs=1"], "command line: --herd.x.legs: there is no such place in the configuration"),
        (["--herd.-1.legs=1"], "command line: --herd._1.legs: there is no such place in the configuration"),
        (
            ["--garden.size.x=1"],
            "command line: --garden.size.x: there is no such place in the configuration",
        ),
        (
            ["--garden.size.x.y=1"],
            "command line: --garden.size.x.y: there is no such place in the configuration",
        ),
    ],
)
def test_malformed_overrides(complaint, arguments, message):
    text = "[garden]\nsize = 3\n" + PET + '[[herd]]\nname = "dog"\n'
    assert complaint(text, *arguments) == message


# ---- complaints


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[garden]\nopen = true\nsiez = 3\n",
            "farm.toml:3: garden.siez: unknown key 'siez'; did you mean 'size'?",
        ),
        ("[gardn]\nsize = 3\n", "farm.toml:1: gardn: unknown key 'gardn'; did you mean 'garden'?"),
        ("[garden]\nsize = '3'\n", "farm.toml:2: garden.size: expected an integer, got '3'"),
        ("[garden]\nsize = true\n", "farm.toml:2: garden.size: expected an integer, got True"),
        ("[garden]\nsize = 3.0\n", "farm.toml:2: garden.size: expected an integer, got 3.0"),
        ("[garden]\nslope = true\n", "farm.toml:2: garden.slope: expected a number, got True"),
        ("[garden]\nslope = '1'\n", "farm.toml:2: garden.slope: expected a number, got '1'"),
        ("[garden]\nslope = -inf\n", "farm.toml:2: garden.slope: expected a finite number, got -inf"),
        ("[garden]\nslope = 1e999\n", "farm.toml:2: garden.slope: expected a finite number, got inf"),
        ("[garden]\nlabel = 8\n", "farm.toml:2: garden.label: expected a string, got 8"),
        ("[garden]\nopen = 1\n", "farm.toml:2: garden.open: expected true or false, got 1"),
        ("[garden]\nplants = 'rose'\n", "farm.toml:2: garden.plants: expected a list, got 'rose'"),
        ("[garden]\nplants = ['a', 1]\n", "farm.toml:2: garden.plants.1: expected a string, got 1"),
        ("[garden]\nnotes = 'x'\n", "farm.toml:2: garden.notes: expected a table, got 'x'"),
        ("garden = 3\n", "farm.toml:1: garden: expected a table, got 3"),
        (
            "[garden]\nstyle = 'fromal'\n",
            "farm.toml:2: garden.style: 'fromal' is not allowed; did you mean 'formal'? (known:",
        ),
        ("[garden]\ndepth = true\n", "farm.toml:2: garden.depth: True is not allowed (known: 1, 2)"),
        (
            "[guard]\nname = 'dgo'\n",
            "farm.toml:2: guard.name: unknown pet 'dgo'; did you mean 'dog'? (known: cat, dog)",
        ),
        ("[guard]\nname = 5\n", "farm.toml:2: guard.name: unknown pet 5 (known: cat, dog)"),
        ("[guard]\nname = 'cat'\n", "farm.toml:1: guard: missing required key 'color'"),
        ("[guard]\nloudness = -1.0\n", "farm.toml:2: guard.loudness: -1.0 is below 0"),
        (
            "\n[[herd]]\nname = 'dog'\n\n[[herd]]\nname = 'dog'\ncolor = 'red'\n",
            "farm.toml:7: herd.1.color: unknown key 'color'",
        ),
    ],
)
def test_complaints_name_file_line_and_key(complaint, text, message):
    assert complaint(text + PET).startswith(message)


def test_an_unknown_key_lists_the_valid_ones(complaint):
    assert complaint(PET + "[guard]\nvolume = 1\n").endswith("(known: legs, loudness)")


def test_a_missing_section_names_the_file(complaint):
    assert complaint("[garden]\nsize = 3\n") == "farm.toml: missing required key 'pet'"


def test_a_missing_section_without_a_file_names_no_file():
    with pytest.raises(ConfigError, match="missing required key 'pet'") as e:
        toml.build(Farm, *toml.read(None))
    assert "None" not in str(e.value), "there is no file, so none can be named"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--garden.siez=3", "command line, --garden.siez: unknown key 'siez'; did you mean 'size'?"),
        ("--gardn.size=3", "command line, --gardn: unknown key 'gardn'; did you mean 'garden'?"),
        ("--garden.size=x", "command line, --garden.size: expected an integer, got 'x'"),
        ("--garden.size=4.5", "command line, --garden.size: expected an integer, got 4.5"),
        ("--garden.size", "command line, --garden.size: needs a value: an integer"),
        ("--garden.open=1", "command line, --garden.open: expected true or false, got 1"),
        ("--garden.plants=rose", "command line, --garden.plants: expected a list, got 'rose'"),
        ("--garden.plants=[1]", "command line, --garden.plants.0: expected a string, got 1"),
        ("--garden=3", "command line, --garden: expected a table, got 3"),
        ("--guard.name=dgo", "command line, --guard.name: unknown pet 'dgo'; did you mean 'dog'?"),
        ("--guard.loudness=-1", "command line, --guard.loudness: -1.0 is below 0"),
    ],
)
def test_complaints_about_overrides_name_the_command_line(complaint, override, message):
    text = "[garden]\nsize = 3\nopen = true\nplants = []\n[guard]\nname = 'dog'\n" + PET
    assert complaint(text, override).startswith(message)


def test_the_line_is_the_one_of_the_key_in_its_own_table(complaint):
    text = "# size = 0\n" + PET + "legs = 'four'\n\n[guard]\nlegs = 4\n"
    assert complaint(text).startswith("farm.toml:5: pet.legs: expected an integer, got 'four'")


def test_a_missing_file(tmp_path):
    path = tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=r"cannot read the configuration: .*No such file") as e:
        toml.read(path)
    assert str(e.value).startswith(str(path))


def test_a_file_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes(b'label = "caf\xe9"\n')
    with pytest.raises(ConfigError, match=r"latin\.toml: cannot read the configuration"):
        toml.read(path)


@pytest.mark.parametrize("kind", ["a named pipe", "a directory"])
def test_a_configuration_that_is_no_file(tmp_path, kind):
    """A pipe, such as a shell's <(command), could be read only once; the launcher and its ranks all read."""
    path = tmp_path / "piped.toml"
    make, complaint = WRONG_KINDS[kind]
    make(path)
    with pytest.raises(ConfigError, match=rf"piped\.toml: cannot read the configuration: {complaint}"):
        toml.read(path)


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "1" * 5000], ids=["brackets", "digits"])
def test_values_that_the_parser_cannot_hold(tmp_path, value):
    path = tmp_path / "large.toml"
    path.write_text(f"a = {value}\n")
    with pytest.raises(ConfigError, match=r"large\.toml: not valid TOML: "):
        toml.read(path)
    assert plain_value(Word(value)) == value


def test_a_file_that_is_not_toml(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[garden]\nsize = \n")
    with pytest.raises(ConfigError, match=r"broken\.toml:2: not valid TOML: "):
        toml.read(path)


# ---- dump


FULL = Farm(
    garden=Garden(
        size=-3,
        slope=1e-8,
        label='a "quoted" \\ line\nand \u00e9',
        open=False,
        style="formal",
        depth=2,
        plants=["x", ""],
        corners=(1, 2, 3),
        notes={"a": {"b": [1, 2.5]}},
    ),
    guard=Cat(color="grey"),
    pet=Dog(legs=3),
    herd=[Dog(loudness=0.1), Cat(color="red")],
)


@pytest.mark.parametrize("farm", [Farm(pet=Cat(color="red")), FULL], ids=["defaults", "everything"])
def test_a_dump_reads_back_equal(load, farm):
    assert load(toml.dump(farm)) == farm


def test_a_dump_names_its_choices_and_leaves_out_what_is_none():
    tree = toml.as_tree(FULL)
    assert tree["guard"] == {"name": "cat", "legs": 4, "color": "grey"}
    assert next(iter(tree["guard"])) == "name"
    assert "limit" not in tree["garden"]
    assert toml.as_tree(Farm(garden=Garden(limit=3), pet=Dog()))["garden"]["limit"] == 3


def test_a_dump_keeps_floats_to_the_last_bit(load):
    for value in (0.1, 1 / 3, 1e-300):
        assert load(toml.dump(Farm(garden=Garden(slope=value), pet=Dog()))).garden.slope == value


@pytest.mark.full
def test_only_a_mistake_about_a_component_imports_the_satellites() -> None:
    code = (
        "from sys import modules; from titanlite.job import load_job\n"
        "for argument in '--quick=1', '--data.sources.0.name=nothing':\n"
        "    try: load_job('debug', [argument])\n"
        "    except ValueError as e: print('titanlite.corpus.components' in modules, 'megatron' in str(e))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["False False", "True True"]


def test_the_configuration_is_read_without_torch():
    code = "import sys, titanlite.config.reference, titanlite.config.toml; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
