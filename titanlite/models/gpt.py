"""A small GPT for the best quality per GPU hour: what speed runs of 2024 to 2026 found to help, each part a
field that can be off. nanochat's checkpoints load (contrib/nanochat.py).

The parts, beside rotary attention and pre-norm blocks: norms without weights, also of the embedding, of
queries and of keys; squared ReLU in the MLP (So et al. 2021, arXiv 2109.08668); projections to the residual
stream that start at zero; per block, a factor of the residual stream and one of the embedding, which is added
again; embeddings that are added to the values of attention behind a gate (Zhou et al. 2024, arXiv
2410.17897); windows in most layers; a soft cap of the logits (Gemma 2). `smear` adds the embedding of the
token before, `backout` subtracts what the residual stream was in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.attention.base import Attention
from titanlite.attention.sdpa import CAUSAL
from titanlite.config.component import ConfigError
from titanlite.models import decoder
from titanlite.models.base import Decoder, HeadFn, ModelFamily, Role
from titanlite.models.decoder import AttentionLayer, RotaryConfig, RotaryDecoder
from titanlite.models.layers import ElementwiseLayer, Linear, SwiGLU

HEAD_DIM, ASPECT = 128, 64  # of the flavors; dim / n_layers before rounding up to whole heads
SMEAR_DIMS = 24  # the first features of a token, which decide how much of the token before is added
GATE_MEAN, GATE_STD = 0.01, 0.0058  # of initial gates, which begin a little above their neutral value
EMBEDDING_INIT_STD, HEAD_INIT_STD, UP_INIT = 0.8, 0.001, 0.4
RESIDUAL_INIT, EMBEDDING_INIT = (1.15, 1.05), (0.20, 0.05)  # of the first and of the last block
BACKOUT_INIT = 0.2
# The fields of parts that a pipeline stage lacks: they need the tokens, the embedding or an earlier block.
NOT_IN_PIPELINES = ("residual_scalars", "value_embedding_interval", "smear", "backout")


@dataclass(frozen=True, kw_only=True)
class GptConfig(RotaryConfig):
    """The architecture of one flavor.

    `norms_heads`: RMSNorm of each head's queries and keys. `has_squared_relu`: the MLP is
    down(relu(up(x))^2); otherwise SwiGLU. `zero_init`: projections to the residual stream start at zero.
    `residual_scalars`: the input of each block is a x + b e, e the normalised embedding, with trained a and
    b. `value_embedding_interval` n: the last block, and every n-th before it, adds an embedding of the token
    to its values; 0: none does. Its gate reads the first `value_gate_dims` features. `logit_softcap` c:
    logits l are c tanh(l / c); 0: they are not capped. `smear`, `backout`: see the module's docstring.
    `matrix_init_std`: 0: 1 / sqrt(dim)."""

    may_be_zero: ClassVar[tuple[str, ...]] = (
        *RotaryConfig.may_be_zero, "matrix_init_std", "value_embedding_interval", "logit_softcap",
    )  # fmt: skip

    vocab_size: int = 32768
    norm_eps: float = 1e-6
    rope_theta: float = 1e5
    max_position: int = 32768
    attention_scale: float = 1.44
    matrix_init_std: float = 0.0
    norms_heads: bool = True
    has_squared_relu: bool = True
    zero_init: bool = True
    residual_scalars: bool = True
    value_embedding_interval: int = 2
    value_gate_dims: int = 12
    logit_softcap: float = 15.0
    smear: bool = True
    backout: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in (("value_gate_dims", self.value_gate_dims), ("smear", SMEAR_DIMS * self.smear)):
            if self.dim < least:
                raise ConfigError(f"{field} reads the first {least} features; dim = {self.dim} is below")

    def has_value_embedding(self, block: int) -> bool:
        """Whether the block with the number `block` has a value embedding."""
        interval = self.value_embedding_interval
        return interval > 0 and (self.n_layers - 1 - block) % interval == 0

    def architecture_fields(self) -> dict[str, Any]:
        fields = super().architecture_fields()
        del fields["zero_init"]
        return fields


def of_depth(depth: int) -> GptConfig:
    """The model with `depth` blocks, from which all sizes follow: width 64 depth, rounded up to whole heads
    of 128, and windows in three layers of four, but not in the last."""
    num_heads = -(-depth * ASPECT // HEAD_DIM)
    return GptConfig(
        dim=num_heads * HEAD_DIM, n_layers=depth, n_heads=num_heads, n_kv_heads=num_heads, head_dim=HEAD_DIM,
        hidden_dim=4 * num_heads * HEAD_DIM, sliding_window=513,
        layer_pattern=("SSSL" * depth)[: depth - 1] + "L",
    )  # fmt: skip


FLAVORS = {
    "debug": GptConfig(
        dim=128, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=32, hidden_dim=512, vocab_size=8192,
        max_position=2048, sliding_window=129, layer_pattern="SSSL",
    ),
    **{f"d{depth}": of_depth(depth) for depth in (4, 6, 8, 10, 12, 16, 20, 24, 26)},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gpt(ModelFamily, name="gpt"):
    """A GPT with the parts that speed runs found to help. The flavors d4 to d26 are named by their depth."""

    flavors = FLAVORS

    def check_pipeline_parallel(self, degree: int) -> None:
        super().check_pipeline_parallel(degree)
        if degree > 1 and (used := [name for name in NOT_IN_PIPELINES if getattr(self.config, name)]):
            raise ConfigError(
                f"{used[0]} needs tensors of other pipeline stages; set it off, or "
                "pipeline_parallel_degree = 1",
                "parallelism.pipeline_parallel_degree",
            )

    def build(self) -> Decoder:
        return GptDecoder(self.config)

    def hf_config(self) -> dict[str, Any]:
        raise ConfigError("gpt has no Hugging Face form (hf_config); use --format=nanochat", "model.name")


class Norm(nn.Module):
    """x / rms(x) * scale over the last dim, computed in fp32, returned in x's dtype. It has no weight."""

    def __init__(self, dim: int, eps: float, scale: float = 1.0):
        super().__init__()
        self.eps, self.scale = eps, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed if self.scale == 1.0 else normed * self.scale).to(x.dtype)


