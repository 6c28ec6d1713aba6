"""The progress line, live and plain."""

from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from hybridflow.observability.printable import PlainConsole
from hybridflow.observability.progress import Progress, ProgressState, eval_label, live_line


class Clock:
    """Time that passes only when asked."""

    now = 0.0

    def __call__(self):
        return self.now


def _plain(total_steps, **options):
    clock = Clock()
    console = Console(file=StringIO(), width=120)
    progress = Progress(total_steps, console=console, is_live=False, clock=clock, **options)
    progress.start()
    return progress, clock, console.file


def _metrics(score=0.5):
    return {"critic/score/mean": score, "response_length/mean": 5.25, "perf/throughput": 12_345.0}


def _run(progress, clock, steps, seconds):
    for step in steps:
        clock.now += seconds
        progress.update(step, _metrics())


def test_plain_lines_come_at_the_first_three_steps_then_every_five_seconds_and_at_the_last():
    progress, clock, file = _plain(20)
    _run(progress, clock, range(1, 21), 1.0)
    lines = file.getvalue().splitlines()
    assert lines.pop(3) == "(from here, at most one line every 5 s; metrics.jsonl has every step)"
    assert [int(line.split("/")[0].removeprefix("step")) for line in lines] == [1, 2, 3, 8, 13, 18, 20]


def test_seconds_per_step_and_the_time_left_are_of_training_and_the_rest_has_its_own():
    progress, clock, file = _plain(100)
    for step in range(1, 5):
        progress.stage("step")
        clock.now += 2.0
        progress.stage(None)
        progress.stage("testing")
        clock.now += 10.0
        progress.stage(None)
        progress.update(step, _metrics())
        progress.stage("save_checkpoint")
        clock.now += 8.0
        progress.stage(None)
    # So far four evaluations and three checkpoints: 16 s per step, in addition to 2 s of training.
    assert file.getvalue().splitlines()[-1].endswith("    2 s/step  eta  3:12 +25:36 evaluating and saving")


def test_the_time_of_a_fault_is_not_that_of_steps():
    progress, clock, file = _plain(100)
    for step in range(1, 4):
        for seconds in (2.0,) if step < 3 else (30.0, 2.0):  # in the third step, a fault interrupts the first attempt
            progress.stage("step")
            clock.now += seconds
            progress.stage(None)
        progress.update(step, _metrics())
    assert file.getvalue().splitlines()[-1].endswith("    2 s/step  eta  3:14")


def test_an_evaluation_that_takes_long_says_how_far_it_is_and_how_long_it_took():
    progress, clock, file = _plain(100)
    for step, seconds in ((0, 3.0), (1, 0.1), (2, 2.0)):
        progress.stage("testing")
        for done in range(0, 1400, 200):
            progress.part("testing", done, 1400)
            clock.now += seconds
        progress.stage(None)
        progress.evaluation(step, {"val-core/a/acc/mean@1": 0.5})
    assert file.getvalue().splitlines() == [
        "evaluating 1400 held-out rows ...",
        "evaluating 1400 held-out rows ... 28%",
        "evaluating 1400 held-out rows ... 57%",
        "evaluating 1400 held-out rows ... 85%",
        "eval  step   0  a exact match 0.500  in 21 s",
        "evaluating 1400 held-out rows ...",  # the one before was slow
        "eval  step   1  a exact match 0.500 (was 0.500)",
        "evaluating 1400 held-out rows ... 42%",
        "evaluating 1400 held-out rows ... 85%",
        "eval  step   2  a exact match 0.500 (was 0.500)  in 14 s",
    ]


def test_an_evaluation_in_two_parts_is_announced_once():
    progress, _, file = _plain(2)
    progress.stage("testing")
    for rows in (256, 64):
        progress.part("testing", 0, rows)
    assert file.getvalue().splitlines() == ["evaluating 256 held-out rows ..."]


def test_plain_lines_are_aligned():
    progress, clock, file = _plain(200)
    clock.now = 0.5
    progress.update(1, _metrics(0.4))
    clock.now = 90.0
    progress.update(2, {"critic/score/mean": -12.5, "response_length/mean": 130.0, "perf/throughput": 9.0})
    lines = file.getvalue().splitlines()
    assert lines[0] == "step   1/200  score   0.400  length  5.25   12.3k tok/s  0.500 s/step  eta  1:40"
    assert [lines[0].index(word) for word in ("score", "length", "tok/s", "eta")] == [
        lines[1].index(word) for word in ("score", "length", "tok/s", "eta")
    ]


