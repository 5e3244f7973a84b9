"""The contract of a model family: all that the rest of titanlite asks of a model.

A family is a TOML choice (`[model] name`) with flavors, a dict of config dataclasses beside the model. Its
module knows no ranks, no kernels and no job; parallel/ shards and compiles it from outside, block by block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.attention.base import Attention
from titanlite.attention.sdpa import CAUSAL
from titanlite.config.component import Component, ConfigError, suggest

# What a decoder applies to its last hidden states [B, T, D] and its head's weight [V, D]: a loss with its
# targets, or what makes logits.
HeadFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Role = Literal["embedding", "matrix", "head", "norm", "router", "expert"]


def logits(hidden_BTD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """The head_fn that makes logits [B, T, V], in the hidden states' dtype."""
    return F.linear(hidden_BTD, weight_VD.to(hidden_BTD.dtype))


class Inputs(NamedTuple):
    """The arguments of Decoder.forward for one micro-batch."""

    tokens: torch.Tensor
    positions: torch.Tensor | None
    attention: Attention
    head_fn: HeadFn


class Decoder(nn.Module):
    """A decoder-only language model under Hugging Face's parameter names.

    A pipeline stage is the same class without some of the blocks, the embedding or the head; a stage without
    an embedding takes hidden states for tokens, one without a head returns hidden states.
    """

    vocab_size: int
    dim: int
    tensor_plan: dict[str, str]
    """How tensor parallel shards the layers, by patterns of their names: `embedding`, `sequence` (norms),
    `gather` (a module whose layers need all tokens), `colwise`, `rowwise`, `heads` (norms within attention:
    each rank has some of the heads), `head`."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention: Attention = CAUSAL,
        head_fn: HeadFn = logits,
    ) -> torch.Tensor:
        """What `head_fn` makes of the last hidden states for tokens int64 [B, T]: logits [B, T, V] by
        default.

        `head_fn` is called inside the forward, with the head's weight, so that a chunked loss can avoid the
        full logits and FSDP has gathered the weight. `positions` int64 [T] or [B, T]; default 0 .. T - 1.
        `attention`: the object whose `attend` every block calls.
        """
        raise NotImplementedError

    def pipeline_stage(self, blocks: Collection[str], first: bool, last: bool) -> Decoder:
        """The same model with only these blocks, with the embedding only if `first`, and with the final norm
        and the head only if `last`. It shares its modules with this model."""
        raise NotImplementedError

    def blocks(self) -> nn.ModuleDict:
        """The transformer blocks in order: the unit of activation checkpointing, compile and sharding."""
        raise NotImplementedError

    def embedding_and_head(self) -> list[list[nn.Module]]:
        """The modules before the blocks and those after them, each list to be sharded together; empty if
        embedding and head share one weight (tied embeddings)."""
        raise NotImplementedError

    def init_normal(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of the normal distribution that initialises the parameter `name`."""
        raise NotImplementedError

    def parameter_role(self, name: str) -> Role:
        """The role of the parameter `name`, for optimizers that treat weights by their purpose.

        Default: every parameter of fewer than two dims is a norm. Other parameters are matrices within the
        blocks; outside the blocks the weight of an nn.Embedding is the embedding (even if it also serves as
        the head), and all others are the head. A family with routers or experts overrides this method.
        """
        if self.get_parameter(name).ndim < 2:
            return "norm"
        module: nn.Module = self
        for child in name.split(".")[:-1]:
            module = module.get_submodule(child)
            if module in self.blocks().values():
                return "matrix"
        return "embedding" if isinstance(module, nn.Embedding) else "head"

    def initial_buffer(self, name: str) -> torch.Tensor:
        """The initial value of the buffer `name`.

        A persistent buffer is state: it starts from this value, is saved under its name and restored. A
        non-persistent buffer is not saved: it has this value in every run. Raises ConfigError by default, so
        that no buffer is forgotten.
        """
        raise ConfigError(f"initial_buffer: the model gives no value for the buffer {name!r}", "model.name")

    @torch.no_grad()
    def fill_buffers(self) -> None:
        """Give all buffers their initial values, in place."""
        for name, buffer in self.named_buffers():
            buffer.copy_(self.initial_buffer(name))

    def auxiliary_losses(self) -> dict[str, torch.Tensor]:
        """Auxiliary losses of the last forward by name, multiplied by their coefficients: fp32 scalars.

        Each is a sum over this rank's tokens in the forward, never a mean. The training step adds it to the
        sum of token losses and divides the total by the number of counted tokens over all ranks and
        micro-batches, so that the gradient does not depend on the layout. Auxiliary losses are logged as
        `train/NAME`; train/loss and validation do not include them. A family that overrides this method
        cannot use pipeline parallel.
        """
        return {}

    def after_step(self, applied: torch.Tensor) -> None:
        """Update buffers after a step of the optimizer. `applied`: bool scalar on the device, False if the
        step was skipped, in which case state must not change. Default: nothing to update."""

    def num_matmul_parameters(self) -> int:
        """The number of parameters that take part in matrix products with every token: all parameters except
        an embedding that is only looked up."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The architecture fields that all families have. A family adds its own."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if type(value) in (int, float) and not 0 < value < math.inf:
                raise ConfigError(f"{f.name} = {value} is not above 0")
            if type(value) is int and value >= 1 << 31:
                raise ConfigError(f"{f.name} = {value} is not below 2^31")

    def architecture_fields(self) -> dict[str, Any]:
        """The fields that must be equal for checkpoints to be interchangeable; vocab_size may be larger."""
        return {key: value for key, value in vars(self).items() if key not in ("vocab_size", "max_position")}


@dataclass(frozen=True, kw_only=True)
class ModelFamily(Component, kind="model"):
    """Kind: `[model] name = ...`."""

    flavor: str
    """Name of the model's size: one of the family's flavors."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the flavor to replace, for example `{ n_layers = 4 }`."""

    flavors: ClassVar[dict[str, Any]]
    hf_model_type: ClassVar[str] = ""
    """The `model_type` of the config.json that from_hf_config reads; empty without a Hugging Face form."""

    def __post_init__(self) -> None:
        if self.flavor not in self.flavors:
            raise ConfigError(
                f"unknown {self.name} flavor {self.flavor!r}{suggest(self.flavor, self.flavors)}", "flavor"
            )
        base = self.flavors[self.flavor]
        known = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
        for key, value in self.overrides.items():
            where = f"overrides.{key}"
            if key not in known:
                raise ConfigError(f"unknown field {key!r}{suggest(key, known)}", where)
            if type(value) is not type(known[key]) and not (type(known[key]) is float and type(value) is int):
                raise ConfigError(f"expected {type(known[key]).__name__}, got {value!r}", where)
        self.config  # noqa: B018 -- a flavor checks its own fields when it is made

    @property
    def config(self) -> Any:
        """The flavor's config with the overrides applied."""
        return dataclasses.replace(self.flavors[self.flavor], **self.overrides)

    def shape(self) -> str:
        """The architecture fields that all families have, and the overridden ones, for the log."""
        names = [f.name for f in dataclasses.fields(DecoderConfig)]
        names += [name for name in self.overrides if name not in names]
        return " ".join(f"{name}={getattr(self.config, name)}" for name in names)

    @property
    def max_position(self) -> int | None:
        """The maximum sequence length of the model, in tokens; None: any length."""
        return getattr(self.config, "max_position", None)

    def check_length(self, seq_len: int) -> None:
        """Raises ConfigError if sequences of `seq_len` tokens exceed the maximum length of the model."""
        if self.max_position is not None and seq_len > self.max_position:
            raise ConfigError(
                f"{seq_len} tokens are more than the {self.max_position} that {self.name} {self.flavor} is "
                f"made for; for a new model, --model.overrides.max_position={seq_len} allows them",
                "training.seq_len",
            )

    def check_tensor_parallel(self, degree: int) -> None:
        """Raises ConfigError unless `degree` tensor-parallel ranks can share the model's layers. A family
        whose `tensor_plan` shards other sizes overrides this method."""
        c = self.config
        for name, size, reason in (
            ("n_heads", c.n_heads, ""),
            ("n_kv_heads", c.n_kv_heads, ": each rank needs key and value heads of its own"),
            ("hidden_dim", c.hidden_dim, ""),
            ("vocab_size", c.vocab_size, ": the head is sharded over the vocabulary"),
        ):
            if size % degree:
                divisors = [n for n in range(2, size + 1) if size % n == 0][:4]
                raise ConfigError(
                    f"{name} = {size} cannot be divided by {degree}{reason}; it can be by {divisors}",
                    "parallelism.tensor_parallel_degree",
                )

    def check_pipeline_parallel(self, degree: int) -> None:
        """Raises ConfigError if the model cannot be split into the pipeline stages of `degree` ranks."""
        if degree > 1 and getattr(self.config, "tie_word_embeddings", False):
            raise ConfigError(
                "the embedding and the head are one weight, but on different stages of the pipeline; "
                "model.overrides.tie_word_embeddings = false makes them two weights, for a new model",
                "parallelism.pipeline_parallel_degree",
            )

    def build(self) -> Decoder:
        """The model, on the current default device (meta in a training run)."""
        raise NotImplementedError

    def hf_config(self) -> dict[str, Any]:
        """The content of the `config.json` of the same model in Hugging Face's implementation. Raises
        ConfigError if there is none."""
        raise ConfigError(f"{self.name} has no Hugging Face form (hf_config)", "model.name")

    @classmethod
    def from_hf_config(cls, config: dict[str, Any]) -> ModelFamily:
        """The family, flavor and overrides that a `config.json` describes. Raises ConfigError if the family
        does not support them."""
        raise ConfigError(f"{cls.name} has no Hugging Face form (from_hf_config)", "model.name")

    @classmethod
    def of_shape(cls, fields: dict[str, Any]) -> ModelFamily:
        """The flavor with these architecture fields, or the nearest flavor with overrides. Fields that are
        not given keep the flavor's values."""

        def overrides(flavor: str) -> dict[str, Any]:
            return {key: v for key, v in fields.items() if v != getattr(cls.flavors[flavor], key)}

        nearest = min(cls.flavors, key=lambda flavor: len(overrides(flavor)))
        return cls(flavor=nearest, overrides=overrides(nearest))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ConfigError if the tokenizer has more ids than the embedding has rows."""
        if vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {vocab_size} ids, {self.flavor} has {self.config.vocab_size}; "
                f"--model.overrides.vocab_size={-(-vocab_size // 64) * 64} makes room, for a new model",
                "model.flavor",
            )
