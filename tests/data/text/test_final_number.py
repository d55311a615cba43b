"""The final number of an answer, in the forms that models and references write."""

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
    ],
)
def test_number(text, number):
    assert gsm8k_answer(text) == Decimal(number)


def test_equal_numbers_are_equal_however_written():
    assert gsm8k_answer("#### 42.00") == gsm8k_answer("so 42.")
    assert gsm8k_answer("I do not know") is None
