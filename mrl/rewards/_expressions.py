# ruff: noqa: RUF001 -- this file maps characters that are not ASCII
r"""Parsing and comparison of short mathematical answers with math-verify.

math-verify (https://github.com/huggingface/Math-Verify) parses and compares. This file rewrites forms that math-verify
misreads (18 dollars, 42., 0.\overline{3}), and compares again where it rounds: to math-verify, 1/2^98 equals 1/2^99.
math-verify's time limits use signals and are off: this code runs in a worker process under the parent's time limit.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

import math_verify
import sympy  # type: ignore[import-untyped]
from math_verify.grader import get_pct_val, is_assignment_relation, take_last_relation

from mrl.rewards._numbers import SCALES, to_ascii

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the time limits that are off

MAX_BITS = 1 << 22
"""Largest integer that is computed, bits; larger powers and factorials are equal only if written the same way."""

_RELATIVE, _RELATIVE_OF_EXACT = 1e-3, 1e-20
_DECIMALS = 40

_SYMBOLS = {
    "∞": r"\infty ", "π": r"\pi ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "÷": r"\div ", "°": r"^\circ ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∅": r"\emptyset ", "√": r"\sqrt ", "θ": r"\theta ",
    "α": r"\alpha ", "β": r"\beta ", "ℝ": r"\mathbb{R}",
}  # fmt: skip
_SYMBOL = re.compile("|".join(_SYMBOLS))
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")
_WRAPPED = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$([^$]+)\$\$",
        r"(?<!\\)\$([^$]+)(?<!\\)\$",
        r"\\\((.+)\\\)",
        r"\\\[(.+)\\\]",
        r"`+([^`]+)`+",
        r"[\"']([^\"']+)[\"']",
        r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|boxed|fbox|mbox)\s*\{([^{}]*)\}",
    )
)
_ENDS = " \t\r\n,;?*"
_DOTS = re.compile(r"(?:\\\.|(?<!\.)\.)$")
_TEXT_AFTER = re.compile(r"(?<=[\d}])\s*\\(?:text(?:rm|bf|it)?|mathrm|mbox)\s*\{\s*([A-Za-z][^{}]*)\}(?=\s*(?:\^|$))")
_SPACE = re.compile(r"(?<!\\)\\[,;:!> ]|~|\\q?quad\b|\\(?:left|right)(?![a-zA-Z])")
_CURRENCY = re.compile(r"^([-+]?)\s*(?:\\?[$€£¥₹]|\\(?:pounds|euro)\b|USD|US\$)\s*(?=[-+]?[\d.])")
_TRAILING_CURRENCY = re.compile(r"(?<=\d)\s*(?:\\?[$€£¥₹]|USD|EUR)$")
_DEGREES = re.compile(r"(?<=[\d}])\s*(?:\^\s*\{?\s*\\circ\s*\}?|°)\s*[CF]?$")
_CJK_UNIT = re.compile(r"(?<=\d)\s*(?![百千万萬亿億])[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]+$")
_CJK_SCALE = re.compile(r"(?<=\d)\s*([百千万萬亿億])[\u4e00-\u9fff]*$")
_CJK_POWERS = {"百": 2, "千": 3, "万": 4, "萬": 4, "亿": 8, "億": 8}
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*(?:[eE]([-+]?\d{1,6})(?!\w)|[x*]\s*(10\s*\^))")
_MIXED = re.compile(r"(?<![\d.,/^_{])(\d+) (\d+)\s*/\s*(\d+)(?![\d/.])")
_REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))|\((\d+)\)(?!\s*[\d\\(]))")
_LETTER = re.compile(r"(?i:option|choice|answer)?\s*(?:\(([A-Z])\)|([A-Z])[).:]|([A-Z])$)\s*(.*)", re.DOTALL)
_SHORT_UNITS = (
    "cm|mm|km|nm|dm|kg|mg|ml|mL|kJ|kW|kWh|Hz|kmh|km/h|m/s|mph|ft|in|yd|mi|lbs?|oz|hrs?|h|s|min|sec|st|nd|rd|th|m|g|L"
)
_OTHER_LETTERS = re.compile(r"^(?:[,&/(\\]|and\b|or\b)|(?<![A-Za-z])[A-Z](?:[).:]|$)")
_QUANTITY = re.compile(
    r"(?P<amount>[-+]?\s?(?:\d[\d,]*(?:\.\d+)?(?: \d+)?(?:\s?/\s?\d+)?|\.\d+|\d*\s?\\[dt]?frac\s*\{\d+\}\s*\{\d+\}))"
    rf"(?:\s*(?:{_SHORT_UNITS})|\s+(?P<words>[A-Za-z][A-Za-z.'-]*(?: [A-Za-z.'-]+)*))"
    r"(?:\s?\^\s?\{?-?\d\}?)?(?:\s?(?:/|\bper\b)\s?[A-Za-z]+(?:\s?\^\s?\{?-?\d\}?)?)?"
)
_NO_UNIT = re.compile(
    r"(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|and|or|to|mod|choose|inf|infinity|percent|percentage|pct|times|over)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_]{2,}(?:[ '’-]+[^\W\d_]+)*")
_FUNCTIONS = re.compile(r"(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|arc)", re.IGNORECASE)
_SHORT_WORDS = {"yes", "no", "true", "false", "none", "all", "odd", "even", "up", "red", "sat", "sun", "one", "two"}
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi)\b)[A-Za-z]{2,}|\b[a-z]\b (?=[a-z]{2})")
_MAX_WORDS = 6
_MAX_DEPTH = 10
_IN_BRACKETS = re.compile(r"(?<![\w)}\]])[(\[]\s*([-+]?[\d.,]+|[A-Z])\s*[)\]]")


@dataclass(frozen=True)
class ParsedAnswer:
    """Parsed form of an answer.

    Attributes:
        text: Normalised text, see `_form`.
        words: Case-folded words, compared literally; "" for an expression.
        found: Parse result of math-verify, sympy expressions and their text; () if it is no expression.
    """

    text: str
    words: str
    found: tuple[Any, ...]

    def __bool__(self) -> bool:
        return bool(self.words or self.found)


@lru_cache(maxsize=4096)  # the samples of a prompt share their answer
def read(text: str) -> ParsedAnswer:
    r"""Parses the content of a box or of answer tags: an expression, optionally with a unit, or words."""
    form = _form(text)
    if letter := _letter(form):
        rest = letter[4].strip()
        own = tuple(_parse(rf"\boxed{{{letter[1] or letter[2] or letter[3]}}}"))
        return ParsedAnswer(form, "", (*own, *(read(rest).found if rest else ())))
    if words := _words(form):
        return ParsedAnswer(form, words, ())
    form = _without_unit(form)
    found = _parse(rf"\boxed{{{_latex(form)}}}") if form else []
    return ParsedAnswer(form, "", tuple(found) if any(not isinstance(one, str) for one in found) else ())


@lru_cache(maxsize=4096)
def read_prose(text: str) -> ParsedAnswer:
    """Parses a sentence: as one expression or quantity if possible, else its last expression, else its words."""
    form = _form(text)
    if _letter(form) or not _PROSE.search(form) or _without_unit(form) != form:
        return read(text)
    loose = _IN_BRACKETS.sub(r" \1 ", re.sub(r"[*`\"]|\\\$", " ", to_ascii(text)))
    found = _parse(_SYMBOL.sub(lambda one: _SYMBOLS[one[0]], loose))
    if any(not isinstance(one, str) for one in found):
        return ParsedAnswer(form, "", tuple(found))
    return read(text) if len(form.split()) <= _MAX_WORDS else ParsedAnswer(form, "", ())


def equal(gold: ParsedAnswer, answer: ParsedAnswer) -> bool:
    """Returns whether an answer equals the ground truth."""
    if gold.text and gold.text == answer.text:
        return True
    if gold.words or answer.words:
        return gold.words == answer.words
    pairs = [
        (one, other)
        for one in gold.found
        for other in answer.found
        if not isinstance(one, str) and not isinstance(other, str)
    ]
    return any(_is_equal(one, other) for one, other in pairs)


def _parse(text: str) -> list[Any]:
    if _depth(text) > _MAX_DEPTH:
        return []  # parsing time grows exponentially with the depth
    parsed: list[Any] = math_verify.parse(text, parsing_timeout=None)
    return parsed


def _letter(form: str) -> re.Match[str] | None:
    """Matches the letter of a choice and the text after it; None if there are several letters."""
    found = _LETTER.fullmatch(form)
    return None if found is None or _OTHER_LETTERS.search(found[4]) else found


def _depth(text: str) -> int:
    """Returns the nesting depth of brackets."""
    steps = [(char in "([{") - (char in ")]}") for char in text]
    return max(accumulate(steps), default=0)


def _form(text: str) -> str:
    """Normalises a text: ASCII where possible, without wrappers, LaTeX spaces, currency and a final full stop."""
    text = _ROOT.sub(r"\\sqrt{\1}", to_ascii(text.strip()))
    before = None
    while before != text:
        before = text
        text = _DOTS.sub("", text.strip(_ENDS)).strip(_ENDS)
        for wrapped in _WRAPPED:
            if found := wrapped.fullmatch(text):
                text = found[1].strip()
        text = text[1:].strip() if text.startswith("=") else text
    text = _TEXT_AFTER.sub(r" \1", to_ascii(_SPACE.sub(" ", text)).strip())
    text = _CJK_SCALE.sub(lambda found: rf" \times 10^{{{_CJK_POWERS[found[1]]}}}", _CJK_UNIT.sub("", text))
    text = _DEGREES.sub("", text)
    text = _TRAILING_CURRENCY.sub("", _CURRENCY.sub(r"\1", text))
    return " ".join(text.split())


def _latex(form: str) -> str:
    """Converts a normalised text into LaTeX that math-verify parses."""
    form = _SYMBOL.sub(lambda one: _SYMBOLS[one[0]], form)
    form = _REPEATING.sub(_repeating, form)
    form = _MIXED.sub(r"\1\\frac{\2}{\3}", form)
    form = _SCIENTIFIC.sub(
        lambda one: rf"{one[1]} \times 10^{{{one[2]}}}" if one[2] else rf"{one[1]} \times {one[3]}", form
    )
    return re.sub(r"(?<=[)\]}]) ?U ?(?=[(\[\\{])", r" \\cup ", form)


def _repeating(found: re.Match[str]) -> str:
    r"""Rewrites a repeating decimal such as 0.1\overline{6} as a fraction."""
    whole, fixed, period = found[1] or "0", found[2], found[3] or found[4] or found[5]
    value = Fraction(int(whole + fixed + period) - int(whole + fixed), (10 ** len(period) - 1) * 10 ** len(fixed))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _without_unit(form: str) -> str:
    """Removes the unit of a quantity such as 18 dollars, 5 km/h or 3 million people; returns other texts unchanged."""
    quantity = _QUANTITY.fullmatch(form)
    if quantity is None:
        return form
    words = quantity["words"]
    if words is None:
        return quantity["amount"]
    if scale := SCALES.get(words.split()[0].casefold()):
        return rf"{quantity['amount']} \times 10^{{{scale}}}"
    is_unit = (
        re.search("[A-Za-z]{3}", words) and re.search("[aeiouy]", words, re.IGNORECASE) and not _NO_UNIT.match(words)
    )
    return quantity["amount"] if is_unit else form


def _words(form: str) -> str:
    """Returns the case-folded words of a text; "" if it is an expression."""
    if not _WORD.fullmatch(form) or (form.isascii() and _FUNCTIONS.match(form)):
        return ""
    known = not form.isascii() or " " in form or form.casefold() in _SHORT_WORDS
    return form.casefold() if known or (len(form) >= 4 and re.search("[aeiouy]", form, re.IGNORECASE)) else ""


def _is_equal(gold: Any, answer: Any) -> bool:
    if max(_bits(gold), _bits(answer)) > MAX_BITS:
        return bool(gold == answer)
    exact = [_rational(one) for one in (gold, answer)]
    if None not in exact:
        return bool(exact[0] == exact[1])
    if not math_verify.verify(gold, answer, timeout_seconds=None):
        return False
    ours, theirs = _scalars(gold), _scalars(answer)
    return len(ours) != len(theirs) or all(map(_is_close, ours, theirs))


def _rational(expression: Any) -> sympy.Rational | None:
    """Returns the exact value of a rational expression; None for any other, and for a percentage."""
    if not isinstance(expression, sympy.Expr) or expression.free_symbols or get_pct_val(expression) is not None:
        return None
    value = expression.doit()
    return value if isinstance(value, sympy.Rational) else None


def _bits(part: Any) -> float:
    """Returns an upper bound of the size of the numbers in an expression's evaluation, bits."""
    if isinstance(part, sympy.Rational):
        return float(max(abs(part.p), part.q).bit_length())
    inner = [_bits(one) for one in getattr(part, "args", ())]
    if isinstance(part, sympy.Pow):
        power = abs(part.exp) if isinstance(part.exp, sympy.Integer) else 2 ** min(inner[1], 64)
        length = power if part.base.is_Add and part.free_symbols else inner[0]  # an expanded sum has `power` terms
        return float(length) * float(min(power, 1 << 64))
    if isinstance(part, sympy.exp):
        return 2 ** min(inner[0], 64) * 2.0
    if isinstance(part, (sympy.factorial, sympy.binomial, sympy.gamma)):
        return 2 ** min(inner[0], 64) * inner[0]
    return sum(inner, 1.0)


