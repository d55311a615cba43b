"""The final number of an answer, in the forms that models and references write."""

from decimal import Decimal

import pytest

from draft_heads.data.text.final_number import gsm8k_answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
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
