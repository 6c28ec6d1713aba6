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
    ("find", "text", "found"),
    [
        (hash_answer, "so 3*4=12\n#### 12", "12"),
        (hash_answer, "#### 1\nno\n#### 2  \n", "2"),
        (hash_answer, "####72", "72"),
        (hash_answer, "no hashes", None),
        (hash_answer, "####\n5", None),
        (boxed_answer, r"thus \boxed{42}.", "42"),
        (boxed_answer, r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (boxed_answer, r"\boxed {x}", "x"),
        (boxed_answer, r"\fbox{7}", "7"),
        (boxed_answer, r"\boxed{never closed", None),
        (boxed_answer, "no box", None),
        (last_number, "first 3, then 4.", "4"),
        (last_number, "costs $1,234.50!", "1,234.50"),
        (last_number, "48+24=72", "72"),
        (last_number, "12-5", "5"),
        (last_number, "it is -5 degrees", "-5"),
        (last_number, "(3)-4", "4"),
        (last_number, "about .5", ".5"),
        (last_number, "none", None),
        (expected_answer, "so\n#### 1,200", "1,200"),
        (expected_answer, r"thus \boxed{7}", "7"),
        (expected_answer, " 46 ", "46"),
        (expected_answer, 145.0, "145"),
        (expected_answer, 2.5, "2.5"),
        (expected_answer, 46, "46"),
        (expected_answer, "Paris", "Paris"),
    ],
)
def test_the_answer_in_a_text(find, text, found):
    assert find(text) == found


def test_hashes_win_over_a_box_and_a_box_over_a_number():
    assert final_answer(r"\boxed{2} #### 1" + "\nsay 3") == "1"
    assert final_answer(r"\boxed{2} or 3") == "2"
    assert final_answer("2 or 3") == "3"
    assert final_answer("neither") is None


SAME = [
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
]
OTHER = [("72", "73"), ("7", "72"), ("-5", "5"), ("2 or 72", "72"), ("Paris", "London"), ("0.5", "5"), ("", "0")]


@pytest.mark.parametrize(("left", "right"), SAME + OTHER)
def test_answers_are_the_same_in_other_words_only(left, right):
    assert same_answer(left, right) is ((left, right) in SAME)


@given(st.integers(-(10**40), 10**40))
def test_integers_of_any_length_are_normalized_to_themselves(number):
    assert normalized(f"{number:,}") == normalized(f"{number}.00") == str(number)


@given(st.text(max_size=60))
def test_normalizing_twice_changes_nothing_that_matters_and_no_text_breaks_it(text):
    assert same_answer(text, text)
    final_answer(text)
