"""The torch optimizer behind Muon: momentum whose matrices are orthogonalised, with AdamW for the rest.

Equal gradients give equal bits on every layout. Momentum is updated on shards. The shards of an update travel
to the rank that owns the matrix, which orthogonalises it, and back: two collectives per bucket of matrices.
While one bucket is worked on, the next one is under way. There is no host synchronisation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from titanlite.mesh import plain_shard
from titanlite.optim.base import load_in_place
from titanlite.optim.exchange import Exchange, Ownership, Transfer
from titanlite.optim.orthogonalize import Coefficients, num_flops, orthogonalize
from titanlite.torch_compat import compile_update

BUCKET_BYTES = 256 << 20  # at most so many bytes of whole matrices per owner and exchange
ALONE_NUMEL = 1 << 22  # a matrix with as many elements fills a GPU: a batch would only need more memory
MOMENTUM, SECOND_MOMENTUM = "momentum_buffer", "second_momentum_buffer"  # keys of the state
LearningRateScale = Literal["match_rms_adamw", "original", "spectral"]


class MuonSettings(NamedTuple):
    """The settings of Muon's rule. `coefficients`: of each Newton-Schulz step. `dtype`: dtype of the
    Newton-Schulz products and of the updates that travel between ranks. `normalizes_rows`: NorMuon.
    `equalizes_rows`: MuonEq. `has_exact_norm`: Muon+."""

    nesterov: bool
    adjust_lr_fn: LearningRateScale
    coefficients: Coefficients
    dtype: torch.dtype
    normalizes_rows: bool = False
    equalizes_rows: bool = False
    has_exact_norm: bool = False
    cautious_weight_decay: bool = False


class Matrix(NamedTuple):
    """A parameter under Muon's rule: a matrix [m, n], or several [num_matrices, m, n] such as the weights of
    experts. `block`: its transformer block, or another name that no other block has. `num_stacked`: into how
    many matrices of equally many rows each matrix is divided, which are orthogonalised separately."""

    parameter: torch.nn.Parameter
    block: str
    num_stacked: int
    group: dict[str, Any]
    """The parameter group, with `lr`, `weight_decay`, `momentum` and, for NorMuon, `beta2`."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """The number of matrices that are orthogonalised separately, and the shape of each of them."""
        num, m, n = (1, *self.parameter.shape)[-3:]
        return num * self.num_stacked, m // self.num_stacked, n


class MuonOptimizer(torch.optim.Optimizer):
    """Muon for `matrices`, and `adamw` for all other parameters, as one optimizer with one state.

    `groups`: parameter groups of the matrices. `adamw`: the optimizer of the other parameters; its groups and
    its state become this optimizer's. `process_group`: the ranks that together hold one copy of the matrices;
    None: this process holds whole matrices. Follows the protocol of torch.amp.GradScaler that guarded_step
    uses.

    State of each matrix: `momentum_buffer`, of the matrix's shape. With NorMuon also
    `second_momentum_buffer` [..., m, 1]: one number per row, sharded like the rows.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        matrices: Sequence[Matrix],
        groups: list[dict[str, Any]],
        adamw: torch.optim.Optimizer | None,
        settings: MuonSettings,
        process_group: dist.ProcessGroup | None,
    ):
        super().__init__([*groups, *(adamw.param_groups if adamw else [])], {})
        self._matrices, self._settings, self._adamw = matrices, settings, adamw
        if adamw is not None:
            self.state.update(adamw.state)
            adamw.state = self.state
        for matrix in matrices:
            p = matrix.parameter
            self.state[p][MOMENTUM] = torch.zeros_like(p)
            if settings.normalizes_rows:
                self.state[p][SECOND_MOMENTUM] = _zeros_per_row(p)
        self.batches = batches_of(matrices)
        self._exchange: Exchange | None = None
        self._row_exchange: Exchange | None = None
        self.ownership: Ownership | None = None
        if process_group is not None and matrices:
            self._connect(process_group)
        device = plain_shard(matrices[0].parameter).device if matrices else torch.device("cpu")
        self._update_momentum = _compiled(_momentum_update(settings.nesterov), device)
        self._update_weight = _compiled(_weight_update(settings.cautious_weight_decay), device)

    def _connect(self, process_group: dist.ProcessGroup) -> None:
        """Choose the owners of the matrices, and prepare the exchanges with them."""
        costs = [
            sum(num * num_flops(m, n, 1) for num, m, n in (self._matrices[i].shape for i in batch))
            for batch in self.batches
        ]
        parameters = [matrix.parameter for matrix in self._matrices]
        num_bytes = [p.numel() * self._settings.dtype.itemsize for p in parameters]
        self.ownership = Ownership.balanced(
            self.batches, costs, num_bytes, process_group.size(), BUCKET_BYTES
        )
        self._exchange = Exchange(parameters, self.ownership, process_group)
        if self._settings.normalizes_rows:
            rows = [self.state[p][SECOND_MOMENTUM] for p in parameters]
            self._row_exchange = Exchange(rows, self.ownership, process_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. If the tensor `found_inf` is 1, weights and state stay bit-identical. Gradients are
        divided by the tensor `grad_scale`."""
        if self._matrices:
            self._step_matrices()
        if self._adamw is not None:
            self._step_adamw(self._adamw)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_in_place(self, state_dict)

    def _step_matrices(self) -> None:
        device = plain_shard(self._matrices[0].parameter).device
        found_inf, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        one = torch.ones((), device=device)
        apply = one.bool() if found_inf is None else found_inf == 0
        scalars = _Scalars(device)
        for i, update in self._updates(apply, one if divisor is None else divisor, scalars):
            matrix = self._matrices[i]
            weight = plain_shard(matrix.parameter)
            if weight.numel():
                lr = matrix.group["lr"]
                rate = scalars.of(lr * lr_scale(self._settings.adjust_lr_fn, *matrix.shape[1:]))
                decay = scalars.of(lr * matrix.group["weight_decay"])
                self._update_weight(_flat(weight), _flat(update.contiguous()), apply, rate, decay)

    def _step_adamw(self, adamw: torch.optim.Optimizer) -> None:
        keys = [key for key in ("found_inf", "grad_scale") if hasattr(self, key)]
        for key in keys:
            setattr(adamw, key, getattr(self, key))
        try:
            adamw.step()
        finally:
            for key in keys:
                delattr(adamw, key)

    def _updates(
        self, apply: torch.Tensor, divisor: torch.Tensor, scalars: _Scalars
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's shard of the update of each matrix, by index."""
        if self._exchange is None:
            for batch in self.batches:
                updates = {i: self._update(i, apply, divisor, scalars) for i in batch}
                yield from self._orthogonalized(batch, updates, self._rows(batch), apply).items()
            return
        buckets = self._exchange.buckets
        next_transfers = self._send(buckets[0], apply, divisor, scalars)
        returning: tuple[list[int], _Transfers] | None = None
        for i, bucket in enumerate(buckets):
            transfers = next_transfers
            if i + 1 < len(buckets):  # on its way while this bucket is worked on
                next_transfers = self._send(buckets[i + 1], apply, divisor, scalars)
            last, returning = returning, (bucket, self._orthogonalize_owned(bucket, transfers, apply))
            if last is not None:
                yield from self._received(*last)
        assert returning is not None
        yield from self._received(*returning)

    def _update(self, i: int, apply: torch.Tensor, divisor: torch.Tensor, scalars: _Scalars) -> torch.Tensor:
        """This rank's shard of the update of matrix i before orthogonalisation; updates its momentum."""
        p, momentum = self._matrices[i].parameter, self._matrices[i].group["momentum"]
        buffer = plain_shard(self.state[p][MOMENTUM])
        gradient = torch.zeros_like(buffer) if p.grad is None else plain_shard(p.grad)
        update = torch.empty_like(buffer, dtype=self._settings.dtype)
        if buffer.numel():
            rates = scalars.of(momentum), scalars.of(1 - momentum)
            self._update_momentum(*map(_flat, (gradient, buffer, update)), apply, divisor, *rates)
        return update

    def _rows(self, bucket: Sequence[int]) -> dict[int, torch.Tensor]:
        """This rank's shards of NorMuon's second moments, for the matrices of a bucket; else none."""
        if not self._settings.normalizes_rows:
            return {}
        return {i: plain_shard(self.state[self._matrices[i].parameter][SECOND_MOMENTUM]) for i in bucket}

    def _send(
        self, bucket: list[int], apply: torch.Tensor, divisor: torch.Tensor, scalars: _Scalars
    ) -> _Transfers:
        """Begin to send the shards of a bucket's updates to the owners of the matrices."""
        assert self._exchange is not None
        updates = {i: self._update(i, apply, divisor, scalars) for i in bucket}
        transfer = self._exchange.send(bucket, updates)
        rows = self._row_exchange
        return _Transfers(transfer, None if rows is None else rows.send(bucket, self._rows(bucket)))

    def _orthogonalize_owned(
        self, bucket: list[int], transfers: _Transfers, apply: torch.Tensor
    ) -> _Transfers:
        """Orthogonalise the matrices of a bucket that this rank owns, and begin to send them back."""
        exchange, row_exchange = self._exchange, self._row_exchange
        assert exchange is not None
        whole = exchange.receive(bucket, transfers.updates)
        rows = {}
        if row_exchange is not None and transfers.rows is not None:
            rows = row_exchange.receive(bucket, transfers.rows)
        done = dict[int, torch.Tensor]()
        for batch in self.batches:
            if batch[0] in whole:
                done |= self._orthogonalized(batch, whole, rows, apply)
        done = {i: done[i] for i in whole}  # in the order of the exchange
        like = torch.empty(0, dtype=self._settings.dtype, device=apply.device)
        returning = exchange.send_back(bucket, done, like)
        if row_exchange is None:
            return _Transfers(returning, None)
        return _Transfers(returning, row_exchange.send_back(bucket, rows, like.float()))

    def _received(self, bucket: list[int], transfers: _Transfers) -> Iterator[tuple[int, torch.Tensor]]:
        """This rank's shards of the orthogonalised updates of a bucket."""
        assert self._exchange is not None
        yield from self._exchange.receive_back(bucket, transfers.updates).items()
        if self._row_exchange is not None and transfers.rows is not None:
            rows = self._rows(bucket)
            for i, values in self._row_exchange.receive_back(bucket, transfers.rows).items():
                rows[i].copy_(values)

    def _orthogonalized(
        self,
        batch: Sequence[int],
        updates: dict[int, torch.Tensor],
        rows: dict[int, torch.Tensor],
        apply: torch.Tensor,
    ) -> dict[int, torch.Tensor]:
        """The orthogonalised updates of a batch of whole matrices. `rows`: NorMuon's second moments of whole
        matrices, changed in place; empty without NorMuon."""
        settings, shapes = self._settings, [self._matrices[i].shape for i in batch]
        matrices = [updates[i].view(shape) for i, shape in zip(batch, shapes)]
        if settings.equalizes_rows:
            matrices = [with_equal_rows(x) for x in matrices]
        stacked = torch.cat([_wide(x) for x in matrices])
        stacked = orthogonalize(stacked, settings.coefficients, settings.dtype)
        if settings.has_exact_norm:
            stacked = with_exact_norm(stacked)
        done = {}
        for i, shape, part in zip(batch, shapes, stacked.split([shape[0] for shape in shapes])):
            update = part.mT if shape[1] > shape[2] else part
            if settings.normalizes_rows:
                moments = rows[i].view(*shape[:2], 1)
                update = normalize_rows(update, moments, apply, self._matrices[i].group["beta2"])
            done[i] = update.reshape(updates[i].shape)
        return done


class _Transfers(NamedTuple):
    """The exchanges of a bucket under way: of updates, and of NorMuon's second moments."""

    updates: Transfer
    rows: Transfer | None


class _Scalars:
    """Numbers of one step, such as learning rates, as fp32 scalars on the device: Python's numbers would make
    torch.compile compile again."""

    def __init__(self, device: torch.device):
        self._device, self._scalars = device, dict[float, torch.Tensor]()

    def of(self, value: float) -> torch.Tensor:
        if value not in self._scalars:
            self._scalars[value] = torch.full((), value, device=self._device)
        return self._scalars[value]


def lr_scale(adjust_lr_fn: LearningRateScale, m: int, n: int) -> float:
    """The factor of the learning rate for a matrix [m, n], m output features and n input features.

    `match_rms_adamw`: the update has the RMS 0.2, which AdamW's updates have (Moonlight, arXiv 2502.16982).
    `original`: Jordan's. `spectral`: the update has the spectral norm sqrt(m / n), so that a learning rate
    carries over to other widths (Bernstein 2025). The first two are torch.optim.Muon's."""
    return {
        "match_rms_adamw": 0.2 * math.sqrt(max(m, n)),
        "original": math.sqrt(max(1.0, m / n)),
        "spectral": math.sqrt(m / n),
    }[adjust_lr_fn]


def batches_of(matrices: Sequence[Matrix]) -> list[list[int]]:
    """The indices of the matrices that are orthogonalised together: small matrices of one shape in one block,
    where a shape and its transpose are the same. The batches depend neither on the number of ranks nor on
    pipeline stages, because the kernels of a matrix product may depend on the size of the batch."""
    batches = defaultdict[tuple[object, ...], list[int]](list)
    for i, matrix in enumerate(matrices):
        _, m, n = matrix.shape
        alone = i if matrix.parameter.ndim > 2 or matrix.parameter.numel() >= ALONE_NUMEL else None
        batches[matrix.block, min(m, n), max(m, n), alone].append(i)
    return list(batches.values())


def with_equal_rows(x: torch.Tensor) -> torch.Tensor:
    """MuonEq (arXiv 2603.28254): scale each row of matrices [..., m, n] to the root mean square of the rows'
    norms. A row of zeros stays zero."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    mean = norms.square().mean(-2, keepdim=True).sqrt()
    return (x * (mean / norms.clamp_min(1e-30))).to(x.dtype)


def with_exact_norm(x: torch.Tensor) -> torch.Tensor:
    """Muon+ (arXiv 2602.21545): scale matrices [..., m, n] to the Frobenius norm sqrt(min(m, n)), that of a
    matrix with orthonormal rows or columns. A matrix of zeros stays zero."""
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    return (x * (min(x.shape[-2:]) ** 0.5 / norm.clamp_min(1e-30))).to(x.dtype)


def normalize_rows(
    update: torch.Tensor, second_moment: torch.Tensor, apply: torch.Tensor, beta2: float
) -> torch.Tensor:
    """NorMuon (arXiv 2510.05491): divide each row of the update [..., m, n] by the root of the running mean
    of its mean square [..., m, 1], then give the matrix its norm back. Changes `second_moment` in place if
    `apply`."""
    x = update.float()
    mean = torch.lerp(second_moment, x.square().mean(-1, keepdim=True), 1 - beta2)
    second_moment.copy_(torch.where(apply, mean, second_moment))
    normalized = x / (mean.sqrt() + 1e-8)
    norms = [torch.linalg.vector_norm(t, dim=(-2, -1), keepdim=True) for t in (x, normalized)]
    return (normalized * (norms[0] / (norms[1] + 1e-8))).to(update.dtype)


def _momentum_update(nesterov: bool) -> Callable[..., None]:
    def update_momentum(
        gradient: torch.Tensor,
        buffer: torch.Tensor,
        update: torch.Tensor,
        apply: torch.Tensor,
        divisor: torch.Tensor,
        momentum: torch.Tensor,
        gradient_weight: torch.Tensor,
    ) -> None:
        """Write the update into `update`, and, if `apply`, the new mean into `buffer`. `gradient_weight`: 1 -
        momentum. Without torch.lerp, whose bits may depend on the place of a value in the tensor on CPU."""
        gradient = gradient / divisor
        mean = buffer + (gradient - buffer) * gradient_weight
        update.copy_(gradient + (mean - gradient) * momentum if nesterov else mean)
        buffer.copy_(torch.where(apply, mean, buffer))

    return update_momentum


def _weight_update(cautious: bool) -> Callable[..., None]:
    def update_weight(
        weight: torch.Tensor,
        update: torch.Tensor,
        apply: torch.Tensor,
        rate: torch.Tensor,
        decay: torch.Tensor,
    ) -> None:
        """If `apply`, let the weight decay and subtract `rate` times the update."""
        kept, update = 1 - decay, update.to(weight.dtype)
        if cautious:  # only where the update also makes the weight smaller (arXiv 2510.12402)
            kept = torch.where(update * weight >= 0, kept, torch.ones_like(kept))
        weight.copy_(torch.where(apply, weight * kept - rate * update, weight))

    return update_weight


def _compiled(function: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """The function compiled on CUDA, into one kernel for tensors of any length; elsewhere as it is."""
    return compile_update(function, dynamic=True) if device.type == "cuda" else function


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one dim. For torch.compile, `data` makes a tensor that does not know its base: it would
    compile again for each kind of base."""
    return tensor.view(-1).data


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.mT if x.size(-2) > x.size(-1) else x


def _zeros_per_row(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros [..., m, 1] for a parameter [..., m, n], sharded like its rows."""
    shard = plain_shard(parameter)
    local = shard.new_zeros((*shard.shape[:-1], 1))
    if not isinstance(parameter, DTensor):
        return local
    last = parameter.ndim - 1
    placements = [Replicate() if p.is_shard(last) else p for p in parameter.placements]
    shape = torch.Size((*parameter.shape[:-1], 1))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )
