"""A model family from outside the package: Llama with squared ReLU in its feed-forward (So et al. 2021,
arXiv 2109.08668), which also works with tensor parallel.

To use it, put this file into the current directory or install it, and write

    [job]
    imports = ["squared_relu"]

    [model]
    name = "squared_relu"
    flavor = "125M"
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.decoder import RotaryConfig, RotaryDecoder
from titanlite.models.layers import Linear
from titanlite.models.llama3 import FLAVORS


class SquaredReLU(nn.Module):
    """down(relu(up(x))^2): two matrices where SwiGLU has three."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.up_proj = Linear(dim, hidden_dim)
        self.down_proj = Linear(hidden_dim, dim)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.relu(self.up_proj(x_BTD)).square())


class Net(RotaryDecoder):
    """Llama's decoder with another feed-forward."""

    def __init__(self, c: RotaryConfig):
        super().__init__(c)
        for block in self.blocks().values():
            block.mlp = SquaredReLU(c.dim, c.hidden_dim)
        # Tensor parallel shards up_proj by columns and down_proj by rows, as in SwiGLU, which also has a
        # gate_proj. A pattern that matches no module is an error.
        del self.tp_plan["model.layers.*.mlp.gate_proj"]


@dataclass(frozen=True, kw_only=True)
class SquaredReLUFamily(ModelFamily, name="squared_relu"):
    """Llama with squared ReLU."""

    flavors = FLAVORS

    def build(self) -> Decoder:
        return Net(self.config)
