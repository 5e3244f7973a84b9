"""`titanlite generate` from Hugging Face directories makes what transformers makes of them; what cannot be
right is one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import make_job
from tests.support.tiers import sampled
from titanlite import cli
from titanlite.models.base import ModelFamily
from titanlite.models.deepseek_v3 import DeepSeekV3
from titanlite.models.gemma3 import Gemma3
from titanlite.models.llama3 import Llama3
from titanlite.models.mistral import Mistral
from titanlite.models.olmo3 import Olmo3
from titanlite.models.qwen2 import Qwen2
from titanlite.models.qwen3 import Qwen3
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.tiktoken import Tiktoken
from titanlite.tools import generate
from titanlite.tools.generate import open_source
from titanlite.train import train

transformers = pytest.importorskip("transformers")

SHAPE = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 64,
    "vocab_size": 258, "max_position": 64,
}  # fmt: skip
SCALED = {"rope_factor": 8.0, "rope_original_max_position": 16, "rope_theta": 1e4}
FAMILIES = {
    "llama3": Llama3(flavor="debug", overrides={**SHAPE, "tie_word_embeddings": False}),
    "llama3 scaled tied": Llama3(flavor="debug", overrides={**SHAPE, **SCALED}),
    "qwen3": Qwen3(flavor="debug", overrides={**SHAPE, "tie_word_embeddings": False}),
    "qwen3 tied": Qwen3(flavor="debug", overrides=SHAPE),
    "qwen2": Qwen2(flavor="debug", overrides=SHAPE),
    "mistral": Mistral(flavor="debug", overrides={**SHAPE, "sliding_window": 7}),
    "gemma3": Gemma3(flavor="debug", overrides={**SHAPE, "sliding_window": 7, "layer_pattern": "SL"}),
    "olmo3": Olmo3(flavor="debug", overrides={**SHAPE, "sliding_window": 6, "layer_pattern": "SL"}),
}
PROMPTS = ["def main(", "a", "The quick brown"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("generate", path)`: exit code, standard output and standard error."""

    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()  # of making what it is run on
        code = cli.run(["generate", *(str(word) for word in argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def write_directory(folder: Path, family: ModelFamily, **options: Any) -> Path:
    """A Hugging Face directory of a random model, written by transformers; raw bytes are its tokens."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**family.hf_config())
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape) * 0.15 + name.endswith("norm.weight"))
    model.generation_config.eos_token_id = [257, 65]
    model.save_pretrained(folder, **options)
    for name, content in Bytes().build().hugging_face_files().items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(params=sampled(FAMILIES, FAMILIES.keys() - {"qwen2", "gemma3", "olmo3"}))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_directory(tmp_path / "hf", FAMILIES[request.param])


@pytest.fixture(scope="module")
def written_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_directory(tmp_path_factory.mktemp("qwen3") / "hf", FAMILIES["qwen3 tied"])


@pytest.fixture
def qwen3(written_qwen3: Path, tmp_path: Path) -> Path:
    """A copy of the directory, which the test may change."""
    return Path(shutil.copytree(written_qwen3, tmp_path / "hf"))


def of_transformers(folder: Path, prompts: list[str], num_new: int) -> list[list[int]]:
    """The likeliest tokens after each prompt, its own padding and end among them, by transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = tokenizer(prompts, return_tensors="pt", padding=True)
    made = model.generate(
        input_ids=rows.input_ids, attention_mask=rows.attention_mask, max_new_tokens=num_new, do_sample=False,
        pad_token_id=257,
    )  # fmt: skip
    return [row[rows.input_ids.shape[1] :].tolist() for row in made]


def text_of(ids: list[int]) -> str:
    end = next((i for i, token in enumerate(ids) if token in (257, 65)), len(ids))
    return Bytes().build().decode(ids[:end])


def test_the_likeliest_text_is_that_of_transformers(run: Run, directory: Path) -> None:
    wanted = [text_of(ids) for ids in of_transformers(directory, PROMPTS, 30)]
    assert len(set(wanted)) == len(PROMPTS)
    options = ["--temperature=0", "--max-new-tokens=30"]
    code, out, err = run(directory, *[f"--prompt={prompt}" for prompt in PROMPTS], *options)
    assert code == 0, err
    assert out == "".join(
        f"--- {i} of 3\n{prompt}{text}\n" for i, (prompt, text) in enumerate(zip(PROMPTS, wanted), 1)
    )
    for prompt, text in zip(PROMPTS, wanted):
        assert run(directory, "--prompt", prompt, *options)[1] == f"{prompt}{text}\n"


def test_a_text_ends_where_transformers_ends_it(run: Run, tmp_path: Path) -> None:
    """One of several ids that end a text is made here."""
    folder = write_directory(tmp_path / "hf", FAMILIES["llama3"])
    first = of_transformers(folder, PROMPTS, 30)
    end = first[0][5]
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [257, end]}))
    wanted = of_transformers(folder, PROMPTS, 30)
    assert wanted[0].index(end) <= 5
    source = open_source(folder, torch.device("cpu"), allow_imports=False)
    assert source.stop_ids == {257, end}
    out = run(folder, f"--prompt={PROMPTS[0]}", "--temperature=0", "--max-new-tokens=30")[1]
    assert out == PROMPTS[0] + source.tokenizer.decode(first[0][: first[0].index(end)]) + "\n"


