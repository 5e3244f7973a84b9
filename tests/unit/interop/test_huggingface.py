"""What comes from Hugging Face and goes there is the same model: bits of the weights, logits, ids; and what
does not fit is refused by name, with nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.jobs import make_job, metrics_of
from tests.support.models import VARIANTS, family, hugging_face, keys_of, random_net, row, tensors_in
from tests.support.tiers import full, sampled
from titanlite import cli
from titanlite.checkpoint.commit import CheckpointError
from titanlite.config.component import ConfigError
from titanlite.data.loader import MicroBatches, SequenceLoader
from titanlite.data.step_sizes import StepSizes
from titanlite.interop.export import ExportFormat, write_directory
from titanlite.interop.huggingface import open_hugging_face
from titanlite.interop.initial import check_initial, open_weights
from titanlite.interop.weights import ModelAndTokenizer, check, load_weights
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.hf_config import read_family
from titanlite.tokenizers.bytes import Bytes
from titanlite.train import train

transformers = pytest.importorskip("transformers")


def imported(folder: Path, model_family: ModelFamily, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our model with the weights of a directory."""
    weights = open_hugging_face(folder, model_family)
    check(weights, model_family)
    net = random_net(model_family, seed=1).to(dtype)
    load_weights(weights, net)
    return net


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("tied", torch.bfloat16),
        *(
            pytest.param(variant, torch.float32, marks=() if variant == "qwen3" else pytest.mark.full)
            for variant in VARIANTS
        ),
    ],
)
def test_round_trip_is_bit_equal(tmp_path: Path, corpus: Path, variant: str, dtype: torch.dtype) -> None:
    """From Hugging Face into a run, through its checkpoint, and back."""
    model_family = family(**VARIANTS[variant])
    hugging_face(model_family, dtype).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    start = [f"--checkpoint.initial_load_path={tmp_path / 'theirs'}", "--optimizer.lr=1e-30"]  # moves nothing
    train(make_job(tmp_path, corpus, *start, "--training.steps=1", *keys_of(model_family)))
    name = str(dtype).removeprefix("torch.")
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "ours"), "--dtype", name]) == 0
    theirs, ours = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    assert all(t.dtype == dtype for t in ours.values())
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert ("lm_head.weight" in ours) == (not model_family.config.tie_word_embeddings)
    open_ = transformers.AutoModelForCausalLM.from_pretrained
    before, after = open_(tmp_path / "theirs"), open_(tmp_path / "ours")
    assert after.dtype == dtype
    with torch.no_grad():
        same = torch.equal(before(row()).logits, after(row()).logits)  # the config says the same, too
    assert same


@pytest.mark.parametrize("prefix", ["language_model.model.", full("model.language_model.")])
@torch.no_grad()
def test_the_text_model_of_a_multimodal_model_is_read(tmp_path: Path, prefix: str) -> None:
    """transformers writes the first prefix; the modules of the model in memory have the second."""
    model_family = family(**VARIANTS["gemma3, tied"])
    text = {key: value for key, value in model_family.hf_config().items() if key != "architectures"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4,
        image_token_index=257, boi_token_index=256, eoi_token_index=255,
    )  # fmt: skip
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.model.language_model.load_state_dict(
        {name.removeprefix("model."): p for name, p in random_net(model_family).state_dict().items()}
    )
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("language_model.model.layers.") for name in tensors)
    assert any(name.startswith("vision_tower.") for name in tensors)
    save_file({k.replace("language_model.model.", prefix): t for k, t in tensors.items()}, file)
    assert read_family(tmp_path).config == model_family.config
    assert (imported(tmp_path, model_family)(row()) - theirs(input_ids=row()).logits).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("variant", ["qwen3_5, tied", full("qwen3_5_moe")])
