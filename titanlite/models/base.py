"""The contract of a model family: everything that the rest of titanlite asks of a model.

A family is a TOML choice (`[model] name`) with flavors, a dict of config dataclasses. Its nn.Module knows no
ranks, no attention kernels and no job; parallel/ shards and compiles it from outside, block by block.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from titanlite.attention.base import Attention, AttentionKind
from titanlite.attention.sdpa import CAUSAL
from titanlite.config.component import Component, ConfigError, suggest
from titanlite.losses import soft_capped

# A function of a decoder's last hidden states [B, T, D] and its head's weight [V, D]: a loss that holds its
# targets, or the computation of logits.
HeadFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Selects a tensor from a parameter: `parameter[index]`. A number removes its dim; () selects the parameter.
Index = tuple[int | slice, ...]
Role = Literal["embedding", "matrix", "head", "norm", "router", "expert", "adapter"]


def logits(hidden_BTD: torch.Tensor, weight_VD: torch.Tensor, softcap: float = 0.0) -> torch.Tensor:
    """Logits [B, T, V] in the hidden states' dtype; with a soft cap (Decoder.logit_softcap) in fp32."""
    values = F.linear(hidden_BTD, weight_VD.to(hidden_BTD.dtype))
    return soft_capped(values.float(), softcap) if softcap else values


