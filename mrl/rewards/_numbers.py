# ruff: noqa: RUF001 -- this file maps characters that are not ASCII
r"""Parsing of written numbers: digits and signs of any script, separators, fractions, powers of ten.

Used by `numeric`, `math` and judges. Imports no torch.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

_MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe58\ufe63\uff0d"  # hyphens, figure and en dash, minus, small and full-width
_SPACES = "\u00a0\u2002\u2003\u2004\u2005\u2007\u2008\u2009\u200a\u202f\u3000"
_NOTHING = "\u200b\u200c\u200d\u200e\u200f\u2060\ufeff\u00ad"
_OTHERS: dict[str, str] = {
    **dict.fromkeys("。｡", ". "), "、": ", ", **dict.fromkeys("⁄∕", "/"), **dict.fromkeys("×✕✖", r"\times "),
    **dict.fromkeys("·⋅∙", "*"), **dict.fromkeys("“”„「」", '"'), **dict.fromkeys("‘’′", "'"),
}  # fmt: skip
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_VULGAR = re.compile(r"(\d?)\s?([¼½¾⅐-⅞↉])")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_EM_DASH = re.compile(r"(?<!\S)—(?=[\d.$])")
_GROUPS = re.compile(rf"(?<=\d)(?:[{_SPACES}]|\\[,!;: ]|\{{,\}}(?:\\!)?|,\s?\\!|[_'])(?=\d{{3}}(?!\d))")
_SPACED = re.compile(r"(?<![\d.,/^_])[1-9]\d{0,2}(?: \d{3})+(?![\d/])", re.ASCII)
_FRACTION = re.compile(r"(\d?)\\[dtc]?frac\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*([\d.,]+)\s*\}|(\d))")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    # not the exponent of a unit, as in 5 m^2
    r"(?<![\d^])(?<!\^\{)(?<!\^[-+(])(?<!\^\{[-+])(?<![\w)]\*\*)(?<![\w)]\*\*[-+(])"
    rf"(?:(?P<whole>\d+) (?=\d+/\d))?(?P<digits>{_DIGITS})"
    r"(?:[eE](?P<e>[-+]?\d{1,6})(?!\w)"
    r"|\s{0,2}(?:x|\*|\\times|\\cdot)\s{0,2}10\s?(?:\^|\*\*)\s?[{(]?(?P<ten>[-+]?\d{1,6})[})]?)?"
    r"(?:\s?(?:\^|\*\*)\s?[{(]?(?P<power>[-+]?\d{1,6})[})]?)?"
    rf"(?:\s?/\s?(?P<below>{_DIGITS}))?"
    r"(?:\s(?P<scale>hundred|thousand|million|billion|trillion)\b)?(?P<percent>\s?\\?%|\s{1,2}percent\b)?",
    re.ASCII,
)
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten by their names."""

_SIGN = re.compile(r"([-+])(\s*)(?:\\?[$€£¥₹]\s?)?[-+]?$")
_SIGN_AFTER_CURRENCY = re.compile(r"[$€£¥₹]\s?([-+])$")
_BEFORE_MINUS = re.compile(
    r"(?:[=:(\[{,<>~*|$]|\b(?:is|are|be|was|to|of|equals?|gives?|get|yields?))\s*$", re.IGNORECASE
)
_LOOK_BACK_CHARS = 40


@dataclass(frozen=True)
class WrittenNumber:
    """A number in a text.

    Attributes:
        value: Number before a percent sign: 50 for "50%".
        percent: True if a percent sign follows.
    """

    value: float
    percent: bool

    @property
    def values(self) -> tuple[float, ...]:
        """Possible values: 50 and 0.5 for "50%"."""
        return (self.value, self.value / 100) if self.percent else (self.value,)


def to_ascii(text: str) -> str:
    r"""Returns a text with digits, signs and punctuation in ASCII, and commas as the only separators of thousands.

    Full-width forms, digits of other scripts, the minus sign and dashes, raised digits (as ^2), typographic quotes and
    spaces; "1\,000", "1{,}000" and "1'000" become "1000". Letters stay as they are.
    """
    if not text.isascii():
        text = _EM_DASH.sub("-", text)
        text = _RAISED.sub(lambda found: "^{" + unicodedata.normalize("NFKC", found[0]) + "}", text)
        text = _VULGAR.sub(lambda found: f"{found[1]}{' ' if found[1] else ''}{_fraction(found[2])}", text)
    text = _SPACED.sub(lambda found: found[0].replace(" ", ""), _GROUPS.sub("", text))
    return text if text.isascii() else _NOT_ASCII.sub(lambda found: _ascii(found[0]), text)


@lru_cache(maxsize=4096)
def _ascii(char: str) -> str:
    if char in _MINUS:
        return "-"
    if char in _SPACES:
        return " "
    if char in _NOTHING:
        return ""
    if char in _OTHERS:
        return _OTHERS[char]
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    return chr(ord(char) - 0xFEE0) if "\uff01" <= char <= "\uff5e" else char


def _fraction(char: str) -> str:
    return unicodedata.normalize("NFKC", char).replace("⁄", "/")


def last_number(text: str) -> WrittenNumber | None:
    """Returns the last number in a text; None if there is none, or if it is not finite."""
    text = _FRACTION.sub(_inline, to_ascii(text))
    last = None
    for found in _NUMBER.finditer(text):
        last = found
    if last is None:
        return None
    try:
        value = _value(last, after_slash=text[: last.start()].endswith("/"))
    except (OverflowError, ZeroDivisionError):
        return None
    if not math.isfinite(value):
        return None
    return WrittenNumber(-value if _is_negative(text, last.start()) else value, last["percent"] is not None)


def _inline(found: re.Match[str]) -> str:
    r"""Rewrites 2\frac{1}{3} as 2 1/3."""
    above, below = found[2] or found[3], found[4] or found[5]
    return f"{found[1]} {above}/{below}" if found[1] else f"{above}/{below}"


def _value(found: re.Match[str], *, after_slash: bool) -> float:
    value, below = _float(found["digits"]), found["below"]
    if below is not None and after_slash:
        return _float(below)  # the year of 3/4/2024
    exponent = found["e"] or found["ten"]
    if exponent is not None:
        value = float(f"{found['digits'].replace(',', '')}e{int(exponent)}")
    if found["power"] is not None:
        value = float(value ** int(found["power"]))
    if below is not None:
        value /= _float(below)
    value += int(found["whole"] or 0)
    return value * 10 ** SCALES[found["scale"]] if found["scale"] else value


def _float(digits: str) -> float:
    return float(digits.replace(",", ""))


def _is_negative(text: str, start: int) -> bool:
    """Returns whether the sign before a number is its minus: not a dash, a bullet of a list or a binary minus."""
    before = text[max(0, start - _LOOK_BACK_CHARS) : start]
    if inner := _SIGN_AFTER_CURRENCY.search(before):
        return inner[1] == "-"
    sign = _SIGN.search(before)
    if sign is None or sign[1] == "+":
        return False
    above = before[: sign.start()]
    if not sign[2]:
        return not re.search(r"[\w.)\]}%]$", above)
    if not above.strip() or above.rstrip(" \t").endswith("\n"):
        return "\n" not in text.strip()  # else the bullet of a list
    return bool(_BEFORE_MINUS.search(above))
