"""Numbers as people read them."""

import math

import pytest

from hybridflow.observability.formatting import count, duration, short, sparkline, spoken_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03"), (math.nan, "-:--")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.44, "3.4 s"), (9.96, "10 s"), (59.9, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_spoken_duration(seconds, text):
    assert spoken_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(950, "950"), (999.6, "1.0k"), (12345, "12.3k"), (123456, "123k"), (4.5e6, "4.5M"), (7.8e9, "7.8B")],
)
def test_count(number, text):
    assert count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.62149, "0.621"),
        (0.01648, "0.0165"),
        (0.00123, "0.00123"),
        (-3.14159, "-3.14"),
        (123.4, "123"),
        (12.345, "12.3"),
        (9.996, "10.0"),
        (54499, "54.5k"),
        (1.23e-5, "1.2e-05"),
    ],
)
def test_short(number, text):
    assert short(number) == text


def test_short_says_what_is_not_a_number():
    assert (short(math.nan), short(math.inf)) == ("-", "inf")
    assert short(math.inf) == "inf"


def test_sparkline_rises_with_the_values_and_keeps_to_its_cells():
    assert sparkline(range(100), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 2.0], 8) == "▁█"
    assert sparkline([3.0, 3.0], 8) == "▁▁"
    assert sparkline([1.0], 8) == ""
