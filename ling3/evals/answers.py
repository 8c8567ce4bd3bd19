"""Extracts the answer from a text: its last number, or its last choice. Numbers are exact fractions, never floats."""

import decimal
import math
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

LETTERS = "ABCDEFGHIJ"
"""The choices of MMLU-Pro."""
MOST_DIGITS = 1000
"""Longer runs of digits are not numbers: the model repeats itself."""
MOST_PLACES = 10 * MOST_DIGITS
"""More digits than a decimal has whose numerator and denominator are numbers of a text."""
MOST_BOXES = 16
"""The most boxes that are read, from the last one back."""

NUMBER = re.compile(
    r"""
    (?<![A-Za-z0-9])                          # not the 2 of CO2
    (?P<sign>(?<![)\]}%.])[-+])?              # a sign, where it is no hyphen and takes nothing away
    (?:[$€£¥₹][ ]?(?P<inner>[-+])?)?          # $18, -$18, $-18
    (?:
        (?<![./,])(?<!/[ ])(?:(?P<units>[0-9]+)[ ])?
        (?P<over>[0-9]+)(?:/|[ ]/[ ])(?P<under>0*[1-9][0-9]*)(?![0-9]|[ ]?/|[.,][0-9])
      | (?P<dotted>[0-9]{1,3}(?:\.[0-9]{3}){2,})(?![0-9]|\.[0-9])
      | (?P<whole>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,4},0[0-9]{3}(?:,[0-9]{4})*)(?![0-9])|[0-9]+)
        (?P<decimals>\.[0-9]+)?(?P<power>[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?
      | (?P<bare>\.[0-9]+)
    )
    """,
    re.VERBOSE,
)

