"""Groups that are discarded: when it is said, and when the run ends."""

from dataclasses import replace

import pytest

from hybridflow.config.asynchrony import Asynchrony, OnDeadline, WhenStale
from hybridflow.dataflows.discards import MOST_IN_A_ROW, Discards
from hybridflow.errors import ConfigError

SETTINGS = Asynchrony(
    max_staleness=2,
    when_stale=WhenStale.drop,
    deadline_tokens=64,
    on_deadline=OnDeadline.replace,
    partial_rollouts=True,
)


def stepped(discards: Discards, discarded: int, *, reason: str = "deadline", trained: int = 4) -> float:
    """A step after so many groups were discarded."""
    for _ in range(discarded):
        discards.add(reason, groups_per_step=trained)
    for _ in range(trained):
        discards.finish()
    return discards.end_step(trained=trained)["async/discarded_fraction"].value


@pytest.mark.parametrize(
    ("reason", "setting", "remedy"),
    [
        (
            "deadline",
            "asynchrony.on_deadline=replace asynchrony.deadline_tokens=64",
            "raise asynchrony.deadline_tokens",
        ),
        ("stale", "asynchrony.when_stale=drop asynchrony.max_staleness=2", "raise asynchrony.max_staleness"),
        ("empty", "asynchrony.deadline_tokens=64", "rollout.max_sequences"),
    ],
)
def test_it_is_said_once_that_most_groups_of_several_steps_are_discarded(caplog, reason, setting, remedy):
    discards = Discards(SETTINGS)
    assert [stepped(discards, 5, reason=reason) for _ in range(2)] == [5 / 9, 5 / 9]
    assert not caplog.text
    for _ in range(5):
        stepped(discards, 5, reason=reason)
    assert caplog.text.count(f"{setting}: 15 groups were discarded while 8 were trained on") == 1
    assert caplog.text.count("were discarded") == 1 and remedy in caplog.text


def test_half_of_the_groups_is_not_most_and_a_better_step_begins_the_count_again(caplog):
    discards = Discards(SETTINGS)
    for discarded in (4, 4, 4, 5, 5, 4, 5, 5, 0):
        stepped(discards, discarded)
    assert not caplog.text


def test_a_single_step_that_discards_the_groups_of_several_is_enough(caplog):
    discards = Discards(SETTINGS)
    for _ in range(12):
        discards.add("deadline", groups_per_step=4)
    assert not caplog.text
    discards.add("deadline", groups_per_step=4)
    assert "13 groups were discarded while 0 were trained on" in caplog.text


@pytest.mark.parametrize("when", [WhenStale.drop, WhenStale.wait])
def test_the_advice_for_stale_groups_does_not_name_the_setting_that_the_run_has(caplog, when):
    discards = Discards(replace(SETTINGS, when_stale=when))
    for _ in range(13):
        discards.add("stale", groups_per_step=4)
    assert "raise asynchrony.max_staleness or lower asynchrony.ahead" in caplog.text
    assert caplog.text.count("asynchrony.when_stale=wait") == 1


def test_groups_that_a_fault_has_cost_do_not_count(caplog):
    discards = Discards(SETTINGS)
    assert [stepped(discards, 20, reason="fault") for _ in range(9)] == [0.0] * 9
    assert not caplog.text


def test_the_run_ends_if_no_group_finishes_for_long():
    discards = Discards(SETTINGS)
    for _ in range(3):
        for _ in range(MOST_IN_A_ROW - 1):
            discards.add("deadline", groups_per_step=4)
        discards.finish()
    with pytest.raises(ConfigError, match=f"{MOST_IN_A_ROW} groups were discarded one after another") as caught:
        for _ in range(MOST_IN_A_ROW):
            discards.add("deadline", groups_per_step=4)
    assert caught.value.remedy.startswith("Raise asynchrony.deadline_tokens")


def test_large_steps_may_discard_more_groups_one_after_another():
    discards = Discards(SETTINGS)
    for _ in range(20 * 64 - 1):
        discards.add("deadline", groups_per_step=64)
    with pytest.raises(ConfigError, match="1280 groups"):
        discards.add("deadline", groups_per_step=64)
