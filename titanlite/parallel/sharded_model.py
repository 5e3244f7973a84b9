"""ShardedModel: all that the loop, validation and sampling see of a model, whatever its layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from titanlite.attention.base import Mask, document_mask
from titanlite.data.batch import Batch
from titanlite.mesh import ALONE, Mesh
from titanlite.models.base import Decoder, Inputs, LossFunction
from titanlite.parallel.context_parallel import Context
from titanlite.parallel.float8 import precompute_scales
from titanlite.parallel.fsdp import reshard, sync_gradients
from titanlite.parallel.initialize import fill_normal
from titanlite.parallel.pipeline_parallel import Pipeline


class ShardedModel:
    """`net` is this rank's part of the model under full-model parameter names; `loss` what is optimised.

    `attention`: the kernel for batches with masked documents or divided rows. `project`: makes the logits,
    where the head alone cannot. `pipeline`: runs the stages, if `net` is not all of the model.
    `reduce_each`: gradients are reduced after each micro-batch instead of once, in the last backward.
    `float8_scales`: weights are gathered in float8. `cpu_offload`: they stay in the host's memory.
    """

    def __init__(
        self,
        net: Decoder,
        loss: LossFunction,
        attention: str,
        mesh: Mesh = ALONE,
        project: LossFunction | None = None,
        pipeline: Pipeline | None = None,
        reduce_each: bool = False,
        float8_scales: bool = False,
        cpu_offload: bool = False,
    ):
        self.net, self.loss, self.attention, self.mesh = net, loss, attention, mesh
        self.project, self.pipeline = project, pipeline
        self.context = Context(mesh.context, attention) if mesh.degrees.context > 1 else None
        self.reduce_each, self.float8_scales, self.cpu_offload = reduce_each, float8_scales, cpu_offload

    def materialize(self, device: torch.device, seed: int) -> None:
        """Give the meta parameters memory and their initial values."""
        self.net.to_empty(device="cpu" if self.cpu_offload else device)
        for name, parameter in self.net.named_parameters():
            mean, std = self.net.initial(name)
            fill_normal(parameter, name, mean, std, seed, device)

    def forward_backward(self, micro_batches: Sequence[Batch], tokens: torch.Tensor) -> torch.Tensor:
        """Accumulate the gradient of (sum of token losses) / `tokens`; returns this rank's share of that
        loss, detached: the shares of all ranks add up to it.

        `tokens`: targets that count over all ranks and micro-batches. Gradients are reduced in the last
        backward, or in each.
        """
        if self.pipeline is not None:
            return self._share(
                self.pipeline.forward_backward([self.model_inputs(b) for b in micro_batches], tokens)
            )
        total = torch.zeros((), device=tokens.device)
        for i, batch in enumerate(micro_batches):
            sync_gradients(self.net, self.reduce_each or i == len(micro_batches) - 1)
            loss = self.net(*self.model_inputs(batch)) / tokens.clamp(min=1)
            loss.backward()
            total += loss.detach()
        return self._share(total)

    def weights_changed(self) -> None:
        """To be called when the optimizer has stepped or a checkpoint was loaded. Collective."""
        if self.float8_scales:
            precompute_scales(self.net)

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """This rank's share of the sum of the token losses of one batch, fp32 scalar. Collective over all
        ranks."""
        loss = self._apply(self.model_inputs(batch))
        reshard(self.net)
        return torch.zeros((), device=batch.inputs.device) if loss is None else self._share(loss)

    def _share(self, loss: torch.Tensor) -> torch.Tensor:
        """Of what several ranks know, one has the loss."""
        return loss if self.mesh.has_tokens else torch.zeros_like(loss)

    def _apply(self, inputs: Inputs) -> torch.Tensor | None:
        """A forward, without gradients; in a pipeline None on ranks that do not have its end."""
        return self.net(*inputs) if self.pipeline is None else self.pipeline.forward(inputs)

    def model_inputs(self, batch: Batch) -> Inputs:
        """The arguments of the model for this rank's share of a micro-batch."""
        inputs, targets, positions = batch.inputs, batch.targets, batch.positions
        mask: Mask | None = None
        if self.context is not None:
            here, there = self.context.places(inputs.shape[1], inputs.device)
            in_pieces = positions is None and self.attention == "pieces"
            mask = self.context.pieces() if in_pieces else self.context.mask(here, there, positions)
            inputs, targets = inputs[:, here], targets[:, here]
            positions = here if positions is None else positions[:, here]
        elif positions is not None:
            mask = document_mask(self.attention, positions, batch.num_documents)
        if positions is None and self.pipeline is not None:  # a later stage does not see how long rows are
            positions = torch.arange(inputs.shape[1], device=inputs.device)
        return Inputs(inputs, targets, self.loss, positions, mask)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, V] for tokens int64 [B, T]. Collective like loss_sum."""
        length, pieces = tokens.shape[1], self.mesh.degrees.tensor * 2 * self.mesh.degrees.context
        tokens = F.pad(tokens, (0, -length % pieces))  # to the right, where none looks
        with torch.compiler.set_stance("force_eager"):  # prompts have many lengths: no graph for each
            here = there = torch.arange(tokens.shape[1], device=tokens.device)
            mask: Mask | None = None
            if self.context is not None:
                here, there = self.context.places(tokens.shape[1], tokens.device)
                mask = self.context.mask(here, there, None)
            logits = self._apply(Inputs(tokens[:, here], tokens, self.project, here, mask))
            if self.pipeline is not None:
                shape = (len(tokens), len(here), self.net.vocab_size)
                logits = self.pipeline.from_last(logits, shape, tokens.device)
            assert logits is not None
            if self.context is not None:
                logits = self.context.gather(logits)[:, there.argsort()]
        reshard(self.net)
        return logits[:, :length]
