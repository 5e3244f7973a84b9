"""Linear attention for one micro-batch: the gated delta rule and the convolution before it, within documents,
along the ranks of context parallel, and token by token.

Shape suffixes as in gated_delta_rule.py; D channels of the convolution, W its width, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from titanlite.attention.base import Attention, AttentionBackend, AttentionKind, AttentionNeeds
from titanlite.attention.context_parallel import SequenceSharding
from titanlite.attention.gated_delta_rule_kernels import Documents, Rule, RuleInputs, kernel_for, torch_rule
from titanlite.attention.short_convolution import short_convolution

KEPT_OPS = ("titanlite.fla_gated_delta_rule", "titanlite.gated_delta_rule_chunks")


class LinearAttention(Attention):
    """Linear attention over whole sequences or, with `documents`, within each document. `rule`: the
    implementation of the gated delta rule."""

    def __init__(self, rule: Rule = torch_rule, documents: Documents | None = None):
        self.rule, self.documents = rule, documents

    def convolve(self, x_BTD: torch.Tensor, weight_DW: torch.Tensor) -> torch.Tensor:
        """short_convolution over the tokens up to each token."""
        starts = None if self.documents is None else self.documents.starts
        return short_convolution(x_BTD, weight_DW, starts)

    def attend_linearly(self, inputs: RuleInputs) -> torch.Tensor:
        """The outputs [B, T, H, V] of the gated delta rule over the tokens up to each token."""
        return self.rule(inputs, None, self.documents, False)[0]


class ShardedLinearAttention(LinearAttention):
    """Linear attention of this rank's two chunks of each sequence. `starts` bool [B, T]: the first tokens of
    the documents of the whole sequences; None without document masks. `documents`: of the chunks.

    A chunk maps the state S before it to M S + N. Each rank computes M and N of its chunks, all ranks gather
    them and compute the states before their chunks, and the rule runs again from these states. The gathered
    matrices are 2 R (E + V) / T of the size of the queries of one head and sequence."""

    def __init__(
        self,
        rule: Rule,
        sharding: SequenceSharding,
        starts: torch.Tensor | None,
        documents: Documents | None,
    ):
        super().__init__(rule, documents)
        self.sharding, self.starts = sharding, starts

    def convolve(self, x_BTD: torch.Tensor, weight_DW: torch.Tensor) -> torch.Tensor:
        sharding, starts = self.sharding, self.starts
        num_earlier, size = weight_DW.shape[1] - 1, x_BTD.shape[1] // 2
        if size < num_earlier:  # of a short prompt: the tokens before a chunk are in several chunks
            whole = short_convolution(sharding.gather_in_order(x_BTD), weight_DW, starts)
            return torch.cat([whole.split(size, 1)[chunk] for chunk in sharding.own_chunks], 1)
        chunks = sharding.chunks_with_previous(x_BTD, num_earlier)
        if starts is not None:
            starts = F.pad(starts, (num_earlier, 0))
            spans = [slice(chunk * size, (chunk + 1) * size + num_earlier) for chunk in sharding.own_chunks]
            starts = torch.cat([starts[:, span] for span in spans])
        return sharding.joined(short_convolution(chunks, weight_DW, starts)[:, num_earlier:])

    def attend_linearly(self, inputs: RuleInputs) -> torch.Tensor:
        sharding = self.sharding
        chunks = RuleInputs(*map(sharding.chunks, inputs))
        out, _ = self.rule(chunks, self._states_before(chunks), self.documents, False)
        return sharding.joined(out)

    def _states_before(self, chunks: RuleInputs) -> torch.Tensor:
        """The states before this rank's chunks, fp32 [2 B, H, E, V]. Collective."""
        size, (E, V) = self.sharding.size, (chunks.k_BTKE.shape[-1], chunks.v_BTHV.shape[-1])
        # From the state (0, 1), with values of zero behind the values, the rule ends in (N, M).
        zeros = chunks.v_BTHV.new_zeros(*chunks.v_BTHV.shape[:-1], E)
        with_zeros = chunks._replace(v_BTHV=torch.cat((chunks.v_BTHV, zeros), -1))
        dtype = torch.promote_types(zeros.dtype, torch.float32)
        first = torch.eye(E, V + E, dtype=dtype, device=zeros.device).roll(V, -1)
        first = first.expand(len(zeros), zeros.shape[2], E, V + E)
        _, last = self.rule(with_zeros, first, self.documents, True)
        assert last is not None
        gathered = self.sharding.gather_in_order(last.unflatten(0, (2, -1)).transpose(0, 1))  # [B, 2 R, ...]
        states = [gathered.new_zeros(len(gathered), *gathered.shape[2:-1], V)]
        for chunk in range(2 * size - 1):
            added, matrix = gathered[:, chunk].split((V, E), -1)
            states.append(added + matrix @ states[-1])
        return torch.cat([states[chunk] for chunk in self.sharding.own_chunks])


