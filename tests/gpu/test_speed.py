"""What is fast only on a GPU: float8, the chunked loss, attention's kernels, profiling, and running out of
memory."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support.gpu import LAUNCHER, column, reference, run, trained
from titanlite.attention.auto import Auto
from titanlite.attention.base import AttentionNeeds
from titanlite.attention.sdpa import SDPA
from titanlite.config.component import ConfigError
from titanlite.losses import ChunkedCrossEntropy, CrossEntropy

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
WIDE = ["--model.overrides.dim=128", "--model.overrides.hidden_dim=256", "--model.overrides.head_dim=32"]
FLOAT8 = [*WIDE, "--compile.enable", "--float8.enable"]


@pytest.mark.parametrize("backend", [None, "inductor"], ids=["eager", "compiled"])
def test_chunked_gradients_in_bf16_are_as_good_as_whole(backend: str | None) -> None:
    """The weight's gradient over 16 chunks is accumulated in fp32."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 512, 256, generator=generator)
    weight = torch.randn(4099, 256, generator=generator) * 0.1
    targets = torch.randint(0, 4099, (4, 512), generator=generator)
    targets[1, :100] = -100
    exact = [x.bfloat16().double().cuda().requires_grad_() for x in (hidden, weight)]
    wanted = F.cross_entropy(F.linear(*exact).flatten(0, 1), targets.cuda().flatten(), reduction="sum")
    wanted.backward()
    errors = []
    for loss in (CrossEntropy(), ChunkedCrossEntropy(chunk_tokens=128)):
        actual = [x.bfloat16().cuda().requires_grad_() for x in (hidden, weight)]
        value = loss.build(backend)(actual[0], actual[1], targets.cuda())
        assert value.item() == pytest.approx(wanted.item(), rel=1e-3)
        value.backward()
        errors.append([((a.grad - b.grad).norm() / b.grad.norm()).item() for a, b in zip(actual, exact)])
    whole, chunked = errors
    assert all(c < 1.1 * w for c, w in zip(chunked, whole)), errors


