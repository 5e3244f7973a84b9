"""Pins AdamW with 8-bit and bfloat16 state: near to AdamW with fp32 state, equal bits however a parameter is
cut into shards, bit-identical when a step is skipped, and what its keys refuse. Controls: torchao's rule for
blocks, a linear second moment. tests/distributed/test_low_bit.py has the layouts, tests/gpu/test_low_bit.py
CUDA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.checkpoints import state_of
from tests.support.jobs import make_job, metrics_of
from tests.support.low_bit import Cut, gradient, grid, joined, rows, trained_shards, whole
from tests.support.models import Parameters, family
from tests.support.runs import assert_same, run_in_hops
from tests.support.tiers import full
from titanlite.checkpoint.state import non_finite
from titanlite.config.component import ConfigError
from titanlite.mesh import ALONE
from titanlite.models.llama3 import Llama3
from titanlite.optim import low_bit
from titanlite.optim.adamw import AdamW, StateDtype
from titanlite.optim.base import ParamGroup, guarded_step, set_lr
from titanlite.optim.low_bit import BLOCK, DTYPES, CompiledAdamW, _decode, _encode
from titanlite.train import train

INT8, BFLOAT16 = "--optimizer.state_dtype=int8", "--optimizer.state_dtype=bfloat16"
SHAPES = {"weight": (48, 512), "experts": (2, 5, 64), "narrow": (6, 40), "norm": (64,), "scale": ()}


def stored_in_8_bits(m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The moments as 8-bit state stores them, decoded again: fp32 [number of blocks, 64]."""
    return _decode(*(t.to(dtype) for t, dtype in zip(_encode(m, v), DTYPES)))


def parameters(seed: int = 0) -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=g)) for name, shape in SHAPES.items()}


def steps(
    config: AdamW, params: dict[str, nn.Parameter], num_steps: int = 5, apply: Any = None
) -> torch.optim.Optimizer:
    """Take steps with equal gradients. `apply`: the steps that are applied; default: all."""
    optimizer = config.build(Parameters(params), ALONE)
    for step in range(1, num_steps + 1):
        set_lr(optimizer, step / num_steps)
        for p in params.values():
            p.grad = gradient(p.shape, step)
        applied = torch.tensor(apply is None or step in apply)
        guarded_step(optimizer, applied, torch.tensor(2.0))
    return optimizer


