"""Pins what text becomes: golden ids of the shipped tokenizer, round trips, that a special token's spelling
is plain text, how documents are framed, that a file which is no tokenizer is an error, and that `titanlite
tokenizer train` learns what Hugging Face's tokenizers learn, the same on every run."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.component import ConfigError
from titanlite.corpus import make_tokenizer as tool
from titanlite.tokenizers.base import BOS, EOS, Tokenizer
from titanlite.tokenizers.bytes import Bytes
from titanlite.tokenizers.tiktoken import LLAMA3_PATTERN, Tiktoken

SHIPPED = Path(__file__).resolve().parents[3] / "assets" / "tokenizer" / "stdlib.tiktoken"

GOLDEN = {
    "": [],
    "def main() -> int:\n    return 0\n": [482, 1802, 422, 331, 1180, 273, 258, 336, 32, 48, 10],
    "caf\u00e9 \u4f60\u597d \U0001f600": [
        *(744, 102, 195, 169, 32, 228, 189, 160, 229, 165, 189, 32, 240, 159, 152, 128)
    ],
    "   \n\t\r\n  x": [258, 10, 9, 13, 10, 32, 868],
    "it's 12345": [325, 904, 32, 5378, 4453],
    "<|begin_of_text|><|end_of_text|>": [
        *(60, 124, 1356, 2854, 4960, 2540, 124, 6307, 124, 1139, 4960, 2540, 124, 62)
    ],
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """tiktoken caches files by path, between processes too: these tests get a cache of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path_factory.mktemp("tiktoken")))
        yield


@pytest.fixture(scope="module")
def shipped() -> Tokenizer:
    return Tiktoken(path=str(SHIPPED)).build()


def framed(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode_documents(texts)]


def ranks_file(path: Path, tokens: Sequence[bytes]) -> Path:
    """A tiktoken file of these tokens, in this order."""
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens)))
    return path


ALL_BYTES = [bytes([b]) for b in range(256)]


@pytest.mark.parametrize("text", GOLDEN, ids=ascii)
def test_golden_ids(shipped: Tokenizer, text: str) -> None:
    assert shipped.encode(text) == GOLDEN[text]
    assert shipped.decode(GOLDEN[text]) == text


def test_shipped_vocabulary(shipped: Tokenizer) -> None:
    assert shipped.vocab_size == 8192
    assert (shipped.bos, shipped.eos) == (8190, 8191)
    assert shipped.decode([shipped.bos, shipped.eos]) == BOS + EOS
    assert shipped.fingerprint == "f977b22be762b457"  # checkpoints and shards name it


def test_shipped_is_the_default_from_the_repository_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SHIPPED.parents[2])
    assert Tiktoken().build().fingerprint == "f977b22be762b457"


@settings(max_examples=30)
@given(text=st.text())
def test_round_trip(shipped: Tokenizer, text: str) -> None:
    ids = shipped.encode(text)
    assert shipped.decode(ids) == text
    assert all(0 <= i < 8190 for i in ids)


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = Bytes().build()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_vocabulary_and_frame() -> None:
    tokenizer = Bytes().build()
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (258, 256, 257)
    assert framed(tokenizer, "ab", "") == [[256, 97, 98, 257], [256, 257]]
    assert tokenizer.decode([256, 97, 0xC3, 257]) == "a\ufffd"


def test_a_special_tokens_spelling_is_plain_text(shipped: Tokenizer) -> None:
    for tokenizer in (shipped, Bytes().build()):
        for text in (BOS, EOS, f"a{EOS}b", "<|reserved_special_token_0|>"):
            ids = tokenizer.encode(text)
            assert tokenizer.bos not in ids
            assert tokenizer.eos not in ids
            assert tokenizer.decode(ids) == text
            (document,) = framed(tokenizer, text)
            assert document == [tokenizer.bos, *ids, tokenizer.eos]