def test_published_files_of_qwen3_5(tmp_path: Path, variant: str) -> None:
    """They are a multimodal model's, with weights of images, and name the module for multi-token prediction
    and the head beside the text model. All weights of the text model are in an export; without n_mtp_layers,
    the module is left out."""
    model_family = family(**VARIANTS[variant] | {"tie_word_embeddings": False, "n_mtp_layers": 1})
    net = random_net(model_family)
    whole = {name: t for name, t in net.state_dict().items() if not name.endswith("tokens_per_expert")}
    published = {
        file.replace("model.", "model.language_model."): t[index].clone()
        for name, t in whole.items()
        for file, index in net.hf_tensors(name, tuple(t.shape))
    }
    assert {"lm_head.weight", "mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= {
        *published
    }
    images = {"model.visual.patch_embed.proj.weight": torch.zeros(2, 2)}
    save_file(published | images, tmp_path / "model.safetensors")
    text = model_family.hf_config()
    model_type = type(model_family).hf_multimodal_type
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "text_config": text}))
    assert read_family(tmp_path).config == model_family.config
    loaded = imported(tmp_path, model_family)
    assert all(torch.equal(p, whole[name]) for name, p in loaded.named_parameters())

    weights = open_hugging_face(tmp_path, model_family)
    write_directory(weights, tmp_path / "out", ModelAndTokenizer(model_family, Bytes().build()))
    exported = tensors_in(tmp_path / "out")
    assert exported.keys() == {name.replace("language_model.", "") for name in published}
    assert json.loads((tmp_path / "out/config.json").read_text())["mtp_num_hidden_layers"] == 1
    without = family(**VARIANTS[variant] | {"tie_word_embeddings": False})
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(row()).logits
    assert (imported(tmp_path, without)(row()) - exact).abs().max() < 1e-4


