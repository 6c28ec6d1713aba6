"""Whatever ends a run, `hybridflow report` shows it up to there and how it ended."""

import re
import time

import pytest

from hybridflow.cli.main import main
from hybridflow.elastic.claim import is_claimed
from hybridflow.observability.ending import read_ending
from tests.distributed.processes import Processes
from tests.distributed.runs import steps_of
from tests.distributed.trapped import ALGORITHMS, KILLED, Command

IN_STEP_3 = 5
"""The call of the reward function: held-out prompts, steps 1 and 2, held-out prompts, step 3."""

OWN = """
calls = 0

def raises(completions):
    global calls
    calls += 1
    assert calls < 5, "out of patience"
    return [float(len(text)) for text in completions]

def diverges(logprobs, old_logprobs, advantages):
    global calls
    calls += 1
    return -(logprobs - old_logprobs).exp() * advantages * (1.0 if calls <= 4 else float("nan"))
"""


@pytest.mark.parametrize(
    ("signal", "setting", "status", "ending", "steps"),
    [
        pytest.param("SIGINT", "", 130, "interrupted</strong> saved step 3", 3, marks=pytest.mark.slow),
        ("SIGKILL", "", KILLED, "failed</strong> no ending was recorded", 2),
        ("", "reward.functions=[{own}:raises]", 1, "failed</strong> RewardError: In training step 3: .*patience", 2),
        ("", "algorithm.policy_loss={own}:diverges", 1, r"failed</strong> \w+Error: .*(?i:nan|not finite)", 2),
    ],
    ids=["Ctrl-C", "SIGKILL", "a reward that raises", "a NaN in the loss"],
)
def test_the_report_shows_the_run_up_to_its_end_and_how_it_ended(
    processes: Processes, tmp_path, signal, setting, status, ending, steps
):
    (tmp_path / "own.py").write_text(OWN)
    run = Command(processes, tmp_path, *ALGORITHMS["grpo"])
    if signal:
        run.trap.write_text(f"{IN_STEP_3} {signal} 0")
    ended = run.start(*filter(None, [setting.format(own=tmp_path / "own.py")]))
    assert ended.status == status, ended.said
    deadline = time.monotonic() + 60  # the process that watches a killed run takes a moment
    while (is_claimed(run.run_dir) or read_ending(run.run_dir) is None) and time.monotonic() < deadline:
        time.sleep(0.1)
    (run.run_dir / "report.html").unlink(missing_ok=True)
    assert main(["report", str(run.run_dir)]) == 0
    page = (run.run_dir / "report.html").read_text()
    assert re.search(f'class="ending [a-z]*"><strong>{ending}', page), page[: page.index("<h2>")][-2000:]
    assert steps_of(run.run_dir) == [*range(steps + 1)]
    assert f"{steps} steps, which took " in page and "data-refresh" not in page and 'aria-label="Score"' in page
    log = (run.run_dir / "run.log").read_text()
    assert re.search(ending.replace("</strong>", ":"), log), log