@dataclass
class LinearState:
    """The state of one layer after the tokens so far: the last inputs of the convolution [B, W - 1, D], and
    the state of the rule [B, H, E, V]. Its size does not depend on the number of tokens."""

    convolution: torch.Tensor | None = None
    rule: torch.Tensor | None = None


class CachedLinearAttention(LinearAttention):
    """Linear attention of new tokens after those of earlier forwards, for generation. The layers are told
    apart by the order of their calls, which is the same in every forward."""

    def __init__(self) -> None:
        super().__init__(torch_rule)
        self.states: list[LinearState] = []
        self._layers: Iterator[LinearState] = iter(())

    def begin_forward(self) -> None:
        """The next layer that is called is the first."""
        self._layers = self._states_in_order()

    def convolve(self, x_BTD: torch.Tensor, weight_DW: torch.Tensor) -> torch.Tensor:
        state, num_earlier = next(self._layers), weight_DW.shape[1] - 1
        earlier = state.convolution
        if earlier is None:
            earlier = x_BTD.new_zeros(len(x_BTD), num_earlier, x_BTD.shape[2])
        last = torch.cat((earlier, x_BTD[:, -num_earlier:]), 1)[:, -num_earlier:]
        state.convolution, self._state = last.clone(), state  # not a view, which would keep more inputs
        return short_convolution(x_BTD, weight_DW, earlier_BPD=earlier)

    def attend_linearly(self, inputs: RuleInputs) -> torch.Tensor:
        out, self._state.rule = self.rule(inputs, self._state.rule, None, True)
        return out

    def _states_in_order(self) -> Iterator[LinearState]:
        yield from self.states
        while True:
            self.states.append(LinearState())
            yield self.states[-1]


class WithLinear(Attention):
    """Attention of a model in which some layers have linear attention, the others `softmax`."""

    def __init__(self, softmax: Attention, linear: LinearAttention):
        self.softmax, self.linear = softmax, linear

    def attend(
        self,
        q_BTHE: torch.Tensor,
        k_BTKE: torch.Tensor,
        v_BTKE: torch.Tensor,
        sinks_H: torch.Tensor | None = None,
    ) -> torch.Tensor:
        sinks = () if sinks_H is None else (sinks_H,)
        return self.softmax.attend(q_BTHE, k_BTKE, v_BTKE, *sinks)

    def of_kind(self, kind: AttentionKind, tokens_BT: torch.Tensor) -> Attention:
        return self.linear if kind.is_linear else self.softmax.of_kind(kind, tokens_BT)

    def visible_keys(
        self, k_BTKE: torch.Tensor, queries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.softmax.visible_keys(k_BTKE, queries)


@dataclass(frozen=True, kw_only=True)
class LinearBackend(AttentionBackend):
    """The built backend of a model in which some layers have linear attention. `softmax`: the backend that
    the configuration chose, for the other layers."""

    name: ClassVar[str] = "linear"
    softmax: AttentionBackend
    rule: Rule

    @property
    def kept_ops(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.softmax.kept_ops, *KEPT_OPS)

    def kernel(self, needs: AttentionNeeds) -> str:
        (kind,) = needs.kinds
        if not kind.is_linear:
            return self.softmax.kernel(needs)
        return "torch" if self.rule is torch_rule else "flash-linear-attention"

    def for_sequences(self, tokens_BT: torch.Tensor) -> Attention:
        return WithLinear(self.softmax.for_sequences(tokens_BT), LinearAttention(self.rule))

    def for_documents(self, positions_BT: torch.Tensor, num_documents: int) -> Attention:
        documents = Documents.of(positions_BT == 0, num_documents)
        softmax = self.softmax.for_documents(positions_BT, num_documents)
        return WithLinear(softmax, LinearAttention(self.rule, documents))

    def for_context_parallel(
        self,
        sharding: SequenceSharding,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor | None,
        num_documents: int,
    ) -> Attention:
        softmax = self.softmax.for_context_parallel(sharding, tokens_BT, positions_BT, num_documents)
        starts = documents = None
        if positions_BT is not None:
            starts, size = positions_BT == 0, tokens_BT.shape[1] // (2 * sharding.size)
            own = torch.cat([starts.split(size, 1)[chunk] for chunk in sharding.own_chunks])
            documents = Documents.of(own, num_documents + len(own))
        return WithLinear(softmax, ShardedLinearAttention(self.rule, sharding, starts, documents))


def build_attention(backend: AttentionBackend, needs: AttentionNeeds) -> AttentionBackend:
    """The built backend for the run: as AttentionBackend.build, for models with linear attention, too. Raises
    ConfigError if the configuration's backend does not support `needs`, or if the package for linear
    attention on this device is missing."""
    softmax = tuple(kind for kind in needs.kinds if not kind.is_linear)
    if softmax == needs.kinds:
        return backend.build(needs)
    built = backend.build(replace(needs, kinds=softmax or (AttentionKind(),)))
    return LinearBackend(softmax=built, rule=kernel_for(needs.device, needs.dtype))
