"""Pins tokenizer.json: ids are those of Hugging Face's transformers for files built as Llama 3's and Qwen's
are, and, where a tiktoken file holds the same merges, the same tokens; special tokens in text are text unless
asked for; BOS and EOS come from where they should; a file that would lose text is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import random
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from tests.support.tiers import full
from titanlite.config.component import ConfigError
from titanlite.corpus.make_tokenizer import byte_alphabet
from titanlite.tokenizers.base import Tokenizer
from titanlite.tokenizers.huggingface import HuggingFace
from titanlite.tokenizers.tiktoken import LLAMA3_PATTERN, Tiktoken

SHIPPED = Path(__file__).resolve().parents[3] / "assets" / "tokenizer" / "stdlib.tiktoken"
QWEN_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
PIECES = [
    *(
        "it's",
        "def main():\n    return",
        "12345",
        "caf\u00e9",
        "cafe\u0301",
        "\u4f60\u597d",
        "\U0001f600",
        "don'T",
    ),
    *("  \t\r\n\n", "\u0434\u0430", "Na\u00efve", "x" * 30, "\u2028", "\x00", "\ufeff", "#!/usr", "don'T"),
]


def texts() -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices([*PIECES, " ", "\n"], k=rng.randint(0, 30))) for _ in range(300)]


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The shipped ranks as a vocabulary and merges of stand-in characters."""
    lines = [line.split() for line in SHIPPED.read_bytes().splitlines()]
    tokens = [base64.b64decode(token) for token, _ in lines]
    stand_in = {b: c for c, b in byte_alphabet().items()}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        # The pair that byte-pair merging with lower ranks only arrives at.
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append(tuple("".join(stand_in[b] for b in part) for part in parts))
    return {"".join(stand_in[b] for b in token): rank for token, rank in ranks.items()}, merges


def write(folder: Path, kind: str, **configured: Any) -> Path:
    """A tokenizer.json like Llama 3's or Qwen's, and tokenizer_config.json with `configured`."""
    folder.mkdir(exist_ok=True)
    vocab, merges = vocabulary()
    library = Library(models.BPE(vocab, merges, ignore_merges=kind == "llama"))
    pattern = LLAMA3_PATTERN if kind == "llama" else QWEN_PATTERN
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    if kind == "llama":
        special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
        library.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
        library.post_processor = processors.TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", len(vocab))]
        )
    else:
        library.normalizer = normalizers.NFC()
        library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
        library.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(configured))
    return folder


Write = Callable[..., Path]
TOKENS = {
    "llama": {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}},
    "qwen": {"bos_token": None, "eos_token": "<|endoftext|>"},
}


@pytest.fixture(scope="module", params=TOKENS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("hf") / request.param, request.param, **TOKENS[request.param])


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return HuggingFace(path=str(folder)).build()


def test_ids_are_those_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in texts():
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)
    total = sum(len(tokenizer.encode(text)) for text in texts())
    assert total < 0.7 * sum(len(text.encode()) for text in texts())  # something was merged


def test_bytes_per_token_add_up_to_those_of_the_text(folder: Path, tokenizer: Tokenizer) -> None:
    table = tokenizer.bytes_per_token()
    assert table is not None
    form = unicodedata.normalize if folder.name == "qwen" else lambda _, text: text
    for text in [*texts(), "a <tool_call>b", "<|im_end|>"]:
        (ids,) = tokenizer.encode_documents([text])
        assert table[ids].sum() == len(form("NFC", text).encode())
    special = [i for i in range(8190, tokenizer.vocab_size) if i not in tokenizer.encode("<tool_call>")]
    assert len(special) == 3
    assert table[special].sum() == 0
    assert (table > 0).sum() == tokenizer.vocab_size - 3  # control: every other id has bytes


def test_tokens_are_those_of_a_tiktoken_file_with_the_same_merges(tmp_path: Path) -> None:
    ours = HuggingFace(path=str(write(tmp_path / "l", "llama", **TOKENS["llama"]))).build()
    theirs = Tiktoken(path=str(SHIPPED)).build()
    assert ours.fingerprint != theirs.fingerprint  # another file, though an equal one
    for text in texts():
        assert ours.encode(text) == theirs.encode(text)
    assert ours.bos == theirs.bos == 8190
    assert ours.vocab_size == 8193


def test_text_survives(folder: Path, tokenizer: Tokenizer) -> None:
    for text in texts():
        expected = text if folder.name == "llama" else unicodedata.normalize("NFC", text)
        assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_special_tokens_in_text_are_text_unless_asked_for(folder: Path, tokenizer: Tokenizer) -> None:
    name = "<|end_of_text|>" if folder.name == "llama" else "<|endoftext|>"
    asked = HuggingFace(path=str(folder), special_tokens_in_text=True).build()
    text = f"a{name}b"
    assert tokenizer.eos not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert asked.encode(text) == [*tokenizer.encode("a"), tokenizer.eos, *tokenizer.encode("b")]
    assert asked.fingerprint != tokenizer.fingerprint
    for one in (tokenizer, asked):
        clone = pickle.loads(pickle.dumps(one))
        assert clone.encode(text) == one.encode(text)
        assert clone.fingerprint == one.fingerprint
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    assert asked.encode(text) == reference.encode(text, add_special_tokens=False)


