"""The parsers, by tables of the ugly answers that models give."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling3.evals.answers import choice, last_choice, last_number, number, numeral

NUMBERS = [
    ("18", "18"),
    ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"),
    ("The answer is 5.", "5"),
    ("The answer is 10.\n", "10"),
    ("10..", "10"),
    ("1,234.50", "1234.5"),
    ("1234.5000 dollars.", "1234.5"),
    ("$1,234,567", "1234567"),
    (r"\$1{,}234", "1234"),
    (r"\boxed{1{,}234}", "1234"),
    (r"\boxed{1{,}234{,}567.25}", "1234567.25"),
    (r"$1,\!234$", "1234"),
    (r"1\,234 m", "1234"),
    ("1\u202f234\u202f567", "1234567"),
    ("1\u2009234", "1234"),
    ("1\u00a0234", "1234"),
    ("1 234", "234"),
    ("between 3, 4 and 5", "5"),
    ("3,4", "4"),
    ("1234,567", "567"),
    ("1,2345", "2345"),
    ("-3", "-3"),
    ("\u22123", "-3"),
    ("\uff0d3", "-3"),
    ("the change is -3.5 degrees", "-3.5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("$ 5", "5"),
    ("€18,", "18"),
    ("¥ 1,000", "1000"),
    ("+7", "7"),
    ("5-3", "3"),
    ("10 - 3", "3"),
    ("(2+1)-3", "3"),
    ("- 3 apples", "3"),
    ("= -3", "-3"),
    ("x=-3", "-3"),
    ("a 3-foot and a 12-foot pole", "12"),
    ("a 12-foot pole", "12"),
    ("50%", "50"),
    (r"50\%", "50"),
    ("12.5 %", "12.5"),
    ("18dollars", "18"),
    ("18 dollars.", "18"),
    ("18km/h", "18"),
    ("12 m^2", "12"),
    ("12 m^{2}", "12"),
    ("12 m²", "12"),
    ("5 g of CO2", "5"),
    ("x_1 = 4 and x_2", "4"),
    (".5", "0.5"),
    ("-.5", "-0.5"),
    ("007", "7"),
    ("0.0", "0"),
    ("-0", "0"),
    ("3/4", "0.75"),
    ("1/3", "1/3"),
    ("2/6 of it", "1/3"),
    ("-3/4.", "-0.75"),
    ("1 1/2 cups", "1.5"),
    ("5 60/2", "30"),
    ("60/2", "30"),
    ("5/0", "0"),
    ("on 12/25/2024", "2024"),
    (r"\frac{3}{4}", "0.75"),
    (r"-\dfrac{3}{4}", "-0.75"),
    (r"\frac12", "0.5"),
    (r"2\frac{1}{2}", "2.5"),
    ("½", "0.5"),
    ("1½ hours", "1.5"),
    ("1.5e3", "1500"),
    ("2E-2", "0.02"),
    ("version 1.2.3", "3"),
    ("at 10:30", "30"),
    ("７８", "78"),
    ("答案是18元。", "18"),
    ("答案是-18", "-18"),
    (r"\boxed{18}", "18"),
    (r"so \boxed{18}. Check: 9 × 2 = 18, and 7 + 2 = 9", "18"),
    (r"\boxed{5} and then \boxed{\text{\$6 each}}", "6"),
    (r"\boxed{7} then \boxed{none}", "7"),
    (r"\boxed{none}, 7", "7"),
    (r"\boxed{\frac{1}{3}}", "1/3"),
    (r"\boxed 5 of 6", "5"),
    (r"\boxed{-4", "-4"),
    (r"\text{so }3\times4=12", "12"),
    (r"\boxed{18 \text{ dollars}}", "18"),
    (r"$$\boxed{x = 5}$$", "5"),
    (r"The answer is $18$.", "18"),
    ("$18 - $3", "3"),
    ("18 eggs. I hope this helps! 😊", "18"),
    ("**42**", "42"),
    ("`42`", "42"),
    ("_42_", "42"),
    ("", None),
    ("no number at all.", None),
    ("eighteen", None),
    ("CO2", None),
    ("9" * 5000, None),
    ("3, then " + "9" * 5000, None),
    ("\x00 3 \ufffd", "3"),
    ("9.8 m s^{-2}", "9.8"),
    ("9.8 m s^-2", "9.8"),
    ("9.8 m s^{ -2 }.", "9.8"),
    (r"\boxed{9.8\,\text{m/s}^{-2}}", "9.8"),
    ("x_{-1} = 4, y_{12}", "4"),
    ("m^2-3", "3"),
    ("x^{-2}", None),
    ("10^{-3}", "0.001"),
    (r"\boxed{10^{-3}}", "0.001"),
    (r"3 \times 10^{8} m/s", "300000000"),
    ("1.5×10^-2", "0.015"),
    ("2^10", "2"),
    ("3 x 10^8m", "300000000"),
    ("10^2-3", "3"),
    (r"\boxed{- 5}", "-5"),
    (r"\boxed{–5}", "-5"),
    (r"\boxed{-\,5}", "-5"),
    (r"\boxed{x = - 5}", "-5"),
    (r"\boxed{$- 5$}", "-5"),
    ("the answer is –5", "-5"),
    ("pages 3–5", "5"),
    (r"\frac{-1}{2}", "-0.5"),
    (r"\frac{1}{-2}", "-0.5"),
    (r"\frac{3.5}{2}", "1.75"),
    (r"\frac{5}{0}", "0"),
    (r"is \frac12", "0.5"),
    (r"1\,\frac12", "1.5"),
    (r"1\ \frac{1}{2}", "1.5"),
    (r"\frac{" + "9" * 5000 + "}{2}", "2"),
    ("1 / 2", "0.5"),
    ("1 1 / 2", "1.5"),
    ("3 / 4 / 2024", "2024"),
    ("10,0000", "100000"),
    ("12,0500,0000", "1205000000"),
    ("in 1990,2000", "2000"),
    ("1.000.000", "1000000"),
    ("It costs 1.000.000.", "1000000"),
    ("USD18", "18"),
    ("-USD18", "-18"),
    ("US$18", "18"),
    ("Rs50", "50"),
    ("Rs.50", "50"),
    ("Rs. 50", "50"),
    ("RM50", "50"),
    ("FORM50", None),
]


@pytest.mark.parametrize(("text", "expected"), NUMBERS, ids=range(len(NUMBERS)))
def test_last_number(text, expected):
    assert number(text) == expected


def test_equal_numbers_are_equal_however_written():
    spellings = ("1234.5", "1,234.50", r"\boxed{1{,}234.500}", "$1,234.5", "2469/2", "1.2345e3")
    assert {last_number(text) for text in spellings} == {Fraction(2469, 2)}


@given(value=st.fractions(max_denominator=10**6))
def test_a_numeral_is_read_as_its_value(value):
    assert last_number(numeral(value)) == value
    assert last_number(f"the answer is {numeral(value)}.") == value


@given(whole=st.integers(0, 10**12), cents=st.integers(0, 99), negative=st.booleans())
def test_commas_and_cents(whole, cents, negative):
    value = (Fraction(whole) + Fraction(cents, 100)) * (-1 if negative else 1)
    assert last_number(f"So: {'-' if negative else ''}${whole:,}.{cents:02d}.") == value


@given(text=st.text())
def test_any_text_has_a_number_or_none(text):
    found = number(text)
    assert found is None or last_number(found) == last_number(text)


CHOICES = [
    ("The answer is (C).", "C"),
    ("the answer is C", "C"),
    ("The answer is: C", "C"),
    ("Answer: C", "C"),
    ("**Answer:** C", "C"),
    ("**Answer: (C)**", "C"),
    ("Answer: option C", "C"),
    ("ANSWER: J.", "J"),
    ("The correct answer is **D**.", "D"),
    ("The correct option is B.", "B"),
    ("the answer is (c)", "C"),
    ("answer: c", "C"),
    ("the answer is a matter of taste: (D)", "D"),
    ("The answer is A because of friction.", "A"),
    ("The answer is (C). Option A is wrong.", "C"),
    ("The answer is (A). No: the answer is (B).", "B"),
    ("The answer is not B but C", "C"),
    ("Option A is out, so option D.", "D"),
    (r"\boxed{C}", "C"),
    (r"$\boxed{\text{(E)}}$", "E"),
    (r"\boxed{\mathrm{F}}", "F"),
    (r"\boxed{c}", "C"),
    (r"\boxed{G. 12 m}", "G"),
    (r"The answer is (A) ... \boxed{B}", "B"),
    (r"\boxed{12}, so the answer is (H)", "H"),
    (r"The answer is $\boxed{D}$", "D"),
    ("Answer: $C$", "C"),
    ("（Ｃ）", "C"),
    ("答案：C", "C"),
    ("C", "C"),
    ("(I)", "I"),
    ("I", "I"),
    ("C.", "C"),
    ("It is B, I think.", "B"),
    ("B. A car needs fuel", "B"),
    ("(B) A car needs fuel", "B"),
    ("B, as I'd say", "B"),
    ("Of B and D, only D", "D"),
    ("A", "A"),
    ("It must be A.", "A"),
    (r"\boxed{a + b}, so (D)", "D"),
    (r"\boxed{C = 5}. The answer is (B).", "B"),
    (r"\boxed{(c)}", "C"),
    ("Answer: E = mc^2, that is (F)", "F"),
    ("The answer is I think B", "B"),
    ("the answer is I.", "I"),
    ("_D_", "D"),
    ("E_1 and D^2 give (H)", "H"),
    ("(C) is the correct answer.", "C"),
    ("Answer: C - as friction is small", "C"),
    ("the answer is 'C'", "C"),
    ("Answer: ‘C’.", "C"),
    ("Answer: “C”", "C"),
    ("'C'", "C"),
    ("<answer>C</answer>", "C"),
    ("Not B. <answer>\nC\n</answer>, as D is wrong", "C"),
    ("The answer is <C>", "C"),
    ("<b>C</b>", "C"),
    ("The answer is A, a good choice", "A"),
    ("The answer is A. It is I who say so", "A"),
    ("Answer: I don't know", None),
    ("The answer is I cannot determine", None),
    ("Answer: A good choice", None),
    ("A man walks", None),
    ("I do not know", None),
    ("The answer is K", None),
    ("An X-ray, T-shirt, CD", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "expected"), CHOICES, ids=range(len(CHOICES)))
def test_last_choice(text, expected):
    assert choice(text) == expected


def test_only_the_letters_asked_for_count():
    assert last_choice("Answer: E", "ABCD") is None
    assert last_choice("B or E", "ABCD") == "B"


@given(text=st.text(alphabet="ABCJKaij()[]{}.,: \n'*$-answeris\\boxed"))
def test_any_text_has_a_choice_or_none(text):
    assert choice(text) in {None, *"ABCDEFGHIJ"}


@pytest.mark.parametrize(
    "text",
    [
        "answer" + "\n" * 50_000,
        "\\boxed{" * 20_000,
        "-" * 50_000,
        "1 " * 50_000,
        "1," * 50_000,
        "the answer is " * 9_000,
    ],
    ids=["blank lines", "boxes", "signs", "numbers", "commas", "phrases"],
)
def test_a_model_that_repeats_itself_is_soon_read(text):
    """In seconds at most: a pattern that went back over what it has read would take hours for the first of these."""
    assert number(text) in (None, "1")
    assert choice(text) is None
