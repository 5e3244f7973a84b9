"""Pins titanlite.config.component: declaring a class registers it, kinds keep apart, a name is taken once,
and an unknown name is told together with the nearest valid one.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from titanlite.config.component import Component, ConfigError, suggest


@pytest.fixture
def shape() -> type[Component]:
    """A kind with two choices."""

    @dataclass(frozen=True)
    class Shape(Component):
        sides: int = 0

    @dataclass(frozen=True)
    class Square(Shape, name="square"):
        sides: int = 4

    @dataclass(frozen=True)
    class Circle(Shape, name="circle"):
        pass

    return Shape


def test_declaring_a_choice_registers_it(shape):
    assert sorted(shape.choices) == ["circle", "square"]
    assert shape.choices["square"](sides=5).sides == 5
    assert shape.choices["square"].name == "square"


def test_kinds_do_not_share_choices(shape):
    @dataclass(frozen=True)
    class Sound(Component):
        pass

    @dataclass(frozen=True)
    class Square(Sound, name="square"):
        pass

    assert Sound.choices == {"square": Square}
    assert shape.choices["square"] is not Square


def test_a_choice_of_a_choice_belongs_to_the_same_kind(shape):
    class Rhombus(shape.choices["square"], name="rhombus"):
        pass

    assert shape.choices["rhombus"] is Rhombus
    assert (Rhombus.name, shape.choices["square"].name) == ("rhombus", "square")


def test_a_class_between_a_kind_and_its_choices_is_neither(shape):
    class Round(shape):
        pass

    class Ring(Round, name="ring"):
        pass

    assert shape.choices["ring"] is Ring
    assert not Round.is_kind()
    assert Round not in shape.choices.values()


def test_kind_or_choice(shape):
    assert shape.is_kind()
    assert not shape.choices["square"].is_kind()


def test_a_name_is_taken_once(shape):
    with pytest.raises(TypeError, match="'square' already names"):

        class Box(shape, name="square"):
            pass

    assert shape.choices["square"].__qualname__.endswith("Square"), "the first one keeps its name"


def test_a_name_is_taken_once_even_by_a_class_that_is_called_the_same(shape):
    # A package of the user's whose AdamW is called "adamw" must not replace titanlite's unseen.
    namespace = {"__module__": "elsewhere", "__qualname__": shape.choices["square"].__qualname__}
    with pytest.raises(TypeError, match="'square' already names"):
        type(shape)("Square", (shape,), namespace, name="square")


def test_declaring_the_same_class_again_replaces_it(shape):
    # what reloading a module does
    def declare() -> type[Component]:
        class Oval(shape, name="oval"):
            pass

        return Oval

    first, second = declare(), declare()
    assert first is not second
    assert shape.choices["oval"] is second


def test_a_kind_is_called_by_its_class_or_as_it_says(shape):
    class Outline(Component, kind="line"):
        pass

    assert (shape.kind, shape.choices["square"].kind, Outline.kind) == ("shape", "shape", "line")


def test_a_config_error_is_the_users_mistake():
    error = ConfigError("wrong", "a.b")
    assert isinstance(error, ValueError)
    assert (str(error), error.key, error.exit_code) == ("wrong", "a.b", 2)


def test_suggest_completes_a_word():
    assert suggest("lr", ["decay", "lr_multiplier"]).startswith("; did you mean 'lr_multiplier'? (known: ")
    assert suggest("l", ["decay", "lr_multiplier"]).startswith(" (known: ")  # control


def test_suggest_sorts_what_is_known_and_takes_other_types():
    assert suggest("stesp", ["steps", "seed", "lr"]) == "; did you mean 'steps'? (known: lr, seed, steps)"
    assert suggest("3", [2, 1]) == " (known: 1, 2)"
