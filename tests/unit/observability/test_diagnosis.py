"""Signs that nothing is being learned, in the metrics of consecutive steps."""

import pytest

from hybridflow.observability.diagnosis import Diagnosis

FINE = {
    "environment/failed_fraction": 0.9,
    "response_length/clip_ratio": 0.9,
    "frac_reward_zero_std": 0.99,
    "actor/grad_norm": 1e-9,
}


@pytest.mark.parametrize(
    ("signs", "message", "remedy"),
    [
        (
            {"response_length/clip_ratio": 0.91},
            "Responses are cut off (steps 2 to 4): more than 90%",
            "Raise data.max_",
        ),
        ({"frac_reward_zero_std": 1.0}, "all samples of each prompt have the same score", "rollout.samples_per_prompt"),
        (
            {"environment/failed_fraction": 1.0, "frac_reward_zero_std": 1.0, "actor/grad_norm": 0.0},
            "All episodes fail (steps 2 to 4): no episode has a score",
            "Fix the environment",
        ),
        ({"actor/grad_norm": 0.0}, "the gradient is zero (actor/grad_norm=0)", "give no advantage"),
    ],
)
def test_a_sign_is_reported_once_at_its_third_consecutive_step_and_stands_while_it_lasts(signs, message, remedy):
    diagnosis = Diagnosis()
    shown = [FINE, FINE | signs, FINE | signs, FINE | signs, FINE | signs]
    found = [diagnosis.update(step, metrics) for step, metrics in enumerate(shown, start=1)]
    assert [len(each) for each in found] == [0, 0, 0, 1, 0]
    assert message in found[3][0].message and remedy in found[3][0].remedy
    assert "(steps 2 to 5)" in diagnosis.standing()[0].message
    assert diagnosis.update(6, FINE) == [] and diagnosis.standing() == []


def test_an_interrupted_streak_counts_from_its_beginning_and_other_rows_do_not_interrupt_it():
    diagnosis, tied = Diagnosis(), {"frac_reward_zero_std": 1.0}
    for step, metrics in enumerate([tied, tied, FINE, tied, {"val-core/a/acc/mean@1": 0.5}, tied], start=1):
        assert diagnosis.update(step, metrics) == []
    assert "(steps 4 to 7)" in diagnosis.update(7, tied)[0].message


def test_ties_explain_a_gradient_of_zero_and_a_number_that_is_not_finite_is_no_sign():
    diagnosis = Diagnosis()
    both = {"frac_reward_zero_std": 1.0, "actor/grad_norm": 0.0, "response_length/clip_ratio": float("nan")}
    found = [advice for step in range(1, 6) for advice in diagnosis.update(step, both)]
    assert [advice.message.partition(":")[0] for advice in found] == ["Nothing is being learned (steps 1 to 3)"]


@pytest.mark.parametrize(
    ("metric", "steps", "title"),
    [
        ("guards/skipped_updates", 3, "Optimizer steps are skipped"),
        ("guards/exceeded", 1, "A limit is exceeded"),
        ("guards/replicas_differ", 1, "Replicas differ"),
    ],
)
def test_what_guards_find_is_reported_with_its_remedy(metric, steps, title):
    diagnosis = Diagnosis()
    found = [diagnosis.update(step, {metric: 0.5}) for step in range(1, steps + 1)]
    assert [len(each) for each in found] == [0] * (steps - 1) + [1]
    assert title in found[-1][0].message and metric in found[-1][0].message and found[-1][0].remedy


def test_how_long_nothing_has_been_learned_is_known():
    diagnosis = Diagnosis()
    for step in range(1, 6):
        diagnosis.update(step, {"actor/grad_norm": 0.0, "guards/exceeded": 1.0})
    assert diagnosis.no_learning(6) is None
    advice = diagnosis.no_learning(5)
    assert advice is not None and "the gradient is zero" in advice.message and "(steps 1 to 5)" in advice.message
