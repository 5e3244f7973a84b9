"""The parameters that one rank holds, from the model on the meta device and the degrees of the layout,
without process groups. The rules follow tensor_parallel, expert_parallel, pipeline_parallel and fsdp in
parallel/."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import NamedTuple

from torch import nn

from titanlite.models.base import Decoder, is_adapter
from titanlite.optim.base import Optimizer
from titanlite.parallel.pipeline_parallel import split_into_stages, stages_of_rank
from titanlite.parallelism import Degrees, Parallelism

EMBEDDING, HEAD, ROOT = "embedding", "head", "root"  # FSDP's units beside the blocks, which are numbers
TWO_MOMENTS = 8.0  # bytes of two fp32 moments
# Tensor-parallel styles that shard the first dim.
ROWS = ("embedding", "head", "colwise", "gather_colwise", "all_heads")


class Tensor(NamedTuple):
    """A parameter as one rank has it. `gathered`: elements when FSDP has gathered it, of which tensor
    parallel or expert parallel leaves a shard. `sharded`: elements between steps, on the rank with the
    largest of `num_shards` shards. `state_bytes`: of the optimizer, per element."""

    name: str
    gathered: int
    sharded: int
    num_shards: int
    is_trained: bool
    is_matrix: bool
    state_bytes: float


class Unit:
    """Parameters that FSDP gathers and frees together. All sizes are numbers of elements, but `state_bytes`.
    `matrices`: of the parameters that a single process casts and that float8 gathers in 8 bits. `gradient`:
    gradients before FSDP shards them."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tensors
        trained = [t for t in tensors if t.is_trained]
        self.gathered = sum(t.gathered for t in tensors)
        self.matrices = sum(t.gathered for t in tensors if t.is_matrix)
        self.sharded = sum(t.sharded for t in tensors)
        self.gradient = sum(t.gathered for t in trained)
        self.sharded_gradient = sum(t.sharded for t in trained)
        self.state_bytes = sum(t.sharded * t.state_bytes for t in trained)


@dataclass(frozen=True)
class RankParameters:
    """The parameters of a rank: its units in the order of the forward. `blocks`: by the position in the
    model. `embedding` and `head`: None on ranks without them, and with tied embeddings, which are in
    `root` with the final norm."""

    blocks: dict[int, Unit]
    embedding: Unit | None
    head: Unit | None
    root: Unit | None

    @property
    def units(self) -> list[Unit]:
        return [u for u in (self.root, self.embedding, *self.blocks.values(), self.head) if u is not None]

    @property
    def has_loss(self) -> bool:
        return self.head is not None or self.root is not None