def is_adapter(name: str) -> bool:
    """Whether the parameter `name` belongs to an adapter, which LoRA.apply has added to a layer."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


@dataclass(frozen=True)
class LossHead:
    """The head_fn of a micro-batch's loss, for models that also predict later tokens. `loss`: the head_fn.
    `ahead(distance)`: the tokens that follow the inputs at this distance, int64 [B, T], and the head_fn of
    the loss whose targets are this distance later. Targets beyond the sequence or the document do not count;
    the value is the sum of the token losses alone."""

    loss: HeadFn
    ahead: Callable[[int], tuple[torch.Tensor, HeadFn]]

    def __call__(self, hidden_BTD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        return self.loss(hidden_BTD, weight_VD)


class Inputs(NamedTuple):
    """The arguments of Decoder.forward for one micro-batch."""

    tokens: torch.Tensor
    positions: torch.Tensor | None
    attention: Attention
    head_fn: HeadFn


class Decoder(nn.Module):
    """A decoder-only language model under Hugging Face's parameter names.

    A pipeline stage is an object of the same class that lacks some of the blocks, the embedding or the head.
    A stage without the embedding takes hidden states instead of tokens; a stage without the head returns
    hidden states.
    """

    config: DecoderConfig
    vocab_size: int
    tp_plan: dict[str, str]
    """The tensor-parallel style of each layer, by patterns of module names. Styles: `embedding`,
    `sequence` (norms between the layers: each rank has some of the tokens), `residual` (the same for
    norms whose output is added to the residual stream, a plain tensor), `gather` (a module whose input is
    gathered, because its layers need all tokens), `gather_sinks` (`gather` for attention with sinks),
    `gated_delta_net` (`gather` for a gated_delta_net.GatedDeltaNet), `colwise`, `rowwise`, `heads` (norms
    within attention: each rank has some of the heads), `all_heads` (norms over the features of all heads
    together), `tokens` (linear layers that every rank applies to its own tokens), `own_tokens` (`tokens`
    with a plain tensor as its output), `gather_colwise` (`colwise` after gathering its input),
    `gather_output` (gathers what the module returns), `local` (a mixture of experts: each rank routes its
    own tokens), `router`, `elementwise` (a layers.ElementwiseLayer, which every rank applies to its own
    tokens), `head`."""
    logit_softcap: float = 0.0
    """The logits l are softcap * tanh(l / softcap), which losses compute, too; 0: they are not capped."""
    mlp_down: str = ""
    """Name, within a block, of the linear layer whose inputs are the hidden units of the MLP, such as
    `mlp.down_proj`, for the measurement of dead units. Empty: they are not measured."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        attention: Attention = CAUSAL,
        head_fn: HeadFn = logits,
    ) -> torch.Tensor:
        """The result of `head_fn`, by default logits [B, T, V], for tokens int64 [B, T].

        `head_fn` is called inside the forward, with the head's weight, so that a chunked loss can avoid the
        full logits and FSDP has gathered the weight. `positions` int64 [T] or [B, T]; default: 0 to T - 1.
        Every block calls `attention.attend`.
        """
        raise NotImplementedError

    def logits(self, hidden_BTD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """The head_fn that returns logits [B, T, V]."""
        return logits(hidden_BTD, weight_VD, self.logit_softcap)

    def pipeline_stage(self, blocks: Collection[str], first: bool, last: bool) -> Decoder:
        """A pipeline stage of this model, which shares its modules: `blocks`, the embedding if `first`, the
        final norm and the head if `last`."""
        raise NotImplementedError

    def blocks(self) -> nn.ModuleDict:
        """The transformer blocks in order. Activation checkpointing, torch.compile and FSDP work by block."""
        raise NotImplementedError

    def training_blocks(self) -> list[nn.Module]:
        """The last of the blocks, as far as only the forward of a training step runs them, for an auxiliary
        loss. Default: none."""
        return []

    def compiled_modules(self) -> list[nn.Module]:
        """Modules outside the blocks that torch.compile makes one graph of, each. Default: none."""
        return []

    def embedding_and_head(self) -> list[list[nn.Module]]:
        """The modules before the blocks and the modules after the blocks. FSDP shards each inner list as one
        unit. Empty if embedding and head share a weight (tied embeddings)."""
        raise NotImplementedError

    def init_normal(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of the normal distribution that initialises the parameter `name`."""
        raise NotImplementedError

    def init_function(self, name: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function, elementwise, from the values that init_normal describes, fp32, to the initial values of
        the parameter `name`. Default: None, the values themselves."""
        return None

    def export_factor(self, name: str) -> float:
        """The factor by which the parameter `name` is multiplied in Hugging Face's form of the model. A
        family with scales that this form lacks folds them into the weights. Default: 1."""
        return 1.0

    def export_offset(self, name: str) -> float:
        """The number that is added to the parameter `name`, after the multiplication by export_factor, in
        Hugging Face's form of the model. Default: 0."""
        return 0.0

    def hf_tensors(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, Index]]:
        """The tensors in Hugging Face's files that hold the parameter or buffer `name`, whose full shape is
        `shape`: the name of each and its index in the parameter. They are disjoint, make up the parameter and
        have the order of its rows. An empty list: the files do not have it, so an export leaves it out, and a
        run that starts from such files keeps its initial value. Default: one tensor of the same name."""
        return [(name, ())]

    def hf_copies(self, name: str) -> list[str]:
        """Further tensors in Hugging Face's files that are equal to the parameter `name`. An export writes
        them; in an import they may be missing, and have to be equal. Default: none."""
        return []

    def parameter_role(self, name: str) -> Role:
        """The role of the parameter `name`, for optimizers that treat weights by their purpose.

        Default: the matrices of adapters are adapters. Every parameter of fewer than two dims is a norm, a
        bias too. Other parameters are matrices within the blocks; outside the blocks the weight of an
        nn.Embedding is the embedding (even if it also serves as the head), and all others are the head. A
        family with routers or experts overrides this method.
        """
        if is_adapter(name):
            return "adapter"
        if self.get_parameter(name).ndim < 2:
            return "norm"
        module: nn.Module = self
        blocks = set(self.blocks().values())
        for child in name.split(".")[:-1]:
            module = getattr(module, child)
            if module in blocks:
                return "matrix"
        return "embedding" if isinstance(module, nn.Embedding) else "head"

    def num_heads(self, name: str) -> int:
        """The number of attention heads that share the rows of the parameter `name` equally, for optimizers
        that treat each head's matrix by itself. Default: 1, for a parameter that is not divided into heads.
        """
        return 1

    def num_stacked(self, name: str) -> int:
        """The number of matrices that each of the matrices of the parameter `name` consists of, one above the
        other, such as the gate and the up projection of an expert, for optimizers that treat matrices by
        themselves. Default: 1."""
        return 1

    def moe_layers(self) -> Mapping[str, nn.Module]:
        """The layers of experts by name, each a moe.MoE. Default: none."""
        return {}

    def initial_buffer(self, name: str) -> torch.Tensor:
        """The initial value of the buffer `name`.

        A persistent buffer is state: it starts from this value, is saved under its name and restored. A
        non-persistent buffer is not saved and starts every run from this value. Default: raises ConfigError,
        so that no buffer stays uninitialised.
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
        sum of token losses and divides the total by the number of targets that count, over all ranks
        and micro-batches, so that the gradient does not depend on the layout. Auxiliary losses are logged as
        `train/NAME`; train/loss and validation do not include them. A family that overrides this method
        cannot use pipeline parallel.
        """
        return {}

    def statistics(self) -> dict[str, torch.Tensor]:
        """Statistics of the newest step by name, such as the load of a router: fp32 scalars, with the same
        names on all ranks. Called after `after_step` when the step is logged. The mean over ranks is logged
        as `model/NAME`."""
        return {}

    def after_step(self, applied: torch.Tensor) -> None:
        """Update buffers after a step of the optimizer. `applied`: bool scalar on the device; False if the
        step was skipped, and the buffers must not change. Default: no update."""

    def num_matmul_parameters(self) -> int:
        """The number of parameters that every token is multiplied with: all parameters except an embedding
        that is only looked up."""
        raise NotImplementedError

    def num_keys(self, seq_len: int) -> int:
        """The number of keys that a token of a sequence of `seq_len` tokens is multiplied with, over all
        layers, without a deduction for causal masking. Default: all tokens in each layer."""
        return self.config.n_layers * seq_len

    def flops_per_token(self, seq_len: int) -> int:
        """Model FLOPs of forward and backward for one token of a sequence of `seq_len` tokens: 6 N + 6 H (E +
        V) K.

        N is num_matmul_parameters(). If parameters are frozen, 6 N is 4 N + 2 for each trained parameter,
        because gradients of frozen weights are not computed. The second term is the two matrix products of
        attention of H heads with K = num_keys(seq_len) keys, head dims E of queries and keys and V of values,
        without a deduction for causal masking (PaLM, Chowdhery et al. 2022, appendix B). The repeated forward
        of activation checkpointing is not counted. A family whose attention or feed-forward computes other
        products overrides this method. Called on the whole model, before it is sharded."""
        config = self.config
        head_dims = config.head_dim + config.v_head_dim
        attention = config.n_heads * head_dims * self.num_keys(seq_len)
        total = self.num_matmul_parameters()
        frozen = any(not p.requires_grad for p in self.parameters())
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad) if frozen else total
        return 4 * total + 2 * trained + 6 * attention


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The architecture fields that all families have. A family adds fields in a subclass.

    Four names have a meaning for the rest of titanlite: `max_position`, the maximum sequence length in
    tokens; `tie_word_embeddings`, which is true if embedding and head share a weight; `n_mtp_layers`, the
    number of modules for multi-token prediction; and `attention_kinds`, a list with the AttentionKind of each
    layer, without which all layers have full attention.

    `may_be_zero`: fields for which 0 has a meaning; all other numbers have to be above 0."""

    may_be_zero: ClassVar[tuple[str, ...]] = ()

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
            if value == 0 and f.name in self.may_be_zero:
                continue
            if type(value) in (int, float) and not 0 < value < math.inf:
                outside = "below 0" if f.name in self.may_be_zero else "not above 0"
                raise ConfigError(f"{f.name} = {value} is {outside if value <= 0 else 'not finite'}")
            if type(value) is int and value >= 1 << 31:
                raise ConfigError(f"{f.name} = {value} is not below 2^31")

    @property
    def v_head_dim(self) -> int:
        """The head dim of the values. A family in which it differs from head_dim, the head dim of queries
        and keys, has a field of this name."""
        return self.head_dim

    def architecture_fields(self) -> dict[str, Any]:
        """The fields that must be equal for checkpoints to be interchangeable. vocab_size is not among them:
        a model may have a larger vocabulary than the checkpoint. Neither are max_position, a limit, and
        mtp_loss_factor, the weight of a loss."""
        free = ("vocab_size", "max_position", "mtp_loss_factor")
        return {key: value for key, value in vars(self).items() if key not in free}


@dataclass(frozen=True, kw_only=True)
class ModelFamily(Component, kind="model", makes=(Decoder,)):
    """Base of model families: `[model] name = "..."` selects a subclass by its name."""

    flavor: str
    """Size of the model: one of the family's flavors."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the flavor to replace: `{ n_layers = 4 }`."""
    origin: str = ""
    """Recorded by the model "huggingface", for messages: the directory of its config.json."""

    tp_fields: ClassVar[dict[str, str]] = {
        "n_heads": "",
        "n_kv_heads": ": each rank needs its own key and value heads",
        "hidden_dim": "",
        "vocab_size": ": the head is sharded over the vocabulary",
    }
    """The config's fields that tensor-parallel ranks share, with the reason for messages. A family whose
    `tp_plan` shards other dims overrides it."""
    flavors: ClassVar[dict[str, Any]]
    hf_model_type: ClassVar[str] = ""
    """The `model_type` in the config.json of the same model in Hugging Face's implementation; empty if there
    is none."""
    hf_multimodal_type: ClassVar[str] = ""
    """The `model_type` in the config.json of Hugging Face's multimodal models whose text model, described by
    `text_config`, is a model of this family; empty if there are none."""

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
        self.config  # noqa: B018 -- making the config checks its fields

    @property
    def config(self) -> Any:
        """The flavor's config with the overrides applied."""
        return dataclasses.replace(self.flavors[self.flavor], **self.overrides)

    @property
    def title(self) -> str:
        """The family with its flavor, or with the directory that the shape was read from, for messages."""
        return f"{self.name} of {self.origin}" if self.origin else f"{self.name} {self.flavor}"

    def shape(self) -> str:
        """The fields of DecoderConfig and the overridden fields with their values, for the log."""
        names = [f.name for f in dataclasses.fields(DecoderConfig)]
        names += [name for name in self.overrides if name not in names]
        return " ".join(f"{name}={getattr(self.config, name)}" for name in names)

    @property
    def max_position(self) -> int | None:
        """The maximum sequence length of the model, in tokens; None: any length."""
        return getattr(self.config, "max_position", None)

    @property
    def attention_kinds(self) -> list[AttentionKind]:
        """The kind of attention of each layer."""
        config = self.config
        return getattr(config, "attention_kinds", None) or [AttentionKind()] * config.n_layers

    @property
    def num_experts(self) -> int:
        """The number of experts of a layer; 0: the model has none."""
        return getattr(self.config, "n_experts", 0)

    def check_length(self, seq_len: int) -> None:
        """Raises ConfigError if sequences of `seq_len` tokens exceed the maximum length of the model."""
        if self.max_position is not None and seq_len > self.max_position:
            raise ConfigError(
                f"{seq_len} tokens are more than max_position = {self.max_position} of {self.title}; "
                f"for a new model, --model.overrides.max_position={seq_len} allows them",
                "training.seq_len",
            )

    def check_tensor_parallel(self, degree: int) -> None:
        """Raises ConfigError unless `degree` tensor-parallel ranks can share the model's layers."""
        for name, reason in self.tp_fields.items():
            if (size := getattr(self.config, name)) % degree:
                divisors = [divisor for divisor in range(2, size + 1) if size % divisor == 0][:4]
                others = f"; it is divisible by {divisors}" if divisors else ""
                raise ConfigError(
                    f"{name} = {size} is not divisible by {degree}{reason}{others}",
                    "parallelism.tensor_parallel_degree",
                )

    def check_pipeline_parallel(self, degree: int) -> None:
        """Raises ConfigError if the model cannot be split into pipeline stages on `degree` ranks."""
        if degree > 1 and getattr(self.config, "tie_word_embeddings", False):
            raise ConfigError(
                "embedding and head share a weight, but are in different pipeline stages; for a new model, "
                "model.overrides.tie_word_embeddings = false gives each its own weight",
                "parallelism.pipeline_parallel_degree",
            )
        if degree > 1 and getattr(self.config, "n_mtp_layers", None):
            raise ConfigError(
                "pipeline parallel does not support multi-token prediction: set "
                "model.overrides.n_mtp_layers = 0 for a new model",
                "parallelism.pipeline_parallel_degree",
            )

    @abstractmethod
    def build(self) -> Decoder:
        """The model, on the current default device (meta in a training run)."""

    def build_on_meta(self) -> Decoder:
        """Build the model without memory for its parameters and buffers."""
        with torch.device("meta"):
            return self.build()

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
        """The family with the flavor that needs the fewest overrides to have these values of `fields`.
        Other fields keep the flavor's values."""

        def overrides(flavor: str) -> dict[str, Any]:
            config = cls.flavors[flavor]
            return {key: value for key, value in fields.items() if value != getattr(config, key)}

        nearest = min(cls.flavors, key=lambda flavor: len(overrides(flavor)))
        return cls(flavor=nearest, overrides=overrides(nearest))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ConfigError if the tokenizer's `vocab_size` is larger than the model's."""
        if vocab_size > self.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has {vocab_size} ids, more than vocab_size = {self.config.vocab_size} of "
                f"{self.title}; for a new model, --model.overrides.vocab_size={-(-vocab_size // 64) * 64} "
                "makes room",
                "model.overrides.vocab_size",
            )