def _scalars(expression: Any) -> list[Any]:
    """Returns the numbers of an expression, set, interval, tuple or matrix, with fixed numbers for the variables."""
    if isinstance(expression, (sympy.MatrixBase, sympy.Tuple)):
        return [one for part in expression for one in _scalars(part)]
    if isinstance(expression, sympy.Interval):
        return [*_scalars(expression.start), *_scalars(expression.end)]
    if isinstance(expression, sympy.FiniteSet):
        inner = [one for part in expression.args for one in _scalars(part)]
        return sorted(inner, key=lambda one: sympy.re(one.doit().evalf()))
    if is_assignment_relation(expression):
        return _scalars(take_last_relation(expression).rhs)
    if not isinstance(expression, sympy.Expr):
        return []
    symbols = sorted(expression.free_symbols, key=str)
    return [expression.subs({one: sympy.Rational(place + 3, 7) for place, one in enumerate(symbols)})]


def _is_close(gold: Any, answer: Any) -> bool:
    """Returns whether two numbers that math-verify considers equal are: it rounds to six decimals."""
    values = [[one.doit() for one in (get_pct_val(value), value) if one is not None] for value in (gold, answer)]
    return any(_same_number(one, other) for one in values[0] for other in values[1])


def _same_number(one: Any, other: Any) -> bool:
    if isinstance(one, sympy.Rational) and isinstance(other, sympy.Rational):
        return bool(one == other)
    limit = _RELATIVE if one.has(sympy.Float) or other.has(sympy.Float) else _RELATIVE_OF_EXACT
    one, other = one.evalf(_DECIMALS), other.evalf(_DECIMALS)
    if not (one.is_number and other.is_number) or one.has(sympy.nan, sympy.zoo, sympy.oo):
        return True
    return bool(abs(one - other) <= limit * max(abs(one), abs(other)))