@pytest.mark.parametrize("variant", sampled(VARIANTS, {"tied", "qwen2, yarn", "olmoe", "deepseek_v3"}))
def test_logits_of_an_export_equal_ours_at_every_position(tmp_path: Path, variant: str) -> None:
    model_family = family(**VARIANTS[variant])
    hugging_face(model_family).save_pretrained(tmp_path / "theirs")
    weights = open_hugging_face(tmp_path / "theirs", model_family)
    pair = ModelAndTokenizer(model_family, Bytes().build())
    write_directory(weights, tmp_path / "fp32", pair)
    write_directory(weights, tmp_path / "bf16", pair, ExportFormat(torch.bfloat16, max_shard_bytes=20_000))
    assert (tmp_path / "bf16/model.safetensors.index.json").exists()
    tokens = row(256)
    exact = imported(tmp_path / "theirs", model_family)
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32")(tokens).logits
        difference = (exact(tokens) - theirs).abs().amax(-1)
    assert difference.shape == (1, 256)
    assert difference.max() < 1e-4

    # The best two logits of a random model are often closer than two steps of bf16 (transformers' bf16 agrees
    # with its own fp32 at 98.5% of the positions): compared is where they are not.
    tokens = torch.cat([row(256, seed=seed) for seed in range(4)])
    rounded = imported(tmp_path / "bf16", model_family, torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        best = exact(tokens).topk(2).values
        decided = best[..., 0] - best[..., 1] > best[..., 0].abs() * 2**-6
        same = rounded(tokens).argmax(-1) == model(tokens).logits.argmax(-1)
    assert decided.float().mean() > 0.85
    # In bf16, transformers' router rounds its logits, and some tokens go to other experts. States of linear
    # attention add up the rounding of all earlier tokens.
    rounds_more = {"n_experts", "delta_n_k_heads"} & model_family.overrides.keys()
    assert same[decided].float().mean() > (0.95 if rounds_more else 0.99)


@pytest.mark.full
@pytest.mark.parametrize(
    "variant", ["scaled rope", "qwen3", pytest.param("qwen3, tied", marks=pytest.mark.full)]
)
def test_a_run_from_an_imported_model_has_transformers_loss(
    tmp_path: Path, corpus: Path, variant: str
) -> None:
    model_family = family(**VARIANTS[variant])
    model = hugging_face(model_family)
    model.save_pretrained(tmp_path / "theirs")
    job = make_job(
        tmp_path,
        corpus,
        f"--checkpoint.initial_load_path={tmp_path / 'theirs'}",
        "--training.steps=1",
        *keys_of(model_family),
    )
    train(job)
    rows = job.data.build(job.tokenizer.build(), seq_len=32, seed=job.training.seed)
    batch = next(
        SequenceLoader(rows, MicroBatches(0, StepSizes.constant(8), 8, 0, 1), num_workers=0, pin_memory=False)
    )
    with torch.no_grad():
        logits = model(batch.inputs).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert metrics_of(job)[0]["train/loss"] == pytest.approx(wanted.item(), abs=1e-4)
    fresh = make_job(tmp_path, corpus, "--training.steps=1", *keys_of(model_family), name="fresh")
    train(fresh)
    assert metrics_of(fresh)[0]["train/loss"] != pytest.approx(wanted.item(), abs=1e-2)  # the control


def test_a_run_that_resumes_does_not_read_it_again(tmp_path: Path, corpus: Path, capsys) -> None:
    model_family = family()
    hugging_face(model_family).save_pretrained(tmp_path / "theirs")
    start = [f"--checkpoint.initial_load_path={tmp_path / 'theirs'}", *keys_of(model_family)]
    train(make_job(tmp_path, corpus, *start, "--training.steps=2"))
    shutil.rmtree(tmp_path / "theirs")
    job = make_job(tmp_path, corpus, *start, "--training.steps=3")
    train(job)
    assert "initial_load_path is not used" in capsys.readouterr().err
    assert [line["step"] for line in metrics_of(job)] == [1, 2, 3]


def test_another_runs_weights_alone_are_taken(tmp_path: Path, corpus: Path) -> None:
    first = make_job(tmp_path, corpus, "--training.steps=4", name="first")
    train(first)
    for place in ("first", "first/checkpoint/step-4"):
        start = [f"--checkpoint.initial_load_path={tmp_path / place}", "--training.seed=5"]
        second = make_job(tmp_path, corpus, *start, "--training.steps=1", name=place.replace("/", "-"))
        if place == "first":
            second = make_job(tmp_path, corpus, *start, "--training.steps=1", name="second")
        train(second)
        line = metrics_of(second)[0]
        assert line["step"] == 1
        assert line["train/loss"] < metrics_of(first)[0]["train/loss"] - 0.1
        assert line["progress/total_tokens"] == 8 * 32


# ---- vocabulary


def test_rows_that_no_id_needs_are_dropped(tmp_path: Path) -> None:
    model_family = family(vocab_size=320, tie_word_embeddings=False)
    hugging_face(model_family).save_pretrained(tmp_path / "padded")
    weights, pair = open_hugging_face(tmp_path / "padded"), ModelAndTokenizer(model_family, Bytes().build())
    write_directory(weights, tmp_path / "dropped", pair)
    write_directory(weights, tmp_path / "kept", pair, ExportFormat(keep_padding=True))
    padded, dropped, kept = (tensors_in(tmp_path / name) for name in ("padded", "dropped", "kept"))
    assert all(torch.equal(kept[name], padded[name]) for name in padded)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(dropped[name], padded[name][:258])
    assert json.loads((tmp_path / "dropped/config.json").read_text())["vocab_size"] == 258
    assert json.loads((tmp_path / "kept/config.json").read_text())["vocab_size"] == 320
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dropped")
    with torch.no_grad():
        difference = model(row()).logits - hugging_face(model_family)(row()).logits[..., :258]
    assert difference.abs().max() < 1e-5


def test_rows_that_the_source_lacks_stay_a_new_models(tmp_path: Path) -> None:
    small, large = family(), family(vocab_size=320)
    hugging_face(small).save_pretrained(tmp_path / "small")
    net = imported(tmp_path / "small", large)
    new, theirs = random_net(large, seed=1), hugging_face(small)
    embedding = net.get_parameter("model.embed_tokens.weight")
    assert torch.equal(embedding[:258], theirs.get_parameter("model.embed_tokens.weight"))
    assert torch.equal(embedding[258:], new.get_parameter("model.embed_tokens.weight")[258:])
    with pytest.raises(
        ConfigError, match=r"embed_tokens.* has shape \(258, 32\), the model's has \(128, 32\)"
    ):
        imported(tmp_path / "small", family(vocab_size=128))


# ---- bad input


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lie_about_length(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 40) + file.read_bytes()[8:])