def test_documents_are_framed_each_and_kept_in_order(shipped: Tokenizer) -> None:
    texts = [f"document {i} \u4f60" * (i % 7) for i in range(100)]
    expected = [[8190, *shipped.encode(t), 8191] for t in texts]
    assert framed(shipped, *texts) == expected
    assert all(ids.dtype == np.uint32 for ids in shipped.encode_documents(texts))


class OneSpecial(Tokenizer):
    """GPT-2's way: one token between documents."""

    vocab_size, bos, eos, fingerprint = 257, 256, 256, "one-special"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_bos_that_is_eos_is_written_at_both_ends() -> None:
    assert framed(OneSpecial(), "ab", "", "c") == [[256, 97, 98, 256], [256, 256], [256, 99, 256]]


def test_special_tokens_come_after_the_ranks(tmp_path: Path) -> None:
    path = str(ranks_file(tmp_path / "a.tiktoken", [*ALL_BYTES, b"hi"]))
    tokenizer = Tiktoken(path=path, num_special_tokens=4).build()
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (261, 257, 258)
    assert tokenizer.encode("hi!") == [256, 33]
    assert tokenizer.decode([259, 260]) == "<|reserved_special_token_0|><|reserved_special_token_1|>"


def test_fingerprint_changes_with_all_that_changes_ids(tmp_path: Path) -> None:
    a, copy = (str(ranks_file(tmp_path / name, [*ALL_BYTES, b"hi"])) for name in ("a", "copy"))
    b = str(ranks_file(tmp_path / "b", [*ALL_BYTES, b"ho"]))
    base = Tiktoken(path=a).build().fingerprint
    assert Tiktoken(path=copy).build().fingerprint == base
    others = [
        Tiktoken(path=b),
        Tiktoken(path=a, pattern=r"\s+|\S+"),
        Tiktoken(path=a, num_special_tokens=3),
        Bytes(),
    ]
    assert len({base, *(o.build().fingerprint for o in others)}) == 5
    assert len(base) == 16


def test_an_edited_file_is_read_anew(tmp_path: Path) -> None:
    """Ids are of the file that the fingerprint is of, whatever was read from that path before."""
    path = tmp_path / "a.tiktoken"
    ranks_file(path, [*ALL_BYTES, b"hi"])
    old = Tiktoken(path=str(path)).build()
    assert old.encode("hi ho") == [256, 32, 104, 111]
    ranks_file(path, [*ALL_BYTES, b"ho"])
    new = Tiktoken(path=str(path)).build()
    assert new.fingerprint != old.fingerprint
    assert new.encode("hi ho") == [104, 105, 32, 256]


def test_a_relative_path_is_of_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, token in (("one", b"hi"), ("two", b"ho")):
        (tmp_path / folder).mkdir()
        ranks_file(tmp_path / folder / "a.tiktoken", [*ALL_BYTES, token])
        monkeypatch.chdir(tmp_path / folder)
        assert Tiktoken(path="a.tiktoken").build().encode(token.decode()) == [256]


def test_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as e:
        Tiktoken(path="nowhere.tiktoken").build()
    assert "'nowhere.tiktoken'" in str(e.value)
    assert str(Path.cwd()) in str(e.value)
    assert e.value.key == "tokenizer.path"
    with pytest.raises(ConfigError):
        Tiktoken(path=str(tmp_path)).build()


def lines(tokens: Sequence[bytes], first: int = 0) -> bytes:
    return b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens, first))


CORRUPT = {
    "empty": b"",
    "a web page": b"<!DOCTYPE html>\n<html>\n",
    "a pointer to the file": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "binary": bytes(range(256)),
    "a rank that is no number": lines(ALL_BYTES) + b"aGk= x\n",
    "cut within a line": lines(ALL_BYTES)[:-4],
    "cut between lines": lines(ALL_BYTES[:100]),
    "a byte left out": lines(ALL_BYTES[:-1]) + b"aGk= 255\n",
    "a rank twice": lines(ALL_BYTES) + b"aGk= 256\naG8= 256\n",
    "a token twice": lines(ALL_BYTES) + b"aGk= 256\naGk= 257\n",
    "a gap that special tokens would fall into": lines(ALL_BYTES) + b"aGk= 257\n",
}