class SquaredReLU(nn.Module):
    """down(relu(up(x))^2) without biases."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.up_proj = Linear(dim, hidden_dim)
        self.down_proj = Linear(hidden_dim, dim)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.relu(self.up_proj(x_BTD)).square())


def mlp_of(config: GptConfig, block: int) -> nn.Module:
    """The MLP of the block with the number `block`."""
    kind = SquaredReLU if config.has_squared_relu else SwiGLU
    return kind(config.dim, config.hidden_dim)


class SelfAttention(decoder.SelfAttention):
    """Attention whose queries and keys are normalised, and whose values get an embedding of the token."""

    def __init__(self, config: GptConfig, has_value_embedding: bool):
        super().__init__(config)
        self.norms_heads, self.eps = config.norms_heads, config.norm_eps
        self.gate_dims = config.value_gate_dims
        self.value_embedding: nn.Embedding | None = None
        if has_value_embedding:
            self.value_embedding = nn.Embedding(config.vocab_size, config.n_kv_heads * config.head_dim)
            self.value_gate = Linear(self.gate_dims, config.n_kv_heads)

    @classmethod
    def of_layer(cls, config: Any, number: int) -> nn.Module:
        return cls(config, config.has_value_embedding(number))

    def normed(self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.norms_heads:
            return q_BTHE, k_BTKE
        return head_norm(q_BTHE, self.eps), head_norm(k_BTKE, self.eps)

    def mixed_values(
        self, v_BTKE: torch.Tensor, x_BTD: torch.Tensor, tokens_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """v + 3 sigmoid(gate(x)) * embedding(token), with a gate for each head."""
        if self.value_embedding is None:
            return v_BTKE
        gate_BTK = 3 * self.value_gate(x_BTD[..., : self.gate_dims]).sigmoid()
        embedded_BTKE = self.value_embedding(tokens_BT).unflatten(-1, v_BTKE.shape[-2:]).to(v_BTKE.dtype)
        return v_BTKE + gate_BTK[..., None] * embedded_BTKE


def head_norm(x_BTHE: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) of each head, computed in fp32, returned in x's dtype."""
    return F.rms_norm(x_BTHE.float(), x_BTHE.shape[-1:], eps=eps).to(x_BTHE.dtype)


