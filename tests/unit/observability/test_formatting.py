"""Numbers as people read them."""

import math

import pytest

from hybridflow.observability.formatting import count, duration, percent, short, sparkline, spoken_duration


@pytest.mark.parametrize(
    ("formatted", "texts"),
    [
        (duration, {0: "0:00", 7.4: "0:07", 59.6: "1:00", 754: "12:34", 3723: "1:02:03", math.nan: "-:--"}),
        (spoken_duration, {3.44: "3.4 s", 9.96: "10 s", 59.9: "1 min 00 s", 200: "3 min 20 s", 7500: "2 h 05 min"}),
        (count, {950: "950", 999.6: "1.0k", 12345: "12.3k", 123456: "123k", 4.5e6: "4.5M", 7.8e9: "7.8B"}),
        (short, {0.0: "0", 1.0: "1", 0.62149: "0.621", 0.01648: "0.0165", 0.00123: "0.00123", -3.14159: "-3.14"}),
        (short, {9.996: "10.0", 12.345: "12.3", 123.4: "123", 54499: "54.5k", 1.23e-5: "1.2e-05"}),
        (short, {math.nan: "-", math.inf: "inf"}),
    ],
)
def test_numbers_as_text(formatted, texts):
    assert {number: formatted(number) for number in texts} == texts


def test_sparkline_rises_with_the_values_and_keeps_to_its_cells():
    assert sparkline(range(100), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 2.0], 8) == "▁█"
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([1.0], 8) == ""


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (5, 2312, "0.22%"),
        (26, 64, "41%"),
        (7470, 7473, "99.9%"),
        (1991, 2000, "99.5%"),
        (3, 3, "100%"),
        (0, 3, "0%"),
        (3141, 2687, "117%"),
    ],
)
def test_a_share_is_all_only_if_it_is_whole(part, whole, text):
    assert percent(part, whole) == text
