"""The arithmetic of plans: sharding against the real transforms, kept tensors against autograd, peaks against
recorded runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from benchmarks import plan_errors
from tests.support.fla import stand_in_for_fla
from tests.support.tiers import full, sampled
from titanlite.attention.context_parallel import SequenceSharding
from titanlite.attention.gated_delta_rule_kernels import fla_rule
from titanlite.attention.linear import KEPT_OPS, LinearAttention, ShardedLinearAttention
from titanlite.attention.sdpa import CAUSAL
from titanlite.config.component import ConfigError
from titanlite.job import Job, load_job
from titanlite.lab.activations import BlockShape, kept_by_block
from titanlite.lab.cards import CARDS, Cluster, parse_gpus
from titanlite.lab.layouts import CLOSE, DOES_NOT_FIT, FITS, assess, fitting_layouts, verdict
from titanlite.lab.memory import GIB, OUTSIDE, in_flight, rank_memory
from titanlite.lab.planned import PlannedRun, planned_run
from titanlite.lab.sharding import parameters_of, rank_parameters
from titanlite.lab.step_time import guesses
from titanlite.losses import ChunkedCrossEntropy
from titanlite.mesh import build_mesh, local_shard
from titanlite.models.base import ModelFamily
from titanlite.models.gemma3 import Gemma3
from titanlite.models.gpt import Gpt
from titanlite.models.llama3 import Llama3
from titanlite.models.olmo3 import Olmo3
from titanlite.models.olmoe import Olmoe
from titanlite.models.qwen3 import Qwen3
from titanlite.models.qwen3_5 import Qwen3_5
from titanlite.models.qwen3_5_moe import Qwen3_5MoE
from titanlite.models.qwen3_moe import Qwen3MoE
from titanlite.optim.adamw import AdamW
from titanlite.optim.base import make_state
from titanlite.optim.muon import Muon
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint, _policy
from titanlite.parallel.apply import parallelize
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallelism import Parallelism

H100 = next(card for card in CARDS if card.name == "H100")
LAYOUTS = [{}, {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}]
MORE_LAYOUTS = [*LAYOUTS, {"context_parallel_degree": 2, "tensor_parallel_degree": 2}]
# dims that ranks do not divide evenly, and untied embeddings, as pipeline parallel needs
LINEAR = {"delta_n_k_heads": 3, "delta_n_v_heads": 6, "delta_v_head_dim": 32, "head_dim": 24}
MODEL = Qwen3(flavor="debug", overrides={"tie_word_embeddings": False, "dim": 65, "hidden_dim": 126})
EXPERTS = Qwen3MoE(flavor="debug", overrides={"tie_word_embeddings": False})
TWO_EXPERTS = Qwen3MoE(flavor="debug", overrides={"n_experts": 2, "tie_word_embeddings": False})
EXPERT_LAYOUTS = [
    {"expert_parallel_degree": 2},
    {"tensor_parallel_degree": 2},
    {"tensor_parallel_degree": 2, "expert_parallel_degree": 2},
]
MORE_EXPERT_LAYOUTS = [*EXPERT_LAYOUTS, {"pipeline_parallel_degree": 2, "expert_parallel_degree": 2}]


def real_sizes(
    world_size: int, model: ModelFamily, layouts: list[dict[str, int]]
) -> list[tuple[int, dict[str, int]]]:
    """On one rank, for each layout: the coordinate along pp, and elements by parameter."""
    sizes_by_layout = []
    for keys in layouts:
        parallelism = Parallelism(**keys)  # type: ignore[arg-type]
        mesh = build_mesh(parallelism, "cpu", torch.distributed.get_rank(), world_size)
        settings = ParallelSettings(parallelism=parallelism)
        sharded = parallelize(model.build_on_meta(), ChunkedCrossEntropy(), mesh, settings)
        sizes = {name: local_shard(p).numel() for name, p in sharded.net.named_parameters()}
        sizes_by_layout.append((mesh.coordinate.pp, sizes))
    return sizes_by_layout


@pytest.mark.parametrize(
    ("world_size", "model", "layouts"),
    [
        full(2, MODEL, LAYOUTS),
        full(4, MODEL, MORE_LAYOUTS),
        full(2, EXPERTS, EXPERT_LAYOUTS),
        full(4, EXPERTS, MORE_EXPERT_LAYOUTS),
        full(4, TWO_EXPERTS, MORE_EXPERT_LAYOUTS),
    ],
)
def test_planned_shards_are_those_of_the_real_transforms(
    run_on: Callable[..., list[Any]], world_size: int, model: ModelFamily, layouts: list[dict[str, int]]
) -> None:
    by_rank = run_on(world_size, real_sizes, world_size, model, layouts)
    net = model.build_on_meta()
    parameters = parameters_of(net, AdamW())
    for i, keys in enumerate(layouts):
        parallelism = Parallelism(**keys)  # type: ignore[arg-type]
        degrees = parallelism.degrees(world_size)
        for pp_rank in range(degrees.pp):
            planned = rank_parameters(parameters, parallelism, degrees, pp_rank)
            sizes = {t.name: t.sharded for unit in planned.units for t in unit.tensors}
            real = [one[i][1] for one in by_rank if one[i][0] == pp_rank]
            assert all(one.keys() == sizes.keys() for one in real)
            largest = {name: max(one[name] for one in real) for name in sizes}
            assert largest == sizes, keys


def block_of(
    model: ModelFamily, tokens: int, number: int, linear: LinearAttention | None = None
) -> tuple[nn.Module, list[Any]]:
    """A block in bf16, and the arguments of its forward."""
    with torch.device("cpu"):
        net = model.build().to(torch.bfloat16)
    for p in net.parameters():
        torch.nn.init.ones_(p)
    config = model.config
    x = torch.ones(1, tokens, config.dim, dtype=torch.bfloat16, requires_grad=True)
    rotary_dim = int(config.head_dim * getattr(config, "rotary_share", 1.0))
    is_linear = config.attention_kinds[number].is_linear
    attention = (linear or LinearAttention(fla_rule)) if is_linear else CAUSAL
    tables = torch.ones(tokens, rotary_dim), torch.ones(tokens, rotary_dim)
    # Its value for all blocks is counted nowhere: it is kept once.
    extra = [x.detach(), torch.zeros(1, tokens, dtype=torch.int64)] if model.name == "gpt" else []
    return list(net.blocks().values())[number], [x, *tables, attention, *extra]


class OneRank(SequenceSharding):
    """Context parallel whose only rank has whole sequences, in two chunks."""

    def __init__(self) -> None:
        self.size, self.rank, self.own_chunks = 1, 0, (0, 1)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def chunks_with_previous(self, x: torch.Tensor, num: int) -> torch.Tensor:
        return torch.nn.functional.pad(self.chunks(x), (0, 0, num, 0))


def kept_bytes(
    model: ModelFamily,
    tokens: int,
    compiled: bool = False,
    number: int = 0,
    linear: LinearAttention | None = None,
) -> float:
    """Bytes per token of the tensors that autograd keeps in the forward of a block in bf16, beside weights
    and rotary tables. `number`: of the block. `linear`: for a gated delta net."""
    block, arguments = block_of(model, tokens, number, linear)
    if compiled:  # split into forward and backward as inductor does
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    others = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *arguments[1:3])}
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in others and t.dim() > 1:
            kept[storage.data_ptr()] = storage.nbytes()
        keep_alive.append(t)
        return t

    keep_alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        block(*arguments)
    return sum(kept.values()) / tokens


@pytest.mark.parametrize(
    "model",
    [family(flavor="debug") for family in (Llama3, Qwen3, Gemma3, Olmo3)],
    ids=lambda model: model.name,
)
def test_kept_tensors_without_the_compiler_are_those_of_autograd(model: Any) -> None:
    shape = BlockShape.of_blocks(model.build_on_meta(), size=2, compiled=False, is_float8=False)[0]
    planned = sum(shape.tensors().values())
    # The CPU's norm, which is not fused as CUDA's is, also keeps x / rms(x) in fp32.
    normed = shape.num_norms * shape.d + (shape.q + shape.kv if shape.normalizes_heads else 0)
    measured = kept_bytes(model, 256)
    assert planned + 4 * normed == pytest.approx(measured, rel=0.02)
    assert planned + 4 * normed - 2 * shape.h < 0.95 * measured  # one tensor less is found


@pytest.mark.parametrize("compiled", [False, full(True)])
@pytest.mark.parametrize("number", [0, 1], ids=["plain", "value embedding"])
def test_kept_tensors_of_a_gpt_are_those_of_autograd(number: int, compiled: bool) -> None:
    # Scaled rotary tables, which all heads share, are not counted.
    model = Gpt(flavor="debug", overrides={"hidden_dim": 640, "attention_scale": 1.0})
    shape = BlockShape.of_blocks(model.build_on_meta(), size=2, compiled=compiled, is_float8=False)[number]
    planned, measured = sum(shape.tensors().values()), kept_bytes(model, 256, compiled, number)
    if not compiled:  # the input of the mix, which is not the block's input
        planned += 2 * shape.d
    assert planned == pytest.approx(measured, rel=0.02)
    assert planned - 2 * shape.d < 0.97 * measured  # one tensor less is found


def test_norms_in_place_of_those_before_need_the_outputs_of_attention_and_mlp() -> None:
    net = Olmo3(flavor="7B").build_on_meta()
    after = BlockShape.of_blocks(net, size=2, compiled=True, is_float8=False)[0]
    before = replace(after, norms_inputs=True)

    def difference(option: str) -> float:
        config = ActivationCheckpoint(mode="selective", selective_ac_option=option)
        (one,), (other,) = (kept_by_block([shape], config) for shape in (after, before))
        return one.kept - other.kept

    assert after.tensors().keys() - before.tensors().keys() == {"attended", "added"}
    assert sum(after.tensors().values()) == sum(before.tensors().values())
    assert difference("op") == 2 * after.d, "the seventh product"
    assert difference("attention") == 2 * after.d, "attended"
    assert difference("mlp") == 0, "added in place of n2"
    assert difference("norms") == 2 * 2 * after.d, "nothing that repeated norms make is kept"


@pytest.mark.parametrize("compiled", [False, full(True)])
@pytest.mark.parametrize("family", [Qwen3MoE, full(Olmoe)])
def test_kept_tensors_of_experts_are_those_of_autograd(family: type[ModelFamily], compiled: bool) -> None:
    model = family(flavor="debug")
    shape = BlockShape.of_blocks(model.build_on_meta(), size=2, compiled=compiled, is_float8=False)[0]
    # As above, the CPU's norm keeps more, if it is not compiled.
    normed = 0 if compiled else 2 * shape.d + shape.q + shape.kv
    planned, measured = sum(shape.tensors().values()) + 4 * normed, kept_bytes(model, 256, compiled)
    assert planned == pytest.approx(measured, rel=0.02)
    assert planned + 2 * shape.num_chosen * shape.d > 1.04 * measured  # with the experts' inputs


@pytest.mark.parametrize("compiled", [False, full(True)])
@pytest.mark.parametrize("number", [0, 3], ids=["gated delta net", "gated attention"])
@pytest.mark.parametrize("family", [Qwen3_5, full(Qwen3_5MoE)])
def test_kept_tensors_of_linear_attention_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, family: type[ModelFamily], number: int, compiled: bool
) -> None:
    """The operator keeps what its kernels need."""
    stand_in_for_fla(monkeypatch)
    model = family(flavor="debug", overrides=LINEAR)
    shape = BlockShape.of_blocks(model.build_on_meta(), size=2, compiled=compiled, is_float8=False)[number]
    normed = 2 * shape.d + (shape.kv if shape.is_linear else shape.q + shape.kv)
    planned, measured = sum(shape.tensors().values()), kept_bytes(model, 256, compiled, number)
    assert planned + (0 if compiled else 4 * normed) == pytest.approx(measured, rel=0.02)


def test_kept_tensors_of_linear_attention_with_context_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_fla(monkeypatch)
    model, tokens = Qwen3_5(flavor="debug", overrides=LINEAR), 4096  # so many that states hardly count
    how: dict[str, Any] = {"size": 2, "compiled": False, "is_float8": False}
    one, two = (BlockShape.of_blocks(model.build_on_meta(), cp=cp, **how)[0] for cp in (1, 2))
    linear = ShardedLinearAttention(fla_rule, OneRank(), None, None)
    more = kept_bytes(model, tokens, linear=linear) - kept_bytes(model, tokens)
    planned = sum(two.tensors().values()) - sum(one.tensors().values())
    assert planned == pytest.approx(more, rel=0.02)
    assert planned - 2 * one.q < 0.98 * more  # one tensor less is found


class KeptByPolicy(TorchDispatchMode):
    """Counts the bytes of the results that the mode "op" of activation checkpointing keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products: Counter[tuple[bool, bool]] = Counter()
        self.num_bytes = 0
        self.last_product = 0
        """Kept bytes of the newest matrix product."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, num = op(*args, **(kwargs or {})), self.num_products.total()
        policy = _policy(KEPT_OPS, self.num_products, SimpleNamespace(is_recompute=False), op)
        is_kept = policy == CheckpointPolicy.MUST_SAVE
        size = sum(t.nbytes for t in tree_leaves(out) if isinstance(t, torch.Tensor)) if is_kept else 0
        self.num_bytes += size
        if self.num_products.total() > num:
            self.last_product = size
        return out


@pytest.mark.parametrize(
    ("family", "number"),
    [
        (Llama3, 0),
        (Gemma3, 0),
        (Qwen3MoE, 0),
        (Gpt, 0),
        (Gpt, 1),
        *((family, number) for family in (Qwen3_5, Qwen3_5MoE) for number in (0, 3)),
    ],
)
def test_the_mode_op_keeps_what_its_policy_says(
    monkeypatch: pytest.MonkeyPatch, family: type[ModelFamily], number: int
) -> None:
    stand_in_for_fla(monkeypatch)
    model = family(flavor="debug", overrides=LINEAR if "qwen3_5" in family.name else {})
    shapes = BlockShape.of_blocks(model.build_on_meta(), size=2, compiled=True, is_float8=False)
    config, shape = ActivationCheckpoint(mode="selective", selective_ac_option="op"), shapes[number]
    planned = kept_by_block(shapes, config)[number].kept
    block, arguments = block_of(model, 256, number)
    with KeptByPolicy() as mode:
        block(*arguments)
    # The backward of a sum does not need the last product of an MLP.
    unneeded = 0 if shape.num_experts or shape.num_norms > 2 else mode.last_product
    kept = (mode.num_bytes - unneeded) / 256 + 2 * shape.d
    # The plan counts small tensors that are computed again: scores of experts, decays and beta.
    small = shape.tensors().get("routing", 0.0) + (8 * shape.heads if shape.is_linear else 0)
    assert 0 <= planned - kept <= small
    assert planned - 2 * shape.d < kept  # one tensor less is found


@pytest.mark.parametrize("number", [0, 3], ids=["gated delta net", "gated attention"])
@pytest.mark.parametrize("family", [Llama3, Qwen3_5, Qwen3_5MoE])
def test_copies_of_weights_are_those_of_the_real_matrices(family: type[ModelFamily], number: int) -> None:
    model = family(flavor="debug", overrides=LINEAR if "qwen3_5" in family.name else {})
    net = model.build_on_meta()
    shape = BlockShape.of_blocks(net, size=2, compiled=True, is_float8=False)[number]
    parameters = list(net.blocks().values())[number].named_parameters()
    # Not the router, decays and the convolution, which are small.
    matrices = {name: p.numel() for name, p in parameters if p.ndim > 1 and min(p.shape[-2:]) > 8}
    attention = sum(size for name, size in matrices.items() if "attn" in name)
    config = ActivationCheckpoint(mode="selective", selective_ac_option="attention")
    (kept,) = kept_by_block([shape], config)
    assert 1 - kept.casts == pytest.approx(attention / sum(matrices.values()))


@pytest.mark.parametrize(
    ("optimizer", "num_bytes"),
    [
        (AdamW(), 8.0),
        (AdamW(state_dtype="bfloat16"), 4.0),
        (AdamW(state_dtype="int8"), 2.125),
        (Muon(state_dtype="int8"), 4.0),
        (Muon(normalize="neuron"), 4 + 4 / 128),
    ],
)
def test_the_state_is_that_of_the_real_optimizer(optimizer: Any, num_bytes: float) -> None:
    net = Llama3(flavor="debug", overrides={"n_layers": 1}).build().requires_grad_()
    parameters = {p.name: p for p in parameters_of(net, optimizer)}
    for p in net.parameters():
        torch.nn.init.ones_(p)
    real = optimizer.build(net, build_mesh(Parallelism(), "cpu", 0, 1))
    make_state(real)
    for name, p in net.named_parameters():
        state = real.state[p]
        tensors = [t for key, t in state.items() if key != "step"]
        size = sum(t.numel() * t.element_size() for t in tensors) / p.numel()
        assert size == pytest.approx(parameters[name].state_bytes), name
    assert parameters["model.layers.0.self_attn.q_proj.weight"].state_bytes == num_bytes


RECORDED = list(plan_errors.recorded())
COUNTED = [run for run in RECORDED if run.file not in plan_errors.UNCOUNTED]
UNCOMPILED = [run for run in RECORDED if run.file == "lora_memory_h200"]


@pytest.mark.parametrize(
    "run", sampled(COUNTED, default=UNCOMPILED), ids=lambda run: f"{run.file}-{run.case}"
)
def test_recorded_peaks_are_planned_within_3_percent(run: plan_errors.Recorded) -> None:
    row = plan_errors.compare(run)
    few_mib = 0.05 / row["measured_gib"]  # more than 3 percent of a run of 1 GiB
    # Of earlier versions: those that kept transposed copies of 8-bit weights needed 7 percent more than now.
    assert abs(row["error"]) < (0.08 if row["before"] else max(0.03, few_mib))
    assert row.get("guess", False) or abs(row.get("time_error", 0)) < 0.15


def test_the_plan_is_too_low_for_the_runs_that_are_left_out() -> None:
    left_out = [run for run in RECORDED if run not in COUNTED]
    assert left_out
    assert all(plan_errors.compare(run)["error"] < -0.1 for run in left_out)


def test_the_committed_errors_are_those_of_the_present_plan() -> None:
    """Of a sample of the recorded runs; plan_errors.py writes the file."""
    committed = json.loads((plan_errors.RESULTS / "plan_errors.json").read_text())
    rows = {(row["file"], row["case"]): row for row in committed["rows"]}
    runs = list(plan_errors.recorded())
    assert {(run.file, run.case) for run in runs} == rows.keys()
    assert committed["summary"] == plan_errors.summary(committed["rows"])
    assert committed["summary"]["largest_memory_error"] < 0.035
    for run in runs[::12]:
        assert plan_errors.compare(run) == rows[run.file, run.case]


def test_the_committed_errors_are_of_all_recorded_runs() -> None:
    rows = json.loads((plan_errors.RESULTS / "plan_errors.json").read_text())["rows"]
    paths = [
        path
        for path in plan_errors.RESULTS.glob("*")
        if not path.stem.startswith(("blind_points", "measure_", "cuda_graphs"))
    ]
    texts = {path.stem: path.read_text() for path in paths}
    files = {
        name for name, text in texts.items() if plan_errors.PEAK in text and plan_errors.GRAPHS not in text
    }
    assert files == {row["file"] for row in rows}
    assert {row["file"] for row in rows if "time_error" not in row} == set(plan_errors.UNTIMED)


def test_a_step_time_that_is_far_off_is_called_a_guess() -> None:
    rows = json.loads((plan_errors.RESULTS / "plan_errors.json").read_text())["rows"]
    far = {row["file"]: row for row in rows if abs(row.get("time_error", 0)) > 0.15}
    experts = {"qwen3_30b_a3b_8layers_h200_b4_int8", "olmoe_1b_7b_h200"}
    deterministic = {"same_bits_8b_h200x2_1_micro_batch"}
    linear = {"gated_delta_net_8192_h200", "gated_delta_net_65536_h200"}
    assert far.keys() == {
        "qwen3_30m_h200", "lora_memory_h200", "finetune_h200", *experts, *deterministic, *linear
    }  # fmt: skip
    assert all(row["guess"] for row in far.values())
    deterministic = {f"same_bits_1b_h200x2_{name}" for name in ("1_micro_batch", "8_micro_batches")}
    sizes = {row["file"] for row in rows if row.get("guess")}
    near = {"optimizer_curves_h200", "qwen3_30b_a3b_8layers_h200_b4_torchtitan"}  # 38M parameters; experts
    assert sizes - far.keys() == near | deterministic


@pytest.mark.parametrize(
    ("overrides", "gpus", "reason"),
    [
        (["--model.flavor=debug"], 1, "models below 500M parameters"),
        (["--no-compile.enable"], 1, "compile.enable"),
        (["--training.deterministic"], 1, "deterministic kernels"),
        (["--model.name=qwen3_5", "--model.flavor=9B"], 1, "linear attention"),
        (["--lora.enable", "--checkpoint.initial_load_path=base"], 1, "[lora]"),
        (["--training.mixed_precision_param=float32"], 1, "fp32"),
        (["--parallelism.data_parallel_replicate_degree=2"], 4, "data_parallel_replicate_degree"),
        (
            [
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
            ],
            2,
            "ZBVZeroBubble",
        ),
        (["--training.enable_cpu_offload"], 1, "enable_cpu_offload"),
        (["--model.name=qwen3_moe", "--model.flavor=30B-A3B"], 1, "experts"),
    ],
)
def test_kinds_of_runs_without_a_measured_time(overrides: list[str], gpus: int, reason: str) -> None:
    cluster, given = Cluster(H100, gpus), ["--model.overrides.n_layers=4", "--parallelism.fsdp_reduce=step"]
    job = load_job("train_configs/llama3_8b.toml", [*given, *overrides], None)
    (only,) = guesses(planned_run(job, cluster))
    assert reason in only
    measured = load_job("train_configs/llama3_8b.toml", given, None)
    assert not guesses(planned_run(measured, cluster))  # control


def debug_run(*overrides: str, gpus: int = 1) -> Any:
    job: Job = load_job("train_configs/debug.toml", overrides, None)
    return planned_run(job, Cluster(H100, gpus))


def peak(run: Any) -> float:
    return max(rank.peak.total for rank in rank_memory(run))


def test_the_peak_follows_the_settings() -> None:
    batch = "--training.local_batch_size=8", "--training.global_batch_size=64"
    given = debug_run(*batch)
    assert given.num_micro_batches == 8
    smaller = [
        debug_run(*batch, "--training.local_batch_size=4"),
        debug_run(*batch, "--activation_checkpoint.mode=full"),
        debug_run(*batch, "--training.enable_cpu_offload"),
        debug_run(*batch, "--optimizer.state_dtype=int8"),
    ]
    assert all(peak(run) < peak(given) for run in smaller)


def test_the_accumulated_gradients_of_all_ranks_are_counted() -> None:
    keys = ("--training.local_batch_size=1", "--training.global_batch_size=8")
    step, each = (debug_run(*keys, f"--parallelism.fsdp_reduce={r}", gpus=4) for r in ("step", "micro_batch"))
    first = [rank_memory(run)[0].moments[0].sizes["gradients"] for run in (step, each)]
    size = sum(p.numel() for p in step.net.parameters())
    assert first[0] == 4 * size
    assert first[1] == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "rank", "expected"),
    [("1F1B", 0, 4), ("1F1B", 3, 1), ("GPipe", 3, 16), ("Interleaved1F1B", 0, 5.5), ("ZBVZeroBubble", 2, 4)],
)
def test_micro_batches_in_flight(schedule: str, rank: int, expected: float) -> None:
    assert in_flight(schedule, rank, 4, 16) == expected
    assert in_flight(schedule, rank, 4, 1) == 1  # never more than there are


def test_a_run_that_needs_more_than_the_card_never_fits() -> None:
    memory = rank_memory(debug_run())
    need = (memory[0].peak.total + OUTSIDE) / GIB
    assert verdict(memory, need - 0.01) == DOES_NOT_FIT
    assert verdict(memory, need + 0.01) == CLOSE
    assert verdict(memory, 2 * need) == FITS
    most = (1.23 * memory[0].peak.total + OUTSIDE) / GIB
    assert verdict(memory, most - 0.01) == CLOSE
    assert verdict(memory, most + 0.01) == FITS


def test_the_search_prefers_the_fastest_layout_and_names_reasons() -> None:
    given = debug_run("--training.global_batch_size=64", gpus=8)
    reason = "no tensor parallel here"

    def refusal(run: PlannedRun) -> str | None:
        uneven = run.global_batch % (run.job.training.local_batch_size * run.degrees.data_parallel)
        return reason if uneven or run.degrees.tp > 1 or run.degrees.pp > 4 else None

    best, others = fitting_layouts(given, Cluster(H100, 8), refusal)
    seconds = [layout.time.seconds for layout in best]
    assert seconds == sorted(seconds)
    assert best[0].time.seconds <= assess(given, Cluster(H100, 8)).time.seconds
    assert all(layout.verdict == FITS and layout.run.degrees.tp == 1 for layout in best)
    assert all(math.prod(layout.run.degrees) == 8 for layout in best)
    assert {refused.reason for refused in others} == {reason}
    small = Cluster(H100._replace(memory_gib=1.0), 8)  # less than what is outside torch
    fitting, others = fitting_layouts(given, small, refusal)
    assert not fitting
    assert any(refused.peak_gib and refused.reason.startswith("too large") for refused in others)


@pytest.mark.parametrize("text", ["64", "0xH100", "8xV99", "xH100"])
def test_gpus_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        parse_gpus(text)
    assert parse_gpus("64 x h100") == (64, H100)


def test_the_time_of_attention_follows_the_windows_of_the_layers() -> None:
    """Of sequences of T tokens, a query sees T / 2 keys on average, with a window W below T W - W^2 / 2T."""

    def attention_s(*overrides: str) -> float:
        keys = ["--training.seq_len=2048", "--model.name=qwen3", "--model.overrides.n_layers=4", *overrides]
        cluster = Cluster(H100, 1)
        run = planned_run(load_job("train_configs/llama3_8b.toml", keys, None), cluster)
        time = assess(run, cluster).time
        assert time is not None
        return time.parts["attention"]

    window = ["--model.overrides.sliding_window=512"]
    full, windows = attention_s(), attention_s(*window)
    mixed = attention_s(*window, "--model.overrides.layer_pattern=SSSL")
    assert windows / full == pytest.approx((512 - 512**2 / 4096) / 1024)
    assert mixed == pytest.approx(0.75 * windows + 0.25 * full)


def test_gated_delta_nets_send_no_keys_and_values() -> None:
    def context_s(pattern: str) -> float:
        keys = ["--model.name=qwen3_5", "--model.flavor=debug", f"--model.overrides.layer_pattern={pattern}"]
        run = debug_run(*keys, "--parallelism.context_parallel_degree=2", gpus=2)
        time = assess(run, Cluster(H100, 2)).time
        assert time is not None
        return time.parts["context parallel"]

    assert context_s("DDDL") == pytest.approx(context_s("L") / 4)


def test_attention_of_a_foreign_model_without_q_proj_has_no_gate() -> None:
    how: dict[str, Any] = {"size": 2, "compiled": True, "is_float8": False}
    assert not BlockShape._of_block(nn.Module(), Llama3(flavor="debug").config, how).gates_attention


def test_models_whose_blocks_are_not_estimated_are_refused() -> None:
    job = load_job("debug", ["--model.name=deepseek_v3"], world_size=1)
    with pytest.raises(ConfigError, match="latent attention or multi-token prediction cannot be planned yet"):
        BlockShape.of_blocks(job.build_on_meta(), size=2, compiled=True, is_float8=False)
