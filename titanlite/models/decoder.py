"""The decoder that Llama-like families share: embedding, pre-norm blocks with rotary grouped-query attention
and SwiGLU, final norm, head.

A family defines its config, its flavors and, if it differs, its attention (qwen3.py is an example). Parameter
names, shapes and the rotate-half layout are Hugging Face's, so that safetensors files load by name. Shape
suffixes: B batch, T tokens, D model dim, H query heads, K key/value heads, E head dim, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from titanlite.attention.base import Attention, AttentionKind
from titanlite.attention.sdpa import CAUSAL
from titanlite.config.component import ConfigError, suggest
from titanlite.models.base import Decoder, DecoderConfig, HeadFn, logits
from titanlite.models.layers import (
    Head,
    Linear,
    RMSNorm,
    RopeScaling,
    SwiGLU,
    apply_rope,
    identity_tables,
    rope_tables,
)

INIT_STD = 0.02
INIT_FIELDS = ("matrix_init_std", "depth_scaled_init", "router_init_std")  # decide initial weights only
ROPE_FIELDS = {  # the fields that each type of rotary scaling reads
    "linear": {"rope_factor"},
    "llama3": {
        "rope_factor", "rope_original_max_position", "rope_low_freq_factor", "rope_high_freq_factor",
    },
    "yarn": {
        "rope_factor", "rope_original_max_position", "rope_beta_fast", "rope_beta_slow",
        "rope_attention_factor", "rope_truncate",
    },
}  # fmt: skip


def shortest_pattern(pattern: str, num_layers: int) -> str:
    """The shortest string whose repetition gives `num_layers` layers the letters that the repetition of
    `pattern` gives them. Its cost does not depend on the number of layers, which may come from a file."""
    pattern = pattern[:num_layers]
    letters = (pattern * 2)[:num_layers]
    return next(pattern[:n] for n in range(1, len(pattern) + 1) if letters[n:] == letters[:-n])


class LayerKind(NamedTuple):
    """Attention and rotary positions of a layer. `rope`: base and scaling of the rotary positions; None: it
    has no rotary positions."""

    attention: AttentionKind
    rope: tuple[float, RopeScaling] | None


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(DecoderConfig):
    """The architecture of one flavor. `max_position`: the maximum sequence length in tokens; a larger
    training.seq_len is refused.

    `layer_pattern`: the attention of each layer by one letter, repeated over the layers: `L` all earlier
    tokens, `S` the newest `sliding_window` tokens, itself included, `N` all earlier tokens without rotary
    positions (NoPE, Kazemnejad et al. 2023). Empty: all layers are S if sliding_window is above 0, otherwise
    L. `window_rope_theta`: the rotary base of S layers; 0: rope_theta.
    `window_rope_scaled`: whether their rotary frequencies are scaled, too.

    `rope_factor` above 1 scales the rotary frequencies for sequences that are longer than
    rope_original_max_position. `rope_type`: how, `linear`, `llama3` or `yarn`; RopeScaling describes them and
    their fields.

    Scales of 1 cost nothing. `residual_scale` multiplies the outputs of attention and MLP before they are
    added to the residual stream, `attention_scale` the attention scores in addition to 1 / sqrt(head_dim),
    `logit_scale` the logits. `matrix_init_std`: standard deviation of the initial matrices of the blocks;
    embedding and head have INIT_STD. `depth_scaled_init`: divide it by sqrt(2 n_layers) for the projections
    that write to the residual stream (GPT-2), so that the variance of the stream does not grow with depth."""

    may_be_zero: ClassVar[tuple[str, ...]] = ("sliding_window", "window_rope_theta", "rope_attention_factor")
    letters: ClassVar[dict[str, str]] = {
        "L": "all earlier tokens", "S": "the window", "N": "all earlier tokens without rotary positions",
    }  # fmt: skip
    """The letters of layer_pattern with their meaning. A family with others overrides `kind_of`, too."""

    norm_eps: float
    rope_theta: float
    rope_type: str = "llama3"
    rope_factor: float = 1.0
    rope_original_max_position: int = 8192
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_attention_factor: float = 0.0
    rope_truncate: bool = True
    max_position: int
    sliding_window: int = 0
    layer_pattern: str = ""
    window_rope_theta: float = 0.0
    window_rope_scaled: bool = True
    tie_word_embeddings: bool = False
    residual_scale: float = 1.0
    attention_scale: float = 1.0
    logit_scale: float = 1.0
    matrix_init_std: float = INIT_STD
    depth_scaled_init: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim = {self.head_dim} is odd; rotary embedding pairs its two halves")
        if self.rope_type not in ROPE_FIELDS:
            raise ConfigError(f"unknown rope_type {self.rope_type!r}{suggest(self.rope_type, ROPE_FIELDS)}")
        if self.rope_factor < 1.0:  # transformers warns, and YaRN has no formula for it
            raise ConfigError(f"rope_factor = {self.rope_factor} is below 1")
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if self.rope_type == "llama3" and self.rope_factor > 1.0 and low >= high:
            raise ConfigError(f"rope_low_freq_factor = {low} is not below rope_high_freq_factor = {high}")
        if self.rope_type != "llama3" and self.rope_factor == 1.0:
            raise ConfigError(
                f"rope_type = {self.rope_type!r} without a rope_factor scales nothing; set both"
            )

        self._check_pattern()

    def _check_pattern(self) -> None:
        if other := set(self.layer_pattern) - self.letters.keys():
            known = " nor ".join(f"{letter} ({meaning})" for letter, meaning in self.letters.items())
            raise ConfigError(f"layer_pattern = {self.layer_pattern!r}: {min(other)!r} is neither {known}")
        if "S" in self.layer_pattern and not self.sliding_window:
            raise ConfigError(f"layer_pattern = {self.layer_pattern!r} needs a sliding_window above 0")
        if "S" not in self.shortest_pattern and self.sliding_window:
            raise ConfigError(
                f"layer_pattern = {self.layer_pattern!r}: none of the {self.n_layers} layers is S, so that "
                f"sliding_window = {self.sliding_window} has no effect; set it to 0"
            )

    @property
    def shortest_pattern(self) -> str:
        """The shortest layer_pattern that gives the layers their letters."""
        return shortest_pattern(self.layer_pattern or ("S" if self.sliding_window else "L"), self.n_layers)

    @property
    def layer_letters(self) -> str:
        """The letter of each layer, as layer_pattern describes it."""
        pattern = self.shortest_pattern
        return (pattern * -(-self.n_layers // len(pattern)))[: self.n_layers]

    @property
    def layer_kinds(self) -> list[LayerKind]:
        """The kind of each layer."""
        kinds = {letter: self.kind_of(letter) for letter in set(self.shortest_pattern)}
        return [kinds[letter] for letter in self.layer_letters]

    def kind_of(self, letter: str) -> LayerKind:
        """The kind of the layers with this letter in layer_pattern."""
        if letter != "S":
            rope = None if letter == "N" else (self.rope_theta, self.rope_scaling)
            return LayerKind(AttentionKind(), rope)
        scaling = self.rope_scaling if self.window_rope_scaled else RopeScaling()
        return LayerKind(
            AttentionKind(self.sliding_window), (self.window_rope_theta or self.rope_theta, scaling)
        )

    @property
    def attention_kinds(self) -> list[AttentionKind]:
        """The kind of attention of each layer."""
        return [kind.attention for kind in self.layer_kinds]

    def architecture_fields(self) -> dict[str, Any]:
        used = {"rope_type"} | ROPE_FIELDS[self.rope_type] if self.rope_factor != 1.0 else {"rope_factor"}
        without_effect = {"rope_type"}.union(INIT_FIELDS, *ROPE_FIELDS.values()) - used
        if "S" not in self.shortest_pattern:
            without_effect |= {"window_rope_theta", "window_rope_scaled"}
        elif self.rope_factor == 1.0:
            without_effect.add("window_rope_scaled")
        fields = super().architecture_fields() | {
            "layer_pattern": self.shortest_pattern,
            "window_rope_theta": self.window_rope_theta or self.rope_theta,
        }
        return {key: value for key, value in fields.items() if key not in without_effect}

    @property
    def rope_head_dim(self) -> int:
        """The number of rotated dims of each head. A family that rotates only some has a field of this
        name."""
        return self.head_dim

    @property
    def embedding_scale(self) -> float:
        """The factor of the embedding's output. A family with another factor overrides this property."""
        return 1.0

    @property
    def rope_scaling(self) -> RopeScaling:
        """The scaling of the rotary frequencies."""
        return RopeScaling(
            self.rope_factor,
            self.rope_low_freq_factor,
            self.rope_high_freq_factor,
            self.rope_original_max_position,
            self.rope_type,
            self.rope_beta_fast,
            self.rope_beta_slow,
            self.rope_attention_factor,
            self.rope_truncate,
        )


