"""The contract of attention: an object with `attend(q, k, v)` for one micro-batch, made by a backend.

The configuration chooses the backend. The blocks of a model only call `attention.attend`. A new kernel, mask
or cache is a class with that method.
Shape suffixes: B batch, T tokens, H query heads, K key/value heads (H is a multiple of K), E head dim. In
multi-head latent attention the values have a smaller head dim than queries and keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from titanlite.attention.context_parallel import SequenceSharding
from titanlite.config.component import Component, ConfigError

SINKS, SOFT_CAP = "attention sinks", "a soft cap of attention scores"  # in messages


class AttentionKind(NamedTuple):
    """The attention of a layer. `window`: the number of newest tokens that a token sees, itself included; 0:
    all earlier tokens. `has_sinks`: `attend` gets attention sinks. `soft_cap` c: scores s become
    c * tanh(s / c) before the softmax (Gemma 2); 0: they stay. `is_linear`: linear attention by the gated
    delta rule instead, by an object of linear.LinearAttention."""

    window: int = 0
    has_sinks: bool = False
    soft_cap: float = 0.0
    is_linear: bool = False

    def __str__(self) -> str:
        if self.is_linear:
            return "linear"
        extras = [
            *(["sinks"] if self.has_sinks else []),
            *([f"cap {self.soft_cap:g}"] if self.soft_cap else []),
        ]
        return ", ".join([f"window {self.window}" if self.window else "full", *extras])

    def num_keys(self, seq_len: int) -> int:
        """The number of keys that a token of a sequence of `seq_len` tokens is multiplied with, without a
        deduction for causal masking."""
        return 0 if self.is_linear else min(seq_len, self.window or seq_len)

    @property
    def changes_softmax(self) -> bool:
        """Whether a mask over scaled scores does not describe the attention."""
        return self.has_sinks or self.soft_cap > 0


class Attention:
    """Attention for one micro-batch. Attributes, such as a mask, are shared by all layers of a kind.

    Compiled blocks take the object as an argument. Its tensor attributes are inputs of the compiled graph:
    new values do not recompile the graph, new shapes do.
    """

    previous_BT: torch.Tensor | None = None
    """Under context parallel: the id of the token before each of this rank's tokens, int64 [B, T]."""

    def previous_tokens(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """The id of the token before each token in its sequence, int64 [B, T]; any id for the first token.
        `tokens_BT`: the model's input."""
        return self.previous_BT if self.previous_BT is not None else previous_of(tokens_BT)

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention, scaled by 1 / sqrt(E), E the head dim of queries and keys. Returns [B, T, H, E],
        E the head dim of the values. `sinks_H`, in layers of a kind with sinks: a logit for each query head,
        which takes part in the softmax over the keys and has no value (gpt-oss). Models pass it only then, so
        that a class without sinks need not have the argument."""
        raise NotImplementedError

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        """The same attention for layers of this kind.

        A model calls this method once per forward and kind, outside of its blocks, unless all of its layers
        have full attention. Only shape and device of `tokens_BT`, this rank's tokens, matter. Default: raises
        ConfigError for a sliding window, sinks, a soft cap and linear attention."""
        check_plain_softmax(self, kind)
        if kind.window:
            raise ConfigError(f"{type(self).__name__} does not support a sliding window", "attention.backend")
        return self

    def visible_keys(
        self, k_BTKE: torch.Tensor, queries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The keys of whole sequences [B, S, K, E], and which of them some queries see, bool [B or 1, Q, S].
        For measurements of attention.

        `queries` int64 [Q]: the indices of the queries among the T tokens of this rank. With context
        parallel, collective. None, the default: the class does not tell.
        """
        return None


def previous_of(tokens_BT: torch.Tensor) -> torch.Tensor:
    """The id of the token before each token of whole sequences; 0 for the first token."""
    return F.pad(tokens_BT, (1, 0))[:, :-1]


def check_plain_softmax(attention: Attention, kind: AttentionKind) -> None:
    """Raises ConfigError if the kind has sinks or a soft cap, or is linear, for classes that support
    neither."""
    if kind.changes_softmax or kind.is_linear:
        feature = "linear attention" if kind.is_linear else SINKS if kind.has_sinks else SOFT_CAP
        raise ConfigError(f"{type(attention).__name__} does not support {feature}", "attention.backend")


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """The attention that a run needs: shapes, dtype, device and masks. Known before the model is built.

    `seq_len`: the longest sequence length; micro-batches may have shorter sequences. `masks_documents`:
    tokens attend only within their document of a packed sequence. `context_parallel`: each sequence is
    sharded over ranks. `kinds`: of the model's layers. `v_head_dim`: the head dim of the values; 0: as of
    queries and keys.
    """

    device: torch.device
    dtype: torch.dtype
    seq_len: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    masks_documents: bool = False
    context_parallel: bool = False
    kinds: tuple[AttentionKind, ...] = (AttentionKind(),)
    v_head_dim: int = 0

    @property
    def window(self) -> int:
        """The shortest sliding window of the layers, in tokens; 0: none has one."""
        return min((kind.window for kind in self.kinds if kind.window), default=0)

    @property
    def has_sinks(self) -> bool:
        """Whether a layer has attention sinks."""
        return any(kind.has_sinks for kind in self.kinds)

    @property
    def has_soft_cap(self) -> bool:
        """Whether a layer caps its attention scores."""
        return any(kind.soft_cap > 0 for kind in self.kinds)

    @property
    def changes_softmax(self) -> bool:
        """Whether a mask over scaled scores does not describe the attention of a layer."""
        return any(kind.changes_softmax for kind in self.kinds)

    @property
    def has_other_values(self) -> bool:
        """Whether the values have another head dim than queries and keys."""
        return self.v_head_dim not in (0, self.head_dim)

    @property
    def has_effective_window(self) -> bool:
        """Whether a window is shorter than the longest sequences, so that it hides tokens."""
        return 0 < self.window < self.seq_len

    @property
    def masks(self) -> bool:
        """Whether a causal mask over whole sequences is not enough."""
        return self.masks_documents or self.context_parallel or self.has_effective_window


@dataclass(frozen=True, kw_only=True)
class AttentionBackend(Component, kind="attention backend", key="backend"):
    """Base of attention backends: `[attention] backend = "..."` selects a subclass by its name. A backend
    makes the attention object of each micro-batch."""

    kept_ops: ClassVar[tuple[str, ...]] = ()
    """Names of the operators whose results selective activation checkpointing keeps, such as
    `my_package.attention`. The operators behind scaled_dot_product_attention are always kept."""
    supports_window: ClassVar[bool] = False
    """Whether the attention objects' method `of_kind` takes a sliding window."""
    supports_v_head_dim: ClassVar[bool] = False
    """Whether the head dim of the values may differ from the head dim of queries and keys in `attend`."""
    supports_sinks: ClassVar[bool] = False
    """Whether the attention objects take sinks: a kind with sinks in `of_kind`, and `sinks_H` in `attend`."""
    supports_soft_cap: ClassVar[bool] = False
    """Whether the attention objects' method `of_kind` takes a soft cap of scores."""

    linear_memory: ClassVar[bool] = False
    """Whether memory is linear in the sequence length, also with masks. FSDP and `titanlite plan` then count
    on it."""

    @classmethod
    def works_on(cls, needs: AttentionNeeds) -> bool:
        """Whether the backend supports the masks in `needs` on this device and in this dtype."""
        return True

    @classmethod
    def supports_softmax(cls, needs: AttentionNeeds) -> bool:
        """Whether the backend supports the sinks and soft caps of the layers."""
        has_sinks = cls.supports_sinks or not needs.has_sinks
        return has_sinks and (cls.supports_soft_cap or not needs.has_soft_cap)

    def check_softmax(self, needs: AttentionNeeds) -> None:
        """Raises ConfigError if the backend does not support the sinks or soft caps of the layers."""
        for is_needed, is_supported, feature in (
            (needs.has_sinks, self.supports_sinks, SINKS),
            (needs.has_soft_cap, self.supports_soft_cap, SOFT_CAP),
        ):
            if is_needed and not is_supported:
                choices: list[Any] = [b for name, b in AttentionBackend.choices.items() if name != "auto"]
                names = [b.name for b in choices if b.supports_softmax(needs) and b.works_on(needs)]
                raise ConfigError(
                    f"{self.name!r} does not support {feature}, which the model has; working backends: "
                    f"{', '.join(names)}",
                    "attention.backend",
                )

    def build(self, needs: AttentionNeeds) -> AttentionBackend:
        """The backend for the run: normally `self`; `auto` returns the backend that it chooses. Called once,
        before the first micro-batch. Raises ConfigError if the backend does not support `needs`."""
        if needs.window and not self.supports_window:
            raise ConfigError(
                f"{self.name!r} does not support the model's sliding window of {needs.window} tokens",
                "attention.backend",
            )
        if needs.has_other_values and not self.supports_v_head_dim:
            raise ConfigError(
                f"{self.name!r} does not support values of head dim {needs.v_head_dim} with queries and "
                f"keys of head dim {needs.head_dim}",
                "attention.backend",
            )
        self.check_softmax(needs)
        whole = not (needs.masks_documents or needs.context_parallel)
        for needed, method, feature in (
            (whole, "for_sequences", "whole sequences"),
            (needs.masks_documents, "for_documents", "document masks"),
            (needs.context_parallel, "for_context_parallel", "context parallel"),
        ):
            if needed and getattr(type(self), method) is getattr(AttentionBackend, method):
                raise ConfigError(f"{self.name!r} does not support {feature}", "attention.backend")
        return self

    def kernel(self, needs: AttentionNeeds) -> str:
        """The name of the kernel that the built backend runs, for the log."""
        return self.name

    def for_sequences(self, tokens_BT: torch.Tensor) -> Attention:
        """Causal attention over whole sequences. Only shape and device of `tokens_BT` matter."""
        raise NotImplementedError

    def for_documents(self, positions_BT: torch.Tensor, num_documents: int) -> Attention:
        """Attention within each document of packed sequences.

        `positions_BT` int64: the position of each token in its document. `num_documents` in the micro-batch
        is known on the host, so that this method does not wait for the device.
        """
        raise NotImplementedError

    def for_context_parallel(
        self,
        sharding: SequenceSharding,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None,
        num_documents: int,
    ) -> Attention:
        """Attention of this rank's queries over the keys of the whole sequences. `tokens_BT` and
        `positions_BT` (None without document masks) cover the whole sequences, not only this rank's tokens.
        `num_documents`: as in for_documents.
        """
        raise NotImplementedError


def kernels(backend: AttentionBackend, needs: AttentionNeeds, kinds: Sequence[AttentionKind]) -> str:
    """The kernel that the built backend runs for each kind of layer, for the log. `kinds`: of each layer."""
    counts = Counter(kinds)
    names = {kind: backend.kernel(replace(needs, kinds=(kind,))) for kind in counts}
    if list(counts) == [AttentionKind()]:
        return names[AttentionKind()]
    nums = {kind: "1 layer" if num == 1 else f"{num} layers" for kind, num in counts.items()}
    return ", ".join(f"{name} ({kind}, {nums[kind]})" for kind, name in names.items())


def document_numbers(positions_BT: torch.Tensor) -> torch.Tensor:
    """The number of each token's document in its sequence, int32 [B, T]."""
    return (positions_BT == 0).cumsum(dim=-1, dtype=torch.int32)


def padded_values(v_BTKE: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Values with zeros up to the head dim of queries and keys, for kernels that need equal head dims. The
    zeros only add zeros behind the attention's output."""
    missing = head_dim - v_BTKE.shape[-1]
    return F.pad(v_BTKE, (0, missing)) if missing else v_BTKE
