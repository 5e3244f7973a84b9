"""Compares the tokenizer.json of an export with the tokenizer that a model was trained with, on a probe of
texts. The two may differ: tiktoken and the library `tokenizers` have different languages of regular
expressions, so a pattern may split text in two ways."""

from __future__ import annotations

from collections.abc import Iterator

from titanlite.config.component import ConfigError
from titanlite.tokenizers.base import Tokenizer

SAMPLES = 1000  # tokens of the vocabulary in the probe
TEXTS = (
    # numbers
    *("1", "12", "123", "1234", "12345678", "7919000", "3.14159", "0xFF", "1,000,000", "a1b22c333d4444"),
    # contractions and case
    *("it's they'LL I'd we\u2019ve 'tis", "don't'S", "'\u017f", "\u212a's", "HTTPServer snake_case"),
    # white space
    *(" ", "  ", "   a", "a   ", "a \n", "a\n", "end\n", "a\n\n\n b", "a\r\n\r\nb", "\t\ta\t", " \n \n "),
    *("a\u00a0\u3000b\u2028c", "a\x0bb\x0cc\x1cd\x1fe\x85f", "x\n$y\n^z"),
    # letters and marks of other scripts
    *("na\u00efve caf\u00e9 e\u0301\u0308", "\u00df\u1e9e\u0130\u0131 \u01c5", "\u0395\u03bb \u0416\u0436"),
    *("\u05d0\u05d1 \u0639\u0631\u0628\u064a \u0661\u0662", "\u0939\u093f\u0928\u094d \u0e44\u0e17\u0e22"),
    *("\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u65e5\u672c\u8a9e\u3067\u3059 \ud55c\uad6d\uc5b4"),
    # emoji, signs, control characters
    *(
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\u2167\u00bd\u00b2",
        "a!!!b ... --- /* x */ //",
    ),
    *("\ufeffa\u200bb\u00adc", "\x00\x01\x7f\x1b[0m", "f(x[0])->{'k': \"v\"};\n\n\treturn"),
    # what looks like a special token
    *("<|endoftext|>", "<s></s><unk>", "a<|x|>b[INST] <0x41>"),
)


def verified_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return tokenizer.hugging_face_files(). Raises ConfigError if the tokenizer.json gives a text of the
    probe other ids than the tokenizer. Without the library `tokenizers`, nothing is compared."""
    files = tokenizer.hugging_face_files()
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        return files
    key = "tokenizer.pattern" if hasattr(tokenizer.config, "pattern") else "tokenizer"
    advice = "write the regular expression in another way, or train without Hugging Face exports"
    try:
        library = Library.from_str(files["tokenizer.json"].decode())
    except Exception as e:  # the library has no exception class
        raise ConfigError(f"the library tokenizers cannot run this tokenizer: {e}; {advice}", key) from None
    # Names of special tokens in a text are special or plain, as in training.
    eos = library.id_to_token(tokenizer.eos) or ""
    library.encode_special_tokens = tokenizer.encode(eos) != [tokenizer.eos]
    for text in _probe(tokenizer):
        ours, theirs = tokenizer.encode(text), library.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            splits = [[tokenizer.decode([i]) for i in ids[:12]] for ids in (ours, theirs)]
            raise ConfigError(
                f"an export would split {text!r} into {splits[1]}, but training splits it into {splits[0]}: "
                f"the library tokenizers does not read the tokenizer in the same way; {advice}",
                key,
            )
    return files


def _probe(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts of many kinds, and texts made of tokens of the vocabulary: where a text is split shows only
    in tokens that the vocabulary has."""
    yield from TEXTS
    for i in range(0, tokenizer.vocab_size, max(tokenizer.vocab_size // SAMPLES, 1)):
        token = tokenizer.decode([i])
        yield f"{token}{token}{token}\n{token} \n\n {token}"
