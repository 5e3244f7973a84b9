"""Multi-token prediction: loss and gradient are those of a plain computation with transformers' block; the
published files of DeepSeek-V3 are read and written with all their tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.support.jobs import make_job, metrics_of
from tests.support.models import EXPERTS, tensors_in
from titanlite.config.component import ConfigError
from titanlite.config.json_file import as_json
from titanlite.data.batch import IGNORE, Batch
from titanlite.interop.export import write_directory
from titanlite.interop.huggingface import open_hugging_face
from titanlite.interop.weights import ModelAndTokenizer, check, load_weights
from titanlite.losses import ChunkedCrossEntropy, cross_entropy
from titanlite.models.base import Decoder, LossHead, ModelFamily
from titanlite.models.deepseek_v3 import DeepSeekV3, LatentAttention, mlp_of
from titanlite.models.lora import LoRA
from titanlite.models.multi_token import MultiTokenBlock
from titanlite.tokenizers.bytes import Bytes
from titanlite.train import train

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": 24, "rope_head_dim": 8,
    "v_head_dim": 16, "q_lora_rank": 20, "kv_lora_rank": 24, "hidden_dim": 96, "vocab_size": 258,
    "tie_word_embeddings": False, "n_mtp_layers": 1, **EXPERTS,
}  # fmt: skip
FACTOR = 0.3
T = 24


def family_of(**overrides: Any) -> ModelFamily:
    return DeepSeekV3(flavor="debug", overrides=SHAPE | overrides)


def random_net(family: ModelFamily) -> Decoder:
    net, generator = family.build(), torch.Generator().manual_seed(0)
    net.fill_buffers()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15 + name.endswith("norm.weight"))
    return net


def batch() -> Batch:
    """Two sequences. In the second, a document ends at token 9, and tokens 15 to 17 are a prompt."""
    tokens = torch.randint(0, SHAPE["vocab_size"], (2, T + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[1, [9, 14, 15, 16]] = IGNORE
    return Batch(tokens[:, :-1], targets, int((targets != IGNORE).sum()), 0)


def head_of(batch: Batch, loss: Any = cross_entropy) -> LossHead:
    """The head_fn that a training step makes."""

    def ahead(distance: int) -> tuple[torch.Tensor, Any]:
        tokens, targets = batch.ahead(distance)
        return tokens, lambda hidden, weight: loss(hidden, weight, targets)

    return LossHead(lambda hidden, weight: loss(hidden, weight, batch.targets), ahead)


def expected_losses(net: Decoder, batch: Batch, target_shift: int = 0, token_shift: int = 0) -> list[Any]:
    """The main loss and the loss of each module, by transformers' model and blocks with the weights of `net`:
    token by token, as the report states them. The shifts are for controls."""
    family = family_of(**{key: getattr(net.config, key) for key in ("n_mtp_layers", "tie_word_embeddings")})
    config = transformers.AutoConfig.for_model(**family.hf_config())
    config._attn_implementation = "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = dict(net.named_parameters()) | dict(net.named_buffers())

    def run(module: Any, prefix: str, *args: Any, **options: Any) -> Any:
        names = {n for n, _ in [*module.named_parameters(), *module.named_buffers()]}
        own = {name: state[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in state}
        return torch.func.functional_call(module, own, args, options)

    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * state[name]

    tokens, targets = batch.inputs, batch.targets
    h = run(theirs.model, "model.", tokens).last_hidden_state
    embedding = state["model.embed_tokens.weight"]
    head = state.get("lm_head.weight", embedding)
    cos_sin = theirs.model.rotary_emb(h, torch.arange(T)[None])
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    losses = [F.cross_entropy((h @ head.T).flatten(0, 1), targets.flatten(), reduction="sum")]
    for k in range(1, net.config.n_mtp_layers + 1):
        prefix = f"model.layers.{net.config.n_layers + k - 1}."
        ids = torch.tensor([[int(row[min(i + k + token_shift, T - 1)]) for i in range(T)] for row in tokens])
        joined = torch.cat(
            (norm(embedding[ids], f"{prefix}enorm.weight"), norm(h, f"{prefix}hnorm.weight")), -1
        )
        layer = DeepseekV3DecoderLayer(config, net.config.n_layers - 1)
        x = run(layer, prefix, joined @ state[f"{prefix}eh_proj.weight"].T, attention_mask=mask,
                position_embeddings=cos_sin)  # fmt: skip
        h = norm(x, f"{prefix}shared_head.norm.weight")
        total = torch.zeros(())
        for i, row in enumerate((h @ head.T).log_softmax(-1)):
            for t in range(T - k):
                if (targets[i, t : t + k + 1] != IGNORE).all():
                    total = total - row[t, targets[i, t + k - target_shift]]
        losses.append(total)
    return losses


def gradient(net: Decoder, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    net.zero_grad()
    loss.backward(retain_graph=True)
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("modules", "tied"), [(1, False), (2, True)])
def test_loss_and_gradient_are_those_of_a_plain_computation(modules: int, tied: bool) -> None:
    net = random_net(family_of(n_mtp_layers=modules, tie_word_embeddings=tied))
    main, *later = expected_losses(net, batch())
    wanted = FACTOR * sum(later) / modules
    ours = net(batch().inputs, head_fn=head_of(batch(), ChunkedCrossEntropy(chunk_tokens=16).build()))
    actual = net.auxiliary_losses()["mtp_loss"]
    assert ours.item() == pytest.approx(main.item(), rel=1e-5)
    assert actual.item() == pytest.approx(wanted.item(), rel=1e-5)
    of_ours, of_theirs = gradient(net, ours + actual), gradient(net, main + wanted)
    assert of_ours.keys() == of_theirs.keys() == dict(net.named_parameters()).keys()
    for name, value in of_theirs.items():
        assert (of_ours[name] - value).abs().max() < 5e-6 * value.abs().max(), name
    largest = max(value.abs().max() for value in of_theirs.values())
    assert max((of_ours[name] - value).abs().max() for name, value in of_theirs.items()) < 1e-6 * largest
    if modules == 1:
        for shifts in ({"target_shift": 1}, {"token_shift": 1}, {"token_shift": -1}):
            control = FACTOR * expected_losses(net, batch(), **shifts)[1]
            assert abs(control - wanted) > 1e-3 * wanted, shifts


def test_the_gradient_reaches_embedding_head_and_main_blocks() -> None:
    net = random_net(family_of())
    net(batch().inputs, head_fn=head_of(batch()))
    reached = {
        name for name, value in gradient(net, net.auxiliary_losses()["mtp_loss"]).items() if value.any()
    }
    assert reached == {name for name, _ in net.named_parameters()}


def test_only_a_training_step_runs_the_modules() -> None:
    net, runs = random_net(family_of()), list[int]()
    net.training_blocks()[0].register_forward_hook(lambda *_: runs.append(1))
    wanted = net(batch().inputs, head_fn=head_of(batch()))
    assert len(runs) == 1
    with torch.no_grad():
        assert torch.equal(net(batch().inputs, head_fn=head_of(batch())), wanted)
    net(batch().inputs)
    assert len(runs) == 1
    assert net.auxiliary_losses() == {}


def test_flops_count_the_block_and_the_head_once_more() -> None:
    net, without = family_of().build_on_meta(), family_of(n_mtp_layers=0).build_on_meta()
    block = sum(p.numel() for p in net.training_blocks()[0].parameters())
    idle = (12 - 3) * 3 * 24 * 64
    assert net.num_matmul_parameters() - without.num_matmul_parameters() == block - idle + 258 * 64
    more = net.flops_per_token(10) - without.flops_per_token(10)
    assert more == 6 * (block - idle + 258 * 64 + 4 * (24 + 16) * 10)


def test_the_published_module_has_the_published_size() -> None:
    """README_WEIGHTS.md of DeepSeek-V3 says 11.5e9, which does not include eh_proj."""
    config = replace(DeepSeekV3(flavor="671B").config, n_mtp_layers=1)
    with torch.device("meta"):
        block = MultiTokenBlock(config, LatentAttention(config), mlp_of(config, 61))
    size = sum(p.numel() for name, p in block.named_parameters() if name != "eh_proj.weight")
    assert size == pytest.approx(11.5e9, rel=1e-3)


def test_a_run_reports_the_loss(tmp_path: Path, corpus: Path) -> None:
    overrides = [f"--model.overrides.{key}={str(value).lower()}" for key, value in SHAPE.items()]
    job = make_job(
        tmp_path, corpus, "--model.name=deepseek_v3", *overrides, "--training.steps=2",
        "--metrics.probe_freq=2", "--metrics.log_freq=1",
    )  # fmt: skip
    train(job)
    first, last = metrics_of(job)
    assert first["train/mtp_loss"] == pytest.approx(FACTOR * first["train/loss"], rel=0.1)
    assert last["probe/attention_logit_max"] > 0
    assert last["probe/residual_rms_last"] > 0, "of the last block that every forward runs"


# ---- files


MODULE = "model.layers.2."
NAMES = {  # tensors of the module in the published files
    "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "shared_head.head.weight",
    "embed_tokens.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
    *(f"self_attn.{name}.weight" for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa",
                                              "kv_a_layernorm", "kv_b_proj", "o_proj")),
    "mlp.gate.weight", "mlp.gate.e_score_correction_bias",
    *(f"mlp.{part}.{name}_proj.weight" for name in ("gate", "up", "down")
      for part in ("shared_experts", *(f"experts.{n}" for n in range(12)))),
}  # fmt: skip


def written(path: Path, tensors: dict[str, torch.Tensor], family: ModelFamily) -> Path:
    """A directory with these tensors and the family's config.json."""
    path.mkdir()
    (path / "config.json").write_bytes(as_json(family.hf_config()))
    save_file(tensors, path / "model.safetensors")
    return path


