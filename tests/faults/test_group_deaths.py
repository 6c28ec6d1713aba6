"""SIGKILL while groups wait, run, are interrupted, have finished or are trained on: no prompt is lost or repeated."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from hybridflow.controller import Backend
from hybridflow.dataflows.schedule import SCHEDULE_FILE
from hybridflow.observability.fault_ledger import FAULTS_FILE
from tests.distributed.processes import Processes
from tests.distributed.runs import Ended, metric_rows, run_here, small_run, steps_of

pytestmark = pytest.mark.ray

OWN = '''
import os, signal, time
from contextlib import suppress
from pathlib import Path
from threading import current_thread, main_thread

from hybridflow.dataflows.grpo import GRPO
from hybridflow.engines.rollout.transformers.engine import TransformersEngine
from hybridflow.resharding.resharder import Resharder

FOLDER = Path({folder!r})

def reached(moment, step):
    """Sends SIGKILL to the processes in the first line of the trap, and removes it, if it names this moment and this
    step or an earlier one."""
    [first, *rest] = (FOLDER / "trap").read_text().splitlines() or [""]
    victims, wanted, least = first.split(",") if first else ("", "", 0)
    if wanted == moment and int(least) <= step:
        (FOLDER / "trap").write_text("\\n".join(rest))
        own = [os.getpid()] if victims == "itself" else []
        for victim in own or [file.read_text() for file in FOLDER.glob(f"{{victims}}*.pid")]:
            with suppress(ProcessLookupError, ValueError):  # it has ended, or writes its id at the moment
                os.kill(int(victim), signal.SIGKILL)

class Engine(TransformersEngine):
    def __init__(self, setup):
        (FOLDER / "rollout.pid").write_text(str(os.getpid()))
        mesh = setup.ranks.mesh
        super().__init__(setup.load_model(), max_sequences=64, eos_token_ids=(), tokenizer=setup.tokenizer, mesh=mesh)

    def _start(self, requests):
        for request in requests:
            request.max_response_tokens = 60 if request.name[0] % 8 == 3 else 4
        super()._start(requests)

    def _step(self):
        time.sleep(0.01)
        reached("running", self.version)
        return super()._step()

    def pause(self, *, keep_cache=False):
        if self.num_running:
            reached("before weights", self.version)
        super().pause(keep_cache=keep_cache)

    def resume(self, *, version):
        super().resume(version=version)
        if self.num_running:
            reached("interrupted", version)

moved = Resharder._moved

def slowly_moved(self, stage, version):
    if current_thread() is not main_thread():
        time.sleep(0.3)
        reached("weights arrive", version)
    return moved(self, stage, version)

Resharder._moved = slowly_moved

class Flow(GRPO):
    def __init__(self, *args, **kwargs):
        (FOLDER / "driver.pid").write_text(str(os.getpid()))
        super().__init__(*args, **kwargs)

    def collect(self, prompts):
        try:
            batch = super().collect(prompts)
        except BaseException:  # the loop has seen which rows it asks for
            reached("waiting", self.iteration)
            raise
        reached("finished", self.iteration)
        return batch

    def learn(self, batch):
        reached("trained", self.iteration)
        metrics = super().learn(batch)
        reached("published", self.iteration)
        return metrics

class Twice:
    """An environment of two replies, which notes the processes of its episodes."""

    def reset(self, row, *, seed):
        (FOLDER / f"environment{{os.getpid()}}.pid").write_text(str(os.getpid()))
        self.turn = 0
        reached("reset", self._count("resets"))

    def step(self, action):
        self.turn += 1
        reached("first reply", self._count("steps"))
        return "+1=", float(len(action)), self.turn == 2, {{}}

    def _count(self, name):
        """How often all processes have called this, up to a race that does not matter."""
        with (FOLDER / name).open("a") as file:
            file.write(".")
        return (FOLDER / name).stat().st_size
'''
GROUPS = 8
POOLS = "placement={pools: {train: {devices: 1}, generate: {devices: 1}}, roles: {rollout: generate, reward: train}}"
APART = ["trainer.devices=2", POOLS]
MOMENTS = ("waiting", "running", "before weights", "interrupted", "finished", "trained", "published")
LONG = [pytest.mark.slow, pytest.mark.timeout(1200)]  # processes that start eight times
EVERY = 3
"""Steps between two deaths: after one, the groups that were generated ahead are generated one step at a time."""

Command = Callable[..., list[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """A function: who dies, at which moments and steps, the number of steps, and settings -> the words of a command."""
    (tmp_path / "own.py").write_text(OWN.format(folder=str(tmp_path)))

    def words(victims: str, deaths: Mapping[str, int], steps: int, *more: str) -> list[str]:
        lines = [f"{victims},{moment},{step}" for moment, step in deaths.items()]
        (tmp_path / "trap").write_text("\n".join(lines))
        return [
            *small_run(tmp_path),
            "algorithm=grpo",
            f"dataflow={tmp_path}/own.py:Flow",
            f"trainer={{backend: ray, total_steps: {steps}, save_every: 1, eval_every: 0, samples_every: 0}}",
            f"trainer={{run_dir: {tmp_path}/run, max_faults: 20}}",
            *more,
        ]

    return words


def partial(folder: Path) -> list[str]:
    words = ["asynchrony={max_staleness: 2, partial_rollouts: true}", "data.max_response_tokens=60"]
    return [*words, f"rollout.engine={folder}/own.py:Engine"]


def left_in(folder: Path) -> list[str]:
    """The deaths that have not happened."""
    return (folder / "trap").read_text().splitlines()


def assert_each_prompt_is_trained_on_once(folder: Path, ended: Ended, steps: int) -> None:
    assert ended.status == 0, ended.said
    assert not left_in(folder)
    run_dir = folder / "run"
    assert steps_of(run_dir) == list(range(1, steps + 1))
    last = metric_rows(run_dir)[-1]
    assert last["async/groups/consumed"] == GROUPS * steps and last["async/groups/discarded"] == 0
    assert last["async/tokens/generated"] == last["async/tokens/consumed"] > 0
    assert max(row["async/staleness/max"] for row in metric_rows(run_dir)) <= 2
    if (schedule := run_dir / SCHEDULE_FILE).exists():
        lines = [json.loads(line) for line in schedule.read_text().splitlines()]
        trained = {line["step"]: line["trained"] for line in lines if "step" in line}  # the last time that it was taken
        assert sorted(uid for uids in trained.values() for uid in uids) == list(range(GROUPS * steps))


def faults_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / FAULTS_FILE).read_text().splitlines()]


@pytest.mark.parametrize(
    "moments", [["interrupted"], pytest.param(MOMENTS, marks=LONG)], ids=["one state", "all states"]
)
def test_a_rollout_that_dies_with_groups_in_any_state(
    ray_backend: Backend, command: Command, tmp_path: Path, moments: Sequence[str]
):
    steps = EVERY * len(moments) + 2
    deaths = {moment: 1 + EVERY * number for number, moment in enumerate(moments)}
    ended = run_here(command("rollout", deaths, steps, *partial(tmp_path), *APART))
    assert_each_prompt_is_trained_on_once(tmp_path, ended, steps)
    faults = faults_of(tmp_path)
    assert [(fault["fault"], fault["pools"]) for fault in faults] == [("WorkerDied", "generate")] * len(moments)


@pytest.mark.slow
def test_a_rollout_that_dies_while_it_generates_and_weights_arrive(
    ray_backend: Backend, command: Command, tmp_path: Path
):
    deaths = {"weights arrive": 1, "before weights": 4, "interrupted": 7}
    ended = run_here(command("rollout", deaths, 11, *partial(tmp_path), *APART, "rollout.transfer.overlap=true"))
    assert_each_prompt_is_trained_on_once(tmp_path, ended, 11)
    assert [(fault["fault"], fault["pools"]) for fault in faults_of(tmp_path)] == [("WorkerDied", "generate")] * 3


@pytest.mark.slow
def test_a_rollout_that_dies_with_the_model_that_is_trained(ray_backend: Backend, command: Command, tmp_path: Path):
    ended = run_here(command("rollout", {"running": 2, "finished": 5}, 8, *partial(tmp_path)))
    assert_each_prompt_is_trained_on_once(tmp_path, ended, 8)
    assert [fault["pools"] for fault in faults_of(tmp_path)] == ["main", "main"]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # processes that start up to eight times
@pytest.mark.parametrize("moments", [["finished"], MOMENTS], ids=["one state", "all states"])
def test_a_driver_that_dies_with_groups_in_any_state_resumes(
    processes: Processes, command: Command, tmp_path: Path, moments: Sequence[str]
):
    """Each time with a Ray of its own."""
    steps = EVERY * len(moments) + 2
    deaths = {moment: 2 + EVERY * number for number, moment in enumerate(moments)}
    restarts = f"trainer.restarts={len(moments)}"
    ended = processes.run(command("driver", deaths, steps, *partial(tmp_path), *APART, restarts))
    assert_each_prompt_is_trained_on_once(tmp_path, ended, steps)
    assert [fault["fault"] for fault in faults_of(tmp_path)] == ["DriverDied"] * len(moments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "moment", "number"),
    [
        pytest.param("itself", "reset", 1, id="others wait"),
        pytest.param("itself", "first reply", 1, id="running"),
        pytest.param("itself", "reset", 12, id="others have finished"),
        pytest.param("environment", "trained", 2, id="all of them, before an update"),
        pytest.param("environment", "published", 2, id="all of them, after an update"),
    ],
)
def test_environments_that_die_while_batches_are_generated_ahead(
    ray_backend: Backend, command: Command, tmp_path: Path, victims: str, moment: str, number: int
):
    """Their episodes start again, and processes that were idle are replaced."""
    words = ["asynchrony.max_staleness=1", "reward.functions=[environment]", *APART]
    words += [f"environment.name={tmp_path}/own.py:Twice", "environment.processes=3", "environment.max_turns=2"]
    words += ["data.max_response_tokens=24", "environment.max_turn_tokens=4"]
    ended = run_here(command(victims, {moment: number}, 7, *words))
    assert_each_prompt_is_trained_on_once(tmp_path, ended, 7)
    rows = metric_rows(tmp_path / "run")
    if victims == "itself":
        assert sum(row.get("environment/retries", 0.0) for row in rows) >= 1.0
    assert len([*tmp_path.glob("environment*.pid")]) > 3
    assert sum(row.get("environment/failures", 0.0) for row in rows) == 0.0
    assert not (tmp_path / "run" / FAULTS_FILE).exists()


@pytest.mark.slow
def test_environments_that_die_while_their_groups_are_interrupted(
    ray_backend: Backend, command: Command, tmp_path: Path
):
    """Replies of theirs are being sampled, before and after new weights; the episodes start again."""
    deaths = {"before weights": 1, "interrupted": 4}
    words = [*partial(tmp_path), "data.max_response_tokens=128", "reward.functions=[environment]", *APART]
    words += [f"environment.name={tmp_path}/own.py:Twice", "environment.processes=16", "environment.retries=4"]
    words += ["environment.max_turns=2", "environment.max_turn_tokens=60"]
    ended = run_here(command("environment", deaths, 8, *words))
    assert_each_prompt_is_trained_on_once(tmp_path, ended, 8)
    rows = metric_rows(tmp_path / "run")
    assert sum(row.get("environment/retries", 0.0) for row in rows) >= 2.0
    assert sum(row.get("environment/failures", 0.0) for row in rows) == 0.0
    assert max(row["async/versions_per_response"] for row in rows if row["step"]) > 1.0
    assert not (tmp_path / "run" / FAULTS_FILE).exists()