def values(params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {f"{name}.{key}": t for name, p in params.items() for key, t in optimizer.state[p].items()}
    return {name: t.detach().clone() for name, t in {**params, **tensors}.items()}


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_five_steps_are_near_those_of_fp32_state(state_dtype: StateDtype) -> None:
    start, ours, theirs = parameters(), parameters(), parameters()
    steps(AdamW(lr=1e-2, weight_decay=0.3), theirs)
    steps(AdamW(lr=1e-2, weight_decay=0.3, state_dtype=state_dtype), ours)
    for name, p in theirs.items():
        error = ((ours[name] - p).norm() / (start[name] - p).norm()).item()
        if state_dtype == "int8" and name in ("narrow", "norm", "scale"):  # which have fp32 state
            assert error < 1e-4, name
        else:
            assert 1e-4 < error < 2e-2, name


def test_fp32_state_is_that_of_torchs_fused_adamw() -> None:
    """On CUDA, CompiledAdamW also has fp32 state: with a kernel of its own for each large parameter. Here its
    CPU code. The third step is skipped."""

    def trained(make: Callable[..., torch.optim.Optimizer], divisor: float) -> dict[str, torch.Tensor]:
        params = parameters()
        keys = {"lr": 1e-2, "weight_decay": 0.3, "betas": (0.9, 0.95)}
        optimizer = make([{"params": list(params.values()), **keys}])
        for step in range(1, 6):
            for p in params.values():
                p.grad = torch.full_like(p, torch.nan) if step == 3 else gradient(p.shape, step)
            guarded_step(optimizer, torch.tensor(step != 3), torch.tensor(divisor))
        return values(params, optimizer)

    ours = partial(CompiledAdamW, eps=1e-8, state_dtype="float32", large=1000)  # `weight` is large
    wanted = trained(partial(torch.optim.AdamW, fused=True), 3.0)
    torch.testing.assert_close(trained(ours, 3.0), wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(trained(ours, 1.0), wanted, rtol=1e-5, atol=1e-6)


def test_the_state_takes_its_bytes() -> None:
    params = parameters()
    int8 = steps(AdamW(state_dtype="int8"), params, 0).state
    weight = {key: (t.dtype, tuple(t.shape)) for key, t in int8[params["weight"]].items()}
    assert weight == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.int8, (48, 512)),
        "exp_avg_scale": (torch.float32, (48, 8)),
        "exp_avg_sq": (torch.uint8, (48, 512)),
        "exp_avg_sq_scale": (torch.float32, (48, 8)),
    }
    assert int8[params["experts"]]["exp_avg_scale"].shape == (2, 5, 1)
    for name in ("narrow", "norm", "scale"):
        assert {t.dtype for t in int8[params[name]].values()} == {torch.float32}
        assert "exp_avg_scale" not in int8[params[name]]
    bfloat16 = steps(AdamW(state_dtype="bfloat16"), params, 0).state
    for p in params.values():
        assert {key: t.dtype for key, t in bfloat16[p].items()} == {
            "step": torch.float32, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16,
        }  # fmt: skip


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_a_skipped_step_leaves_every_bit(state_dtype: StateDtype) -> None:
    params = parameters()
    optimizer = steps(AdamW(lr=1e-2, state_dtype=state_dtype), params, 2)
    before = values(params, optimizer)
    for p in params.values():
        p.grad = torch.full_like(p, torch.nan)
    guarded_step(optimizer, torch.tensor(False), torch.tensor(torch.nan))
    after = values(params, optimizer)
    assert all(torch.equal(after[name], t) for name, t in before.items())
    guarded_step(optimizer, torch.tensor(True), None)  # control: the step would have changed them
    assert not torch.equal(values(params, optimizer)["weight"].nan_to_num(), before["weight"])


def test_the_first_step_may_be_skipped() -> None:
    config = AdamW(lr=1e-2, state_dtype="int8")
    once, skipped = parameters(), parameters()
    steps(config, once, num_steps=1)
    optimizer = config.build(Parameters(skipped), ALONE)
    for applied in (False, True):
        for p in skipped.values():
            p.grad = gradient(p.shape, 1)
        guarded_step(optimizer, torch.tensor(applied), torch.tensor(2.0))
    for name, p in once.items():
        assert torch.equal(skipped[name], p)


def test_a_parameter_without_gradient_stays() -> None:
    params = parameters()
    optimizer = AdamW(state_dtype="int8").build(Parameters(params), ALONE)
    before = values(params, optimizer)
    params["weight"].grad = gradient(SHAPES["weight"], 1)
    guarded_step(optimizer, torch.tensor(True), None)
    after = values(params, optimizer)
    changed = {name for name, t in before.items() if not torch.equal(after[name], t)}
    assert {name.partition(".")[0] for name in changed} == {"weight"}
    assert after["weight.step"] == 1
    assert after["norm.step"] == 0


# ---- shards


@pytest.mark.parametrize("cut", [rows, grid])
def test_shards_have_the_bits_of_the_whole(cut: Cut) -> None:
    assert torch.equal(joined(trained_shards(cut)), joined(trained_shards(whole)))


def test_control_blocks_that_depend_on_the_shard_differ() -> None:
    ours = joined(trained_shards(rows, block_of_shard=True))
    assert not torch.equal(ours, joined(trained_shards(whole, block_of_shard=True)))


def test_a_shard_that_cuts_a_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit, "local_shard", lambda t: t[..., :96])
    with pytest.raises(ConfigError, match=r"shape \(8, 128\) is cut into shards of \(8, 96\)") as e:
        CompiledAdamW([{"params": [nn.Parameter(torch.ones(8, 128))], "lr": 1.0}], 1e-8, "int8")
    assert e.value.key == "optimizer.state_dtype"


