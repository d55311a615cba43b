"""The final number of an answer, in the forms that models and references write."""

import time
from decimal import Decimal

import pytest

from draft_heads.data.text.final_number import gsm8k_answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7\n#### 42", "42"),
        ("#### 1 then #### 2 then 3", "2"),
        ("#### $1,234.50.", "1234.50"),
        ("#### -7", "-7"),
        ("#### none, but 5 before", "5"),
        ("He has 18 apples and pays $20.", "20"),
        ("It costs -$3.50", "-3.50"),
        ("It costs $-3.50.", "-3.50"),
        ("x = −4", "-4"),
        ("10-7", "7"),
        ("8 - 3", "3"),
        ("1,234,567", "1234567"),
        ("1,000, then 2", "2"),
        ("about .5", "0.5"),
        ("5% of it", "5"),
        ("12,34", "34"),
        ("#### Step 2: Total\n7 + 5 = **12**", "12"),
        ("#### 2. Total\nThat is 12.", "12"),
        ("#### 1. **Eggs left**\n16 - 7 = 9\n\n#### 2. **Earnings**\n9 x 2 = 18\n\nShe makes $18 a day.", "18"),
        ("#### 2. $9 for each\n9 x 2 = 18", "18"),
        ("#### 2. 9 eggs\nThat is $18.", "18"),
        ("#### 2\ufe0f\u20e3 Earnings\n9 x 2 = 18", "18"),
        ("#### Solution:\n16 - 3 - 4 = 9\n9 * 2 = 18", "18"),
        ("#### Final result:\n$18\n\nThat is all.", "18"),
        ("#### Final answer:\n$18\n\nNote: 9 eggs", "18"),
        ("#### 5\n#### \U0001f389 18!", "18"),
        ("#### \u2705\ufe0f **18**\nfor 9 eggs", "18"),
        ("#### 42.**\nCheck: 6 x 7", "42"),
        ("#### 42. **Done**", "42"),
        ("#### **42**", "42"),
        ("#### 42.\nShe has 7 apples and 3 pears", "42"),
        ("#### 18.\n\nQuestion: Tom has 5 apples", "18"),
        ("#### The answer is 42\nNote 7", "42"),
        ("#### Answer: 42\nNote 7", "42"),
        ("#### \\boxed{42} since 7", "42"),
        ("#### -$7\nNote 8", "-7"),
        ("That is \\$1{,}234", "1234"),
        ("#### 3 + 4 = 7", "7"),
        ("#### 3+4=7", "7"),
        ("#### $3 + $4 = $7.\nNote 8", "7"),
        ("#### 3 apples + 4 apples = 7 apples", "7"),
        ("#### (3 + 4) × 2 = 14", "14"),
        ("#### 3 \\times 4 = \\boxed{12}", "12"),
        ("#### 3 plus 4 equals 7", "7"),
        ("#### 5% of 200 = 10", "10"),
        ("#### 10 - 2 = 8 - 1 = 7", "7"),
        ("#### 7 = 3 + 4", "7"),
        ("#### x = 7\nNote 8", "7"),
        ("#### **Answer: 3 + 4 = 7**\nNote 8", "7"),
        ("#### 3 + 4", "7"),
        ("#### 2 + 3 * 4", "14"),
        ("#### 8 -3", "5"),
        ("#### 1/2", "0.5"),
        ("#### 10-12 apples", "10"),
        ("#### 3 of 10", "3"),
        ("#### 42 - she has 3 left", "42"),
        ("#### 42 (6 + 1 = 7 boxes)", "42"),
        ("#### 18 because 3 × 6 = 19", "18"),
        ("#### 18 is more than 7", "18"),
        (r"\boxed{1\,000}", "1000"),
        (r"\boxed{1,\!000}", "1000"),
        (r"#### 1\,250", "1250"),
        ("#### 1{,}250", "1250"),
        ("It is 1 000.", "1000"),
        ("#### 1 000", "1000"),
        ("#### 12\u202f345\u202f678", "12345678"),
        ("in 2019 120 came", "120"),
        ("7 100 20", "20"),
        ("#### 42. She keeps 3 for herself.", "42"),
        ("#### 2. Total\n5 + 3 = 8", "8"),
        ("#### Total: $42\nx 7", "42"),
        ("#### Total cost = 42", "42"),
        ("#### = 42\n7", "42"),
        ("#### 2^3 = 8", "8"),
        ("#### 2 ** 3 = 8", "8"),
        ("#### 2 1/2", "2.5"),
        ("She needs 3 3/4 cups.", "3.75"),
        ("#### \u20135", "-5"),
        ("#### $\u22123", "-3"),
        ("10\u201312", "12"),
        ("3/4", "0.75"),
        ("The answer is 1/4.", "0.25"),
        ("So -18 / 6", "-3"),
        ("It is $\\frac{3}{4}$.", "0.75"),
        ("2\\dfrac{1}{2} cups", "2.5"),
        ("3/4 of 12 = 9", "9"),
        ("on 1/2/2024", "2024"),
        ("18e2", "1800"),
        ("#### 1.8E+3 metres", "1800"),
        ("#### 20 minutes/day * 5 days = 100 minutes", "100"),
        ("#### $15/hour × 8 hours = $120\nNote 8", "120"),
        ("The area is 18 m^2.", "18"),
        ("#### 18 cm^2", "18"),
        (r"\boxed{18 \text{ cm}^2}", "18"),
        (r"It is $18\text{ ft}^3$", "18"),
        ("18 square meters (m^2)", "18"),
        ("5 + x_1", "5"),
        ("7 and 0^0", "0"),
        (r"It is \boxed{3} + 4, so 7." + "\n7 it is", "7"),
        ("#### 10^3", "1000"),
        ("It is 2^{10}.", "1024"),
        ("#### 3 × 10^2 = 300", "300"),
        ("5'000", "5000"),
        ("5’000 people", "5000"),
        ("#### 12,34,567", "1234567"),
        ("1,00,000", "100000"),
        ("#### 2½", "2.5"),
        ("½", "0.5"),
        ("1 ¾ cups", "1.75"),
        (r"\frac12", "0.5"),
        (r"\frac{12}{5}", "2.4"),
        ("5 100-dollar bills", "100"),
        ("#### 36 divided by 2 = 18", "18"),
        ("#### 6 multiplied by 3 equals 18", "18"),
        ("#### 9 eggs at $2 each = $18", "18"),
        ("#### 16 - 3 - 4 = 9, 9 * 2 = 18", "18"),
        ("So \\boxed{18} (Step 3)", "18"),
        (r"\boxed{\frac{3}{4}} of 8", "0.75"),
        ("#### 20–25", "20"),
        ("#### 20-25", "20"),
        ("#### 8 – 3", "5"),
        ("#### 1.5 million", "1.5"),
    ],
)
def test_number(text, number):
    assert gsm8k_answer(text) == Decimal(number)


def test_equal_numbers_are_equal_however_written():
    assert gsm8k_answer("#### 42.00") == gsm8k_answer("so 42.")
    assert gsm8k_answer("I do not know") is gsm8k_answer("1/0") is None


@pytest.mark.parametrize(
    "run", ["a" * 300, "哈" * 300, "3" + "_" * 4000 + "!", "3 " + "ab_" * 2000 + "!", "a b " * 2000]
)
def test_a_loop_after_a_mark_is_read_in_time(run):
    """Words may be cut from a run of letters in as many ways as its length to the power of four."""
    begun = time.perf_counter()
    for mark in ("#### ", "\\boxed{"):
        gsm8k_answer(mark + run)
    assert time.perf_counter() - begun < 5
