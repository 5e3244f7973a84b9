"""GPUs to plan for: their memory and speeds, from the vendors' data sheets, and the factors by which a
machine was measured to differ from what the plan computes with them."""

from __future__ import annotations

import re
from typing import NamedTuple

from titanlite.config.component import ConfigError, suggest
from titanlite.flops import peak_bf16_flops

GIB = 1 << 30


class Card(NamedTuple):
    """A GPU, or the CPU of a machine. `memory_gib`: what torch reports as the total, which is less than the
    data sheet says. `memory_rate`: bytes/s of its memory. `link_rate`: bytes/s to other GPUs of the node, in
    one direction. `measured_flops`: FLOP/s of a large matrix product, of a device without a data sheet."""

    name: str
    memory_gib: float
    memory_rate: float
    link_rate: float
    measured_flops: float = 0.0
    is_cpu: bool = False

    @property
    def flops(self) -> float:
        """Dense bf16 FLOP/s."""
        flops = self.measured_flops or peak_bf16_flops(self.name)
        assert flops is not None, self.name
        return flops


class Speeds(NamedTuple):
    """Times of a machine in units of those that the plan computes; 1: as planned."""

    blocks: float = 1.0
    head: float = 1.0  # embedding, head and loss
    optimizer: float = 1.0
    link: float = 1.0  # collectives within a node


class Cluster(NamedTuple):
    """GPUs of one kind. `network_rate`: bytes/s of each GPU to other nodes, in one direction."""

    card: Card
    gpus: int
    gpus_per_node: int = 8
    network_rate: float = 50e9  # 400 Gb/s per GPU, as in NVIDIA's DGX H100
    speeds: Speeds = Speeds()


PCIE = 25e9  # PCIe 4.0 x16, about what copies reach
CARDS = [
    Card("B200", 178.3, 8.0e12, 900e9),
    Card("H200", 139.8, 4.8e12, 450e9),
    Card("H100", 79.1, 3.35e12, 450e9),
    Card("H100 NVL", 93.0, 3.9e12, 300e9),
    Card("H100 PCIe", 79.1, 2.0e12, PCIE),
    Card("A100", 79.1, 2.0e12, 300e9),
    Card("L40S", 44.4, 0.864e12, PCIE),
    Card("RTX 4090", 23.6, 1.0e12, PCIE),
    Card("A10", 22.0, 0.6e12, PCIE),
    Card("L4", 22.0, 0.3e12, PCIE),
]


def parse_gpus(text: str) -> tuple[int, Card]:
    """The number and the kind of GPUs of a text such as "64xH100". Raises ConfigError."""
    known = {_plain(card.name): card for card in CARDS}
    match = re.fullmatch(r"(\d+)\s*[xX]\s*(.+)", text.strip(), re.ASCII)
    if match is None:
        raise ConfigError(f"command line, --gpus: {text!r} is not a number and a GPU such as 64xH100")
    if _plain(match[2]) not in known:
        names = [card.name for card in CARDS]
        raise ConfigError(f"command line, --gpus: unknown GPU {match[2]!r}{suggest(match[2], names)}")
    return num_gpus(match[1]), known[_plain(match[2])]


def num_gpus(digits: str) -> int:
    """The number of GPUs that --gpus gives. Raises ConfigError."""
    if len(digits) > 6 or int(digits) == 0:
        raise ConfigError(f"command line, --gpus: {digits} is not a number of GPUs from 1 to 999,999")
    return int(digits)


def known_card(device_name: str) -> Card | None:
    """The card of a device, by the name that its driver gives; None for one that is not in CARDS."""
    named = [card for card in CARDS if re.search(rf"\b{card.name}\b", device_name)]
    best = max(named, key=lambda card: len(card.name), default=None)
    is_known = best is not None and peak_bf16_flops(device_name) == best.flops  # H200 NVL is no H200
    return best if is_known else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
