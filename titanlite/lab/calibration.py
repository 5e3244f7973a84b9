"""The file in which `titanlite tune --measure` records the times of a machine.

Blocks, head and optimizer are measured as the trainer runs them, on one rank. Their times in units of those
that the plan computes for the same model apply to every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titanlite.checkpoint.run_identity import differences
from titanlite.config.component import ConfigError
from titanlite.config.json_file import as_json, read_object
from titanlite.lab.cards import Card, Speeds, num_gpus, parse_gpus

FORMAT = 1
PARTS = ("planned", "measured")
Times = tuple[float, float]


class PartTimes(NamedTuple):
    """Seconds of what a step consists of. `block`: forward and backward of one micro-batch through one block;
    `head`: through embedding, head and loss. `optimizer`: of one rank with the whole model. `link`: two
    all-gathers of a block's weights and the reduction of its gradients; None with one rank."""

    block: float
    head: float
    optimizer: float
    link: float | None = None


@dataclass(frozen=True)
class Measurement:
    """Measured times, and the machine. `sequences`: of a measured micro-batch. `matmul_flops` and
    `memory_rate`: of one large matrix product and of a copy; they tell how fast the device is, and the plan
    does not use them for known GPUs. `keys`: of the job, those on which the times depend."""

    config: str
    device: str
    num_ranks: int
    sequences: int
    card: Card
    planned: PartTimes
    measured: PartTimes
    matmul_flops: float
    memory_rate: float
    keys: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def speeds(self) -> Speeds:
        """The measured times in units of the planned ones; 1 for those that were not measured."""
        return Speeds(*(ratio(m, p) for m, p in zip(self.measured, self.planned)))

    @property
    def note(self) -> str:
        """A note for plans with these times."""
        machine = f"{self.device}, torch {self.versions.get('torch')}"
        return f"step time is calibrated by the times of {self.config} on {machine}"

    def changed(self, keys: Mapping[str, Any]) -> list[str]:
        """The names of the decisive keys that have other values in the job measured."""
        return [key for key, _, _ in differences(dict(self.keys), dict(keys))]

    def to_json(self) -> bytes:
        """The content of the file."""
        parts = {
            "card": self.card._asdict(),
            "planned": self.planned._asdict(),
            "measured": self.measured._asdict(),
        }
        return as_json({"format": FORMAT, **asdict(self), **parts})


def ratio(measured: float | None, planned: float | None) -> float:
    return measured / planned if measured is not None and planned else 1.0


def part_times(small: Times, large: Times, n: int, num_blocks: int) -> PartTimes:
    """The times of a model with `num_blocks` blocks, from models with n and 2 n blocks. `small` and `large`:
    seconds of a micro-batch, and of the optimizer."""
    heads = [max(2 * of_small - of_large, 0.0) for of_small, of_large in zip(small, large)]
    blocks = [(of_large - head) / (2 * n) for of_large, head in zip(large, heads)]
    return PartTimes(blocks[0], heads[0], heads[1] + num_blocks * blocks[1])


def split_as_planned(
    measured: PartTimes, planned: PartTimes, micro_batch_s: float, num_blocks: int
) -> PartTimes:
    """The measured times; if their difference leaves nothing for the blocks or for the head, because of other
    work on the machine, `micro_batch_s` of a model with `num_blocks` blocks is split as the plan does."""
    if min(measured.block, measured.head) > 0:
        return measured
    factor = micro_batch_s / (planned.head + num_blocks * planned.block)
    return measured._replace(block=factor * planned.block, head=factor * planned.head)


def read_measurement(path: Path) -> Measurement:
    """The measurement in a file. Raises ConfigError."""
    try:
        tree = read_object(path)
    except ConfigError as e:
        raise ConfigError(f"command line, --measured: {e}") from None
    try:
        if tree.pop("format") != FORMAT:
            raise ValueError(f'its "format" is not {FORMAT}')
        tree |= {name: PartTimes(**tree[name]) for name in PARTS} | {"card": Card(**tree["card"])}
        measurement = Measurement(**tree)
        for name, factor in zip(PartTimes._fields, measurement.speeds):
            if not 1e-9 < factor < 1e9:
                raise ValueError(f"measured.{name} is {factor:.1e} times planned.{name}")
        return measurement
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ConfigError(
            f"command line, --measured: {path}: {e}; it is no file that this version's "
            "`titanlite tune --measure` wrote"
        ) from None


def planned_gpus(
    text: str | None, fewest: int, default: Card, measurement: Measurement | None
) -> tuple[int, Card]:
    """The number and the kind of the GPUs of --gpus, such as 64xH100, or without it the `fewest` of the
    measured machine's kind. With a measurement, a number is enough. Raises ConfigError."""
    if text is None:
        return fewest, measurement.card if measurement else default
    if measurement is None:
        return parse_gpus(text)
    card = measurement.card
    if text.strip().isdecimal():
        return num_gpus(text.strip()), card
    num, kind = parse_gpus(text)
    if kind.name != card.name:
        raise ConfigError(
            f"command line, --measured: the file was measured on {measurement.device}, which says nothing of "
            f"{kind.name}; measure there, or plan for --gpus={num}"
        )
    return num, card
