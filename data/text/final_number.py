"""The number that an answer to a word problem ends with."""

from __future__ import annotations

import re
from decimal import Decimal, DivisionByZero, InvalidOperation
from itertools import pairwise
from unicodedata import normalize

_IS = "是为為得于於はがに은는이가"  # "is", "gives", or what marks a subject, written without a space
# A number in running text: optional sign (not the minus of 5-3, but that of 是-3, after a word for "is"), currency,
# thousands separators, decimals, exponent of ten. A full stop after it is not part of it.
_NUMBER = re.compile(
    rf"(?:(?:(?<![\w)%.])|(?<=[{_IS}]))[-−–](?![$€£][-−–]))?"
    r"[$€£]?(?:(?<=[$€£])[-−–])?"
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2}(?!\w))?|(?<![^\W_])(?<!\.)(?<![^\W\d]/)\.\d+)"
)
_ANSWER = r"(?:the )?(?:final )?answers?(?: is)?(?: \([^()\d\n]*\))?[ \t]*(?:[:=]|-(?= ))?"
_TITLE = r"[^\W\d_][^\d\n:=]{0,60}+[:=]"  # `Janet's earnings:`
_ORDINAL = re.compile(rf"[ \t*_]*(\d{{1,2}})[.)][ \t*_]+(?={_TITLE})")  # of `2. Total: 18`
_ASIDE = re.compile(  # a heading such as `Check:`, `Step 3: Verification`
    r"[^\w\n]*(?:(?:step \d+|double|sanity|final|quick|let['’]s)[-: ]+)*"
    r"(?:check(?:s|ing)?|verif\w+|notes?|proof|breakdown|summary)\b[^\w\n]*(?::|\n)",
    re.IGNORECASE,
)
_LEAD = re.compile(rf"#*[ \t*_]*(?:{_ANSWER}|(?P<title>{_TITLE})|[:=])?[\s*_`$\\{{\[]*", re.IGNORECASE)
_THOUSANDS = re.compile(
    r"(?<=\d)(?:\{,\}|,?\\[,!:; ]|[\u00a0\u2009\u202f'’])(?=\d{3}(?!\d))"
)  # LaTeX's, narrow spaces, and apostrophes
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.,]\d|\d|-[^\W\d])")  # 1 250 000, not 5 100-dollar bills
_LAKHS = re.compile(r"(?<![\d.,])\d{1,2}(?:,\d\d)+,\d{3}(?!,?\d)")  # 12,34,567
_UNIT_EXPONENT = re.compile(r"(?<=[^\W\d_]|[)}\]])(?:\^|_(?=\{?\d+\}?\b))(?:\{\d+\}|\d+)")  # of `m^2`; the 1 of `x_1`
_SQUARE = re.compile(r"(?<![^\W\d_])([cmk]?m|ft|in|yd)[23]\b")  # 18 cm2
_POWER = re.compile(r"(?<![\w.,^])(\d+(?:\.\d+)?) ?\^ ?(?:\{([1-9]\d?)\}|([1-9]\d?)(?!\d))")
_VULGAR = re.compile(r"(\d)? ?([¼½¾⅐-⅞])")
_MARK = re.compile(r"####|\\boxed(?=\{.*+\D*+\Z)")  # the box of the last line with a number
_EARLIER = re.compile(r"[^=;]*=[^=;]*?[,;] +(?=[$€£]?\d[^,;=]*=)")  # `16 - 3 = 13, ` before `13 * 2 = 26`
_MIXED = re.compile(r"(?<![\d./])(\d+) (\d+)/(\d*[1-9]\d*)(?![\d./]\d|\d)")  # 2 1/2
_LATEX_FRACTION = re.compile(r"(\d ?)?\\[dt]?frac ?\{?(\d+)\}?\{?(\d+)\}?")
_DIVIDED = re.compile(r" ?[/÷] ?")  # between the last two numbers of a text
_HEADING = re.compile(r"[.):][ \t]*[^\W\d]|[.)][ \t]+[*_`$\d]|\ufe0f?\u20e3")  # after the number of `#### 2. Total`
_OPERATORS = {"+": "+", "plus": "+", "-": "-", "−": "-", "–": "-", "minus": "-", "/": "/", "÷": "/", r"\div": "/"}
_OPERATORS |= dict.fromkeys(("*", "×", "·", "x", "X", "times", r"\times", r"\cdot"), "*")
_OPERATORS |= {"multiplied by": "*", "divided by": "/", "at": "*"}  # `9 eggs at $2`
_OPERATORS |= {"of": "of", "^": "^", "**": "^"}
_TOKEN = re.compile(
    rf"(?P<number>(?>{_NUMBER.pattern}))|(?P<equals>=>|->|→|[=≈]|(?:equals|is|gives|makes)\b)"
    r"|(?P<operator>\\times|\\div|\\cdot|\*\*|[+*×·÷−–^-]|/(?![^\W\d])|[xX](?=[\s$€£\d])"
    r"|(?:plus|minus|times|of|at|(?:multiplied|divided) by)\b)"
    r"|(?P<bracket>[()])"
)
_DECORATION = r"(?:boxed\{|\\text\{|[\s*_`$\\{}\[\]%€£])"
_WORD = r"[^\W\d_]++(?:_[^\W\d_]++)*+"
_BEFORE_A_NUMBER = re.compile(rf"{_DECORATION}*(?:(?:about|exactly|approximately) )?")
_AFTER_A_NUMBER = re.compile(  # `3 red apples`, `2 cups/day`
    rf"{_DECORATION}*+(?:/?{_WORD}(?:(?:{_DECORATION}++/?|/){_WORD}){{0,2}}{_DECORATION}*+)?"
)
_BEFORE = re.compile(r"(?:[ \t\r*_`${}]|\.{2,}|\.(?!\d))+")  # a number that stands alone; not the point of .5
_NAME = re.compile(r"[^\W\d][\w \t]*")  # the `x` of `x = 7`


