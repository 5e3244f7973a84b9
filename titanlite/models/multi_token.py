"""Multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2): modules behind the main model
that predict later tokens, for a second loss.

Module k joins the hidden state of module k - 1 at token i, for k = 1 the main model's after its final norm,
with the embedding of token i + k, runs one block, and predicts token i + k + 1 with the main model's head. So
it sees no token that it predicts. The order of the two in `eh_proj`, and the norms before it, are those of
the published weights, as vllm (deepseek_mtp.py) and Megatron-LM (multi_token_prediction.py) read them; with
several modules, each takes the normalised output of the one before it, as in Megatron-LM.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from titanlite.attention.base import Attention
from titanlite.attention.sdpa import CAUSAL
from titanlite.models.base import HeadFn, LossHead, logits
from titanlite.models.decoder import Block, RotaryConfig, RotaryDecoder
from titanlite.models.layers import Linear, rope_tables

MTP_PLAN = {  # Decoder.tp_plan of what a module has beside the parts of a block
    "enorm": "sequence",
    "hnorm": "sequence",
    "eh_proj": "own_tokens",
    "shared_head.norm": "sequence",
}


class MultiTokenBlock(Block):
    """One module: a block between the joining of its two inputs and the norm before the shared head."""

    def __init__(self, config: RotaryConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__(config, attention, mlp)
        self.enorm = self.norm_type(config.dim, config.norm_eps)
        self.hnorm = self.norm_type(config.dim, config.norm_eps)
        self.eh_proj = Linear(2 * config.dim, config.dim)
        self.shared_head = nn.ModuleDict(
            {"norm": self.norm_type(config.dim, config.norm_eps, config.logit_scale)}
        )

    def forward(  # type: ignore[override]
        self,
        h_BTD: torch.Tensor,
        embedded_BTD: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
    ) -> torch.Tensor:
        joined_BTD = self.eh_proj(torch.cat((self.enorm(embedded_BTD), self.hnorm(h_BTD)), -1))
        return self.shared_head["norm"](super().forward(joined_BTD, cos, sin, attention))


class MultiTokenPrediction(RotaryDecoder):
    """Adds modules to a decoder: a base class in front of the family's decoder, which makes them with
    `add_modules`.

    Only the forward of a training step runs them. Their loss `mtp_loss` is mtp_loss_factor times the mean of
    the modules' losses."""

    def add_modules(self, blocks: list[MultiTokenBlock], factor: float) -> None:
        """Add the modules, which are blocks under the numbers that follow the main model's."""
        first = self.config.n_layers
        self.model.layers.update({str(first + i): block for i, block in enumerate(blocks)})
        self.tp_plan = self.tp_plan | {f"model.layers.*.{name}": style for name, style in MTP_PLAN.items()}
        self.folded_scales["shared_head.norm.weight"] = self.config.logit_scale
        self.factor, self.losses = factor / len(blocks), dict[str, torch.Tensor]()

    def training_blocks(self) -> list[nn.Module]:
        return list(self.model.layers.values())[self.config.n_layers :]

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention: Attention = CAUSAL,
        head_fn: HeadFn = logits,
    ) -> torch.Tensor:
        self.losses = {}
        if isinstance(head_fn, LossHead) and torch.is_grad_enabled():
            if positions is None:
                positions = torch.arange(tokens.shape[1], device=tokens.device)
            head_fn = partial(self._all_losses, positions, attention, head_fn)
        return super().forward(tokens, positions, attention, head_fn)

    def _all_losses(
        self,
        positions: torch.Tensor,
        attention: Attention,
        head_fn: LossHead,
        hidden_BTD: torch.Tensor,
        weight_VD: torch.Tensor,
    ) -> torch.Tensor:
        """The head_fn that returns the main loss, and puts the modules' loss into `losses`. It runs the
        modules, because FSDP gathers the head's weight for one call only."""
        config: Any = self.config
        assert self.model.embed_tokens is not None
        cos, sin = rope_tables(positions, config.rope_head_dim, config.rope_theta, config.rope_scaling)
        h_BTD, total = hidden_BTD, torch.zeros((), device=hidden_BTD.device)
        for distance, block in enumerate(self.training_blocks(), 1):
            tokens_BT, later_head_fn = head_fn.ahead(distance)
            h_BTD = block(h_BTD, self.model.embed_tokens(tokens_BT), cos, sin, attention)
            total = total + later_head_fn(h_BTD, weight_VD)
        self.losses = {"mtp_loss": self.factor * total}
        return head_fn(hidden_BTD, weight_VD)

    def auxiliary_losses(self) -> dict[str, torch.Tensor]:
        return self.losses

    def hf_copies(self, name: str) -> list[str]:
        """The files have a copy of the embedding and of the head for each module."""
        role, ends = self.parameter_role(name), list[str]()
        if role == "embedding":
            ends.append("embed_tokens.weight")
        if role == "head" or (role == "embedding" and self.lm_head is None):
            ends.append("shared_head.head.weight")
        numbers = list(self.model.layers)[self.config.n_layers :]
        return [f"model.layers.{number}.{end}" for number in numbers for end in ends]

    def num_matmul_parameters(self) -> int:
        """The head counts once more for each module."""
        head = self.vocab_size * self.config.dim
        return super().num_matmul_parameters() + len(self.training_blocks()) * head

    def flops_per_token(self, seq_len: int) -> int:
        config = self.config
        per_module = config.n_heads * (config.head_dim + config.v_head_dim) * seq_len
        return super().flops_per_token(seq_len) + 6 * len(self.training_blocks()) * per_module
