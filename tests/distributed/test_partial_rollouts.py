"""Partial rollouts through the real command: interrupted by a publication on Ray, and repeated from their schedule."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.controller import Backend
from hybridflow.dataflows.schedule import recorded_steps
from hybridflow.observability.trace import STEP, read_trace
from tests.distributed.runs import (
    assert_refused,
    metric_rows,
    reproducible,
    rows_of_run,
    run_here,
    sample_rows,
    small_run,
)

ENGINE = """
import time

from hybridflow.engines.rollout.transformers.engine import TransformersEngine

class Slow(TransformersEngine):
    '''A long episode takes longer than a step of training and a transfer.'''

    def __init__(self, setup):
        ends, mesh = setup.eos_token_ids, setup.ranks.mesh
        super().__init__(setup.load_model(), max_sequences=64, eos_token_ids=ends, tokenizer=setup.tokenizer, mesh=mesh)

    def _step(self):
        time.sleep(0.02)
        return super()._step()

class Tailed(Slow):
    '''Every eighth prompt has long responses.'''

    def _start(self, requests):
        for request in requests:
            request.max_response_tokens = 60 if request.name[0] % 8 == 3 else 4
        super()._start(requests)
"""
SLOW_TRANSFERS = """
from pathlib import Path
from threading import current_thread, main_thread

from hybridflow.resharding.resharder import Resharder

moved = Resharder._moved

class Counting(Tailed):
    '''Weights that arrive in a thread take 0.3 seconds; notes how many steps of decoding are taken meanwhile.'''

    arriving, steps = False, 0

    def _step(self):
        Counting.steps += Counting.arriving
        return super()._step()

def slowly_moved(self, stage, version):
    if current_thread() is main_thread():
        return moved(self, stage, version)
    Counting.arriving, Counting.steps = True, 0
    time.sleep(0.3)
    report = moved(self, stage, version)
    Counting.arriving = False
    with Path(__file__).with_name("steps").open("a") as file:
        print(Counting.steps, file=file)
    return report

Resharder._moved = slowly_moved
"""
ENVIRONMENT = """
class Turns:
    '''Every eighth prompt has many turns.'''

    def reset(self, row, *, seed):
        self.left = 6 if seed % 8 == 3 else 1

    def step(self, action):
        self.left -= 1
        return action[:1], float(len(action) % 5), self.left <= 0, {"left": self.left}
"""
STEPS, GROUPS = 5, 8
VLLM = pytest.mark.vllm
LAYOUTS = {
    "one replica": (["Tailed"], 1),
    "two replicas": (["Tailed"], 2),
    "slow transfers": (["Counting", "rollout.transfer.overlap=true"], 1),
    "vllm": (["vllm"], 1),
    "two replicas of vllm": (["vllm"], 2),
    "vllm on two ranks": (["vllm", "rollout.parallelism.tensor=2"], 2),
    "vllm on two ranks with copies": (["vllm", "rollout.parallelism.tensor=2", "rollout.transfer.overlap=true"], 2),
}
"""The rollout engine and further settings, and the devices of the rollout's pool."""


def cases(quick: str) -> list:
    """All layouts; the tests of all but one are slow."""
    marks = {name: [VLLM] if "vllm" in name else [] for name in LAYOUTS}
    return [
        pytest.param(name, marks=[*own, *([] if name == quick else [pytest.mark.slow])]) for name, own in marks.items()
    ]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """A function: a name, a layout and further settings -> the directory of the run."""
    (tmp_path / "own.py").write_text(ENGINE + SLOW_TRANSFERS)

    def directory(name: str, layout: str, *words: str) -> Path:
        (engine, *more), devices = LAYOUTS[layout]
        engine = engine if engine == "vllm" else f"{tmp_path}/own.py:{engine}"
        pools = f"pools: {{train: {{devices: 1}}, generate: {{devices: {devices}}}}}"
        settings = [
            *settings_of(tmp_path),
            f"rollout.engine={engine}",
            f"trainer={{backend: ray, devices: {1 + devices}}}",
            f"placement={{{pools}, roles: {{rollout: generate, reward: train}}}}",
            *more,
            *words,
        ]
        rows_of_run(tmp_path / name, settings)
        return tmp_path / name

    return directory