def test_several_files_are_one_model(run: Run, tmp_path: Path) -> None:
    one = write_directory(tmp_path / "one", FAMILIES["qwen3"])
    several = write_directory(tmp_path / "several", FAMILIES["qwen3"], max_shard_size="20KB")
    assert len(list(several.glob("*.safetensors"))) > 2
    options = ["--prompt=ab", "--max-new-tokens=20"]
    assert run(one, *options)[:2] == run(several, *options)[:2]
    assert run(one, *options)[0] == 0


@pytest.mark.full
def test_each_of_several_prompts_gives_the_text_that_it_gives_alone(
    run: Run, qwen3: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo words\nthree\n")
    options = ["--max-new-tokens=20", "--temperature=1"]
    code, out, err = run(qwen3, "--prompt=zero", "--prompt-file", file, *options, "--seed=5")
    assert code == 0, err
    prompts = ["zero", "one", "two words", "three"]
    alone = [
        run(qwen3, f"--prompt={prompt}", *options, f"--seed={5 + i}")[1] for i, prompt in enumerate(prompts)
    ]
    assert out == "".join(f"--- {i} of 4\n{text}" for i, text in enumerate(alone, 1))
    assert alone[0] != run(qwen3, "--prompt=zero", *options, "--seed=6")[1]


def test_a_special_token_in_a_prompt_is_one(qwen3: Path) -> None:
    source = open_source(qwen3, torch.device("cpu"), allow_imports=False)
    assert source.encode("a<|end_of_text|>") == [256, 97, 257]
    assert source.encode("a") == transformers.AutoTokenizer.from_pretrained(qwen3)("a").input_ids


def test_a_run_is_continued_as_its_samples_are(run: Run, tmp_path: Path, corpus: Path) -> None:
    """With a cache as without one, from the same seed, which is another one for each prompt."""
    job = make_job(
        tmp_path, corpus, "--training.steps=2", "--generation.prompts=['ab', 'ab']", "--generation.top_k=9"
    )
    train(job)
    _, one, other = (job.folder / "samples.txt").read_text().split("--- step 2\n")
    assert one != other
    code, out, err = run(job.folder, "--prompt=ab", f"--seed={job.training.seed}", "--top-k=9")
    assert code == 0, err
    assert err == f"titanlite: using {job.folder}/checkpoint/step-2\n"
    assert len(out) > 20
    assert (job.folder / "samples.txt").read_bytes().decode().startswith(f"--- step 2\n{out}")


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_an_export_is_continued_as_its_run_is(run: Run, tmp_path: Path, corpus: Path, family: str) -> None:
    job = make_job(tmp_path, corpus, "--training.steps=2", f"--model.name={family}")
    train(job)
    assert cli.run(["export", str(job.folder), str(tmp_path / "hf"), "--dtype=float32"]) == 0
    texts = [run(path, "--prompt=ab", "--temperature=0") for path in (job.folder, tmp_path / "hf")]
    assert texts[0][:2] == texts[1][:2]
    assert texts[0][0] == 0
    assert texts[1][2] == f"titanlite: using {tmp_path / 'hf'}\n"


# ---- what cannot be right


def complaint(result: tuple[int, str, str], code: int = 2) -> str:
    assert result[0] == code, result[2]
    assert result[1] == ""
    *before, line = result[2].splitlines()
    assert line.startswith("titanlite: ")
    assert all(line.startswith("titanlite: using ") for line in before), "only the model is named before it"
    return line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature=-1"], "--temperature: -1.0 is not 0 or above"),
        (["--temperature=nan"], "--temperature: nan is not 0 or above"),
        (["--top-p=0"], "--top-p: 0.0 is not above 0"),
        (["--top-k=-2"], "--top-k: -2 is below 0"),
        (["--max-new-tokens=0"], "--max-new-tokens: 0 is below 1"),
        (
            ["--max-new-tokens=63"],
            "a prompt of 3 tokens and --max-new-tokens=63 exceed the model's max_position of 64",
        ),
        (["--prompt-file=none.txt"], "--prompt-file: none.txt cannot be read"),
    ],
)
def test_bad_options_are_told(run: Run, qwen3: Path, options: list[str], message: str) -> None:
    assert message in complaint(run(qwen3, "--prompt=ab", *options))