def test_the_logits_take_no_memory_of_their_own() -> None:
    def peak(loss: CrossEntropy | ChunkedCrossEntropy) -> int:
        hidden = torch.randn(8, 2048, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(65536, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, 65536, (8, 2048), device=CUDA)
        torch._dynamo.reset()  # or shapes of other tests would make these dynamic ones
        function = loss.build("inductor")
        function(hidden, weight, targets).backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(hidden, weight, targets).backward()
        return torch.cuda.max_memory_allocated() - before

    logits = 8 * 2048 * 65536 * 2
    assert peak(CrossEntropy()) > logits
    assert peak(ChunkedCrossEntropy(chunk_tokens=2048)) < logits / 5


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_trains_like_bf16_and_resumes_to_the_bit(tmp_path: Path, corpus: Path, recipe: str) -> None:
    overrides = [*FLOAT8, f"--float8.recipe={recipe}"]
    plain = reference(corpus, *WIDE, "--compile.enable")
    whole = run(tmp_path, corpus, *overrides, name="whole")
    assert column(whole, "train/loss") != column(plain, "train/loss")
    assert column(whole, "train/loss") == pytest.approx(column(plain, "train/loss"), rel=2e-2)
    run(tmp_path, corpus, *overrides, "--training.steps=3", name="parts")
    parts = run(tmp_path, corpus, *overrides, name="parts")
    for key in ("train/loss", "train/grad_norm"):
        assert column(parts, key) == column(whole, key)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_float8_gathered_in_8_bits_changes_no_number(tmp_path: Path, corpus: Path) -> None:
    off = "--float8.enable_fsdp_float8_all_gather=false"
    freed = "--parallelism.fsdp_reshard_after_forward=always"
    gathered = run(tmp_path, corpus, *FLOAT8, freed, ngpu=2, name="gathered")
    plain = run(tmp_path, corpus, *FLOAT8, freed, off, ngpu=2, name="plain")
    assert column(gathered, "train/loss") == pytest.approx(column(plain, "train/loss"), rel=1e-3)


def kernel(backend: SDPA, dtype: torch.dtype, shape: tuple[int, int, int, int], masked: bool = False) -> str:
    """What a run takes for sequences of `shape`: tokens, heads, key heads, head dim."""
    T, H, K, E = shape
    needs = AttentionNeeds(
        device=CUDA, dtype=dtype, seq_len=T, n_heads=H, n_kv_heads=K, head_dim=E, masks_documents=masked
    )
    return backend.build(needs).kernel(needs)


def test_the_math_kernel_is_only_taken_where_no_other_is() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    grouped, plain = (64, 8, 2, 64), (64, 8, 8, 64)
    try:
        assert kernel(Auto(), bf16, grouped) in ("flash", "cudnn")
        for name in ("flash", "cudnn", "math"):
            assert kernel(Auto(sdpa_kernel=name), bf16, grouped) == name
        assert kernel(Auto(), fp32, plain) == "efficient"
        q, k = (torch.randn(1, n, 64, 64, device=CUDA) for n in (8, 2))
        with pytest.raises(RuntimeError, match=r"No available kernel|Invalid backend"):
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        assert kernel(Auto(), fp32, grouped) == "math"
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        for named, masked, shape in (("cudnn", False, grouped), ("flash", True, plain)):
            with pytest.raises(ConfigError, match=f"'{named}': no kernel on this device for") as e:
                kernel(SDPA(sdpa_kernel=named), fp32, shape, masked)
            assert e.value.key == "attention.sdpa_kernel"
        assert kernel(Auto(), bf16, grouped, masked=True) == "varlen"
    finally:
        for enable in ("flash", "cudnn", "mem_efficient", "math"):
            getattr(torch.backends.cuda, f"enable_{enable}_sdp")(True)


@pytest.mark.parametrize("mode", ["op", "2", "mlp", "attention", "norms"])
def test_selective_recompute_gives_the_same_loss(tmp_path: Path, corpus: Path, mode: str) -> None:
    plain = reference(corpus, "--compile.enable")
    selective = [
        "--activation_checkpoint.mode=selective",
        f"--activation_checkpoint.selective_ac_option={mode}",
    ]
    again = run(tmp_path, corpus, "--compile.enable", *selective, name="again")
    assert column(again, "train/loss") == pytest.approx(column(plain, "train/loss"), rel=5e-3)


def test_profiles(tmp_path: Path, corpus: Path) -> None:
    """The table is of kernels, not of operators; the allocations are there."""
    profile = [
        "--profiling.enable_profiling",
        "--profiling.enable_memory_snapshot",
        "--profiling.profile_freq=6",
    ]
    folder = tmp_path / "run"
    log = trained(tmp_path, corpus, *profile)
    table = log.split("time per step up to step 6")[1]
    assert "aten::" not in table
    assert "ProfilerStep" not in table
    assert "gemm" in table or "nvjet" in table or "cutlass" in table
    assert (folder / "profile/trace-step-6-rank-0.json.gz").exists()
    snapshot = pickle.loads((folder / "profile/memory-step-6-rank-0.pickle").read_bytes())
    assert snapshot["segments"]
    assert any(trace for trace in snapshot["device_traces"])


def test_segments_are_expandable(tmp_path: Path, corpus: Path) -> None:
    """Also without the launcher, which sets it for its ranks."""
    profile = ["--profiling.enable_memory_snapshot", "--profiling.profile_freq=3", "--training.steps=3"]
    alone, launched = [sys.executable, "-m", "titanlite.cli", "train"], LAUNCHER
    for name, program in (("alone", alone), ("launched", launched)):
        trained(tmp_path, corpus, *profile, name=name, program=program)
        snapshot = pickle.loads((tmp_path / name / "profile/memory-step-3-rank-0.pickle").read_bytes())
        assert all(segment["is_expandable"] for segment in snapshot["segments"]), name


OUTLIERS = ["--guard.skip_sigma=6", "--guard.window=2"]


WATCH = """
import warnings
import torch
from titanlite.parallel import clip
torch.cuda.set_sync_debug_mode("warn")
warnings.simplefilter("always")
clip.GLOBAL_STEPS = 2
"""


@pytest.mark.parametrize(
    "keys",
    [[], OUTLIERS, ["--training.clip=tensor"], [*WIDE, "--optimizer.state_dtype=int8"]],
    ids=["default", "outliers", "clipped by tensor", "8-bit state"],
)
def test_a_step_never_waits_for_the_device(tmp_path: Path, corpus: Path, keys: list[str]) -> None:
    """Four more steps bring no synchronising call, unless they are logged."""
    (tmp_path / "watch.py").write_text(WATCH)
    watched = ['--job.imports=["watch"]', "--compile.enable", "--checkpoint.enable=false", *keys]

    def waits(steps: int, log_freq: int) -> int:
        log = trained(
            tmp_path, corpus, *watched, f"--training.steps={steps}", f"--metrics.log_freq={log_freq}",
            name=f"{steps}-{log_freq}",
        )  # fmt: skip
        said = [line for line in log.splitlines() if "called a synchronizing CUDA operation" in line]
        return sum("_inductor" not in line for line in said)  # which compiles in whichever run is first

    assert waits(8, 100) == waits(4, 100)
    assert waits(8, 1) > waits(8, 100) > 0


def test_nsys_ranges_leave_the_run_as_it_is(tmp_path: Path, corpus: Path) -> None:
    plain = run(tmp_path, corpus, name="plain")
    profile = ["--profiling.enable_profiling", "--profiling.profiler=nsys", "--profiling.profile_freq=4"]
    assert column(run(tmp_path, corpus, *profile, name="nsys"), "train/loss") == column(plain, "train/loss")


def test_out_of_memory_is_explained(tmp_path: Path, corpus: Path) -> None:
    limit = tmp_path / "limit.py"
    limit.write_text("import torch\ntorch.cuda.set_per_process_memory_fraction(0.01)\n")
    large = [
        '--job.imports=["limit"]', "--training.seq_len=256", "--training.local_batch_size=512",
        "--training.global_batch_size=512", "--model.overrides.dim=512", "--model.overrides.hidden_dim=4096",
        "--data.holdout_sequences=0",
    ]  # fmt: skip
    last = trained(tmp_path, corpus, *large, code=5).split("titanlite: out of memory")[-1]
    assert last.startswith(" in step 1, forward (peak memory ")
    assert "activation_checkpoint.mode = " in last
    assert "Tried to allocate" in last