def test_a_line_that_is_no_token_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "page.tiktoken"
    path.write_bytes(lines(ALL_BYTES) + CORRUPT["a web page"])
    with pytest.raises(ConfigError) as e:
        Tiktoken(path=str(path)).build()
    assert str(e.value) == (
        f"{path} is not a tiktoken file: line 257 is not a base64 token and its rank: '<!DOCTYPE html>'"
    )


@pytest.mark.parametrize("case", CORRUPT)
def test_a_file_that_is_no_tokenizer(tmp_path: Path, case: str) -> None:
    path = tmp_path / "a.tiktoken"
    path.write_bytes(lines(ALL_BYTES))
    assert Tiktoken(path=str(path)).build().vocab_size == 258  # what the cases spoil is good
    path = tmp_path / "b.tiktoken"
    path.write_bytes(CORRUPT[case])
    with pytest.raises(ConfigError) as e:
        Tiktoken(path=str(path)).build()
    assert str(path) in str(e.value)
    assert e.value.key == "tokenizer.path"


def test_a_pattern_that_is_no_regular_expression() -> None:
    with pytest.raises(ConfigError):
        Tiktoken(path=str(SHIPPED), pattern="(").build()


@pytest.mark.parametrize("number", [-1, 0, 1])
def test_too_few_special_tokens(number: int) -> None:
    with pytest.raises(ConfigError) as e:
        Tiktoken(num_special_tokens=number)
    assert e.value.key == "num_special_tokens"


def test_a_very_long_run_of_spaces(shipped: Tokenizer) -> None:
    """A regular expression that backtracks over it overflows its stack."""
    text = " " * 1_000_000 + "x"
    assert shipped.decode(shipped.encode(text)) == text