def test_cpu_chunks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = joined(trained_shards(whole))
    monkeypatch.setattr(low_bit, "CPU_CHUNK", 3 * BLOCK)
    assert torch.equal(joined(trained_shards(whole)), wanted)


# ---- quantisers


def linear(m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit state with linear codes of the second moment."""
    scale = v.amax(-1, keepdim=True)
    return stored_in_8_bits(m, v)[0], (v / scale * 255).round() / 255 * scale


def update_error(store: Callable[..., Any], spread: float) -> float:
    """The relative error of m / sqrt(v), for values of a block that spread log-normally."""
    g = torch.Generator().manual_seed(0)
    size = torch.exp(spread * torch.randn(64, BLOCK, generator=g))
    m, v = size * torch.randn(64, BLOCK, generator=g), size.square()
    m2, v2 = store(m, v)
    exact = m / (v.sqrt() + 1e-8)
    return ((m2 / (v2.sqrt() + 1e-8) - exact).norm() / exact.norm()).item()


def test_small_moments_keep_their_digits_and_linear_codes_lose_them() -> None:
    assert update_error(stored_in_8_bits, 0.5) < 0.02
    assert update_error(stored_in_8_bits, 1.0) < 0.1
    assert update_error(linear, 1.0) > 1e3


def test_what_is_above_zero_stays_above_zero() -> None:
    v = torch.logspace(-20, 0, BLOCK)
    v[0] = 0
    codes = low_bit._encode(v[None], v[None])[2][0]
    assert codes[0] == 0
    assert (codes[1:] >= 1).all()
    assert codes[-1] == 255


def test_blocks_of_zeros_and_of_extremes_are_finite() -> None:
    for value in (0.0, 1e-45, 1e-30, 3e38):
        m, v = torch.full((2, BLOCK), value), torch.full((2, BLOCK), value)
        m[0, 1] = -value
        for x, y in zip((m, v), stored_in_8_bits(m, v)):
            assert torch.allclose(x, y, rtol=1e-5, atol=1e-37)


def ratio_of_running_means(beta2: float, num_steps: int, kind: str) -> float:
    """The mean of sqrt(v) with stored moments to sqrt(v) in fp32, under gradients that shrink tenfold."""
    g = torch.Generator().manual_seed(0)
    size = torch.exp(0.5 * torch.randn(16, BLOCK, generator=g))
    exact = ours = torch.zeros_like(size)
    for step in range(num_steps):
        square = (size * 10 ** (-step / num_steps) * torch.randn(size.shape, generator=g)).square()
        exact = exact + (1 - beta2) * (square - exact)
        ours = ours + (1 - beta2) * (square - ours)
        ours = ours.bfloat16().float() if kind == "bfloat16" else stored_in_8_bits(ours, ours)[1]
    return (ours / exact).sqrt().mean().item()


@pytest.mark.full
def test_why_bfloat16_needs_a_beta2_of_at_most_0_99() -> None:
    assert ratio_of_running_means(0.99, 1000, "bfloat16") == pytest.approx(1, abs=0.03)
    assert ratio_of_running_means(0.999, 3000, "bfloat16") > 1.5
    assert ratio_of_running_means(0.999, 3000, "int8") == pytest.approx(1, abs=0.03)
    net = Llama3(flavor="debug").build_on_meta()
    AdamW(state_dtype="bfloat16", beta2=0.99).check(net)
    with pytest.raises(ConfigError, match=r"bfloat16.* needs beta2 of at most 0.99, not 0.999") as e:
        AdamW(state_dtype="bfloat16", beta2=0.999).check(net)
    assert e.value.key == "optimizer.beta2"
    AdamW(state_dtype="int8", beta2=0.999).check(net)


# ---- what reads the state


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_the_newest_update_follows_from_the_state(state_dtype: StateDtype) -> None:
    own = ParamGroup(pattern="weight", beta1=0.5, beta2=0.8)
    params, config = parameters(), AdamW(lr=1e-2, state_dtype=state_dtype, param_groups=[own])
    optimizer = steps(config, params, 4)
    before = params["weight"].detach().clone()
    for p in params.values():
        p.grad = gradient(p.shape, 9)
    optimizer.step()
    state = optimizer.state[params["weight"]] | {"step": 5}
    (group,) = (group for group in optimizer.param_groups if group["betas"] == (0.5, 0.8))
    update = config.update_of(params["weight"].detach(), state, group)
    expected = before - params["weight"].detach()
    assert ((update - expected).norm() / expected.norm()).item() < 0.03


def test_the_noise_scale_follows_from_the_state() -> None:
    ours, theirs = (
        torch.stack(
            config.signal_and_noise(
                {**steps(config, params).state[params["weight"]], "step": 5}, {"betas": (0.9, 0.95)}
            )
        )
        for config in (AdamW(state_dtype="int8"), AdamW())
        if (params := parameters())
    )
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.abs().max()))


class LargestTensors(TorchDispatchMode):
    """Counts the results with storage of their own that are as large as a whole parameter."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.num = size, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == self.size:
            known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            self.num += result.untyped_storage().data_ptr() not in known
        return result


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_a_report_copies_large_parameters_by_rows(
    state_dtype: StateDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, config = parameters(), AdamW(state_dtype=state_dtype)
    optimizer = steps(config, params, 4)
    weight, group = params["weight"].detach(), optimizer.param_groups[0]
    state = optimizer.state[params["weight"]] | {"step": 4}

    def read() -> tuple[int, int, torch.Tensor, torch.Tensor]:
        with LargestTensors(weight.numel()) as of_update:
            update = config.update_of(weight, state, group)
        with LargestTensors(weight.numel()) as of_noise:
            estimates = config.signal_and_noise(state, group)
        assert update is not None
        assert estimates is not None
        return of_update.num, of_noise.num, update, torch.stack(estimates)

    num, num_for_noise, update, estimates = read()
    assert num > 1  # a small parameter is read at once
    assert num_for_noise > 0
    monkeypatch.setattr(low_bit, "ROWS_ELEMENTS", 5 * weight.shape[1])
    num, num_for_noise, by_rows, estimates_by_rows = read()
    assert (num, num_for_noise) == (1, 0)  # only the update itself
    assert torch.equal(by_rows, update)
    torch.testing.assert_close(estimates_by_rows, estimates, rtol=1e-3, atol=0)


def test_scales_that_are_not_finite_are_found() -> None:
    params = parameters()
    net = Parameters(params)
    optimizer = steps(AdamW(state_dtype="int8"), params)
    optimizer.state[params["weight"]]["clip_norm"] = torch.tensor(torch.inf)
    assert non_finite(state_of(net, optimizer).tensors()) == []
    optimizer.state[params["weight"]]["exp_avg_sq_scale"][3, 2] = torch.inf
    assert non_finite(state_of(net, optimizer).tensors()) == ["optimizer.weight.exp_avg_sq_scale"]


def test_tensor_parallel_may_not_cut_a_block() -> None:
    net = family(dim=64, hidden_dim=192, n_heads=4, head_dim=32).build_on_meta()
    AdamW(state_dtype="int8").check(net, 1)
    for state_dtype in ("float32", "bfloat16"):
        AdamW(state_dtype=state_dtype).check(net, 2)
    with pytest.raises(ConfigError, match=r"mlp.down_proj.weight has rows of 192 values.* divides 3,") as e:
        AdamW(state_dtype="int8").check(net, 2)
    assert e.value.key == "optimizer.state_dtype"
    AdamW(state_dtype="int8").check(family(dim=64, hidden_dim=256, head_dim=32).build(), 2)
    # A dim that no block fits keeps fp32 state on every layout.
    AdamW(state_dtype="int8").check(family(dim=64, hidden_dim=96, head_dim=8).build(), 2)


# ---- runs

WIDE = ["--model.overrides.dim=64", "--model.overrides.hidden_dim=128", "--model.overrides.head_dim=16"]


@pytest.mark.full
@pytest.mark.parametrize("key", [INT8, full(BFLOAT16)])
def test_a_run_resumes_to_the_bit(tmp_path: Path, corpus: Path, key: str) -> None:
    keys = (*WIDE, key, "--metrics.detail_freq=2", "--training.clip=tensor")
    whole_run = run_in_hops(tmp_path, corpus, [6], *keys, name="whole")
    hops = run_in_hops(tmp_path, corpus, [3, 6], *keys)
    assert_same(hops, whole_run)
    last = metrics_of(hops)[-1]
    assert 0 < last["norms/update_ratio_median"] < 1
    assert "train/noise_scale_noise" in last


def test_another_state_dtype_is_refused_on_resume(tmp_path: Path, corpus: Path) -> None:
    train(make_job(tmp_path, corpus, *WIDE, INT8, "--training.steps=1"))
    for other in ("float32", "bfloat16"):
        job = make_job(tmp_path, corpus, *WIDE, f"--optimizer.state_dtype={other}", "--training.steps=2")
        with pytest.raises(ConfigError, match=f'state_dtype was "int8", is "{other}". Undo the change') as e:
            train(job)
        assert e.value.key == "optimizer.state_dtype"
    allowed = '--checkpoint.allow_changed=["optimizer"]'  # the new state starts at zero
    train(make_job(tmp_path, corpus, *WIDE, BFLOAT16, "--training.steps=2", allowed))


# ---- training for longer


class Uneven(nn.Module):
    """Features of sizes from 1 to 1/30, which make the gradients before and after as uneven."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.logspace(-1.5, 0, x.shape[-1])


def final_loss(state_dtype: str, seed: int, num_steps: int) -> torch.Tensor:
    """The mean loss of the last tenth of the steps of a small model of tokens, some of which are rare. The
    learning rate decays to zero."""
    torch.manual_seed(seed)
    mlp = [nn.Linear(256, 128), nn.SiLU(), nn.Linear(128, 256)]
    net = nn.Sequential(nn.Embedding(256, 64), Uneven(), nn.Flatten(), *mlp)
    config = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    optimizer = CompiledAdamW([{"params": list(net.parameters()), **config}], 1e-8, state_dtype)
    table = torch.randint(0, 256, (256,), generator=torch.Generator().manual_seed(7))
    data = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(num_steps):
        set_lr(optimizer, 1 - step / num_steps)
        tokens = (256 * torch.rand(64, 4, generator=data) ** 3).long()
        targets = table[(tokens[:, 0] + 3 * tokens[:, 3]) % 256]
        loss = nn.functional.cross_entropy(net(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses[-num_steps // 10 :]).mean()


@pytest.mark.full
def test_2000_steps_end_as_with_fp32_state() -> None:
    exact = [final_loss("float32", seed, 2000) for seed in (0, 1, 2)]
    spread = max(exact) - min(exact)
    for state_dtype in ("int8", "bfloat16"):
        ours = final_loss(state_dtype, 0, 2000)
        assert abs(ours - exact[0]) < max(spread, torch.tensor(0.01)), (state_dtype, ours, exact)


@pytest.mark.full
def test_control_linear_codes_do_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    encode, decode = low_bit._encode, low_bit._decode

    def encode_linearly(m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes1, scale1, _, scale2 = encode(m, v)
        return codes1, scale1, (v / scale2 * 255).round(), scale2

    def decode_linearly(*state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return decode(*state)[0], state[2].float() / 255 * state[3]

    exact = final_loss("int8", 0, 400)
    monkeypatch.setattr(low_bit, "_encode", encode_linearly)
    monkeypatch.setattr(low_bit, "_decode", decode_linearly)
    assert not final_loss("int8", 0, 400) < exact + 0.5