def split_badly(folder: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "gone.safetensors"}}
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def only_an_adapter(folder: Path) -> None:
    for file in folder.glob("*"):
        file.unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"base_model.lm_head.lora_A.weight": torch.ones(2, 2)}, folder / "adapter_model.safetensors")


BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
NORM = "model.norm.weight"
BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda d: edit(d, lambda t: t.pop(NORM)), r"model\.norm\.weight of shape \(32,\) is missing"),
    "extra": (
        lambda d: edit(d, lambda t: t.update(more=torch.ones(1))),
        r"more in model\.safetensors is unexpected",
    ),
    "shape": (
        lambda d: edit(d, lambda t: t.update({NORM: torch.ones(31)})),
        r"model\.norm\.weight in model\.safetensors has shape \(31,\), the model's has \(32,\)",
    ),
    "dtype": (
        lambda d: edit(d, lambda t: t.update({NORM: torch.ones(32, dtype=torch.int8)})),
        r"model\.norm\.weight .* is torch\.int8; quantized",
    ),
    "other head": (
        lambda d: edit(d, lambda t: t.update({"lm_head.weight": torch.ones(258, 32)})),
        r"differs from the embedding.* to false in .*/theirs/config\.json and the job's model\.overrides$",
    ),
    "vocabulary": (
        lambda d: edit(d, lambda t: t.update({"model.embed_tokens.weight": torch.ones(300, 32)})),
        r"embed_tokens\.weight .*has shape \(300, 32\), the model's has \(258, 32\)",
    ),
    "architecture": (
        lambda d: edit_config(d, model_type="qwen3"),
        r"model_type is 'qwen3', but the job's model is 'llama'; a job of this one has --model\.name=qwen3",
    ),
    "unknown architecture": (
        lambda d: edit_config(d, model_type="gpt2"),
        r'model_type "gpt2" is not supported \(known: ',
    ),
    "adapter": (only_an_adapter, "is a PEFT adapter, not a whole model; merge it into its base model"),
    "rope type": (
        lambda d: edit_config(
            d, rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 4.0}, rope_theta=500000.0
        ),
        r"rope_type \"dynamic\" is not supported \(known: default, linear, llama3, yarn\)",
    ),
    "rope theta": (
        lambda d: edit_config(d, rope_parameters=None, rope_theta=1e4),
        "rope_theta is 10000.0, the job's 500000.0",
    ),
    "eps": (lambda d: edit_config(d, rms_norm_eps=1e-6), "norm_eps is 1e-06, the job's 1e-05"),
    "heads": (lambda d: edit_config(d, num_attention_heads=8), "n_heads is 8, the job's 4"),
    "window": (lambda d: edit_config(d, use_sliding_window=True), "use_sliding_window = true; only false"),
    "unscaled rope": (
        lambda d: edit_config(
            d, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **BANDS}
        ),
        r"rope_factor is 8\.0, the job's 1\.0; its rope_original_max_position is 64, the job's 8192; "
        r"'--model\.overrides=\{rope_factor = 8\.0, rope_original_max_position = 64\}' makes the job's model",
    ),
    "quantized": (lambda d: edit_config(d, quantization_config={}), "quantized"),
    "truncated": (truncate, r"model\.safetensors is not a complete safetensors file"),
    "header": (lie_about_length, r"model\.safetensors is not a complete safetensors file"),
    "index": (split_badly, "names 'gone.safetensors', which does not exist"),
    "config": (lambda d: (d / "config.json").write_text("{"), "config.json cannot be read"),
    "pickle": (only_a_pickle, r"pytorch_model\.bin"),
    "nothing": (lambda d: shutil.rmtree(d), "no such directory"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, corpus: Path, case: str
) -> None:
    damage, message = BAD[case]
    model_family = family()
    hugging_face(model_family).save_pretrained(tmp_path / "theirs")
    check(open_hugging_face(tmp_path / "theirs", model_family), model_family)  # the control
    damage(tmp_path / "theirs")
    job = make_job(
        tmp_path, corpus, f"--checkpoint.initial_load_path={tmp_path / 'theirs'}", *keys_of(model_family)
    )
    with pytest.raises(ConfigError, match=message) as error:
        train(job)
    assert error.value.key == "checkpoint.initial_load_path"
    assert "\n" not in str(error.value)
    assert not job.folder.exists()


