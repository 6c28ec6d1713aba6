"""The built-in player of games: its files, short runs of each task, and a run that must reach 90% of the optimum."""

import json
import random
import sys
import time
from pathlib import Path

import pytest

from hybridflow.config.paths import builtin_path
from recipes import kuhn_exploitability, tiny_games
from tests.distributed.runs import Row, rows_of_run, run_well
from tests.oracles.environments import best_guessing, lake_values
from tests.oracles.environments import kuhn_exploitability as oracle

MODEL = builtin_path("builtin:games")
LAKE = ["SFFF", "FHFH", "FFFH", "HFFG"]
TASKS = ("guess_number", "frozen_lake", "kuhn_poker", "calculator_tool")


def settings(path: Path) -> dict[str, object]:
    return {key: value for key, value in json.loads(path.read_text()).items() if key != "transformers_version"}


def test_the_recipe_makes_the_committed_files(tmp_path):
    tiny_games.make_data(tmp_path)
    for path in tmp_path.glob("*.jsonl"):
        assert path.read_bytes() == (MODEL.parent / path.name).read_bytes()
    tiny_games.make_shape(tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} | {"model.safetensors"} == {
        path.name for path in MODEL.iterdir()
    }
    assert (tmp_path / "model" / "tokenizer.json").read_text() == (MODEL / "tokenizer.json").read_text()
    assert settings(tmp_path / "model" / "config.json") == settings(MODEL / "config.json")


def test_the_recipe_trains_on_games_that_the_environments_have_played(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_games, "NUM_TRACES", 20)
    steps = "trainer={total_steps: 2, save_every: 2, device: cpu}"
    monkeypatch.setattr(sys, "argv", ["tiny_games.py", str(tmp_path / "out"), steps, "data.batch_size=16"])
    run_well([], command=lambda _: tiny_games.main() or 0)
    rows = [json.loads(line)["messages"] for line in (tmp_path / "out" / "traces.jsonl").read_text().splitlines()]
    assert {str(row[0]["content"])[:4] for row in rows} >= {"gues", "lake", "poke"}
    assert any(message["role"] == "tool" for row in rows for message in row)
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("task", "algorithm"),
    [
        *((task, "grpo") for task in TASKS),
        *(pytest.param(task, "ppo", marks=[] if task == TASKS[0] else pytest.mark.slow) for task in TASKS),
    ],
)
def test_each_task_runs(tmp_path, task, algorithm):
    small = "trainer={total_steps: 2, eval_every: 2, save_every: 0, keep_every: 0, threads: 1, device: cpu}"
    sizes = ["data={batch_size: 2, eval_limit: 8}", "rollout.samples_per_prompt=4"]
    sizes += ["actor.minibatch_size=2", "critic.minibatch_size=2"]
    rows = rows_of_run(tmp_path / "run", [f"algorithm={algorithm}", f"task={task}", small, *sizes])
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert max(row["training/rollout_logprobs_diff_max"] for row in rows[1:]) < 1e-4


def test_exploitability_is_that_of_the_oracle():
    draw = random.Random(0)
    for _ in range(5):
        policy = {(card, moves): draw.random() for card in "JQK" for moves in ("", "p", "b", "pb")}
        expected = oracle(lambda card, moves, policy=policy: policy["JQK"[card], moves]) / 2
        assert kuhn_exploitability.exploitability(policy) == pytest.approx(expected)


def test_the_average_wins_the_mean_of_what_the_policies_win():
    draw = random.Random(0)
    one, two, three, other = ({(c, m): draw.random() for c in "JQK" for m in ("", "p", "b", "pb")} for _ in range(4))
    average, value = kuhn_exploitability.averaged([one, two, three]), kuhn_exploitability.value
    assert value(average, other) == pytest.approx(sum(value(each, other) for each in (one, two, three)) / 3)
    assert value(other, average) == pytest.approx(sum(value(other, each) for each in (one, two, three)) / 3)


def test_the_built_in_player_of_poker_bets_by_its_card():
    policy = kuhn_exploitability.bets(*loaded(MODEL))
    for (card, _), bet in policy.items():
        assert bet == pytest.approx(("JQK".index(card) + 1) / 4, abs=0.15)  # learned from a few thousand games


def loaded(path: Path):
    found = kuhn_exploitability
    return found.AutoModelForCausalLM.from_pretrained(path), found.AutoTokenizer.from_pretrained(path)


TURN = "environment.credit=turn"
LEARNED = {
    "frozen_lake": ({"grpo": [], "reinforce_plus_plus_baseline": []}, 0.1, lake_values(LAKE, 0.0, 16)[16][0, 0][0]),
    "guess_number": (
        {"reinforce_plus_plus": [TURN, "actor.optimizer.learning_rate=1e-3"], "ppo": [TURN]},
        0.6,
        best_guessing(15, 6, 0.1),
    ),
    "calculator_tool": ({"grpo": [], "ppo": []}, 0.3, 1.0),
}
"""For each task: algorithms with their settings, the most that the built-in player reaches, and the optimum."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("task", "algorithm"), [(task, each) for task, (own, *_) in LEARNED.items() for each in own])
def test_the_game_is_learned(tmp_path, record_property, task, algorithm):
    settings, most, optimum = LEARNED[task]
    words = [f"algorithm={algorithm}", f"task={task}", "trainer.device=cpu", *settings[algorithm]]
    began = time.monotonic(), time.process_time()
    rows = rows_of_run(tmp_path / "run", words)
    record_property("seconds", time.monotonic() - began[0])
    record_property("cpu_seconds", time.process_time() - began[1])
    scores = evaluation(rows)
    record_property("scores", scores)
    assert scores[0] < most and scores[-1] >= 0.9 * optimum


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("algorithm", ["dr_grpo", "ppo"])
def test_self_play_approaches_an_equilibrium(tmp_path, algorithm):
    rows_of_run(tmp_path / "run", [f"algorithm={algorithm}", "task=kuhn_poker", "trainer.device=cpu"])
    found, exploitability = kuhn_exploitability.policies(tmp_path / "run"), kuhn_exploitability.exploitability
    assert exploitability(kuhn_exploitability.bets(*loaded(MODEL))) > 0.13
    assert exploitability(kuhn_exploitability.averaged([*found.values()])) <= 0.1


def evaluation(rows: list[Row]) -> list[float]:
    """The held-out return at each evaluation."""
    return [value for row in rows for name, value in row.items() if name.startswith("val-core/")]
