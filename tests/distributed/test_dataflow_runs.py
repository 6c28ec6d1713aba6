"""Runs of the further dataflows through the real command: resumed as if never stopped, and placed in pools."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.controller import Backend
from tests.distributed.runs import Row, reproducible, rows_of_run, sample_rows, small_run

DATAFLOWS = {
    "remax": (),
    "dapo": ("dataflow_settings.max_refills=2", "rollout.samples_per_prompt=3"),
    "pf_ppo": (),
    "ppo_ptx": (),
    "safe_rlhf": ("algorithm.kl={placement: reward, coefficient: 0.01, target: 0.01}",),
}
"""What each is run with, beside `algorithm=NAME`."""

WITH_STATE = ("dapo", "ppo_ptx", "safe_rlhf")
"""Those that have a state of their own to resume: prompts drawn ahead, a place in the texts, a multiplier."""

Run = Callable[..., list[Row]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A function: settings -> the metrics of each of four steps, of a run that is saved every second."""

    def rows(*settings: str, folder: str = "run") -> list[Row]:
        found = reproducible(rows_of_run(tmp_path / folder, [*small_run(tmp_path), *settings]))
        return [row for row in found if row["step"] > 0]

    return rows


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in WITH_STATE else pytest.mark.slow) for n in DATAFLOWS]
)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(run: Run, tmp_path: Path, name):
    settings = (f"algorithm={name}", *DATAFLOWS[name])
    whole = run(*settings, folder="whole")
    checkpoint = f"trainer.resume={tmp_path}/whole/checkpoints/step_2"
    assert run(*settings, checkpoint) == whole[2:]
    assert [row["step"] for row in whole] == [1, 2, 3, 4]


def test_dapo_draws_more_than_it_learns_from_and_accounts_for_it(run: Run):
    drawn = 0.0
    for row in run("algorithm=dapo", *DATAFLOWS["dapo"]):
        assert row["dapo/prompts_drawn"] == 8 * (1 + row["dapo/refills"])
        assert row["dapo/prompts_drawn"] == 8 + row["dapo/groups_discarded"] + row["dapo/groups_surplus"]
        drawn += row["dapo/prompts_drawn"]
        assert row["training/epoch"] <= drawn // 64
    assert drawn > 4 * 8


def test_dapo_punishes_long_responses_and_judges_groups_without_it(run: Run, tmp_path: Path):
    short = "data.max_response_tokens=4"  # a buffer of half of it: 3 tokens cost 0.5 and 4 cost 1
    settings = ("algorithm=dapo", *DATAFLOWS["dapo"], short, "dataflow_settings.overlong_buffer=0.5")
    settings += ("rollout.samples_per_prompt=6",)  # or normalized advantages may be equal by chance
    often = "trainer={samples_every: 1, sample_rows: 64, total_steps: 2}"
    rows = run(*settings, often)
    samples = [row for row in sample_rows(tmp_path / "run") if row["split"] == "train"]
    assert len({row["score"] for row in samples}) > 2
    for row in samples:
        right, text = float(row["response"] == row["answer"]), row["response"]
        costs = [max(0.0, (tokens - 2) / 2) for tokens in (len(text), len(text) + 1)]  # the last may be the end's
        assert any(row["score"] == pytest.approx(right - cost) for cost in costs), row
    for row in rows:
        assert -1.0 <= row["rewards/overlong/mean"] < 0.0
        mean = row["rewards/exact_match/mean"] + row["rewards/overlong/mean"]
        assert row["critic/score/mean"] == pytest.approx(mean, abs=1e-6)
    # In the first step nothing has been learned: the same groups teach something, punished or not.
    plain = run(*settings, often, "dataflow_settings.overlong_buffer=0", folder="plain")
    judged = [name for name in rows[0] if name.startswith("dapo/")] + ["rewards/exact_match/mean"]
    assert [rows[0][name] for name in judged] == [plain[0][name] for name in judged]
    assert "rewards/overlong/mean" not in plain[0]
    assert plain[0]["actor/grad_norm"] != rows[0]["actor/grad_norm"]


def test_the_two_critics_of_safe_rlhf_are_saved_apart(run: Run, tmp_path: Path):
    rows = run("algorithm=safe_rlhf", "trainer.total_steps=2")
    assert rows[0]["cost_critic/vf_loss"] != rows[0]["critic/vf_loss"]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert {"actor", "critic", "cost_critic"} <= {path.name for path in checkpoint.iterdir()}


@pytest.mark.slow  # the quick case of the same rule: tests/distributed/test_runs_engines.py
@pytest.mark.ray
def test_the_judges_of_safe_rlhf_may_live_elsewhere(run: Run, ray_backend: Backend):
    local = run("algorithm=safe_rlhf", folder="local")
    pools = "placement={pools: {policy: {devices: 1}, costs: {devices: 1}}, roles: {cost: costs, cost_critic: costs}}"
    assert run("algorithm=safe_rlhf", "trainer={backend: ray, devices: 2}", pools) == local