def settings_of(folder: Path) -> list[str]:
    return [
        *small_run(folder),
        "algorithm=grpo",
        "asynchrony={max_staleness: 2, partial_rollouts: true}",
        "data.max_response_tokens=60",
        "rollout.sampling.ignore_eos=true",
        f"trainer={{total_steps: {STEPS}, save_every: 0, eval_every: 0}}",
    ]


@pytest.mark.ray
@pytest.mark.parametrize("layout", cases(quick="one replica"))
def test_a_rollout_in_its_own_pool_is_interrupted_by_new_weights_and_replays_bit_for_bit(
    run: Callable[..., Path], ray_backend: Backend, layout: str
):
    first = run("first", layout)
    recorded, rows = recorded_steps(first), [row for row in metric_rows(first) if row["step"]]
    decoded = [steps for step in recorded for steps in step.yielded]
    replicas = LAYOUTS[layout][1] // (2 if "ranks" in layout else 1)
    assert len(decoded) == STEPS - 1 and {len(steps) for steps in decoded} == {replicas}
    assert all(max(own) > 0 for own in zip(*decoded, strict=True))  # each replica generates while a step learns
    assert max(row["async/versions_per_response"] for row in rows) > 1.0
    assert max(row["async/staleness/max"] for row in rows) <= 2.0
    assert sorted(uid for step in recorded for uid in step.trained) == list(range(STEPS * GROUPS))
    again = run("again", layout, f"asynchrony.replay={first}")
    assert reproducible(metric_rows(again)) == reproducible(metric_rows(first))
    assert recorded_steps(again) == recorded