def test_an_added_token_that_is_not_special_stays_one(tmp_path: Path) -> None:
    tokenizer = HuggingFace(path=str(write(tmp_path / "q", "qwen", **TOKENS["qwen"]))).build()
    assert tokenizer.encode("<tool_call>") == [8193]
    assert tokenizer.vocab_size == 8194


def test_frames(folder: Path, tokenizer: Tokenizer) -> None:
    ids = [ids.tolist() for ids in tokenizer.encode_documents(["it's", ""])]
    if folder.name == "llama":
        assert (tokenizer.bos, tokenizer.eos) == (8190, 8191)
        assert ids == [[8190, *tokenizer.encode("it's"), 8191], [8190, 8191]]
    else:
        assert tokenizer.bos == tokenizer.eos == 8190
        assert ids == [[8190, *tokenizer.encode("it's"), 8190], [8190, 8190]]
    # Datasets that begin with BOS but do not end with EOS have another fingerprint, so that they are refused.
    inputs = ((folder / "tokenizer.json").read_bytes(), False, tokenizer.bos, tokenizer.eos)
    before = hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]
    assert (tokenizer.fingerprint == before) == (tokenizer.bos != tokenizer.eos)
    assert tokenizer.decode([tokenizer.eos]) in ("<|end_of_text|>", "<|endoftext|>")


def test_bos_and_eos_by_key_and_without_a_configuration(tmp_path: Path) -> None:
    folder = write(tmp_path / "q", "qwen")
    (folder / "tokenizer_config.json").unlink()
    file = str(folder / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json") as e:
        HuggingFace(path=file).build()
    assert e.value.key == "tokenizer.eos"
    tokenizer = HuggingFace(path=file, bos="<|im_start|>", eos="<|im_end|>").build()
    assert (tokenizer.bos, tokenizer.eos) == (8191, 8192)
    with pytest.raises(ConfigError, match=r"no token '<\|no\|>'") as e:
        HuggingFace(path=file, eos="<|no|>").build()
    assert e.value.key == "tokenizer.eos"
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        HuggingFace(path=file).build()


@pytest.mark.full
def test_fingerprints_tell_files_and_frames_apart(tmp_path: Path) -> None:
    q, moved, spaced = (write(tmp_path / name, "qwen", **TOKENS["qwen"]) for name in "qms")
    (spaced / "tokenizer.json").write_text((q / "tokenizer.json").read_text() + " ")
    made = [HuggingFace(path=str(q), **keys).build() for keys in ({}, {"eos": "<|im_end|>"})]
    made += [HuggingFace(path=str(write(tmp_path / "l", "llama", **TOKENS["llama"]))).build()]
    assert len({tokenizer.fingerprint for tokenizer in made}) == 3
    assert HuggingFace(path=str(moved)).build().fingerprint == made[0].fingerprint


def sentencepiece(tree: dict[str, Any]) -> None:
    tree["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}


def without_a_byte(tree: dict[str, Any]) -> None:
    tree["model"]["vocab"] = {t: i for t, i in tree["model"]["vocab"].items() if t != "\u0100"}
    tree["model"]["merges"] = []


def wordpiece(tree: dict[str, Any]) -> None:
    tree["model"] = {"type": "WordPiece", "vocab": {"a": 0}}


def lowercased(tree: dict[str, Any]) -> None:
    tree["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}


def with_a_space_in_front(tree: dict[str, Any]) -> None:
    tree["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


@pytest.mark.parametrize(
    "spoil",
    [
        *(without_a_byte, lowercased),
        *map(full, [sentencepiece, wordpiece, with_a_space_in_front, lambda tree: tree.pop("model")]),
    ],
)
def test_a_file_that_would_lose_text(tmp_path: Path, spoil: Callable[[dict[str, Any]], None]) -> None:
    folder = write(tmp_path / "q", "qwen", **TOKENS["qwen"])
    file = folder / "tokenizer.json"
    tree = json.loads(file.read_text())
    spoil(tree)
    file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: ") as e:
        HuggingFace(path=str(folder)).build()
    assert e.value.key == "tokenizer.path"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\xff", b"{}"])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    reason = " is not valid JSON, for example because it is cut off" if content in (b"", b"{") else ": "
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(ConfigError, match=rf"tokenizer\.json{reason}"):
            HuggingFace(path=str(path)).build()


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        HuggingFace(path=str(tmp_path / "nowhere.json")).build()


def test_a_very_long_run(tokenizer: Tokenizer) -> None:
    text = " " * 200_000 + "x" * 200_000
    assert tokenizer.decode(tokenizer.encode(text)) == text
