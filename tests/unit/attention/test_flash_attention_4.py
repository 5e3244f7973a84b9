"""FlashAttention 4 on a machine without a GPU: when it is refused. The kernels run
in tests/gpu/test_flash_attention_4.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from titanlite.attention import flash_attention_4
from titanlite.attention.auto import Auto
from titanlite.attention.base import AttentionBackend, AttentionKind, AttentionNeeds
from titanlite.attention.flash_attention_4 import FlashAttention4
from titanlite.attention.head_tail import HeadTail
from titanlite.attention.sdpa import SDPA
from titanlite.config.component import ConfigError


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a Hopper GPU with the package, whose kernels run."""
    monkeypatch.setattr(flash_attention_4, "_capability", lambda device: 9)
    monkeypatch.setattr(flash_attention_4, "is_installed", lambda: True)
    monkeypatch.setattr(flash_attention_4, "use_flash_attention_4", lambda on: None)
    monkeypatch.setattr(flash_attention_4, "_try", lambda needs: None)
    monkeypatch.setattr(HeadTail, "works_on", classmethod(lambda cls, needs: needs.context_parallel))
    yield
    for enable in ("flash", "cudnn", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{enable}_sdp")(True)


def needs(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **fields: Any) -> AttentionNeeds:
    shape = {"seq_len": 16384, "n_heads": 8, "n_kv_heads": 2, "head_dim": 128} | fields
    return AttentionNeeds(device=torch.device(device), dtype=dtype, **shape)


def refused(**fields: Any) -> str:
    with pytest.raises(ConfigError) as e:
        FlashAttention4().build(needs(**fields))
    assert e.value.key == "attention.backend"
    return str(e.value)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device": "cpu"}, "needs a GPU, not cpu"),
        ({"dtype": torch.float32}, "needs bf16 or fp16, not float32"),
        (
            {"context_parallel": True, "masks_documents": True},
            "does not support document masks and sliding windows under context parallel",
        ),
        (
            {"context_parallel": True, "kinds": (AttentionKind(), AttentionKind(50))},
            "does not support document masks and sliding windows under context parallel",
        ),
    ],
    ids=str,
)
def test_what_it_lacks_is_refused(fields: dict[str, Any], message: str) -> None:
    assert refused(**fields) == f"'flash_attention_4' {message}"


@pytest.mark.usefixtures("hopper")
def test_what_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(flash_attention_4, "is_installed", lambda: False)
        assert refused().endswith("needs the package flash-attn-4: pip install 'titanlite[flash4]'")
    with monkeypatch.context() as patch:
        patch.setattr(flash_attention_4, "_capability", lambda device: 8)
        assert refused().endswith("needs a GPU of compute capability 9 or 10, such as H100 and B200")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        FlashAttention4().build(needs())
        patch.setattr(flash_attention_4, "flash_attention_4_can_be_deterministic", lambda: False)
        assert refused().endswith("unset training.deterministic")


@pytest.mark.usefixtures("hopper")
def test_kernels_that_fail_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(needs: AttentionNeeds) -> None:
        raise RuntimeError("no such tile\nstack trace")

    used = list[bool]()
    monkeypatch.setattr(flash_attention_4, "use_flash_attention_4", used.append)
    monkeypatch.setattr(flash_attention_4, "_try", fails)
    assert refused().endswith("does not run with these packages, model and masks: no such tile")
    assert used == [True, False]


def test_it_is_itself_the_kernel() -> None:
    with pytest.raises(ConfigError, match="ignores it; remove the key or set it to 'auto'") as e:
        FlashAttention4(sdpa_kernel="cudnn")
    assert e.value.key == "sdpa_kernel"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fields", [{}, {"context_parallel": True}, {"masks_documents": True}], ids=str)
def test_auto_does_not_take_it(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    monkeypatch.setattr("titanlite.attention.sdpa.SDPA.kernel", lambda self, needs: "cudnn")
    assert FlashAttention4().build(needs(**fields)).kernel(needs(**fields)) == "flash_attention_4"
    assert Auto().build(needs(**fields)).name != "flash_attention_4"


def test_every_backend_but_the_dense_one_is_planned_as_linear() -> None:
    choices = AttentionBackend.choices.values()
    own = [c for c in choices if issubclass(c, SDPA) and c.__module__.startswith("titanlite.")]
    assert [c.name for c in own if not c.linear_memory] == ["sdpa"]
