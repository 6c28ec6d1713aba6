"""Every method that the configuration can choose, two steps of it: it runs, it teaches, and it is no other one."""

import math
from pathlib import Path

import pytest

from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES
from tests.distributed.runs import Row, rows_of_run, small_run

PRESETS = sorted(path.stem for path in Path("trainer_configs/algorithm").glob("*.yaml"))
QUICK = ("ppo", "grpo", "gspo", "rloo", "cispo", "remax", "kl_cov", "optimal_token_baseline")
"""One of each kind; unit tests compare the numbers of every method with an oracle."""

STEPS = 2
MAY_REST = {"grpo_passk"}
"""A step whose groups all have several best samples, or none, has advantages of 0 everywhere, as it should."""


@pytest.fixture(scope="module")
def trajectory(tmp_path_factory: pytest.TempPathFactory):
    """A function: settings -> the rows of a run of two steps with them, run once."""
    known: dict[tuple[str, ...], list[Row]] = {}

    def rows(*settings: str) -> list[Row]:
        if settings not in known:
            folder = tmp_path_factory.mktemp("run")
            run = [f"trainer={{total_steps: {STEPS}, eval_every: 0, save_every: 0}}", "rollout.samples_per_prompt=4"]
            known[settings] = rows_of_run(folder / "run", [*small_run(folder), *run, *settings])
        return known[settings]

    return rows


def gradients(rows: list[Row]) -> list[float]:
    """The policy's gradient norm at each step."""
    return [row["actor/grad_norm"] for row in rows]


def assert_teaches(rows: list[Row], *, may_rest: bool) -> None:
    """Every number is finite, and the policy's gradient is zero in no step, but one without advantages."""
    assert [row["step"] for row in rows] == [1, 2]
    wrong = [name for row in rows for name, value in row.items() if not math.isfinite(value)]
    assert not wrong
    resting = [row for row in rows if may_rest and row["critic/advantages/max"] == row["critic/advantages/min"] == 0.0]
    assert len(resting) < len(rows)
    assert min(gradients([row for row in rows if row not in resting])) > 1e-4
    assert max(row["training/rollout_logprobs_diff_max"] for row in rows) < 1e-4


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in PRESETS]
)
def test_a_method_runs_teaches_and_is_no_other_one(trajectory, preset):
    rows = trajectory(f"algorithm={preset}")
    assert_teaches(rows, may_rest=preset in MAY_REST)
    for other in ("ppo", "grpo"):
        assert preset == other or gradients(rows) != gradients(trajectory(f"algorithm={other}"))


def test_every_choice_has_a_preset_of_its_name():
    assert {*ADVANTAGES, *POLICY_LOSSES} - {"gae"} <= set(PRESETS)
