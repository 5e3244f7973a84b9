"""Amounts in a configuration: every field that is annotated takes them, in sections, lists, tables and
choices from outside the package, and its own checks see the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import pytest

from titanlite.config import toml
from titanlite.config.amount import Amount, Conversion, Interval, MultipleOfInterval, StepCount, Steps
from titanlite.config.component import Component, ConfigError
from titanlite.config.resolve import amounts, resolve, value_at
from titanlite.data.step_sizes import StepSize, StepSizes

RUN = Conversion(
    seq_len=100,
    global_batch_size=10,
    step_sizes=StepSizes([StepSize(0, 5), StepSize(50, 20)]),
    num_parameters=1000,
    epoch_sequences=None,
)


@dataclass(frozen=True, kw_only=True)
class Schedule(Component):
    """A kind that checks a field of its own."""

    delay: Steps = 0
    """Steps without a schedule."""

    def __post_init__(self) -> None:
        if self.delay > 20 and not isinstance(self.delay, Amount):
            raise ConfigError(f"{self.delay} is above 20", "delay")


@dataclass(frozen=True, kw_only=True)
class Ramp(Schedule, name="ramp"):
    """A choice that does not call the check of its kind."""

    points: list[list[Annotated[float, StepCount()]]] = field(default_factory=list)
    length: Steps | None = None

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 5:
            raise ConfigError(f"{self.length} is below 5", "length")


@dataclass(frozen=True, kw_only=True)
class Saves:
    """A section."""

    interval: Interval = 5
    export: MultipleOfInterval = 0
    by_name: dict[str, Steps] = field(default_factory=dict)
    count: int = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The schema of these tests."""

    steps: Steps = 100
    saves: Saves = field(default_factory=Saves)
    schedules: list[Schedule] = field(default_factory=list)


def plan(*overrides: str) -> Plan:
    return toml.build(Plan, *toml.read(None, overrides))


ALL = plan(
    "--steps=9K tokens",
    "--saves={interval = '3K tokens', export = '11K tokens', by_name = {a = '2 tokens/parameter', b = 7}}",
    "--schedules.0.name=ramp",
    "--schedules.0.points=[['2500 tokens', 0.5], [7, 1]]",
    "--schedules.0.length=50 sequences",
    "--schedules.0.delay=1 epoch",
)


def test_every_annotated_field_takes_amounts() -> None:
    assert {key: str(amount) for key, amount in amounts(ALL).items()} == {
        "steps": "9K tokens",
        "saves.interval": "3K tokens",
        "saves.export": "11K tokens",
        "saves.by_name.a": "2 tokens/parameter",
        "schedules.0.delay": "1 epoch",
        "schedules.0.points.0.0": "2.5K tokens",
        "schedules.0.length": "50 sequences",
    }
    assert value_at(ALL, "saves.export") == Amount.parse("11K tokens")


def test_positions_follow_the_step_sizes_and_intervals_the_global_batch_size() -> None:
    resolved = resolve(ALL, RUN)
    assert resolved.steps == 12  # ten steps of 5 sequences, two of 20
    assert resolved.saves == Saves(interval=3, export=9, by_name={"a": 4, "b": 7})  # 11 // 3 * 3
    assert resolved.schedules[0].points == [[5.0, 0.5], [7.0, 1.0]]
    assert [type(step) for step, _ in resolved.schedules[0].points] == [float, float]
    assert resolved.schedules[0].length == 10


def test_epochs_remain_until_their_length_is_known() -> None:
    once = resolve(ALL, RUN)
    assert list(amounts(once)) == ["schedules.0.delay"]
    with_data = replace(RUN, epoch_sequences=50)
    assert resolve(once, with_data) == resolve(ALL, with_data)
    assert resolve(ALL, with_data).schedules[0].delay == 10
    assert not amounts(resolve(ALL, with_data))


def test_what_has_no_amounts_is_the_same_object() -> None:
    mine = plan("--steps=5 steps", "--schedules.0.name=ramp")
    assert (mine.steps, type(mine.steps)) == (5, int)
    assert resolve(mine, RUN) is mine
    assert resolve(ALL, RUN).schedules is not ALL.schedules


def test_a_multiple_waits_for_its_interval() -> None:
    mine = plan("--saves={interval = '0.1 epochs', export = '11K tokens'}")
    assert resolve(mine, RUN).saves == mine.saves
    assert resolve(mine, replace(RUN, epoch_sequences=400)).saves == Saves(interval=4, export=8)
    at_least_one = plan("--saves={interval = 50, export = '1K tokens'}")
    assert resolve(at_least_one, RUN).saves.export == 50


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("--steps=499 tokens", "steps", "is less than one step, which takes 5 sequences of 100 tokens"),
        ("--saves.interval=999 tokens", "saves.interval", "which takes 10 sequences of 100 tokens"),
        ("--schedules.0.length=20 sequences", "schedules.0.length", "4 is below 5"),
        ("--schedules.0.delay=40K tokens", "schedules.0.delay", "27 is above 20"),
        ("--schedules.0.points=[[1, 2], [5, '1 tokens']]", "schedules.0.points.1.1", "less than one step"),
    ],
)
def test_numbers_of_steps_that_are_refused(override: str, key: str, message: str) -> None:
    name = ["--schedules.0.name=ramp"] if "schedules" in override else []
    given = plan(*name, override)  # only resolving finds it
    with pytest.raises(ConfigError, match=message) as e:
        resolve(given, RUN)
    assert e.value.key == key


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--steps=ten", '--steps: expected an integer or an amount such as "4B tokens", "1.5 epochs" or '),
        ("--steps=1.5", "--steps: expected an integer or an amount such as "),
        ("--steps", "--steps: needs a value: an integer or an amount such as "),
        ("--steps=4B", "--steps: '4B' has no unit; write an integer, or an amount such as "),
        ("--steps=4B tokns", "--steps: unknown unit 'tokns' of '4B tokns'; did you mean 'tokens'? (known: "),
        ("--saves.by_name={a = '0 tokens'}", "--saves.by_name.a: '0 tokens' is not above 0"),
        ("--saves.count=4B tokens", "--saves.count: expected an integer, got '4B tokens'"),
    ],
)
def test_values_that_are_no_amounts(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as e:
        plan(override)
    assert str(e.value).startswith(f"command line, {message}")
    assert "\n" not in str(e.value)


def test_amounts_are_written_as_they_can_be_read() -> None:
    assert toml.as_tree(ALL)["saves"] | {"by_name": {}} == {
        "interval": "3K tokens", "export": "11K tokens", "by_name": {}, "count": 3,
    }  # fmt: skip
    tree = toml.parse(toml.dump(ALL))
    _, locator = toml.read(None)
    assert toml.build(Plan, tree, locator) == ALL
