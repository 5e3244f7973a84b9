"""Pins the arithmetic of cost: FLOPs per token against torch's own counter on a real forward and backward,
and the table of peak rates -- the devices it knows, and above all the ones it must not claim to know.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.jobs import make_job, metrics_of
from titanlite.flops import peak_bf16_flops
from titanlite.losses import cross_entropy
from titanlite.models.decoder import RotaryDecoder
from titanlite.models.llama3 import Llama3Config
from titanlite.train import train


def small_llama(**changes: object) -> RotaryDecoder:
    """A Llama whose attention is a good part of its arithmetic, and whose heads do not add up to its dim."""
    fields = {
        "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 24, "hidden_dim": 160,
        "vocab_size": 320,
    }  # fmt: skip
    torch.manual_seed(0)
    net = RotaryDecoder(Llama3Config(**(fields | changes)))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return net


def counted(net: RotaryDecoder, seq_len: int, rows: int = 2) -> float:
    """FLOPs a token of a forward and backward, counted by torch; the math backend shows its matmuls."""
    tokens = torch.randint(net.vocab_size, (rows, seq_len))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        net(tokens, head_fn=partial(cross_entropy, targets_BT=tokens)).backward()
    return counter.get_total_flops() / (rows * seq_len)


@pytest.mark.parametrize("seq_len", [16, 256], ids=["weights", "attention"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_flops_per_token_are_what_torch_counts(tied, seq_len):
    net = small_llama(tie_word_embeddings=tied)
    assert net.flops_per_token(seq_len) == pytest.approx(counted(net, seq_len), rel=0.03)


def test_flops_without_grouped_queries():
    net = small_llama(n_kv_heads=4)
    assert net.flops_per_token(128) == pytest.approx(counted(net, 128), rel=0.03)


def test_attention_is_a_share_that_the_counter_would_miss():
    # The negative control: at 256 tokens neither term alone is within the tolerance above.
    net = small_llama(tie_word_embeddings=True)
    weights, total = 6 * net.num_matmul_parameters(), counted(net, 256)
    assert weights < 0.8 * total
    assert net.flops_per_token(256) - weights < 0.8 * total


def test_a_looked_up_embedding_costs_nothing_and_a_tied_one_is_the_head():
    tied, untied = small_llama(tie_word_embeddings=True), small_llama(tie_word_embeddings=False)
    assert tied.num_matmul_parameters() == untied.num_matmul_parameters()
    assert counted(tied, 16) == counted(untied, 16)


def test_the_formula():
    net = small_llama()
    assert net.flops_per_token(7) == 6 * net.num_matmul_parameters() + 12 * 3 * 4 * 24 * 7


def test_a_window_limits_the_keys_that_count():
    net, windowed = small_llama(), small_llama(sliding_window=5)
    assert windowed.flops_per_token(7) == net.flops_per_token(5) < net.flops_per_token(7)
    assert windowed.flops_per_token(3) == net.flops_per_token(3)


def test_the_flops_of_a_run_are_those_that_its_model_gives(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(RotaryDecoder, "flops_per_token", lambda net, seq_len: 10**6 * seq_len)
    job = make_job(tmp_path, corpus, "--training.steps=1")
    assert train(job) == 0
    metrics = metrics_of(job)[-1]
    per_s = metrics["throughput/tokens_per_second_per_device"]
    assert metrics["throughput/tflops"] == pytest.approx(per_s * 10**6 * job.training.seq_len / 1e12)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H800", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("AMD Instinct MI300X", 1307),
        ("AMD Instinct MI325X", 1307),
        ("AMD Instinct MI355X", 2500),
        ("AMD Instinct MI250X", 191.5),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
    ],
)
def test_peaks_that_are_known(name, tera):
    assert peak_bf16_flops(name) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 3080",
        "NVIDIA RTX A1000",
        "NVIDIA A10G",
        "NVIDIA A16",
        "NVIDIA L40",
        "NVIDIA H20",
        "NVIDIA GB300",
        "NVIDIA B300",
        "Tesla T4",
        "Tesla V100-SXM2-16GB",
        "AMD Instinct MI300A",
        "Apple M3 Max",
        "x86_64",
        "",
    ],
)
def test_unknown_devices_have_no_peak(name):
    assert peak_bf16_flops(name) is None


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"])
def test_a_slice_of_a_device_does_not_have_the_peak_of_the_whole(name):
    assert peak_bf16_flops(name) is None


def test_the_pcie_card_does_not_have_the_peak_of_the_module():
    assert peak_bf16_flops("NVIDIA H800 PCIe") != peak_bf16_flops("NVIDIA H800")
