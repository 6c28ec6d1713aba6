"""The recipe of an algorithm of one's own: short, run by the real command, placed by settings."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.cli import main as cli
from hybridflow.controller import Backend
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan.dataflow import find_dataflow
from hybridflow.launch.plan.roles import plan_roles
from hybridflow.launch.step_trace import plan_to_show, trace_step
from hybridflow.workers.reward_model import RewardModelWorker
from tests.distributed.runs import Row, reproducible, rows_of_run, small_run
from tests.reward_models import make_decoder

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "custom_dataflow.py"
TYPED = "dataflow=recipes/custom_dataflow.py:BestOfN"
"""What its header says to type, in the root of a checkout."""

POOLS = [
    "placement={pools: {policy: {devices: 1}, first: {devices: 1}, second: {devices: 1}}, roles: {reward: first}}",
    "roles.style.pool=second",
    "trainer.devices=3",
]

Run = Callable[..., list[Row]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function: settings -> the metrics of each step of the recipe; those of step 0 are the first evaluation's."""
    monkeypatch.chdir(ROOT)

    def rows(*settings: str) -> list[Row]:
        words = [TYPED, "trainer={total_steps: 3, save_every: 0}", "dataflow_settings.distill_steps=2", *settings]
        found = reproducible(rows_of_run(tmp_path / "run", [*small_run(tmp_path), *words]))
        return [row for row in found if row["step"] > 0]

    return rows


def test_the_algorithm_is_less_than_forty_lines():
    module = ast.parse(RECIPE.read_text())
    (algorithm,) = [node for node in module.body if isinstance(node, ast.ClassDef)]
    for node in ast.walk(algorithm):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            texts = [s for s in node.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
            node.body = [statement for statement in node.body if statement not in texts]
    assert len([line for line in ast.unparse(algorithm).splitlines() if line.strip()]) < 40


def test_the_command_of_its_header_is_whole():
    config = compose_run([TYPED], config_name="ppo").config
    assert "hybridflow ppo dataflow=custom_dataflow.py:BestOfN " in RECIPE.read_text()
    assert {spec.name: spec.pool for spec in plan_roles(config, find_dataflow(config.dataflow), None)} == {
        "actor": "main",
        "critic": "main",
        "reward": "main",
        "style": "main",
    }


def test_as_it_is_typed_it_imitates_first_and_goes_on_with_ppo(run, tmp_path):
    rows = run()
    assert ["train/loss" in row for row in rows] == [True, True, False]
    assert ["actor/pg_loss" in row for row in rows] == [False, False, True]
    for row in rows:
        added = row["rewards/exact_match/mean"] + 0.3 * row["rewards/closeness/mean"]
        assert row["critic/score/mean"] == pytest.approx(added)
        assert row["actor/grad_norm"] > 0.0
    assert any(name.startswith("val-core/") for name in rows[-1])
    assert "origin: dataflow" in (tmp_path / "run/config.yaml").read_text()


def test_the_second_reward_may_be_another(run, tmp_path):
    (tmp_path / "brief.py").write_text(
        "def brief(completions, **columns):\n    return [-len(c) for c in completions]\n"
    )
    (row,) = run(f"roles.style.functions=['{tmp_path}/brief.py:brief']", "trainer={total_steps: 1, eval_every: 0}")
    assert "rewards/closeness/mean" not in row
    assert row["critic/score/mean"] == pytest.approx(row["rewards/exact_match/mean"] + 0.3 * row["rewards/brief/mean"])


def test_a_step_is_drawn(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["show", "--dataflow", TYPED.partition("=")[2]]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("custom_dataflow.py:BestOfN")
    assert "adds  scores rewards/closeness" in shown


def reward_models(first: object, second: object) -> list[str]:
    """Two reward models, as the header of the recipe has them."""
    return [
        f"reward={{functions: [], model: {{path: {first}}}}}",
        f"roles.style={{kind: reward_model, model: {{path: {second}}}}}",
    ]


def test_reward_models_in_pools_of_their_own_judge_at_once(monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = plan_to_show(compose_run([TYPED, *reward_models("my/first", "my/second"), *POOLS], config_name="ppo"))
    specs = {role.name: role for role in plan.roles}
    assert [specs[name].worker_class for name in ("reward", "style")] == [RewardModelWorker, RewardModelWorker]
    calls = {call.name: call for call in trace_step(plan).calls}
    first, second = calls["reward.score"], calls["style.score"]
    assert (first.pool, second.pool) == ("first", "second")
    assert first.time == second.time
    assert second.adds == ("scores",)


def test_two_reward_models_score_a_real_run(run, tmp_path):
    first, second = make_decoder(tmp_path / "first"), make_decoder(tmp_path / "second", seed=8)
    rows = run(*reward_models(first, second))
    assert ["train/loss" in row for row in rows] == [True, True, False]
    for row in rows:
        added = row["rewards/model/mean"] + 0.3 * row["rewards/style/mean"]
        assert row["critic/score/mean"] == pytest.approx(added, abs=1e-5)
        assert row["rewards/model/mean"] != row["rewards/style/mean"]
        assert not any("closeness" in name for name in row)


@pytest.mark.slow  # the quick case of the same rule: tests/distributed/test_runs_engines.py
@pytest.mark.ray
def test_on_ray_with_its_rewards_in_pools_of_their_own_it_gives_the_same_bits(run, ray_backend: Backend):
    assert run() == run(*POOLS, "trainer={backend: ray, resume: never}")