def test_no_prompt_is_told(run: Run, qwen3: Path) -> None:
    assert "give --prompt or --prompt-file" in complaint(run(qwen3))


def test_all_positions_may_be_used(run: Run, qwen3: Path) -> None:
    assert run(qwen3, "--prompt=ab", "--max-new-tokens=61")[0] == 0


def damaged(folder: Path, damage: str) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_norm.weight"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-50])
    elif damage == "missing":
        save_file({k: v for k, v in tensors.items() if k != name}, file)
    elif damage == "unexpected":
        save_file({**tensors, "model.bias": torch.zeros(3)}, file)
    elif damage == "shape":
        save_file({**tensors, name: torch.zeros(3)}, file)
    elif damage == "rows":
        save_file({**tensors, "model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:250]}, file)
    elif damage == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif damage == "no weights":
        file.unlink()
    elif damage == "architecture":
        (folder / "config.json").write_text('{"model_type": "gpt2"}')


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        ("truncated", 2, "model.safetensors is not a complete safetensors file"),
        ("missing", 3, "model.layers.0.self_attn.q_norm.weight of shape (16,) is missing"),
        ("unexpected", 3, "model.bias in model.safetensors is unexpected"),
        ("shape", 3, "q_norm.weight in model.safetensors has shape (3,), the model's has (16,)"),
        ("rows", 3, "has shape (250, 32), the model's has (258, 32)"),
        ("no tokenizer", 2, "tokenizer.json"),
        ("no weights", 2, "has no weights: neither model.safetensors nor model.safetensors.index.json"),
        ("architecture", 2, 'model_type "gpt2" is not supported (known: '),
    ],
)
def test_a_damaged_directory_is_told(run: Run, qwen3: Path, damage: str, code: int, message: str) -> None:
    damaged(qwen3, damage)
    assert message in complaint(run(qwen3, "--prompt=ab"), code)


def test_a_damaged_checkpoint_is_told(run: Run, tmp_path: Path, corpus: Path) -> None:
    job = make_job(tmp_path, corpus, "--training.steps=1")
    train(job)
    shard = next((job.folder / "checkpoint/step-1").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert "is damaged: " in complaint(run(job.folder, "--prompt=ab"), 3)


def test_a_tokenizer_of_another_model_is_told(run: Run, qwen3: Path) -> None:
    stdlib = Path(__file__).resolve().parents[3] / "assets/tokenizer/stdlib.tiktoken"
    for name, content in Tiktoken(path=str(stdlib)).build().hugging_face_files().items():
        (qwen3 / name).write_bytes(content)
    said = complaint(run(qwen3, "--prompt=ab"))
    assert "its config.json vocab_size = 258: they belong to different models" in said


def test_buffers_keep_their_dtype_on_a_gpu() -> None:
    """Correction biases of routers in bf16 would choose other experts."""
    net = DeepSeekV3(flavor="debug").build_on_meta()
    generate._cast(net, torch.bfloat16)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in net.buffers()} == {torch.float32}


def test_a_run_with_experts_continues_prompts(tmp_path: Path, corpus: Path) -> None:
    experts = {"n_kv_heads": 4, "head_dim": 24, "rope_head_dim": 8, "v_head_dim": 16, "moe_hidden_dim": 16}
    keys = [f"--model.overrides.{key}={value}" for key, value in experts.items()]
    job = make_job(tmp_path, corpus, "--model.name=deepseek_v3", *keys, "--training.steps=1")
    train(job)
    assert cli.run(["generate", str(job.folder), "--prompt", "ab", "--max-new-tokens", "4"]) == 0