class ResidualMix(ElementwiseLayer):
    """a x + b e, with one trained number each."""

    def __init__(self) -> None:
        super().__init__()
        self.residual = nn.Parameter(torch.empty(1))
        self.embedding = nn.Parameter(torch.empty(1))

    def forward(self, x_BTD: torch.Tensor, embedded_BTD: torch.Tensor) -> torch.Tensor:
        a, b = (self.own(p).to(x_BTD.dtype) for p in (self.residual, self.embedding))
        return a * x_BTD + b * embedded_BTD


class Smear(ElementwiseLayer):
    """x + scale sigmoid(gate x) * (the x of the token before) for normalised embeddings x, of which the gate
    reads the first SMEAR_DIMS features. The first token of a document stays."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.gate = nn.Parameter(torch.empty(SMEAR_DIMS))
        self.scale = nn.Parameter(torch.empty(1))

    def forward(
        self, x_BTD: torch.Tensor, previous_BTD: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The result from the embeddings of the tokens and of those before, not yet normalised. `positions`:
        int64 [T] or [B, T] of all tokens, 0 for the first of each document."""
        x_BTD, previous_BTD = self.norm(x_BTD), self.norm(previous_BTD)
        gate, scale = (self.own(p).to(x_BTD.dtype) for p in (self.gate, self.scale))
        share_BT = scale * (x_BTD[..., :SMEAR_DIMS] @ gate).sigmoid()
        is_first_BT = self.own_tokens(torch.atleast_2d(positions) == 0)
        return x_BTD + share_BT.masked_fill(is_first_BT, 0.0)[..., None] * previous_BTD