def published(family: ModelFamily) -> dict[str, torch.Tensor]:
    """Random tensors under the names of the published files."""
    net, tensors = random_net(family), dict[str, torch.Tensor]()
    for name, value in net.state_dict().items():
        for part, index in net.hf_tensors(name, tuple(value.shape)):
            tensors[part] = value[index].clone()
    tensors[f"{MODULE}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return tensors | {f"{MODULE}shared_head.head.weight": head.clone()}


@pytest.mark.parametrize("tied", [False, True])
def test_import_and_export_keep_every_tensor(tied: bool, tmp_path: Path) -> None:
    family = family_of(tie_word_embeddings=tied)
    tensors = published(family)
    assert {name.removeprefix(MODULE) for name in tensors if name.startswith(MODULE)} == NAMES
    path = written(tmp_path / "published", tensors, family)
    weights = open_hugging_face(path, family)
    check(weights, family)
    net = family.build()
    load_weights(weights, net)
    write_directory(weights, tmp_path / "export", ModelAndTokenizer(family, Bytes().build()))
    exported = tensors_in(tmp_path / "export")
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], value) for name, value in tensors.items())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", attn_implementation="eager"
    )
    assert theirs.config.num_nextn_predict_layers == 1
    net.fill_buffers()
    with torch.no_grad():
        assert (net(batch().inputs) - theirs(batch().inputs).logits).abs().max() < 1e-4


