"""ShardedModel: the interface of a model on any layout, for the training loop, validation and sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from titanlite.attention.base import previous_of
from titanlite.attention.context_parallel import SequenceSharding
from titanlite.attention.shared_prefix import for_shared_prefix
from titanlite.config.component import ConfigError
from titanlite.data.batch import Batch
from titanlite.losses import IGNORE, WHOLE_VOCABULARY, Loss, VocabularyShard, score_targets
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder, HeadFn, Inputs, LossHead, is_adapter
from titanlite.models.lora import initial_bound
from titanlite.parallel.cuda_graphs import CudaGraphs, MicroBatchLosses
from titanlite.parallel.expert_loads import ExpertLoads
from titanlite.parallel.fingerprint import Fingerprint
from titanlite.parallel.float8 import precompute_scales
from titanlite.parallel.fsdp import reshard, sync_gradients
from titanlite.parallel.initialize import fill_normal, fill_uniform
from titanlite.parallel.pipeline_parallel import Pipeline
from titanlite.parallel.probe import NUM_QUERIES, BlockRecorder, BlockStatistics, state_unchanged
from titanlite.parallel.same_bits import apply_ordered_sums, forget_gradients, ordered_sum
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallel.tensor_parallel import gather_for_loss, gather_logits, vocabulary_shard
from titanlite.step_clock import StepClock

# Makes the hidden states of all tokens and this rank's rows of the head's weight from the arguments of
# head_fn, under tensor parallel.
GatherForLoss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class LossObserver(Protocol):
    """Looks at the inputs of the loss."""

    def observe(
        self,
        hidden_BTD: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_BT: torch.Tensor,
        positions_T: torch.Tensor,
        source_ids_B: torch.Tensor | None,
        vocabulary: VocabularyShard,
    ) -> None:
        """Called for each micro-batch before its loss, on the ranks that compute the loss, with this rank's
        tokens. `positions_T`: their positions in the sequence. `source_ids_B`: Batch.source_ids. Must not
        change the tensors. Collective over the tensor-parallel ranks."""


class ShardedModel:
    """A model on any layout, made by `parallelize`. `net`: this rank's stages and shards, with the parameter
    names of the whole model. `expert_loads`: counts and balances the loads of experts."""

    def __init__(
        self,
        net: Decoder,
        loss: Loss,
        mesh: Mesh,
        settings: ParallelSettings,
        *,
        pipeline: Pipeline | None,
        expert_loads: ExpertLoads,
        mlp_units: Mapping[str, int],
    ):
        """`pipeline`: None without pipeline parallel. `mlp_units`: the result of `mlp_units` for the whole
        model."""
        self.net, self.mesh, self.settings = net, mesh, settings
        self.pipeline, self.expert_loads, self._mlp_units = pipeline, expert_loads, mlp_units
        self.attention, self.clock = settings.attention, settings.clock
        self._vocabulary = replace(WHOLE_VOCABULARY, softcap=net.logit_softcap)
        self._head_fn_for_logits: HeadFn = net.logits
        self._gather_for_loss: GatherForLoss | None = None
        if mesh.degrees.tp > 1:
            self._vocabulary = vocabulary_shard(net, mesh.tp)
            self._head_fn_for_logits = gather_logits(mesh.tp, net.logit_softcap)
            self._gather_for_loss = partial(gather_for_loss, mesh=mesh.tp)
        self.loss = loss.build(settings.compile.loss_backend, self._vocabulary)
        self.auxiliary_losses: dict[str, torch.Tensor] = {}
        self._names_of_loss = loss.auxiliary_losses
        self._auxiliary_sums: list[torch.Tensor] = []  # of the loss's auxiliary losses, per micro-batch
        self._gathers_float8 = settings.float8.gathers_float8 and mesh.device_mesh is not None
        self.sharding = SequenceSharding(mesh.cp) if mesh.degrees.cp > 1 else None
        self._ordered_sums = apply_ordered_sums(net, mesh) if mesh.same_bits else []
        self._graphs: CudaGraphs | None = None
        if settings.compile.cuda_graphs:
            self._graphs = CudaGraphs(net, self._micro_batch, settings.graphs_are_optional)

    def materialize(self, device: torch.device, seed: int) -> None:
        """Allocate parameters and buffers, which are on the meta device, and set their initial values."""
        for name, buffer in self.net.named_buffers():  # before memory is allocated for the weights
            if self.net.initial_buffer(name).shape != buffer.shape:
                raise ConfigError(f"initial_buffer: {name!r} has shape {tuple(buffer.shape)}", "model.name")
        self.net.to_empty(device="cpu" if self.settings.cpu_offload else device)
        if self.settings.cpu_offload:  # only parameters are offloaded
            for module in self.net.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(device))
        self.net.fill_buffers()
        for stage in self.pipeline.stages.values() if self.pipeline is not None else ():
            if names := [name for name, buffer in stage.named_buffers() if buffer.is_meta]:
                raise ConfigError(
                    "pipeline parallel supports buffers only in a block, the embedding, the final norm or "
                    f"the head; {names[0]!r} is elsewhere",
                    "parallelism.pipeline_parallel_degree",
                )
        for name, parameter in self.net.named_parameters():
            if is_adapter(name):
                fill_uniform(parameter, name, initial_bound(name, parameter.shape), seed, device)
                continue
            mean, std = self.net.init_normal(name)
            fill_normal(parameter, name, mean, std, seed, device, self.net.init_function(name))
        self.expert_loads.enable(self.net)

    def forward_backward(
        self,
        micro_batches: Sequence[Batch],
        num_targets: torch.Tensor,
        observer: LossObserver | None = None,
    ) -> torch.Tensor:
        """Accumulate the gradient of (sum of token losses and auxiliary losses) / `num_targets`. Returns this
        rank's summand of (sum of token losses) / `num_targets`, detached: the sum over all ranks is the loss.
        Afterwards `auxiliary_losses` has this rank's summands of the auxiliary losses, of the model and of
        the loss.

        `num_targets`: number of targets that count, over all ranks and micro-batches. Gradients are reduced
        in the last backward, or in every backward. `observer`: looks at the inputs of the loss."""
        self._auxiliary_sums = []
        self.expert_loads.begin_step(micro_batches)
        clock = self.clock
        if self.pipeline is not None:
            clock.enter("forward_backward")
            inputs = [self.model_inputs(batch, observer) for batch in micro_batches]
            total = self.pipeline.forward_backward(inputs, num_targets)
            self.auxiliary_losses = self._auxiliary_losses_of_loss(num_targets)
            return self._counted_once(total)
        total, auxiliary = torch.zeros((), device=num_targets.device), dict[str, torch.Tensor]()
        in_order = list[torch.Tensor]()  # the losses of the micro-batches, for ordered sums
        for ordered in self._ordered_sums:
            ordered.begin_step()
        graphs = self._graphs
        if graphs is not None and (observer is not None or not graphs.begin_step(micro_batches[0])):
            graphs = None
        for i, batch in enumerate(micro_batches):
            if graphs is not None:
                clock.enter("forward_backward")
                losses = graphs.forward_backward(batch, num_targets, is_first=i == 0)
            else:
                is_last = i == len(micro_batches) - 1
                if self._ordered_sums and i > 0 and self.mesh.dp_size > 1:
                    forget_gradients(self.net)
                sync_gradients(self.net, self.settings.reduces_every_micro_batch or is_last)
                losses = self._micro_batch(batch, num_targets, observer, clock)
            if self._ordered_sums:
                in_order.append(losses.tokens)
            else:
                total += losses.tokens
            for name, value in losses.auxiliary.items():
                auxiliary[name] = auxiliary.get(name, 0.0) + value
            if losses.of_loss is not None:
                self._auxiliary_sums.append(losses.of_loss)
        is_first_step = not self.auxiliary_losses
        if is_first_step and (both := auxiliary.keys() & set(self._names_of_loss)):
            raise ConfigError(f"loss and model both have an auxiliary loss {min(both)!r}", "loss.name")
        self.auxiliary_losses = auxiliary | self._auxiliary_losses_of_loss(num_targets)
        if self._ordered_sums:
            for ordered in self._ordered_sums:
                ordered.end_step(len(micro_batches))
            return ordered_sum(in_order, self.mesh)
        return self._counted_once(total)

    def _micro_batch(
        self,
        batch: Batch,
        num_targets: torch.Tensor,
        observer: LossObserver | None = None,
        clock: StepClock | None = None,
    ) -> MicroBatchLosses:
        """Forward and backward of one micro-batch. `clock`: measures the phases; None: nothing does."""
        if clock is not None:
            clock.enter("forward")
        loss = self.net(*self.model_inputs(batch, observer)) / num_targets.clamp(min=1)
        tokens, auxiliary = loss.detach(), dict[str, torch.Tensor]()
        for name, value in self.net.auxiliary_losses().items():
            value = value / num_targets.clamp(min=1)
            auxiliary[name] = value.detach()
            loss = loss + value
        if clock is not None:
            clock.enter("backward")
        loss.backward()
        of_loss = self._auxiliary_sums.pop() if self._names_of_loss else None
        return MicroBatchLosses(tokens, auxiliary, of_loss)

    def fingerprint(self, batch: Batch, num_targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Digests of the results of one more forward and backward of a micro-batch, int64 scalars by name:
        the loss, auxiliary losses, and for each block this rank's own gradient, which is not summed over
        ranks. Ranks with equal weights and micro-batches have equal digests if their kernels are
        deterministic. Call it when there are no gradients: it leaves none, and changes no state. Collective;
        only for data-parallel ranks."""
        fingerprint = Fingerprint(self.net)
        with (
            torch.no_grad(),
            state_unchanged(self.net, batch.inputs.device),
            torch.enable_grad(),
            fingerprint.taking_gradients(),
        ):
            losses = self._micro_batch(batch, num_targets)
        return fingerprint.values(losses)

    def weights_changed(self) -> None:
        """Update values that are derived from the weights. Call it after loading a checkpoint; `after_step`
        calls it after each step. Collective."""
        if self._gathers_float8:
            precompute_scales(self.net)

    def after_step(self, applied: torch.Tensor) -> None:
        """Update the model after a step of the optimizer. `applied`: bool scalar, False if the step was
        skipped. Collective."""
        self.net.after_step(applied)
        self.expert_loads.after_step(applied)
        self.weights_changed()

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """This rank's summand of the sum of the token losses of one batch, fp32 scalar. Collective over all
        ranks."""
        loss = self._forward(self.model_inputs(batch))
        reshard(self.net)
        return torch.zeros((), device=batch.inputs.device) if loss is None else self._counted_once(loss)

    def _auxiliary_losses_of_loss(self, num_targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's summands of the loss's auxiliary losses: zero on ranks without the last pipeline stage,
        so that all ranks have the same names."""
        if not (names := self._names_of_loss):
            return {}
        sums = sum(self._auxiliary_sums, torch.zeros(len(names), device=num_targets.device))
        return dict(zip(names, self._counted_once(sums / num_targets.clamp(min=1))))

    def _counted_once(self, loss: torch.Tensor) -> torch.Tensor:
        """Zero on all tensor-parallel ranks but the first, so that a sum over ranks counts the loss once."""
        return loss if self.mesh.is_tp_leader else torch.zeros_like(loss)

    def _forward(self, inputs: Inputs) -> torch.Tensor | None:
        """The output of a forward. With pipeline parallel, None on ranks without the last stage."""
        return self.net(*inputs) if self.pipeline is None else self.pipeline.forward(inputs)

    def model_inputs(self, batch: Batch, observer: LossObserver | None = None) -> Inputs:
        """The arguments of the model for this rank's tokens of a micro-batch."""
        tokens, targets, positions = batch.inputs, batch.targets, batch.positions
        if self.sharding is not None:
            attention = self.attention.for_context_parallel(
                self.sharding, tokens, positions, batch.num_documents
            )
            local = self._local_positions(tokens)
            attention.previous_BT = previous_of(tokens)[:, local]
            tokens, targets = tokens[:, local], targets[:, local]
            positions = local if positions is None else positions[:, local]
        elif positions is not None:
            attention = self.attention.for_documents(positions, batch.num_documents)
        else:
            attention = self.attention.for_sequences(tokens)
            if self.pipeline is not None:  # with tensor parallel, hidden states are shorter than tokens
                positions = self._local_positions(tokens)

        def head_fn(hidden_BTD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
            if self._gather_for_loss is not None:
                hidden_BTD, weight_VD = self._gather_for_loss(hidden_BTD, weight_VD)
            if observer is not None:
                self.clock.enter("statistics")
                positions_T, ids = self._local_positions(batch.inputs), batch.source_ids
                observer.observe(hidden_BTD, weight_VD, targets, positions_T, ids, self._vocabulary)
                self.clock.enter("forward" if self.pipeline is None else "forward_backward")
            loss = self.loss(hidden_BTD, weight_VD, targets)
            if not self._names_of_loss:
                return loss
            if torch.is_grad_enabled():  # not in validation
                self._auxiliary_sums.append(loss[1:].detach())
            return loss[0]

        return Inputs(tokens, positions, attention, LossHead(head_fn, partial(self._ahead, batch)))

    def _ahead(self, batch: Batch, distance: int) -> tuple[torch.Tensor, HeadFn]:
        """LossHead.ahead for this rank's tokens of a micro-batch."""
        tokens, targets = batch.ahead(distance)
        if self.sharding is not None:
            local = self._local_positions(tokens)
            tokens, targets = tokens[:, local], targets[:, local]

        def head_fn(hidden_BTD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
            if self._gather_for_loss is not None:
                hidden_BTD, weight_VD = self._gather_for_loss(hidden_BTD, weight_VD)
            loss = self.loss(hidden_BTD, weight_VD, targets)
            loss = loss[0] if self._names_of_loss else loss
            # Auxiliary losses are sums over ranks: the value counts once, every rank needs the gradient.
            return loss if self.mesh.is_tp_leader else loss - loss.detach()

        return tokens, head_fn

    def _local_positions(self, tokens_BT: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """The position in the sequence of each of this rank's tokens, int64 [T]. `device`: default: the
        device of the tokens."""
        length, device = tokens_BT.shape[1], device or tokens_BT.device
        if self.sharding is None:
            return torch.arange(length, device=device)
        return self.sharding.local_positions(length, device)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] for tokens int64 [B, T]. Collective like loss_sum."""
        length, multiple = tokens.shape[1], self.mesh.degrees.tp * 2 * self.mesh.degrees.cp
        # Causal attention never looks at padding on the right.
        tokens = F.pad(tokens, (0, -length % multiple))
        padded = tokens.shape[1]
        positions = torch.arange(padded, device=tokens.device)
        with torch.compiler.set_stance("force_eager"):  # prompts have many lengths: avoid a graph per length
            if self.sharding is None:
                attention = self.attention.for_sequences(tokens)
            else:  # the positions of one document per sequence select attention masks, which fit all lengths
                whole = positions.expand(len(tokens), -1)
                attention = self.attention.for_context_parallel(self.sharding, tokens, whole, len(tokens))
                attention.previous_BT = previous_of(tokens)[:, self._local_positions(tokens)]
                positions = self.sharding.local_positions(padded, tokens.device)
                tokens = tokens[:, positions]
            logits = self._forward(Inputs(tokens, positions, attention, self._head_fn_for_logits))
            if self.pipeline is not None:
                shape = (*tokens.shape, self.net.vocab_size)
                logits = self.pipeline.broadcast_from_last(logits, shape, tokens.device)
            assert logits is not None
            if self.sharding is not None:
                logits = self.sharding.gather_in_order(logits)
        reshard(self.net)
        return logits[:, :length]

    @property
    def can_share_prefixes(self) -> bool:
        """Whether `score` takes sequences with several continuations of one prefix."""
        kinds = getattr(self.net.config, "attention_kinds", ())
        return self.sharding is None and not any(kind.is_linear or kind.changes_softmax for kind in kinds)

    @torch.no_grad()
    def score(
        self, batch: Batch, vocab_size: int, segments_BT: torch.Tensor, num_segments: int
    ) -> torch.Tensor:
        """This rank's summand of the scores of one batch of sequences of any length, fp32 [B, num_segments,
        2]: the sum of log p over the targets of each segment, and how many of them are not the most likely
        token; zeros for a segment without targets. `vocab_size`: ids from here on, which pad the model's
        vocabulary, have p = 0, as in an export, which lacks them. Collective like loss_sum.

        `segments_BT`: the number of each token's segment, from 1; 0: the token is in no segment. If the batch
        has positions, segments are continuations of one prefix, as for_shared_prefix takes them."""
        # Causal attention never looks at padding on the right.
        padding = (0, -batch.inputs.shape[1] % (self.mesh.degrees.tp * 2 * self.mesh.degrees.cp))
        batch = replace(
            batch, inputs=F.pad(batch.inputs, padding), targets=F.pad(batch.targets, padding, value=IGNORE)
        )
        targets, segments_BT, positions_BT = batch.targets, F.pad(segments_BT, padding), batch.positions
        if self.sharding is not None:
            assert positions_BT is None
            local = self._local_positions(batch.inputs)
            targets, segments_BT = targets[:, local], segments_BT[:, local]
            # The positions of one document per sequence select attention masks, which fit all lengths.
            whole = torch.arange(batch.inputs.shape[1], device=batch.inputs.device)
            num_sequences = len(batch.inputs)
            batch = replace(batch, positions=whole.expand(num_sequences, -1), num_documents=num_sequences)

        def head_fn(hidden_BTD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
            if self._gather_for_loss is not None:
                hidden_BTD, weight_VD = self._gather_for_loss(hidden_BTD, weight_VD)
            scores_BT2 = score_targets(hidden_BTD, weight_VD, targets, vocab_size, self._vocabulary)
            masks = [(segments_BT == i)[..., None] for i in range(1, num_segments + 1)]
            return torch.stack([(scores_BT2 * mask).sum(1) for mask in masks], 1)

        if positions_BT is None:
            inputs = self.model_inputs(batch)
        else:
            positions_BT = F.pad(positions_BT, padding)
            attention = for_shared_prefix(batch.inputs, segments_BT, positions_BT)
            inputs = Inputs(batch.inputs, positions_BT, attention, head_fn)
        with torch.compiler.set_stance("force_eager"):  # requests have many lengths: avoid a graph per length
            scores = self._forward(inputs._replace(head_fn=head_fn))
        reshard(self.net)
        no_scores = torch.zeros(len(targets), num_segments, 2, device=targets.device)
        return no_scores if scores is None else self._counted_once(scores)

    @torch.no_grad()
    def probe(self, batch: Batch) -> list[BlockStatistics]:
        """Statistics of what happens inside all blocks of the model in a forward of one micro-batch per
        data-parallel rank. Runs without torch.compile and changes no state. Waits for the device. Collective
        over all ranks."""
        inputs, device = self.model_inputs(batch), batch.inputs.device
        recorder = BlockRecorder(self.net, self._mlp_units, self.mesh, device)
        attention = recorder.attention(inputs.attention, self._last_queries(batch).to(device))
        inputs = inputs._replace(attention=attention, head_fn=lambda hidden, weight: hidden.new_zeros(()))
        with state_unchanged(self.net, device), torch.compiler.set_stance("force_eager"), recorder.hooks():
            self._forward(inputs)
        reshard(self.net)
        return recorder.statistics()

    def _last_queries(self, batch: Batch) -> torch.Tensor:
        """The indices of the last NUM_QUERIES tokens of each sequence among this rank's tokens of it; int64,
        on the host."""
        positions = self._local_positions(batch.inputs, torch.device("cpu"))
        return (positions >= batch.inputs.shape[1] - NUM_QUERIES).nonzero().flatten()