class Parameter(NamedTuple):
    """A parameter of the whole model. `unit`: the number of its block, or EMBEDDING, HEAD or ROOT.
    `sharded_dim`: the dim that tensor parallel shards; None: none. `is_expert`: whether it has the matrices
    of all experts of a layer, which are not cut."""

    name: str
    shape: tuple[int, ...]
    unit: int | str
    sharded_dim: int | None
    is_expert: bool
    is_trained: bool
    state_bytes: float

    def on_rank(self, parallelism: Parallelism, degrees: Degrees) -> Tensor:
        """The parameter as a rank has it."""
        shape = [
            -(-size // degrees.tp) if dim == self.sharded_dim else size for dim, size in enumerate(self.shape)
        ]
        num_shards = degrees.dp_shard * degrees.cp
        if self.is_expert and parallelism.has_expert_axes:
            shape[0] //= parallelism.expert_parallel_degree
            num_shards = num_shards * degrees.tp // parallelism.expert_parallel_degree
            if shape[0] % num_shards:  # FSDP shards the rows of the experts, in equal parts
                shape = [shape[1], shape[0], *shape[2:]]
        rows, columns = shape[0], math.prod(shape[1:])
        return Tensor(
            name=self.name,
            gathered=rows * columns,
            sharded=-(-rows // num_shards) * columns,  # torch gives the first ranks the larger shards
            num_shards=num_shards,
            is_trained=self.is_trained,
            is_matrix=len(shape) >= 2,
            state_bytes=self.state_bytes,
        )


def parameters_of(net: Decoder, optimizer: Optimizer) -> list[Parameter]:
    """All parameters of the whole model, with what decides how they are sharded."""
    rules = {name: group.rule for group, names in optimizer.grouped(net).items() for name in names}
    units = dict[nn.Module, int | str]({block: i for i, block in enumerate(net.blocks().values())})
    for group in net.embedding_and_head():
        units |= dict.fromkeys(group, EMBEDDING if isinstance(group[0], nn.Embedding) else HEAD)
    parameters = list[Parameter]()
    prefixes = {f"{name}.": units[module] for name, module in net.named_modules() if module in units}
    for name, parameter in net.named_parameters():
        parameters.append(
            Parameter(
                name=name,
                shape=tuple(parameter.shape),
                unit=next((unit for prefix, unit in prefixes.items() if name.startswith(prefix)), ROOT),
                sharded_dim=_sharded_dim(net, name, parameter.ndim),
                is_expert=net.parameter_role(name) == "expert",
                is_trained=parameter.requires_grad,
                state_bytes=_state_bytes(optimizer, parameter, rules[name]) if name in rules else 0.0,
            )
        )
    return parameters


def _state_bytes(optimizer: Optimizer, parameter: nn.Parameter, rule: str) -> float:
    """Bytes of optimizer state per element; an optimizer that does not tell is taken to have two moments."""
    known = optimizer.state_bytes(parameter, rule)
    return TWO_MOMENTS if known is None else known


def _sharded_dim(net: Decoder, name: str, ndim: int) -> int | None:
    """The dim of a parameter that tensor parallel shards, by the style of its layer in `tp_plan`. Of an
    adapter, one of the two matrices is sharded: COLWISE_ADAPTER and ROWWISE_ADAPTER."""
    module = name.rpartition(".")[0]
    if is_adapter(name):
        module = module.rpartition(".")[0]
    style = next((style for pattern, style in net.tp_plan.items() if fnmatch(module, pattern)), None)
    dim = 0 if style in ROWS else 1 if style == "rowwise" else None
    if is_adapter(name) and (dim, name.split(".")[-2]) not in ((0, "lora_B"), (1, "lora_A")):
        return None
    return dim if dim is not None and dim < ndim else None


def rank_parameters(
    parameters: Sequence[Parameter], parallelism: Parallelism, degrees: Degrees, pp_rank: int
) -> RankParameters:
    """The parameters of the ranks with coordinate `pp_rank` along the pipeline-parallel axis."""
    by_unit: dict[int | str, list[Tensor]] = {}
    blocks = list(dict.fromkeys(p.unit for p in parameters if isinstance(p.unit, int)))
    chosen: set[int | str] = {*blocks, EMBEDDING, HEAD, ROOT}
    if degrees.pp > 1:
        stages = split_into_stages(parallelism, [str(i) for i in blocks])
        numbers = stages_of_rank(parallelism.pipeline_parallel_schedule, pp_rank, degrees.pp)
        chosen = {int(name) for number in numbers for name in stages[number]}
        chosen |= {EMBEDDING} if 0 in numbers else set()
        chosen |= {HEAD} if len(stages) - 1 in numbers else set()
    for parameter in parameters:
        if parameter.unit in chosen:
            by_unit.setdefault(parameter.unit, []).append(parameter.on_rank(parallelism, degrees))
    units = {key: Unit(tensors) for key, tensors in by_unit.items()}
    return RankParameters(
        blocks={i: units[i] for i in blocks if i in units},
        embedding=units.get(EMBEDDING),
        head=units.get(HEAD),
        root=units.get(ROOT),
    )
