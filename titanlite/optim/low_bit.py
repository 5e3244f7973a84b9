"""AdamW by a compiled kernel, with state in fp32, bfloat16 or 8 bits: `optimizer.state_dtype`.

In 8 bits, a block of 64 consecutive values along the last dim shares an fp32 scale s, the largest absolute
value of the block:

    first moment m     int8    code = round(127 f(m / s)), f(x) = 2 x / (1 + |x|)
    second moment v    uint8   code = round(255 sqrt(v / s)), at least 1 if v > 0

f is the companding function of FlashOptim (arXiv 2602.23349). Both functions spend most of the codes on small
values. Linear codes would round the small second moments of a block to 0; where the next gradient is 0, too,
the update m / (sqrt(v) + eps) would explode.

No block crosses the border of a shard, so each code and each scale, and with them each weight, has the same
bits on every layout. The state consists of plain tensors, which torch DCP reshards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import EllipsisType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titanlite.config.component import ConfigError
from titanlite.mesh import local_shard, plain_shard
from titanlite.optim.base import load_in_place
from titanlite.torch_compat import (
    compile_update,
    dtensor_like,
    foreach_copy,
    fused_adamw,
    mark_dynamic,
    plain_tensor,
)

BLOCK = 64  # values per scale
KEYS = ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")  # without blocks there are no scales
DTYPES = (torch.int8, torch.float32, torch.uint8, torch.float32)  # of KEYS
CPU_CHUNK = 1 << 16  # values that the CPU updates at a time: their temporary tensors fit its cache
LARGE = 1 << 22  # a shard with fp32 state and at least this many values gets its own kernel
ROWS_ELEMENTS = 1 << 24  # of moments_by_rows: 64 MiB in fp32
SMALLEST = torch.finfo(torch.float32).tiny  # the scale of a block of zeros


class CompiledAdamW(torch.optim.Optimizer):
    """AdamW with state in `state_dtype`: "float32", "bfloat16" or "int8".

    Each step computes the moments and the update in fp32, from the stored moments, and rounds only the
    moments that it stores. With "int8", parameters of fewer than two dims and parameters whose last dim is no
    multiple of 64 keep their state in fp32. This depends on the shape of the whole parameter, not on its
    shards.

    State of a parameter: `step`, an fp32 scalar; `exp_avg` and `exp_avg_sq`, sharded like the parameter; with
    8 bits also their scales `exp_avg_scale` and `exp_avg_sq_scale`, whose last dim is 64 times smaller. All
    state is made by the constructor.

    The step follows the protocol of `guarded_step`: it reads `found_inf` and `grad_scale` as tensors and does
    not wait for the device. On CUDA the update of a parameter is one kernel, compiled once for all shapes.
    With "float32", shards of fewer than `large` values share torch's fused kernels, because hundreds of small
    kernels would wait for the host."""

    _step_supports_amp_scaling = True

    def __init__(self, groups: list[dict[str, Any]], eps: float, state_dtype: str, large: int = LARGE):
        """`groups`: with `params`, `lr` and `betas`."""
        super().__init__(groups, {"eps": eps, "weight_decay": 0.0})
        self._least = large if state_dtype == "float32" else 0
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _initial_state(parameter, state_dtype)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step. `found_inf`: fp32 scalar attribute; 0 or absent: the step is applied. `grad_scale`:
        fp32 scalar attribute by which gradients are divided; None or absent: they are not."""
        found_inf, divisor = (getattr(self, name, None) for name in ("found_inf", "grad_scale"))
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            states = [self.state[p] for p in parameters]
            old_steps = [state["step"] for state in states]
            one = torch.ones_like(old_steps[0])
            apply = one if found_inf is None else (found_inf == 0).to(one)
            steps = torch.stack(old_steps) + apply
            foreach_copy(old_steps, steps.unbind())
            scalars = _scalars(group, steps, one if divisor is None else divisor, apply)
            small = []
            for parameter, state, row in zip(parameters, states, scalars.unbind()):
                assert parameter.grad is not None
                tensors = [parameter, parameter.grad, *_moment_tensors(state)]
                shards = [plain_shard(tensor) for tensor in tensors]
                if shards[0].numel() < self._least:
                    small.append([*shards, state["step"]])
                else:
                    _step_one(row, _blocks(shards))
            if small:
                fused_adamw(list(zip(*small)), group, found_inf, divisor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_in_place(self, state_dict)


def moments(state: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second moment of a parameter in fp32, from state of any dtype: plain tensors, such as
    this rank's shards."""
    m, v = state["exp_avg"], state["exp_avg_sq"]
    if m.dtype != torch.int8:
        return m.float(), v.float()
    decoded = _decode(*_blocks(_moment_tensors(state)))
    return decoded[0].view(m.shape), decoded[1].view(m.shape)


def moments_by_rows(
    state: Mapping[str, Any],
) -> Iterator[tuple[slice | EllipsisType, torch.Tensor, torch.Tensor]]:
    """The moments of a parameter in fp32, rows of at most about `ROWS_ELEMENTS` elements at a time: copies in
    fp32 of a whole head need more memory than the report that asks for them is worth. Yields the index of the
    rows in the parameter, and their first and second moment, which must not be changed."""
    whole = state["exp_avg"]
    if not whole.ndim or whole.numel() <= ROWS_ELEMENTS:
        yield ..., *moments(state)
        return
    num_rows = max(ROWS_ELEMENTS * len(whole) // whole.numel(), 1)
    for first in range(0, len(whole), num_rows):
        rows = slice(first, first + num_rows)
        yield rows, *moments({key: state[key][rows] for key in KEYS if key in state})


def has_blocks(parameter: torch.Tensor) -> bool:
    """Whether "int8" keeps the state of this parameter in 8 bits."""
    return parameter.ndim >= 2 and parameter.shape[-1] % BLOCK == 0


def _initial_state(parameter: torch.Tensor, state_dtype: str) -> dict[str, torch.Tensor]:
    whole = plain_tensor(parameter.detach())
    shard = local_shard(whole)
    if state_dtype != "int8" or not has_blocks(parameter):
        dtype = torch.bfloat16 if state_dtype == "bfloat16" else torch.float32
        made = {key: _zeros(whole, dtype) for key in ("exp_avg", "exp_avg_sq")}
    elif shard.shape[-1] % BLOCK:
        raise ConfigError(
            f"a parameter of shape {tuple(whole.shape)} is cut into shards of {tuple(shard.shape)}: 8-bit "
            f"state has blocks of {BLOCK} values along the last dim, which a shard must not cut",
            "optimizer.state_dtype",
        )
    else:
        sizes = (1, BLOCK, 1, BLOCK)
        made = {key: _zeros(whole, dtype, size) for key, dtype, size in zip(KEYS, DTYPES, sizes)}
    return {"step": torch.zeros((), device=shard.device), **made}


def _zeros(parameter: torch.Tensor, dtype: torch.dtype, block: int = 1) -> torch.Tensor:
    """Zeros, sharded like the parameter: one per `block` values of the last dim."""

    def shape(tensor: torch.Tensor) -> torch.Size:
        return torch.Size([*tensor.shape[:-1], tensor.shape[-1] // block]) if block > 1 else tensor.shape

    shard = local_shard(parameter)
    zeros = shard.new_zeros(shape(shard), dtype=dtype)
    return dtensor_like(zeros, parameter, shape(parameter)) if isinstance(parameter, DTensor) else zeros


def _moment_tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return [state[key] for key in KEYS if key in state]


def _blocks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of tensors of one parameter: [number of blocks, 64], scales [number of blocks, 1]. Views of one
    dim if the parameter has no blocks. For torch.compile, `data` makes views that do not know their base: it
    would compile again for each shape of the base."""
    if not any(t.dtype == torch.int8 for t in tensors):
        return [t.view(-1).data for t in tensors]
    num_blocks = tensors[-1].numel()  # the last tensor has the scales of the second moment
    return [t.view(num_blocks, BLOCK if t.numel() > num_blocks else 1).data for t in tensors]


def _scalars(
    group: Mapping[str, Any], steps: torch.Tensor, divisor: torch.Tensor, apply: torch.Tensor
) -> torch.Tensor:
    """The scalars that `_update` needs, by parameter: fp32 [number of parameters, 8]. Computed in fp64
    on the device. A row has 32 bytes, because compiled code copies inputs that are not 16-byte aligned."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    steps = steps.double()
    columns = [
        torch.full_like(steps, 1 - lr * group["weight_decay"]),
        lr / (1 - beta1**steps),
        1 / (1 - beta2**steps).sqrt(),
        torch.full_like(steps, group["eps"]),
        torch.full_like(steps, 1 - beta1),
        torch.full_like(steps, 1 - beta2),
        (1 / divisor.to(steps)).expand_as(steps),
        apply.to(steps).expand_as(steps),
    ]
    return torch.stack(columns, 1).float()


def _step_one(scalars: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Update one parameter. `tensors`: views of its weight, its gradient and its moments, by `_blocks`."""
    if not tensors[0].numel():  # torch cannot compile the update of an empty shard
        return
    if tensors[0].is_cuda:
        for tensor in tensors:
            mark_dynamic(tensor, 0)
        _compiled_update()(scalars, *tensors)
        return
    for chunk in _chunks(tensors):
        _update(scalars, *chunk)


@cache
def _compiled_update() -> Callable[..., None]:
    return compile_update(_update)


def _chunks(tensors: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    rows = CPU_CHUNK // tensors[0].shape[1] if tensors[0].ndim == 2 else CPU_CHUNK
    yield from zip(*(tensor.split(rows) for tensor in tensors))


def _update(
    scalars: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, *state: torch.Tensor
) -> None:
    """One step of AdamW in place. torch.where and not a product leaves everything unchanged if the step is
    not applied: zero times NaN is NaN.

    On CPU each operation is rounded by itself (torch.lerp would not be), which makes the bits of a value
    independent of its place in the tensor."""
    shrink, step_size, inverse_root, eps, weight1, weight2, factor, apply = scalars.unbind()
    in_8_bits = len(state) == len(KEYS)
    m, v = _decode(*state) if in_8_bits else (state[0].float(), state[1].float())
    g = gradient.float() * factor
    m = m + (g - m) * weight1
    v = v + (g * g - v) * weight2
    updated = weight * shrink - m * step_size / (v.sqrt() * inverse_root + eps)
    stored = _encode(m, v) if in_8_bits else (m, v)
    for old, new in zip((weight, *state), (updated, *stored)):
        old.copy_(torch.where(apply > 0, new.to(old.dtype), old))


def _encode(m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes and scales of fp32 moments [number of blocks, 64], in the order of KEYS. Codes are whole numbers
    in fp32. Products with a reciprocal replace most divisions, because exact division is slow."""
    scale1 = m.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    scale2 = v.amax(-1, keepdim=True).clamp(min=SMALLEST)
    x, root = m * (1 / scale1), (v * (1 / scale2)).sqrt() * 255
    codes1 = (254 * x / (1 + x.abs())).round()
    codes2 = torch.where(v > 0, root.round().clamp(min=1), 0)
    return codes1, scale1, codes2, scale2


def _decode(
    codes1: torch.Tensor, scale1: torch.Tensor, codes2: torch.Tensor, scale2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp32 moments of codes and scales."""
    x, root = codes1.float() * (1 / 127), codes2.float() * (1 / 255)
    return x / (2 - x.abs()) * scale1, root * root * scale2