class Backout(ElementwiseLayer):
    """x - scale * (the residual stream in the middle of the model)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, x_BTD: torch.Tensor, middle_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD - self.own(self.scale).to(x_BTD.dtype) * middle_BTD


class Block(decoder.Block):
    """A pre-norm block whose input is a mix of the residual stream and the embedding."""

    norm_type: ClassVar[type[nn.Module]] = Norm  # type: ignore[assignment]

    def __init__(self, config: GptConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__(config, attention, mlp)
        self.residual_mix = ResidualMix() if config.residual_scalars else None

    def forward(  # type: ignore[override]
        self,
        x_BTD: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Attention,
        embedded_BTD: torch.Tensor,
        tokens_BT: torch.Tensor,
    ) -> torch.Tensor:
        if self.residual_mix is not None:
            x_BTD = self.residual_mix(x_BTD, embedded_BTD)
        attended = self.self_attn(self.input_layernorm(x_BTD), cos, sin, attention, tokens_BT)
        x_BTD = torch.add(x_BTD, attended, alpha=self.scale)
        return torch.add(x_BTD, self.mlp(self.post_attention_layernorm(x_BTD)), alpha=self.scale)


class Model(decoder.Model):
    """Embedding, blocks and final norm, with the parts that connect distant places of the model."""

    config: GptConfig

    def __init__(
        self,
        config: GptConfig,
        attention: type[AttentionLayer],
        mlp: Callable[[Any, int], nn.Module],
        block: type[decoder.Block],
    ):
        super().__init__(config, attention, mlp, block)
        self.embedding_norm = Norm(config.dim, config.norm_eps)
        self.smear = Smear(self.embedding_norm) if config.smear else None
        self.backout = Backout() if config.backout else None

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None, attention: Attention) -> torch.Tensor:
        h_BTD = x
        if self.embed_tokens is not None:
            h_BTD = self.embed_tokens(x)
            if self.smear is None:
                h_BTD = self.embedding_norm(h_BTD)
            else:
                if positions is None:
                    positions = torch.arange(x.shape[1], device=x.device)
                h_BTD = self.smear(h_BTD, self.embed_tokens(attention.previous_tokens(x)), positions)
        embedded_BTD, middle = h_BTD, self.config.n_layers // 2
        for i, (block, *inputs) in enumerate(self.with_inputs(x, positions, attention)):
            h_BTD = block(h_BTD, *inputs, embedded_BTD, x)
            if i == middle:
                middle_BTD = h_BTD
        if self.backout is not None:
            h_BTD = self.backout(h_BTD, middle_BTD)
        return self.norm(h_BTD) if self.norm is not None else h_BTD


TP_PLAN = {  # by the field that adds the modules
    "residual_scalars": {"model.layers.*.residual_mix": "elementwise"},
    "smear": {"model.smear": "elementwise"},
    "backout": {"model.backout": "elementwise"},
    "value_embedding_interval": {
        "model.layers.*.self_attn.value_embedding": "colwise",
        "model.layers.*.self_attn.value_gate": "colwise",
    },
}


class GptDecoder(RotaryDecoder):
    """RotaryDecoder with this family's blocks and capped logits."""

    config: GptConfig
    model_type: ClassVar[type[decoder.Model]] = Model

    def __init__(self, config: GptConfig):
        plan = {k: v for field, part in TP_PLAN.items() if getattr(config, field) for k, v in part.items()}
        super().__init__(config, SelfAttention, plan, mlp_of, Block)
        if config.has_squared_relu:
            del self.tp_plan["model.layers.*.mlp.gate_proj"]
        self.logit_softcap = config.logit_softcap

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention: Attention = CAUSAL,
        head_fn: HeadFn | None = None,
    ) -> torch.Tensor:
        return super().forward(tokens, positions, attention, head_fn or self.logits)

    def compiled_modules(self) -> list[nn.Module]:
        model = self.model
        assert isinstance(model, Model)
        first = model.smear if model.smear is not None else model.embedding_norm
        return [module for module in (first, model.backout, model.norm) if module is not None]

    def parameter_role(self, name: str) -> Role:
        return "embedding" if name.endswith("value_embedding.weight") else super().parameter_role(name)

    def init_normal(self, name: str) -> tuple[float, float]:
        config = self.config
        std = config.matrix_init_std or config.dim**-0.5
        if name.endswith(
            ("smear.scale", *(("o_proj.weight", "down_proj.weight") if config.zero_init else ()))
        ):
            return 0.0, 0.0
        if name.endswith("backout.scale"):
            return BACKOUT_INIT, 0.0
        if name.endswith(("smear.gate", "value_gate.weight")):
            return GATE_MEAN, GATE_STD
        for end, (first, last) in (("residual", RESIDUAL_INIT), ("embedding", EMBEDDING_INIT)):
            if name.endswith(f"residual_mix.{end}"):
                block = int(name.split(".")[2])
                return first + (last - first) * block / max(config.n_layers - 1, 1), 0.0
        if name == "lm_head.weight":
            return 0.0, HEAD_INIT_STD
        if name == "model.embed_tokens.weight":
            return 0.0, EMBEDDING_INIT_STD
        return 0.0, std * UP_INIT if name.endswith("up_proj.weight") else std

    def num_matmul_parameters(self) -> int:
        tables = [m.weight for m in self.model.layers.modules() if isinstance(m, nn.Embedding)]
        return super().num_matmul_parameters() - sum(table.numel() for table in tables)
