"""Sentences in many scripts, for tests of tokenizers."""

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, 1,234 times in 2026.",
    "Le caf\xe9 na\xeff de l'\xe9t\xe9 co\xfbte 3,50 \u20ac \xe0 l'\xeele d'Ol\xe9ron.",
    "Die Stra\xdfe f\xfchrt \xfcber die gr\xf6\xdfte Br\xfccke der Stadt K\xf6ln.",
    "El ni\xf1o comi\xf3 pi\xf1a; \xbfqui\xe9n lo vio? \xa1Nadie!",
    (
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u041c\u043e\u0441\u043a\u0432"
        "\u0430 \u0431\u043e\u043b\u044c\u0448\u043e\u0439 \u0433\u043e\u0440\u043e\u0434 \u043d"
        "\u0430 \u0440\u0435\u043a\u0435."
    ),
    (
        "\u0397 \u03b3\u03bb\u03ce\u03c3\u03c3\u03b1 \u03b5\u03af\u03bd\u03b1\u03b9 \u03c0\u03b1"
        "\u03bb\u03b9\u03ac \u03ba\u03b1\u03b9 \u03cc\u03bc\u03bf\u03c1\u03c6\u03b7."
    ),
    (
        "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645\u060c \u0647"
        "\u0630\u0627 \u0646\u0635 \u0642\u0635\u064a\u0631."
    ),
    ("\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd, \u05d6\u05d4\u05d5 \u05de\u05e9\u05e4\u05d8."),
    (
        "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e, \u092f\u0939 "
        "\u090f\u0915 \u0935\u093e\u0915\u094d\u092f \u0939\u0948\u0964"
    ),
    (
        "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u5feb\u901f\u7684\u68d5\u8272\u72d0\u72f8\u8df3\u8fc7"
        "\u61d2\u72d7\u3002"
    ),
    (
        "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3002\u6771\u4eac\u306f\u5927\u304d\u306a\u90fd"
        "\u5e02\u3067\u3059\u3002\u30ab\u30bf\u30ab\u30ca\u3082\u3002"
    ),
    (
        "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4. \uc11c\uc6b8\uc740 \ud070 \ub3c4\uc2dc\uc785"
        "\ub2c8\ub2e4."
    ),
    (
        "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01 \u0e20\u0e32"
        "\u0e29\u0e32\u0e44\u0e17\u0e22"
    ),
    ("def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)  # \u03b8(\u03c6^n)"),
    ("\U0001f600 \U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2192 \u221e \u2260 \xbd"),
]
