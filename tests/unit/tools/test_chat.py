"""`titanlite generate --chat` answers as transformers does; `titanlite data show` marks what is trained."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.chats import CHATML, SPECIAL, conversations, write_conversations, write_tokenizer
from tests.support.models import family, hugging_face
from titanlite import cli
from titanlite.generate import Generation
from titanlite.tokenizers.chat import ChatFormat
from titanlite.tools.generate import open_source

transformers = pytest.importorskip("transformers")
END = SPECIAL.index("<|im_end|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer and a template."""
    folder = write_tokenizer(tmp_path_factory.mktemp("chat") / "m", CHATML)
    hugging_face(family(vocab_size=400, max_position=512)).save_pretrained(folder)
    return folder


def answer(folder: Path, messages: list[dict[str, str]]) -> list[int]:
    """The likeliest answer of at most 12 tokens, by transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=[1, END], pad_token_id=1)
    return ids[0, prompt["input_ids"].shape[1] :].tolist()


def text_of(folder: Path, ids: list[int]) -> str:
    return transformers.AutoTokenizer.from_pretrained(folder).decode([i for i in ids if i not in (1, END)])


def chat(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run(["generate", str(folder), "--chat", "--temperature=0", "--max-new-tokens=12", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.full
def test_answers_are_those_of_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"role": "user", "content": "What does len() do?"}
    ids = answer(folder, [first])
    source = open_source(folder, torch.device("cpu"), allow_imports=False)
    config = Generation(temperature=0, max_new_tokens=12)
    assert list(source.answer([first], config, 0))[-1] == ids
    assert list(source.answer([{**first, "role": "system"}], config, 0))[-1] != ids  # control
    expected = text_of(folder, ids)
    assert chat(folder, capsys, f"--prompt={first['content']}")[1] == f"{expected}\n"
    turns = [first, {"role": "assistant", "content": expected}, {"role": "user", "content": "Why?"}]
    monkeypatch.setattr("sys.stdin", io.StringIO("What does len() do?\n\nWhy?\n"))
    assert chat(folder, capsys)[1] == f"{expected}\n{text_of(folder, answer(folder, turns))}\n"


def test_an_answer_ends_with_its_turn(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids that end a turn come from the template: generation_config.json does not name them."""
    ids = answer(folder, [{"role": "user", "content": "a"}])
    monkeypatch.setattr(ChatFormat, "end_of_turn", lambda self: {ids[3]})
    assert chat(folder, capsys, "--prompt=a")[1] == text_of(folder, ids[: ids.index(ids[3])]) + "\n"


def test_a_tokenizer_without_a_template_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "m"
    shutil.copytree(folder, other)
    (other / "chat_template.jinja").unlink()
    code, _, err = chat(other, capsys, "--prompt=a")
    assert code == 2
    assert "has no chat template" in err.strip().splitlines()[-1]


@pytest.mark.full
@pytest.mark.parametrize("length", [0, 3, 99])
def test_a_template_that_takes_too_much_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    other = tmp_path / "m"
    shutil.copytree(folder, other)
    bomb = f"{{% if messages[-1].content | length >= {length} %}}{{{{ 'x' * 10**10 }}}}{{% endif %}}"
    (other / "chat_template.jinja").write_text(bomb + CHATML)
    code, _, err = chat(other, capsys, "--prompt=abc")
    told = "chat_template.jinja takes more than 2 GiB of memory for a conversation\n"
    assert (code, err.endswith(told)) == ((2, True) if length < 99 else (0, False))


def test_a_template_that_does_not_train_the_end_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = CHATML.replace(
        "message.content + '<|im_end|>' }}{%- endgeneration %}",
        "message.content }}{%- endgeneration %}{{- '<|im_end|>' }}",
    )
    file = write_conversations(tmp_path / "in.jsonl", conversations()[:1])
    for name, template in (("outside", outside), ("inside", CHATML)):
        folder, out = write_tokenizer(tmp_path / name, template), tmp_path / f"{name}-out"
        words = ["--documents=chat", "--tokenizer.name=huggingface", f"--tokenizer.path={folder}"]
        assert cli.run(["prepare", str(file), f"--output={out}", *words]) == 0
        told = f"{out}: {folder}/chat_template.jinja trains no token behind an answer, so that the model will"
        assert (told in capsys.readouterr().err) == (name == "outside")
        show = ["data", "show", str(out), "--seq_len=77", f"--tokenizer.path={folder}"]
        assert cli.run([*show, "--tokenizer.name=huggingface"]) == 0
        assert (told in capsys.readouterr().out) == (name == "outside")


def test_trained_tokens_are_marked(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_conversations(tmp_path / "in.jsonl", conversations()[:1])
    tokenizer = ["--tokenizer.name=huggingface", f"--tokenizer.path={folder}"]
    out = tmp_path / "out"
    assert cli.run(["prepare", str(file), f"--output={out}", "--documents=chat", *tokenizer]) == 0
    assert json.loads((out / "dataset.json").read_text())["prepared"]["documents"] == "chat"
    prepared = capsys.readouterr().out.splitlines()[-1]
    assert cli.run(["data", "verify", str(out)]) == 0
    tokenized = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        conversations()[0], return_assistant_tokens_mask=True, return_dict=True
    )
    ids, mask = tokenized["input_ids"], tokenized["assistant_masks"]
    counts = f"1 documents, {len(ids)} tokens, {sum(mask)} ({sum(mask) / len(ids):.1%}) of them trained"
    assert f"{out}: {counts}, all hashes match" in capsys.readouterr().out
    assert prepared.startswith(f"{out}: {counts} (")
    words = ["data", "show", str(out), "--seq_len=77", "--packing=best_fit", f"--cache_dir={tmp_path}/c"]
    assert cli.run(words) == 0
    text = capsys.readouterr().out
    content = conversations()[0][1]["content"]
    assert f"<|im_start|>assistant\n>>>{content}<|im_end|><<<\n" in text
    assert text.count(">>>") == 1
    assert text.startswith(f"{out}: {counts}\n==== ")