def gsm8k_answer(text: str) -> Decimal | None:
    """The last number that `####` or the last line's `\\boxed` marks, else the last of the text; None for none.

    A number alone goes before others. Where `####` is a heading, a number with a title (`#### Total: 18`) counts only
    if no later heading but a check or a note has numbers.
    Of a marked equation it is the last side that is a number, of a sum without a result its value. Fractions and powers
    have their values; the exponent of a unit is no number, a comma is no decimal point, and a
    word of size is not read. Examples:
    "5 + 3 = 8\\n#### 1,234.50" → 1234.50; "#### 3 + 4 = 7" → 7; "#### 3 + 4" → 7; "She pays $-3." → -3; "It is 3/4."
    → 0.75; "on 1/2/2024" → 2024; "18 m^2" → 18; "2^3" → 8; "1.5 million" → 1.5.
    """
    text = _SPACED.sub(lambda found: found[0].replace(" ", ""), _THOUSANDS.sub(",", text))
    text = _SQUARE.sub(r"\1", _UNIT_EXPONENT.sub("", text))
    text = _POWER.sub(lambda found: f"{Decimal(found[1]) ** int(found[2] or found[3])}", text)
    text = _LAKHS.sub(lambda found: found[0].replace(",", ""), text)
    text = _VULGAR.sub(lambda found: f"{found[1] or ''} {normalize('NFKC', found[2]).replace('⁄', '/')}", text)
    text = _LATEX_FRACTION.sub(lambda found: f"{f'{found[1].strip()} ' if found[1] else ''}{found[2]}/{found[3]}", text)
    text = _MIXED.sub(lambda found: str(int(found[1]) + Decimal(found[2]) / Decimal(found[3])), text)
    parts = _MARK.split(text)[1:]
    plain = [_NUMBER.fullmatch(_alone(part.split("\n", 1)[0])) for part in parts]
    if official := [found[0] for found in plain if found]:  # `#### 18`, as references have it
        return _decimal(official[-1])
    parts = [
        part[found.end() :] if (found := _ORDINAL.match(part)) and int(found[1]) <= len(parts) else part
        for part in parts
    ]
    marked = [part for part in parts if _NUMBER.search(part) and not _ASIDE.match(part)]
    for part in reversed(marked):
        number, titled = _number_after_mark(part)
        if number is not None and (part is marked[-1] or not titled):
            return number
    numbers = list(_NUMBER.finditer(text))
    divided = [bool(_DIVIDED.fullmatch(text, a.end(), b.start())) for a, b in pairwise(numbers[-3:])]
    if divided[-1:] == [True] and divided[:-1] != [True]:  # no date
        return _value([numbers[-2][0], "/", numbers[-1][0]])
    return _decimal(numbers[-1][0]) if numbers else None