@pytest.mark.ray
def test_a_rollout_generates_while_weights_arrive_and_replays_without_copies(
    run: Callable[..., Path], ray_backend: Backend, tmp_path: Path
):
    first = run("first", "slow transfers")
    steps = [int(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert len(steps) >= STEPS - 2 and min(steps) > 0
    yielded = [call for step in recorded_steps(first) for call in step.yielded]
    assert all(call[0] >= least for call, least in zip(yielded[-len(steps) :], steps, strict=True))
    again = run("again", "one replica", f"asynchrony.replay={first}")
    assert reproducible(metric_rows(again)) == reproducible(metric_rows(first))


def with_turns(folder: Path) -> list[str]:
    """Settings of episodes whose replies have eight tokens."""
    (folder / "turns.py").write_text(ENVIRONMENT)
    environment = f"environment={{name: '{folder}/turns.py:Turns', processes: 0, max_turns: 6, max_turn_tokens: 8}}"
    return [environment, "reward.functions=environment"]


@pytest.mark.ray
@pytest.mark.parametrize("layout", cases(quick="one replica"))
def test_episodes_continue_over_updates_and_replay_bit_for_bit(
    run: Callable[..., Path], ray_backend: Backend, tmp_path: Path, layout: str
):
    words = with_turns(tmp_path) + ([] if "vllm" in layout else [f"rollout.engine={tmp_path}/own.py:Slow"])
    first = run("first", layout, *words)
    rows = [row for row in metric_rows(first) if row["step"]]
    assert max(row["async/versions_per_response"] for row in rows) > 1.0
    assert max(row["async/staleness/max"] for row in rows) <= 2.0 and max(row["num_turns/max"] for row in rows) == 6.0
    assert rows[-1]["environment/info/left"] == 0.0
    again = run("again", layout, *words, f"asynchrony.replay={first}")
    assert reproducible(metric_rows(again)) == reproducible(metric_rows(first))
    assert recorded_steps(again) == recorded_steps(first)


def responses(run_dir: Path) -> dict[int, list[list[int]]]:
    """The token ids of all samples that were trained on, by prompt."""
    found: dict[int, list[list[int]]] = {}
    for sample in sample_rows(run_dir):
        if sample["split"] == "train" and not sample.get("is_last"):
            found.setdefault(sample["uid"], []).append(sample["response_ids"])
    return found


@pytest.mark.ray
@pytest.mark.slow  # the quick cases of the same rule: T2 in tests/parity/test_interruption.py
@pytest.mark.parametrize("has_turns", [False, True])
@pytest.mark.parametrize("layout", cases(quick="vllm"))
def test_weights_that_do_not_change_give_the_tokens_of_the_synchronous_run(
    run: Callable[..., Path], ray_backend: Backend, tmp_path: Path, layout: str, has_turns: bool
):
    """Whatever engine and replica a row is on, wherever it is interrupted, and whichever rows it runs with."""
    unchanged = ["actor.optimizer.learning_rate=0", f"trainer.sample_rows={2 * GROUPS}"]
    unchanged += ["trainer={samples_every: 1, sample_token_ids: true}"]
    unchanged += with_turns(tmp_path) if has_turns else []
    alone = [*settings_of(tmp_path), *unchanged, "asynchrony={max_staleness: 0, partial_rollouts: false}"]
    rows_of_run(tmp_path / "alone", alone)
    words = [] if "vllm" in layout else [f"rollout.engine={tmp_path}/own.py:Slow"]
    partial = run("partial", layout, *unchanged, *words)
    assert max(row["async/versions_per_response"] for row in metric_rows(partial) if row["step"]) > 1.0
    found, expected = responses(partial), responses(tmp_path / "alone")
    assert sorted(found) == sorted(expected) == list(range(STEPS * GROUPS))
    assert [len(samples) for samples in found.values()] == [2] * STEPS * GROUPS
    # Rows that run together are rounded together; in 4,800 draws, rounding may choose between two tokens once.
    assert sum(found[uid] != expected[uid] for uid in found) <= 1


@pytest.mark.ray
@pytest.mark.slow
def test_two_replicas_in_the_actors_processes_give_the_same_run_twice(tmp_path: Path, ray_backend: Backend):
    (tmp_path / "own.py").write_text(ENGINE)
    words = ["trainer={backend: ray, devices: 2, total_steps: 4}", f"rollout.engine={tmp_path}/own.py:Tailed"]
    found = [rows_of_run(tmp_path / name, [*settings_of(tmp_path), *words]) for name in ("first", "again")]
    assert reproducible(found[0]) == reproducible(found[1])
    assert max(row["async/versions_per_response"] for row in found[0] if row["step"]) > 1.0
    trained = [uid for step in recorded_steps(tmp_path / "first") for uid in step.trained]
    assert sorted(trained) == list(range(4 * GROUPS))


def test_a_schedule_that_cannot_be_repeated_is_refused(tmp_path: Path):
    settings = [*settings_of(tmp_path), f"trainer.run_dir={tmp_path}/run", f"asynchrony.replay={tmp_path}/first"]
    assert_refused(run_here(settings), "there is no schedule.jsonl", "asynchrony.partial_rollouts=true")
    (tmp_path / "first").mkdir()
    line = {"step": 1, "yielded": [], "trained": [0]}
    (tmp_path / "first" / "schedule.jsonl").write_text(json.dumps(line) + "\n")
    assert_refused(run_here(settings), "has 1 steps, and this run trainer.total_steps=5", "trainer.total_steps=1")


def test_without_staleness_groups_are_scored_as_they_finish_and_the_run_is_the_synchronous_one(tmp_path: Path):
    (tmp_path / "own.py").write_text(ENGINE)
    settings = [*settings_of(tmp_path), f"rollout.engine={tmp_path}/own.py:Tailed", "asynchrony.max_staleness=0"]
    found = reproducible(rows_of_run(tmp_path / "early", settings))
    expected = reproducible(rows_of_run(tmp_path / "whole", [*settings, "asynchrony.partial_rollouts=false"]))
    assert [{name: row[name] for name in other} for row, other in zip(found, expected, strict=True)] == expected
    assert {row["async/staleness/max"] for row in found if row["step"]} == {0.0}
    for step in (section for section in read_trace(tmp_path / "early") if section.what == STEP):
        scored = [span for span in step.spans if span.name == "reward.score"]
        generated = [span for span in step.spans if span.name == "rollout.advance" and span.start < scored[-1].start]
        assert scored[0].start < generated[-1].start, "the first groups are scored before the last ones have finished"