def test_evaluations_have_lines_of_their_own_beside_the_first_value():
    progress, _, file = _plain(200)
    progress.evaluation(0, {"val-core/arithmetic/acc/mean@1": 0.4, "critic/score/mean": 0.3})
    progress.evaluation(40, {"val-core/arithmetic/acc/mean@1": 0.71})
    progress.evaluation(41, {"critic/score/mean": 0.3})
    assert file.getvalue().splitlines() == [
        "eval  step   0  arithmetic exact match 0.400",
        "eval  step  40  arithmetic exact match 0.710 (was 0.400)",
    ]


def test_a_progress_that_was_not_started_prints_nothing():
    console = Console(file=StringIO())
    progress = Progress(3, console=console, is_live=False)
    progress.stage("gen")
    progress.update(1, _metrics())
    progress.evaluation(1, {"val-core/a/acc/mean@1": 0.4})
    progress.close()
    assert console.file.getvalue() == ""


def test_a_live_line_moves_and_the_cursor_comes_back():
    console = PlainConsole(file=StringIO(), force_terminal=True, width=110)
    progress = Progress(4, console=console, is_live=True)
    progress.start()
    for step in range(1, 5):
        progress.update(step, _metrics(step / 4))
    progress.close()
    progress.close()
    written = console.file.getvalue()
    assert "tok/s" in written and "\\x1b" not in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_a_resumed_run_counts_its_own_steps_and_recalls_the_first_evaluation():
    progress, clock, file = _plain(100, start_step=90)
    progress.recall([{"step": 0, "val-core/a/acc/mean@1": 0.4}, {"step": 1, "critic/score/mean": None}])
    _run(progress, clock, [91, 92], 3.0)
    assert file.getvalue().splitlines()[-1].endswith("3 s/step  eta  0:24")
    progress.evaluation(92, {"val-core/a/acc/mean@1": 0.7})
    assert "0.700 (was 0.400)" in file.getvalue()


def test_asynchronous_training_shows_how_old_its_samples_are():
    progress, clock, file = _plain(9)
    clock.now = 1.0
    progress.update(1, _metrics(0.4) | {"async/staleness/mean": 1.5})
    assert "12.3k tok/s  staleness  1.50      1 s/step" in file.getvalue()


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"train/loss": 0.75}, "loss   0.750      1 s/step"),
        (
            {"train/loss": 0.41, "rewards/accuracies": 0.8125, "perf/throughput": 12_300.0},
            "loss   0.410  accuracy 0.812   12.3k tok/s      1 s/step",
        ),
    ],
)
def test_training_without_rewards_shows_its_loss_and_the_accuracy_of_preferences(metrics, line):
    progress, clock, file = _plain(9)
    clock.now = 1.0
    progress.update(1, metrics)
    assert file.getvalue() == f"step 1/9  {line}  eta  0:08\n"


ROLLOUTS = ProgressState(
    total_steps=200, step=37, label="score", headline=[0.1, 0.4, 0.62], response_length=5.1,
    tokens_per_second=12_300.0, seconds_per_step=0.5, stage="update_actor",
)  # fmt: skip
PREFERENCES = ProgressState(
    total_steps=200, step=37, label="loss", headline=[0.7 - 0.02 * step for step in range(16)], accuracy=0.78125,
    tokens_per_second=12_300.0, seconds_per_step=0.5, stage="update_actor",
)  # fmt: skip


@pytest.mark.parametrize(
    ("state", "width", "parts"),
    [
        (ROLLOUTS, 36, "37/200|score 0.620"),
        (ROLLOUTS, 120, "37/200|eta 1:22|score 0.620|▁▅█|length 5.10|12.3k tok/s|update_actor"),
        (PREFERENCES, 80, "37/200|loss 0.400|accuracy 0.781|12.3k tok/s"),
        (PREFERENCES, 120, "37/200|━|eta 1:22|loss 0.400|accuracy 0.781|12.3k tok/s|update_actor"),
    ],
)
def test_a_live_line_shows_what_fits(state, width, parts):
    assert [part for part in parts.split("|") if part not in live_line(state, width).plain] == []
    for narrower in range(1, width + 1):
        assert cell_len(live_line(state, narrower).plain) <= narrower
    assert live_line(state, width, is_ascii=True).plain.isascii()


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("val-core/gsm8k/acc/mean@1", "gsm8k exact match"),
        ("val-core/a/b/pass_rate/mean@4", "a/b pass rate (mean of 4)"),
        ("val-core/gsm8k/acc/pass@8", "gsm8k exact match (best of 8)"),
        ("val-core/hh/margin", "hh held-out margin"),
        ("val-aux/a/b/exact_match/mean", "a/b reward exact_match"),
        ("val-aux/games/failed_fraction", "games failed fraction"),
        ("critic/score/mean", "critic/score/mean"),
    ],
)
def test_eval_labels(name, label):
    assert eval_label(name) == label