FULL_WIDTH = {ord("０") + i: str(i) for i in range(10)}
PLAIN = str.maketrans(
    {**FULL_WIDTH, "−": "-", "－": "-", "﹣": "-", "＄": "$", "￥": "¥", "⁄": "/", "．": ".", "–": "-"}
)
PLAIN_LETTERS = str.maketrans(
    {chr(ord("Ａ") + i): chr(ord("A") + i) for i in range(26)} | {"（": "(", "）": ")", "：": ":"}
)
# Thousands separators besides the comma: LaTeX's spaces and commas, and non-breaking spaces.
THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,;:!]|,\{\}|[\u00a0\u2007\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
PART = r"\{ ?([-+]?[0-9]+(?:\.[0-9]+)?) ?\}"
FRACTION = re.compile(
    rf"(?P<before>[0-9]?)(?P<gap>(?:\\[,;:! ]|[ ~]){{0,3}})\\[dtc]?frac ?(?:{PART} ?{PART}|([0-9])([0-9]))"
)
VULGAR = re.compile("(?P<before>[0-9]?)(?P<character>[¼-¾⅐-⅞])")

# 3 \times 10^{8}: only powers of ten are computed.
SCIENTIFIC = re.compile(
    r"(?:(?P<before>[0-9]) ?(?:[×*x]|\\times|\\cdot) ?|(?<![A-Za-z0-9.,]))10 ?"
    r"\^ ?(?:\{ ?(-?[0-9]{1,3}) ?\}|(-?[0-9]{1,3})(?![0-9]))"
)
SCRIPT = re.compile(r"(?:\^|(?<=[A-Za-z0-9)}])_) ?(?:\{[^{}]*\}|[-+]?[0-9]+)")
"""Exponents and subscripts."""
CURRENCY = re.compile(
    r"(?<![A-Za-z])(?:(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CAD|AUD|SGD|HKD|MYR|RM|Rp)(?=[0-9])|Rs\.?(?=[0-9])|US(?=\$))"
)
BOXED_MINUS = re.compile(r"(?:^|=)[\s$]*-(?:\s|\\[,;:! ])*")
"""A minus before a box's number, even with space after it: in a box it is not the hyphen of a list."""

BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
STYLE = re.compile(r"\\(?:text|mathrm|mathbf|mathit|mathsf)[a-z]*\s*(?=\{)|[*`]")

ANSWER_TAG = re.compile(r"<answer>", re.IGNORECASE)
TAG = re.compile(r"</?(?:[biup]|[a-z]{2,10})>")
CONNECTIVES = "and|as|because|but|by|for|from|given|in|is|not|or|since|so|when|where|which|with"
"""Words that may follow "A" if it is a choice and not an article."""

Parser = Callable[[str], str | None]
"""A function from a text to its answer in canonical spelling, or to None if it has none."""


def last_number(text: str) -> Fraction | None:
    r"""The value of the last number in `text`, or None. The last `\boxed{}` with a number takes precedence.

    `1,234.50`, `1{,}234.5` and `1 234.5` with an unbreakable space are one number, as are `1.234.567` and `12,0500`
    (grouped by ten thousands). So are `3/4`, `3 / 4`, `\frac{3}{4}` and `¾`, and `1 1/2` is a mixed number; a date such
    as 3/4/2024 is three numbers. Currency and units are skipped, also `%` (`50%` is 50), and so are exponents,
    subscripts and the digits of a name (`m^2`, `s^{-2}`, `x_1`, `CO2`). Powers of ten are computed (`10^{-3}` is 0.001,
    `3 \times 10^8` is 300000000), others are not (`2^10` is 2). Numbers in words are not read, and a comma is never a
    decimal point. In a box, space may follow a minus (`\boxed{- 5}`); elsewhere such a hyphen begins a list item.
    """
    for box in reversed(_boxes(text)):
        value = _last(_numbers(BOXED_MINUS.sub(_tight, box.translate(PLAIN))))
        if value is not None:
            return value
    return _last(_numbers(text))


def _numbers(text: str) -> list[Fraction | None]:
    """The values of all numbers in order, with None for one of too many digits."""
    text = CURRENCY.sub("$", text.translate(PLAIN).replace(r"\$", "$").replace(r"\%", "%")).replace("$$", "$")
    text = VULGAR.sub(_spelled, FRACTION.sub(_as_slash, text))
    # The brace that is left marks a minus after it as a subtraction, not a sign.
    text = SCRIPT.sub("}", SCIENTIFIC.sub(_with_e, text))
    text = re.sub(r"\\[a-zA-Z]+", " ", THOUSANDS.sub(",", text))
    return [_value(match) if len(match[0]) <= MOST_DIGITS else None for match in NUMBER.finditer(text)]


def _last(values: list[Fraction | None]) -> Fraction | None:
    return values[-1] if values else None


def _tight(match: re.Match[str]) -> str:
    return f"{match[0][:1] if match[0][0] == '=' else ''}-"


def _with_e(match: re.Match[str]) -> str:
    return f"{match['before'] or '1'}e{match[2] or match[3]}}}"


def _value(match: re.Match[str]) -> Fraction:
    over, under = match["over"], match["under"]
    if over:
        value = Fraction(int(over), int(under))
        if match["units"]:
            # A number before an improper fraction does not belong to it: this is no mixed number.
            value += int(match["units"]) if value < 1 else 0
    elif match["dotted"]:
        value = Fraction(match["dotted"].replace(".", ""))
    else:
        value = Fraction("".join(match[part] or "" for part in ("whole", "decimals", "power", "bare")).replace(",", ""))
    return -value if "-" in (match["sign"], match["inner"]) else value


def _as_slash(match: re.Match[str]) -> str:
    if len(match[0]) > MOST_DIGITS:
        return match[0]
    over, under = Fraction(match[3] or match[5]), Fraction(match[4] or match[6])
    scale = math.lcm(over.denominator, under.denominator) * (-1 if under < 0 else 1)
    return f"{match['before']}{' ' if match['before'] or match['gap'] else ''}{over * scale}/{under * scale}"


def _spelled(match: re.Match[str]) -> str:
    spelled = unicodedata.normalize("NFKC", match["character"]).replace("⁄", "/")
    return f"{match['before']}{' ' if match['before'] else ''}{spelled}"


def numeral(value: Fraction) -> str:
    """The canonical spelling: a decimal such as `1234.5` if it terminates, else a fraction such as `1/3`."""
    with decimal.localcontext() as exact:
        exact.prec, exact.traps[decimal.Inexact] = MOST_PLACES, True
        try:
            return f"{decimal.Decimal(value.numerator) / value.denominator:f}"
        except decimal.Inexact:
            return str(value)


def number(text: str) -> str | None:
    """The parser for numbers: `last_number`, spelled as `numeral` does."""
    value = last_number(text)
    return None if value is None else numeral(value)


def last_choice(text: str, letters: str = LETTERS) -> str | None:
    r"""The choice that `text` makes, one of `letters`, or None.

    The first of these that is found: the last `\boxed{C}`; the last "the answer is (C)", "Answer: C", "the correct
    option is C"; the last "option C"; the last capital that stands alone. In the last case, A and I before another word
    are taken as article and pronoun; after "answer", A and I count if the next word can follow a choice ("A because
    …"). Lower-case letters count only after "answer", in parentheses or at the end of the line, and alone in a box. A
    letter of a formula (`C = 5`, `E_1`) is not a choice.
    """
    plain = ANSWER_TAG.sub(" answer: ", STYLE.sub("", text.translate(PLAIN_LETTERS)))
    plain = TAG.sub(" ", re.sub(rf"<([{letters}])>", r"(\1)", plain))
    either = f"[{letters}]"
    word = r"[A-Za-z0-9]|['’][A-Za-z]|-[A-Za-z]| (?<=I )(?:think|believe|guess|would)\b"
    formula = r"_[A-Za-z0-9{]|[ \t]*+[=+*/^<>]"
    alone = rf"({either})(?!{word}|{formula})"
    boxed = rf"[\W_]*+(?:(?i:option|choice)\W++)?(?:{alone}|({either.lower()})(?=[\W_]*+$))"
    for box in reversed(_boxes(plain)):
        match = re.match(boxed, box)
        if match:
            return (match[1] or match[2]).upper()

    # Possessive quantifiers (*+) avoid backtracking: after "answer", a model may write thousands of blank lines.
    subject = r"(?:answer|(?:correct|right|best)\s++(?:option|choice))\b"
    noun = r"(?:(?:the\s++)?(?:choice|option|letter)\b)?+[\s:\-=]*+"
    verb = r"(?:(?:is|would\s++be|must\s++be|should\s++be)\b)?+[\s:\-=]*+"
    given = rf"(?i:{subject}[\s:\-=]*+{noun}{verb}{noun})[\s({{\[\"'‘’“$]*+"
    small = rf"(?<=\()({either.lower()})(?=\))|({either.lower()})(?=[).\s]*(?:\n|$))"
    letter = rf"{alone}(?!(?<=[AI])[ \t]++(?!(?:{CONNECTIVES})\b)[a-z])"
    found = [*re.finditer(rf"{given}(?:{letter}|{small})", plain)]
    found = found or [*re.finditer(rf"(?i:\b(?:option|choice))[\s:({{]*{alone}", plain)]
    if found:
        return next(group for group in found[-1].groups() if group).upper()
    last = None
    for match in re.finditer(rf"(?<![A-Za-z0-9])(?<![A-Za-z]['’]){alone}", plain):
        if not (match[1] in "AI" and re.match(r"[ \t]+[A-Za-z]", plain[match.end() :])):
            last = match[1]
    return last


def choice(text: str) -> str | None:
    """The parser for MMLU-Pro's choices: `last_choice` among `LETTERS`."""
    return last_choice(text)


def only_number(text: str) -> str | None:
    """The number of a text, or None unless it has exactly one."""
    values = _numbers(text)
    return number(text) if len(values) == 1 else None


def leading_choice(text: str) -> str | None:
    """The letter that a text begins with, or None: `B`, `(B)`, `B. Vitamin A`."""
    match = re.match(rf"[\s({{\[\"'$*]*+([{LETTERS}])(?=\W*$|[)\]}}\"'*]*[.):,\]}}*])", text.translate(PLAIN_LETTERS))
    return match[1] if match else None


GOLD: dict[Parser, Parser] = {number: only_number, choice: leading_choice}
"""For each parser of model outputs, the strict parser of expected answers, which makes no guesses."""
PARSERS: dict[str, Parser] = {"number": number, "choice": choice}


def _boxes(text: str) -> list[str]:
    r"""The contents of the last few `\boxed{…}`, with nested braces; an unclosed box reaches to the text's end."""
    boxes = []
    for match in [*BOX.finditer(text)][-MOST_BOXES:]:
        if not match[1]:
            boxes.append(text[match.end() :].split(maxsplit=1)[0] if text[match.end() :].strip() else "")
            continue
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        boxes.append(text[match.end() : end - 1] if depth == 0 else text[match.end() :])
    return boxes