def _alone(line: str) -> str:
    """A line without what stands around a number that is all it says."""
    line = line.rstrip(" \t\r*_`$.{}")
    before = _BEFORE.match(line)
    return line[before.end() :] if before else line


def _number_after_mark(text: str) -> tuple[Decimal | None, bool]:
    """The number that the text after a mark begins with, and whether it has a title. None for words, and for headings:
    `2. Total` above more numbers, or `Solution:` above several lines of them."""
    lead = _LEAD.match(text)
    assert lead, "each part of it may be missing"
    titled = lead["title"] is not None
    line, *below = text[lead.end() :].split("\n", 1)
    while earlier := _EARLIER.match(line):
        line = line[earlier.end() :]
    sides = _sides(line)
    numbers = [side[0] for side in sides if len(side) == 1]
    more = below and _NUMBER.search(below[0])
    if more and len(sides) == 1 and numbers and (only := _NUMBER.match(line)) and _HEADING.match(line, only.end()):
        return None, titled
    if titled and "\n" in lead[0] and below and _NUMBER.search(below[0].split("\n", 1)[0]):
        return None, titled
    if numbers:
        return _decimal(numbers[-1]), titled
    return (_value(sides[-1]) if sides else None), titled


def _sides(line: str) -> list[list[str]]:
    """The sides of the equation that a line begins with, each number, operator, number, …: `3 + 4 = 7` has two."""
    sides: list[list[str]] = []
    side: list[str] = []
    end, brackets = 0, False
    named = _NAME.match(line)
    if named and (equals := _TOKEN.match(line, named.end())) and equals.group() == "=":
        end = equals.end()
    for token in _TOKEN.finditer(line, end):
        gap, kind, found = line[end : token.start()], token.lastgroup, token.group()
        wants_number = len(side) % 2 == 0
        if not (_BEFORE_A_NUMBER if wants_number else _AFTER_A_NUMBER).fullmatch(gap):
            break
        if kind == "bracket":
            if (found == "(") != wants_number:
                break
            brackets = True
        elif kind == "number":
            if not wants_number:
                if found[0] not in "-−–":  # two numbers in a row; `8 -3` is a difference
                    break
                side.append("-")
                found = found[1:]
            side.append(found)
        elif wants_number:  # an operator or `=` without a number before it
            break
        elif kind == "operator":
            spaced = line[token.start() - 1].isspace() or found not in "-–"  # 10-12 is a range
            side.append(_OPERATORS[found] if spaced else "to")
        else:
            sides.append(side)
            side = []
        end = token.end()
    if side and len(side) % 2 == 0:
        side.pop()  # an operator that no number follows
    if brackets and len(side) > 1:
        side = []  # of a value that is not computed here
    return [*sides, side] if side else sides


def _value(side: list[str]) -> Decimal | None:
    """The value of number, operator, number, …, products before sums; the first number if an operator is no such, None
    for a power."""
    terms = [_decimal(side[0])]
    try:
        for operator, number in zip(side[1::2], map(_decimal, side[2::2])):
            if operator == "*":
                terms[-1] *= number
            elif operator == "/":
                terms[-1] /= number
            elif operator in "+-":
                terms.append(number if operator == "+" else -number)
            else:
                return None if operator == "^" else terms[0]
    except (DivisionByZero, InvalidOperation):
        return None
    return sum(terms, Decimal(0))


def _decimal(number: str) -> Decimal:
    return Decimal(re.sub(r"[^\d.eE+-]", "", re.sub("[−–]", "-", number)))
