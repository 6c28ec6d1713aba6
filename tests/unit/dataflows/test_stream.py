"""Groups that are generated across updates: staleness, accounts, replay, deadlines, resuming, and faults."""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.loop import Loop
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.remax import ReMax
from hybridflow.dataflows.safe_rlhf import SafeRLHF
from tests.unit.dataflows.programs import numbers
from tests.unit.dataflows.test_ahead import STEPS, consumed, run_of

KINDS = [GRPO, PPO, DAPO, ReMax, SafeRLHF]


def streamed(directory: Path, run_dir: Path, kind=GRPO, *, staleness=2, ahead=1, steps=STEPS, save_every=0, **settings):
    run = run_of(directory, run_dir, kind, staleness=staleness, ahead=ahead, steps=steps, save_every=save_every)
    return replace(run, asynchrony=replace(run.asynchrony, partial_rollouts=True, **settings))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("staleness", "ahead"), [(1, 1), (2, 2), (3, 1)])
def test_each_prompt_is_trained_on_once_and_no_token_is_too_old(toy_dir, tmp_path, kind, staleness, ahead):
    run = streamed(toy_dir(), tmp_path, kind, staleness=staleness, ahead=ahead)
    assert Loop(run).run().steps == STEPS
    rows = [row for step, row in numbers(run).items() if step]
    assert max(row["async/staleness/max"] for row in rows) <= staleness
    assert max(consumed(run).values()) == 1 and len(consumed(run)) >= 4 * STEPS
    assert rows[-1]["async/groups/consumed"] == 4 * STEPS