def test_copies_may_be_missing_and_must_be_equal(tmp_path: Path) -> None:
    family, tensors = family_of(), published(family_of())
    copy = f"{MODULE}embed_tokens.weight"
    without = {name: value for name, value in tensors.items() if name != copy}
    other_factor = family_of(mtp_loss_factor=0.1)
    check(open_hugging_face(written(tmp_path / "without", without, family), other_factor), other_factor)
    changed = written(tmp_path / "changed", tensors | {copy: tensors[copy] + 1}, family)
    with pytest.raises(ConfigError, match=r"layers.2.embed_tokens.weight in .* differs from model.embed_tok"):
        check(open_hugging_face(changed, family), family)


def test_files_without_the_module_are_refused(tmp_path: Path) -> None:
    tensors = {name: value for name, value in published(family_of()).items() if not name.startswith(MODULE)}
    path = written(tmp_path / "without", tensors, family_of())
    with pytest.raises(ConfigError, match=r"no weights of model.layers.2, .* num_nextn_predict_layers"):
        check(open_hugging_face(path, family_of()), family_of())
    without = family_of(n_mtp_layers=0)
    (path / "config.json").write_bytes(as_json(without.hf_config()))
    check(open_hugging_face(path, without), without)
    with pytest.raises(ConfigError, match="its n_mtp_layers is 0, the job's 1"):
        check(open_hugging_face(path, family_of()), family_of())


# ---- refusals


def test_features_that_do_not_work_with_it_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not support multi-token prediction") as e:
        family_of().check_pipeline_parallel(2)
    assert e.value.key == "parallelism.pipeline_parallel_degree"
    family_of(n_mtp_layers=0).check_pipeline_parallel(2)
    with pytest.raises(ConfigError, match="adapters do not work with multi-token prediction") as e:
        LoRA(enable=True).apply(family_of().build_on_meta())
    assert e.value.key == "lora.enable"
    with pytest.raises(ConfigError, match="does not work with a sliding_window"):
        family_of(sliding_window=8)
    with pytest.raises(ConfigError, match=r"mtp_loss_factor = -1\.0 is not above 0"):
        family_of(mtp_loss_factor=-1.0)