def corpus() -> list[str]:
    """A few hundred documents of made-up words, some beyond ASCII."""
    rng = random.Random(0)
    letters = "etaoinshrdlu\u00e9\u00df\u4f60\u597d\u0434\u0430"
    words = ["".join(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(200)]

    def document() -> str:
        tokens = (rng.choice([*words, "it's", "x1234", "(a, b):", "\n    ", "\t"]) for _ in range(50))
        return " ".join(tokens) + "\n"

    return [document() for _ in range(300)]


@pytest.fixture(scope="module")
def learned() -> list[bytes]:
    return tool.train_bpe(corpus(), 600)


def hugging_face(texts: Sequence[str], vocab_size: int) -> Callable[[str], list[tuple[bytes, int]]]:
    """Hugging Face's own byte-level BPE with Llama 3's split: text to (token, id)s."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet))
    to_byte = tool.byte_alphabet()

    def encode(text: str) -> list[tuple[bytes, int]]:
        encoded = bpe.encode(text)
        return [(bytes(to_byte[c] for c in token), i) for token, i in zip(encoded.tokens, encoded.ids)]

    return encode


def test_learned_ranks_are_bytes_then_merges(learned: list[bytes]) -> None:
    assert len(learned) == len(set(learned)) == 600
    assert learned[:256] == ALL_BYTES
    for rank, token in enumerate(learned[256:], 256):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        assert any(a in learned[:rank] and b in learned[:rank] for a, b in splits)


def test_same_ids_as_hugging_face(tmp_path: Path, learned: list[bytes]) -> None:
    """Single bytes have other numbers there (theirs are sorted by stand-in); every merge has the same."""
    tokenizer = Tiktoken(path=str(ranks_file(tmp_path / "a.tiktoken", learned))).build()
    reference = hugging_face(corpus(), 600)
    rng = random.Random(1)
    letters = "etaoinshrdlu\u00e9\u4f60\u0434 \n\t'1(:Z\U0001f600"
    unseen = ["".join(rng.choices(letters, k=rng.randint(0, 60))) for _ in range(300)]
    merged = 0
    for text in [*corpus(), *unseen]:
        pairs, ids = reference(text), tokenizer.encode(text)
        assert [learned[i] for i in ids] == [token for token, _ in pairs]
        assert [i for i in ids if i >= 256] == [i for _, i in pairs if i >= 256]
        merged += sum(i >= 256 for i in ids)
    assert merged > 10_000


def test_training_twice_gives_the_same_ranks(learned: list[bytes]) -> None:
    assert tool.train_bpe(corpus(), 600) == learned
    assert tool.train_bpe(corpus()[:-1], 600) != learned  # it is the text that decides


def test_a_smaller_vocabulary_is_the_beginning_of_a_larger(learned: list[bytes]) -> None:
    assert tool.train_bpe(corpus(), 400) == learned[:400]
    assert tool.train_bpe(["ab"], 10_000) == [*ALL_BYTES, b"ab"]


def test_byte_alphabet_is_hugging_faces() -> None:
    from tokenizers import pre_tokenizers

    alphabet = tool.byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["a"], alphabet["\u0120"], alphabet["\u010a"]) == (97, 32, 10)


def test_the_verb_writes_a_file_that_loads(
    tmp_path: Path, learned: list[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    for i, text in enumerate(corpus()):
        (tmp_path / f"{i:03}.txt").write_text(text)
    output = tmp_path / "out.tiktoken"
    argv = ["train", str(tmp_path / "*.txt"), "--vocab-size", "600", "--output", str(output)]
    assert tool.main(argv) == 0
    assert output.read_bytes() == lines(learned)
    said = f"{output}: 600 tokens (256 bytes, 344 merges) from {len(corpus())} files\n"
    assert capfd.readouterr().out == said  # of the library, too
    assert Tiktoken(path=str(output)).build().vocab_size == 602


def test_the_verb_refuses_fewer_ranks_than_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="256"):
        tool.main(["train", "--vocab-size", "255", "--output", str(tmp_path / "out")])
    assert list(tmp_path.glob("out*")) == []


def test_special_tokens_in_text_if_asked_for(shipped: Tokenizer) -> None:
    asked = Tiktoken(path=str(SHIPPED), special_tokens_in_text=True).build()
    text = f"a{EOS}b"
    assert shipped.eos not in shipped.encode(text)
    assert asked.encode(text) == [*shipped.encode("a"), shipped.eos, *shipped.encode("b")]
    assert asked.encode("a b") == shipped.encode("a b")
    assert asked.fingerprint != shipped.fingerprint


@pytest.mark.parametrize("number", [24_999, 25_000, 25_001, 37_500, 50_001, 75_000])
def test_runs_are_cut_where_llama_3_cuts_them(shipped: Tokenizer, number: int) -> None:
    for run in (" " * number, "x" * number):
        text = f"a b {run} c"
        begin = 4 if run[0] == "x" else 3
        size = number if run[0] == "x" else number + 2  # with the spaces around
        cuts = [begin + end for end in range(25_000, size, 25_000)]
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None])]
        assert shipped.encode(text) == [i for piece in pieces for i in shipped.encode(piece)]
        assert len(pieces) == -(-size // 25_000)


def test_show_prints_each_token(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert tool.main(["show", "it's", "12345", f"--tokenizer.path={SHIPPED}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:-1]] == ["325", "904", "32", "5378", "4453"]
    assert "8,192 ids" in lines[0]
    assert lines[-1].startswith("5 tokens, 10 characters")
    assert tool.main(["show", "\u00f6 \u65e5"]) == 0  # bytes of characters
    printed = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()[3:-1]]
    assert printed == ["C3", "B6", "' '", "E6", "97", "A5"]
    with pytest.raises(ConfigError, match="did you mean 'show'"):
        tool.main(["sho"])