def test_a_tied_configuration_with_a_head_of_its_own(tmp_path: Path) -> None:
    """The advice of the error message works."""
    tied, untied = family(), family(tie_word_embeddings=False)
    hugging_face(tied).save_pretrained(tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(258, 32)}))
    edit_config(tmp_path, tie_word_embeddings=False)
    check(open_hugging_face(tmp_path, untied), untied)


def test_one_message_has_all_that_a_job_of_another_shape_needs(tmp_path: Path, corpus: Path) -> None:
    theirs = family(
        dim=48, n_layers=3, n_heads=3, n_kv_heads=1, head_dim=16, hidden_dim=80, vocab_size=300,
        tie_word_embeddings=False, rope_theta=1e4,
    )  # fmt: skip
    hugging_face(theirs).save_pretrained(tmp_path / "theirs")
    start = [f"--checkpoint.initial_load_path={tmp_path / 'theirs'}", "--training.steps=1"]
    with pytest.raises(ConfigError) as error:
        train(make_job(tmp_path, corpus, *start))
    option = re.search(r"'(--model\.overrides=\{.*\})' makes the job's model equal", str(error.value))
    assert option is not None, str(error.value)
    job = make_job(tmp_path, corpus, *start, option[1])
    check_initial(tmp_path / "theirs", ModelAndTokenizer(job.model, job.tokenizer.build()))
    assert job.model.config.vocab_size == 300


def test_a_file_instead_of_its_folder_is_told(tmp_path: Path) -> None:
    hugging_face(family()).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/model.safetensors"
    with pytest.raises(ConfigError, match=rf"is a file; give its directory: {file.parent}$"):
        open_weights(file, family())


def test_a_tied_directory_may_repeat_its_head(tmp_path: Path) -> None:
    model_family = family()
    hugging_face(model_family).save_pretrained(tmp_path / "theirs")
    edit(tmp_path / "theirs", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    imported(tmp_path / "theirs", model_family)


def test_both_eras_of_rope_are_understood(tmp_path: Path) -> None:
    model_family = family(**VARIANTS["scaled rope"])
    hugging_face(model_family).save_pretrained(tmp_path / "new")
    config = json.loads((tmp_path / "new/config.json").read_text())
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    (tmp_path / "old/config.json").write_text(
        json.dumps({**config, "rope_theta": theta, "rope_scaling": rope})
    )
    for folder in ("new", "old"):
        check(open_hugging_face(tmp_path / folder, model_family), model_family)
        other = family(**{**VARIANTS["scaled rope"], "rope_factor": 4.0})
        with pytest.raises(ConfigError, match=r"rope_factor is 8\.0, the job's 4\.0"):
            check(open_hugging_face(tmp_path / folder, other), other)


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_family = family()
    hugging_face(model_family).save_pretrained(tmp_path / "theirs")
    weights = open_hugging_face(tmp_path / "theirs", model_family)
    pair = ModelAndTokenizer(model_family, Bytes().build())
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="there exists"):
        write_directory(weights, tmp_path / "there", pair)
    monkeypatch.setattr("os.rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"could not be written: OSError: .*No space"):
        write_directory(weights, tmp_path / "out", pair)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs", "there"]
