import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rewards.answers import (
    boxed_answer,
    expected_answer,
    final_answer,
    hash_answer,
    last_number,
    normalized,
    same_answer,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3*4=12\n#### 12", "12"),
        ("#### 1\nno\n#### 2  \n", "2"),
        ("####72", "72"),
        ("no hashes", None),
        ("####\n5", None),
    ],
)
def test_the_answer_after_the_last_hashes(text, answer):
    assert hash_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"thus \boxed{42}.", "42"),
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x}", "x"),
        (r"\fbox{7}", "7"),
        (r"\boxed{never closed", None),
        ("no box", None),
    ],
)
def test_the_answer_in_the_last_box(text, answer):
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then 4.", "4"),
        ("costs $1,234.50!", "1,234.50"),
        ("48+24=72", "72"),
        ("12-5", "5"),
        ("it is -5 degrees", "-5"),
        ("(3)-4", "4"),
        ("about .5", ".5"),
        ("none", None),
    ],
)
def test_the_last_number(text, number):
    assert last_number(text) == number


def test_hashes_win_over_a_box_and_a_box_over_a_number():
    assert final_answer(r"\boxed{2} #### 1" + "\nsay 3") == "1"
    assert final_answer(r"\boxed{2} or 3") == "2"
    assert final_answer("2 or 3") == "3"
    assert final_answer("neither") is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("so\n#### 1,200", "1,200"),
        (r"thus \boxed{7}", "7"),
        (" 46 ", "46"),
        (145.0, "145"),
        (2.5, "2.5"),
        (46, "46"),
        ("Paris", "Paris"),
    ],
)
def test_the_expected_answer_of_a_row(answer, expected):
    assert expected_answer(answer) == expected


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1,200", "1200"),
        ("72.0", "72"),
        ("$72", "72"),
        ("0072", "72"),
        ("-0", "0"),
        (".5", "0.50"),
        (r"\frac{1}{2}", r"\dfrac{1}{2}"),
        (r"\text{ Paris }", "paris"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        ("30^\\circ", "30"),
        ("50\\%", "50"),
        ("72 apples", "72"),
        ("72.", "72"),
    ],
)
def test_answers_that_are_the_same(left, right):
    assert same_answer(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [("72", "73"), ("7", "72"), ("-5", "5"), ("2 or 72", "72"), ("Paris", "London"), ("0.5", "5"), ("", "0")],
)
def test_answers_that_differ(left, right):
    assert not same_answer(left, right)


@given(st.integers(-(10**40), 10**40))
def test_integers_of_any_length_are_normalized_to_themselves(number):
    assert normalized(f"{number:,}") == normalized(f"{number}.00") == str(number)


@given(st.text(max_size=60))
def test_normalizing_twice_changes_nothing_that_matters_and_no_text_breaks_it(text):
    assert same_answer(text, text)
    final_answer(text)