MLP_PLAN = {
    "model.layers.*.mlp": "gather",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
TP_PLAN = {
    "model.embed_tokens": "embedding",
    "model.layers.*.input_layernorm": "sequence",
    "model.layers.*.self_attn": "gather",
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.post_attention_layernorm": "sequence",
    **MLP_PLAN,
    "model.norm": "sequence",
}


MakeMLP = Callable[[Any, int], nn.Module]  # of a RotaryConfig and the number of a block


class AttentionLayer(nn.Module):
    """Base of the attention layers of blocks, which are made from a RotaryConfig."""

    scales_queries: ClassVar[str] = "q_proj"
    """Name of the module whose weight, and bias if it has one, the queries are proportional to."""

    def __init__(self, config: Any):
        super().__init__()

    @classmethod
    def of_layer(cls, config: Any, number: int) -> nn.Module:
        """The layer of the block with this number. A family with layers of several classes overrides it."""
        return cls(config)


class SelfAttention(AttentionLayer):
    """Grouped-query attention with rotary positions."""

    qkv_bias: ClassVar[bool] = False
    """Whether the projections to queries, keys and values have biases."""
    o_bias: ClassVar[bool] = False
    """Whether the projection of the output has a bias."""

    def __init__(self, config: RotaryConfig):
        super().__init__(config)
        self.head_dim, self.scale = config.head_dim, config.attention_scale
        self.q_proj = Linear(config.dim, config.n_heads * config.head_dim, self.qkv_bias)
        self.k_proj = Linear(config.dim, config.n_kv_heads * config.head_dim, self.qkv_bias)
        self.v_proj = Linear(config.dim, config.n_kv_heads * config.head_dim, self.qkv_bias)
        self.o_proj = Linear(config.n_heads * config.head_dim, config.dim, self.o_bias)

    def forward(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention, *extra: Any
    ) -> torch.Tensor:
        """The outputs [B, T, D]. `extra`: arguments of mixed_values."""
        # -1: under tensor parallel, this rank has only some of the heads.
        q, k, v = (
            p(x_BTD).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BTHE, k_BTKE = self.normed(q, k)
        k_BTKE = apply_rope(k_BTKE, cos, sin)
        if self.scale != 1.0:  # of the queries' tables: in fp32, and equal for every attention backend
            cos, sin = cos * self.scale, sin * self.scale
        sinks = self.sinks_of_heads(v.dtype)
        v_BTKE = self.mixed_values(v, x_BTD, *extra)
        out_BTHE = attention.attend(apply_rope(q_BTHE, cos, sin), k_BTKE, v_BTKE, *sinks)
        return self.o_proj(out_BTHE.flatten(-2))

    def sinks_of_heads(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The attention sinks of this rank's heads, [H], in a family that has them; otherwise none."""
        return ()

    def normed(self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys as they enter the rotary embedding. Families that normalise them override this
        method."""
        return q_BTHE, k_BTKE

    def mixed_values(self, v_BTKE: torch.Tensor, x_BTD: torch.Tensor) -> torch.Tensor:
        """The values. Families that add to them override this method, with further arguments."""
        return v_BTKE


def dense_mlp(config: RotaryConfig, block: int) -> nn.Module:
    """The MLP of the block with the number `block`: SwiGLU."""
    return SwiGLU(config.dim, config.hidden_dim)


class Block(nn.Module):
    """x + scale * attention(norm(x)), then x + scale * mlp(norm(x)), with residual_scale."""

    norm_type: ClassVar[type[RMSNorm]] = RMSNorm
    """The class of this block's norms and of the final norm."""
    tp_plan: ClassVar[dict[str, str]] = {}
    """Entries of Decoder.tp_plan for the modules that a subclass adds or uses differently."""

    def __init__(self, config: RotaryConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.input_layernorm = self.norm_type(config.dim, config.norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = self.norm_type(config.dim, config.norm_eps)
        self.mlp = mlp
        self.scale = config.residual_scale

    def forward(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        x_BTD, h_BTD = self.attend(x_BTD, cos, sin, attention)
        return torch.add(x_BTD, self.mlp(h_BTD), alpha=self.scale)

    def attend(
        self, x_BTD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attention: Attention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after attention, and the input of the MLP."""
        attended = self.self_attn(self.input_layernorm(x_BTD), cos, sin, attention)
        x_BTD = torch.add(x_BTD, attended, alpha=self.scale)
        return x_BTD, self.post_attention_layernorm(x_BTD)


class Model(nn.Module):
    """Embedding, blocks and final norm. In a pipeline stage, `embed_tokens` and `norm` may be None."""

    def __init__(
        self, config: RotaryConfig, attention: type[AttentionLayer], mlp: MakeMLP, block: type[Block]
    ):
        super().__init__()
        self.config, self.kinds = config, config.layer_kinds
        self.embed_tokens: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        blocks = [
            block(config, attention.of_layer(config, i), mlp(config, i)) for i in range(config.n_layers)
        ]
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        # Scaling the last hidden states scales the logits: no head and no loss has to know the scale.
        self.norm: RMSNorm | None = block.norm_type(config.dim, config.norm_eps, config.logit_scale)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None, attention: Attention) -> torch.Tensor:
        h_BTD = x if self.embed_tokens is None else self.embed_tokens(x)
        if self.embed_tokens is not None and (scale := self.config.embedding_scale) != 1.0:
            # A tensor, because Hugging Face's models round the factor to the dtype of the hidden states, too.
            h_BTD = h_BTD * torch.full((), scale, dtype=h_BTD.dtype, device=h_BTD.device)
        for block, cos, sin, of_kind in self.with_inputs(x, positions, attention):
            h_BTD = block(h_BTD, cos, sin, of_kind)
        return self.norm(h_BTD) if self.norm is not None else h_BTD

    def with_inputs(
        self, x: torch.Tensor, positions: torch.Tensor | None, attention: Attention
    ) -> Iterator[tuple[nn.Module, torch.Tensor, torch.Tensor, Attention]]:
        """The blocks in order, each with the rotary tables and the attention of its kind. `x`: the model's
        input [B, T, ...]."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        num_layers = len(self.kinds)  # further blocks are those of multi-token prediction
        layers = {number: block for number, block in self.layers.items() if int(number) < num_layers}
        kinds = [self.kinds[int(number)] for number in layers]
        attentions = {kind.attention: attention for kind in kinds}
        if any(kind.attention != AttentionKind() for kind in self.kinds):  # of the model, not of the stage
            tokens_BT = positions.expand(len(x), -1)
            attentions = {kind: attention.of_kind(kind, tokens_BT) for kind in attentions}
        dim = self.config.rope_head_dim
        tables = {
            rope: rope_tables(positions, dim, *rope) if rope else identity_tables(positions, dim)
            for rope in {kind.rope for kind in kinds}
        }
        for block, kind in zip(layers.values(), kinds):
            yield block, *tables[kind.rope], attentions[kind.attention]


class RotaryDecoder(Decoder):
    """The model with its head. With tied embeddings there is no lm_head: the embedding's weight is also the
    head's.

    `attention`: the class of each block's attention. `attention_plan`: entries of `tp_plan` for the modules
    that this class adds to SelfAttention. `mlp`: makes the MLP of the block with a number. `block`: the class
    of the blocks.
    """

    config: RotaryConfig
    mlp_down = "mlp.down_proj"
    model_type: ClassVar[type[Model]] = Model
    """The class of embedding, blocks and final norm."""

    def __init__(
        self,
        config: RotaryConfig,
        attention: type[AttentionLayer] = SelfAttention,
        attention_plan: dict[str, str] | None = None,
        mlp: MakeMLP = dense_mlp,
        block: type[Block] = Block,
    ):
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.model = self.model_type(config, attention, mlp, block)
        self.folded_scales = {
            "o_proj.weight": config.residual_scale,
            "o_proj.bias": config.residual_scale,
            "down_proj.weight": config.residual_scale,
            f"self_attn.{attention.scales_queries}.weight": config.attention_scale,
            f"self_attn.{attention.scales_queries}.bias": config.attention_scale,
            "model.norm.weight": config.logit_scale,
        }
        self.lm_head = None if config.tie_word_embeddings else Head(config.dim, config.vocab_size)
        head_plan = {} if config.tie_word_embeddings else {"lm_head": "head"}
        self.tp_plan = TP_PLAN | block.tp_plan | (attention_plan or {}) | head_plan

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention: Attention = CAUSAL,
        head_fn: HeadFn = logits,
    ) -> torch.Tensor:
        h_BTD = self.model(tokens, positions, attention)
        if self.lm_head is not None:
            return self.lm_head(h_BTD, head_fn)
        if self.config.tie_word_embeddings and self.model.embed_tokens is not None:
            return head_fn(h_BTD, self.model.embed_tokens.weight)
        return h_BTD

    def pipeline_stage(self, blocks: Collection[str], first: bool, last: bool) -> Decoder:
        containers = (self, self.model, self.model.layers)
        stage = copy.deepcopy(self, {id(m): m for m in self.modules() if m not in containers})
        stage.model.layers = nn.ModuleDict({i: b for i, b in self.model.layers.items() if i in blocks})
        stage.model.embed_tokens = self.model.embed_tokens if first else None
        stage.model.norm = self.model.norm if last else None
        stage.lm_head = self.lm_head if last else None
        return stage

    def blocks(self) -> nn.ModuleDict:
        return self.model.layers

    def embedding_and_head(self) -> list[list[nn.Module]]:
        if self.config.tie_word_embeddings:
            return []
        before: list[nn.Module | None] = [self.model.embed_tokens]
        after: list[nn.Module | None] = [self.model.norm, self.lm_head]
        present = [[module for module in group if module is not None] for group in (before, after)]
        return [group for group in present if group]

    def init_normal(self, name: str) -> tuple[float, float]:
        if name.endswith("norm.weight"):
            return 1.0, 0.0
        if name.endswith(".bias"):
            return 0.0, 0.0
        if self.parameter_role(name) in ("embedding", "head"):
            return 0.0, INIT_STD
        config, std = self.config, self.config.matrix_init_std
        ends = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
        is_scaled = config.depth_scaled_init and name.endswith(ends)
        return 0.0, std / math.sqrt(2 * config.n_layers) if is_scaled else std

    def export_factor(self, name: str) -> float:
        return next((scale for end, scale in self.folded_scales.items() if name.endswith(end)), 1.0)

    def num_heads(self, name: str) -> int:
        if name.endswith("q_proj.weight"):
            return self.config.n_heads
        return self.config.n_kv_heads if name.endswith(("k_proj.weight", "v_proj.weight")) else 1

    def num_keys(self, seq_len: int) -> int:
        return sum(kind.num_keys(seq_len) for kind in self.config.attention_kinds)

    def num_matmul_parameters(self) -> int:
        total = sum(p.numel() for p in self.parameters())
        return total if self.lm_head is None else total - self.vocab_size * self.config.dim
