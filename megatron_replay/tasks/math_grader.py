r"""The math grader: 1 where math-verify finds the answer of a response equal to the gold answer, else 0.

Grader processes load this file by its path, without the package, so nothing of the package is imported here.

The answer of a response is, by the first rule that applies:
1. the content of its last complete \boxed{...} or \fbox{...};
2. what follows the colon in its last line that begins with "Answer:" or "Final answer:";
3. its last number, unless that stands inside a LaTeX command ("\frac{1}{2}" alone is no number).
A response without an answer scores 0. The gold answer is plain text or LaTeX, bare, between dollars, or boxed.
Where it is a plain number the answer must be written as one number too: a problem that is said again, such as
"12 \cdot 34 + 5", equals its answer and is none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

# an escaped character is skipped: \{ opens no group
_BRACES = re.compile(r"\\(?:boxed|fbox)(?:\s*(?P<open>\{)|[ ]+(?P<bare>[^\s${}\\]+))|\\.|(?P<brace>[{}])", re.DOTALL)
_ANSWER_LINE = re.compile(
    r"^[ \t*#>]*(?:the )?(?:final )?answer(?: is)?[ \t]*:(?P<text>.+)$", re.IGNORECASE | re.MULTILINE
)
_NUMBER = re.compile(
    r"(?<!\w)(?:(?<![)\]}.])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?|(?<![\w.])-?\.\d+(?:\s?\\?%)?"
)

# the parser computes these, and leaves no trace of them in what it gives back
_COMPUTED = re.compile(r"\\[dt]?binom(?![a-zA-Z])|\\choose(?![a-zA-Z])|\\det(?![a-zA-Z])|matrix\}")


def last_boxed(text: str) -> str | None:
    """Content of the last box that closes, in one pass; of nested boxes, the outer one. None without a box."""
    found: str | None = None
    # the start of each open group's content where the group is a box, else None
    groups: list[int | None] = []
    for match in _BRACES.finditer(text):
        if match["open"]:
            groups.append(match.end())
        elif match["bare"]:
            found = match["bare"]
        elif match["brace"] == "{":
            groups.append(None)
        elif match["brace"] == "}" and groups:
            start = groups.pop()
            if start is not None:
                found = text[start : match.start()]
    return found


def final_answer(response: str) -> str | None:
    """The answer of a response by the rules above, or None."""
    boxed = last_boxed(response)
    if boxed is not None:
        return boxed.strip() or None
    lines = list(_ANSWER_LINE.finditer(response))
    if lines:
        return bare(lines[-1]["text"].replace("**", "")) or None
    numbers = list(_NUMBER.finditer(response))
    if not numbers:
        return None
    start, end = numbers[-1].span()
    inside_latex = response[max(0, start - 1) : start] in ("{", "^", "_", "\\") or response[end : end + 1] in ("}", "{")
    return None if inside_latex else numbers[-1].group()


def gold_answer(answer: str) -> str:
    """The gold answer without box and dollars. Raises ValueError for one that is blank."""
    boxed = last_boxed(answer)
    text = bare(answer if boxed is None else boxed)
    if not text:
        raise ValueError(f"answer must not be blank, got {answer!r}")
    return text


def bare(text: str) -> str:
    """`text` without white space, a final full stop, and one pair of math delimiters around it."""
    text = text.strip().removesuffix(".").strip()
    for begin, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text[len(begin) : len(text) - len(end)]
        if text.startswith(begin) and text.endswith(end) and begin not in inner:
            return inner.strip()
    return text


def grade(*, prompt: Any, response: str, answer: str, extra: Mapping[str, Any]) -> float:
    """1 for a response whose answer equals `answer`, else 0. An error of math-verify is raised, never a 0.

    math-verify's own limits are off: they are alarms, which work on a main thread alone. The process has a limit.
    """
    gold, said = gold_answer(answer), final_answer(response)
    if said is None:
        return 0.0
    if "".join(said.split()) == "".join(gold.split()):
        return 1.0
    if is_plain_number(gold) and not says_one_number(said, gold):
        return 0.0
    return float(equal(gold, parsed(said)))


def equal(gold: str, said: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(parsed(gold), said, timeout_seconds=None, raise_on_error=True))


def is_plain_number(gold: str) -> bool:
    """Whether it is an integer, a fraction, a decimal or a percentage, alone or as in x=5."""
    from sympy import Equality, Expr

    value = parsed(gold)[0] if parsed(gold) else gold
    value = value.rhs if isinstance(value, Equality) else value
    return isinstance(value, Expr) and all(x.is_Number or is_percent(x) for x in factors(value))


def says_one_number(said: str, gold: str) -> bool:
    """Whether an answer that may equal a plain number says a number, or the work that leads to one.

    Of an equation one side must be the number. A decimal may stand for what has no other closed form, such as \\ln 2 or
    1+\\sqrt{3}. What is no expression at all is left to the comparison.
    """
    from sympy import Equality, Expr, FiniteSet

    value = parsed(said)[0] if parsed(said) else said
    if _COMPUTED.search(said.rpartition("=")[2]):
        return False
    if isinstance(value, Expr):
        return is_one_number(value) or ("." in gold and is_irrational(value))
    if isinstance(value, FiniteSet):
        return all(is_one_number(x) for x in value)
    if isinstance(value, str) or not value.has(Equality):
        return True
    sides = [side for equation in value.atoms(Equality) for side in equation.args]
    # a set, as in x \in \{5\}
    sides += [x for side in sides if isinstance(side, FiniteSet) for x in side]
    return any(is_one_number(side) and equal(gold, [side]) for side in sides)


def is_one_number(value: Any) -> bool:
    """Whether it is one number as numbers are written: 5, -1/2, 0.5, 50%, 2\\sqrt{3}, 2\\pi, 2^{10}, 1.2 \\cdot 10^4.

    That is a product of at most one number, one power or root of a number, and one denominator.
    """
    from sympy import NumberSymbol, Pow

    found = {"number": 0, "power": 0, "denominator": 0}
    for x in factors(value):
        if x.is_Number:
            found["number"] += x != -1
        elif isinstance(x, Pow) and all(y.is_Number or isinstance(y, NumberSymbol) for y in x.args):
            found["denominator" if x.exp == -1 else "power"] += 1
        elif not isinstance(x, NumberSymbol) and not is_percent(x):
            return False
    return max(found.values()) <= 1


def is_irrational(value: Any) -> bool:
    """Whether something in it has no finite decimals, and nothing in it is an operator that was not carried out."""
    from sympy import Derivative, Integral, Limit, NumberSymbol, Pow, Product, Sum, exp, factorial, log
    from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

    if value.has(Integral, Sum, Product, Limit, Derivative, factorial):
        return False
    roots = any(not x.exp.is_integer for x in value.atoms(Pow))
    return roots or value.has(NumberSymbol, exp, log, TrigonometricFunction, InverseTrigonometricFunction)


def factors(value: Any) -> list[Any]:
    """Of a product, whatever is grouped in it; else the value alone."""
    from sympy import Mul

    return [x for part in value.args for x in factors(part)] if isinstance(value, Mul) else [value]


def is_percent(value: Any) -> bool:
    from sympy import Rational, UnevaluatedExpr

    return isinstance(value, UnevaluatedExpr) and value.args[0] == Rational(1, 100)


@lru_cache(maxsize=256)
def parsed(text: str) -> list[Any]:
    """What math-verify reads in one answer: an expression where it can, and its normalised text.

    Raises MemoryError or RecursionError where it stopped short of an expression for want of memory or stack.
    """
    from latex2sympy2_extended import latex2sympy
    from math_verify import LatexExtractionConfig, parse

    # it warns once that its limits are off
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    found: list[Any] = parse(f"\\boxed{{{text}}}", config, parsing_timeout=None, raise_on_error=True)
    if all(isinstance(x, str) for x in found):
        # parse() takes any exception for text that is no mathematics
        try:
            latex2sympy(found[-1] if found else text, is_real=True, convert_degrees=False, normalization_config=None)
        except (MemoryError, RecursionError):
            raise
        except Exception:
            return found
    return found
