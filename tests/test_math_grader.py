"""The math grader: which answer it takes from a response, what equals what, and hard cases in grader processes."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import latex2sympy2_extended
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_replay.tasks import math_grader
from megatron_replay.tasks.grader_pool import Grade, GraderOptions, GraderPool
from megatron_replay.tasks.math_grader import final_answer, gold_answer, grade, last_boxed
from tests.launch import ROOT

TIMEOUT = 4.0
# half a minute of parsing
STALL = r"\boxed{" + "(" * 60 + "3" + ")" * 60 + "}"
TOWER = r"\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool(GraderOptions("math-verify", workers=2, timeout=TIMEOUT), os.environ) as pool:
        yield pool


def item(answer: str, response: str) -> dict[str, Any]:
    return {"prompt": "", "response": response, "answer": answer, "extra": {}}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{3} and \boxed{4}", "4"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{\frac{1}{2}}}", r"\frac{1}{2}"),
        (r"{ \boxed{\{1\}}", r"\{1\}"),
        (r"\boxed {5}", "5"),
        (r"$\boxed 5$", "5"),
        (r"\fbox{6}", "6"),
        (r"\boxed{\boxed{7}}", r"\boxed{7}"),
        (r"\\boxed{8}", None),
        (r"\boxed{}", ""),
        (r"\boxed", None),
        ("no box", None),
    ],
)
def test_last_boxed(text: str, found: str | None) -> None:
    assert last_boxed(text) == found


@settings(deadline=None)
@given(st.text("{}\\ 1box", max_size=30), st.text("1x+ ", max_size=5), st.text("}\\ 1", max_size=10))
def test_a_box_is_found_whatever_stands_around_it(before: str, content: str, after: str) -> None:
    assert last_boxed(before + "\n" + r"\boxed{" + content + "}" + "\n" + after) == content


def test_a_hundred_thousand_open_boxes_are_one_pass() -> None:
    assert last_boxed(r"\boxed{1}" + r"\boxed{" * 100_000) == "1"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"Answer: 3, that is \boxed{4}", "4"),
        ("Answer: 3\nmore 5", "3"),
        ("Answer: 3\nAnswer: 4", "4"),
        (r"**Final Answer:** $\frac{1}{2}$.", r"\frac{1}{2}"),
        ("The final answer is: 7", "7"),
        ("an answer: 3 in the middle of a line, then 8", "8"),
        ("so 33, no 1,234.5", "1,234.5"),
        ("it costs $18.", "18"),
        ("3/4", "3/4"),
        ("about 75 %", "75 %"),
        ("x = -3", "-3"),
        ("9-3", "3"),
        ("x3", None),
        (".5", ".5"),
        (r"\frac{1}{2}", None),
        ("2^3", None),
        ("no number", None),
        (r"\boxed{ }", None),
        ("", None),
    ],
)
def test_final_answer(response: str, answer: str | None) -> None:
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    "answer", ["34", " 34. ", "$34$", "$$34$$", r"\(34\)", r"\[34\]", r"\boxed{34}", r"is \boxed{$34$}"]
)
def test_gold_in_plain_text_or_latex(answer: str) -> None:
    assert gold_answer(answer) == "34"
    assert gold_answer("$1$ and $2$") == "$1$ and $2$"


@pytest.mark.parametrize("answer", ["", " ", "$ $", r"\boxed{}"])
def test_a_blank_gold_answer(answer: str) -> None:
    with pytest.raises(ValueError, match="^answer must not be blank"):
        grade(**item(answer, "3"))


EQUAL = [
    ("34", r"\boxed{34}"),
    ("1/2", r"\boxed{\frac{2}{4}}"),
    (r"\frac12", r"so $\boxed{0.5}$"),
    ("0.333333333", r"\boxed{1/3}"),
    (r"$\frac{\sqrt{2}}{2}$", r"\boxed{\frac{1}{\sqrt 2}}"),
    (r"\{1,2,3\}", r"\boxed{3, 2, 1}"),
    (r"(-\infty,2)\cup(3,\infty)", r"\boxed{(3, \infty) \cup (-\infty, 2)}"),
    ("50\\%", r"\boxed{0.5}"),
    ("50%", r"\boxed{50}"),
    (r"5\text{ cm}", r"\boxed{5}"),
    ("5", r"\boxed{5 \mathrm{~cm}^2}"),
    (r"90^\circ", r"\boxed{90}"),
    ("1234", "the total is 1,234."),
    ("x=5", r"\boxed{5}"),
    ("n(n+1)/2", r"\boxed{\frac{n^2+n}{2}}"),
    (r"\text{(C)}", r"\boxed{C}"),
    ("\\$18.90", r"\boxed{18.9}"),
    ("3+4i", r"\boxed{4i+3}"),
    ("2^{10}", "Answer: 1024"),
    # one number, in the forms that numbers have
    ("1024", r"\boxed{2^{10}}"),
    ("3072", r"\boxed{3 \cdot 2^{10}}"),
    ("341.333333", r"\boxed{\frac{2^{10}}{3}}"),
    ("12000", r"\boxed{1.2 \times 10^4}"),
    ("0.001", r"\boxed{10^{-3}}"),
    ("2.5", r"\boxed{2\frac{1}{2}}"),
    ("5/2", r"\boxed{2 \frac12}"),
    ("-1/2", r"\boxed{-\frac12}"),
    ("0.03", r"\boxed{3\%}"),
    ("3", r"\boxed{\sqrt{9}}"),
    ("0.5", r"\boxed{\frac{0.25}{0.5}}"),
    ("5", r"\boxed{10/2}"),
    ("3.4641016151377544", r"\boxed{2\sqrt{3}}"),
    ("3.14159265", r"\boxed{\pi}"),
    ("0.693147181", r"\boxed{\ln 2}"),
    ("2.732051", r"\boxed{1+\sqrt{3}}"),
    ("413", r"\boxed{12 \cdot 34 + 5 = 413}"),
    ("55", r"\boxed{\binom{11}{2} = 55}"),
    ("7", r"\boxed{f(2)=7}"),
    ("3", r"\boxed{x \in \{3\}}"),
    # a gold answer that is no plain number may be worked out in either
    (r"12 \cdot 34 + 5", r"\boxed{413}"),
    (r"\binom{n}{2}", r"\boxed{\frac{n(n-1)}{2}}"),
    (r"1+\sqrt{3}", r"\boxed{\sqrt{3}+1}"),
]
DIFFERENT = [
    ("34", r"\boxed{35}"),
    ("-3", r"\boxed{3}"),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"),
    ("2", r"it is \frac{1}{2}"),
    (r"\{1,2,3\}", r"\boxed{\{1,2\}}"),
    ("[0,1)", r"\boxed{[0,1]}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    (r"\pi", r"\boxed{3.14}"),
    ("x^2+2x+1", r"\boxed{(x+2)^2}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 3 \end{pmatrix}}"),
    ("B", r"\boxed{A}"),
    ("3", r"\boxed{3} or \boxed{4}"),
    ("3", r"\boxed{3, 4}"),
    ("3", r"\boxed{###}"),
    ("3", ""),
    # the problem said again
    ("413", r"\boxed{12 \cdot 34 + 5}"),
    ("413", "Answer: 12*34+5"),
    ("413", r"\boxed{12 \cdot 34 + 5 = 0}"),
    ("413", r"\boxed{x = 12 \cdot 34 + 5}"),
    ("6", r"\boxed{2 \times 3}"),
    ("12", r"\boxed{\frac{12 \cdot 34}{34}}"),
    ("25", r"\boxed{3^2+4^2}"),
    ("5", r"\boxed{\sqrt{3^2+4^2}}"),
    ("385", r"\boxed{\sum_{k=1}^{10} k^2}"),
    ("6", r"\boxed{\prod_{k=1}^3 k}"),
    ("3", r"\boxed{\int_0^3 1 dx}"),
    ("1.5", r"\boxed{\int_0^{1.5} 1 dx}"),
    ("0", r"\boxed{\frac{d}{dx} 5}"),
    ("2", r"\boxed{\lim_{x\to 0} \frac{\sin 2x}{x}}"),
    ("55", r"\boxed{\binom{11}{2}}"),
    ("55", r"\boxed{{11 \choose 2}}"),
    ("24", r"\boxed{4!}"),
    ("4", r"\boxed{\gcd(12,20)}"),
    ("60", r"\boxed{\operatorname{lcm}(12,20)}"),
    ("2", r"\boxed{\max(1,2)}"),
    ("3", r"\boxed{\lfloor 3.7 \rfloor}"),
    ("3", r"\boxed{\log_2 8}"),
    ("1", r"\boxed{\sin(\pi/2)}"),
    ("3", r"\boxed{\begin{vmatrix}3&0\\0&1\end{vmatrix}}"),
    ("3", r"\boxed{\{1+2\}}"),
    ("50\\%", r"\boxed{\frac14 + \frac14}"),
    ("x=5", r"\boxed{2+3}"),
]


def test_equal_and_different_answers(pool: GraderPool) -> None:
    """From a thread: math-verify's own limits are alarms, which only a main thread can have."""
    found: list[Grade] = []
    asked = [item(*case) for case in EQUAL + DIFFERENT]
    thread = threading.Thread(target=lambda: found.extend(pool.grade(asked)))
    thread.start()
    thread.join()
    for case, got in zip(EQUAL + DIFFERENT, found, strict=True):
        assert got == Grade(1.0 if case in EQUAL else 0.0), case


def test_the_examples_of_the_page(pool: GraderPool) -> None:
    """docs/data.md lists groups of answers: each is equal to the first of its group, or different from it."""
    page = " ".join((ROOT / "docs" / "data.md").read_text(encoding="utf-8").split())
    for words, expected, least in (("Equal are, for example,", 1.0, 6), ("Different are", 0.0, 4)):
        listed = page.partition(words)[2].partition(". ")[0]
        groups = [re.findall(r"`([^`]+)`", group) for group in listed.split(";")]
        assert len(groups) >= least and all(len(group) > 1 for group in groups), listed
        cases = [(group[0], f"\\boxed{{{said}}}") for group in groups for said in group[1:]]
        for case, got in zip(cases, pool.grade([item(*case) for case in cases]), strict=True):
            assert got == Grade(expected), case


def test_hard_responses_are_judged_or_given_up_within_the_limit(pool: GraderPool) -> None:
    deep = r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}"
    found = pool.grade(
        [
            item("3", STALL),
            item("3", TOWER),
            item("9^{9^{9^{9}}}", TOWER),
            item("3", deep),
            item("3", "word " * 20_000 + r"\boxed{3}"),
            item("3", "(" * 100_000),
            item("3", r"\boxed{" + "7" * 100_000 + "}"),
            item("3", r"\boxed{3}"),
        ]
    )
    # who stalls the grader is wrong; equal text needs no computation
    assert (found[0].value, found[0].failure) == (0.0, "timeout")
    assert found[1] == Grade(0.0)
    assert found[2] == Grade(1.0)
    assert (found[3].value, found[3].failure) in ((0.0, "timeout"), (None, "error"))
    assert found[4] == Grade(1.0)
    assert found[5] == Grade(0.0)
    assert found[6].value == (None if found[6].failure == "error" else 0.0)
    assert found[7] == Grade(1.0)


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
def test_a_parser_short_of_memory_or_stack_is_no_wrong_answer(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("math_verify.parser.latex2sympy", short)
    monkeypatch.setattr(latex2sympy2_extended, "latex2sympy", short)
    with pytest.raises(error):
        grade(**item("3", r"\boxed{41+y}"))


def test_an_error_of_the_comparison_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise TypeError("cannot compare")

    monkeypatch.setattr("math_verify.grader.sympy_expr_eq", broken)
    with pytest.raises(TypeError, match="^cannot compare"):
        grade(**item("3", r"\boxed{4}"))


def test_the_grader_needs_no_package() -> None:
    """Grader processes load it by its path; whatever it imported of the package would bring torch along."""
    source = Path(math_grader.__file__).read_text(encoding="utf-8")
    assert "megatron_replay" not in source and "import torch" not in source
