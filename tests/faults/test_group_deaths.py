"""SIGKILL while groups wait, run, are interrupted, have finished or are trained on: no prompt is lost or repeated."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from hybridflow.controller import Backend
from hybridflow.dataflows.schedule import SCHEDULE_FILE
from hybridflow.observability.fault_ledger import FAULTS_FILE
from tests.distributed.processes import Processes
from tests.distributed.runs import Ended, metric_rows, run_here, small_run, steps_of
from tests.distributed.trapped import KILLED

pytestmark = pytest.mark.ray

OWN = '''
import os, signal, time
from contextlib import suppress
from pathlib import Path

from hybridflow.dataflows.grpo import GRPO
from hybridflow.engines.rollout.transformers.engine import TransformersEngine

FOLDER = Path({folder!r})

def reached(moment, step):
    """Sends SIGKILL to the processes that the trap names, if it names this moment and step; once."""
    trap = FOLDER / "trap"
    if trap.exists() and trap.read_text().split()[1:] == [moment.replace(" ", "_"), str(step)]:
        victims = trap.read_text().split()[0]
        trap.unlink()
        own = [os.getpid()] if victims == "itself" else []
        for victim in own or [int(file.read_text()) for file in FOLDER.glob(f"{{victims}}*.pid")]:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

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
STEPS, GROUPS = 5, 8
POOLS = "placement={pools: {train: {devices: 1}, generate: {devices: 1}}, roles: {rollout: generate, reward: train}}"
APART = ["trainer.devices=2", POOLS]
MOMENTS = ("waiting", "running", "before weights", "interrupted", "finished", "trained", "published")

Settings = Callable[..., list[str]]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A function: who dies, the moment, the step and further settings -> the words of the command."""
    (tmp_path / "own.py").write_text(OWN.format(folder=str(tmp_path)))

    def words(victims: str, moment: str, step: int, *more: str) -> list[str]:
        (tmp_path / "trap").write_text(f"{victims} {moment.replace(' ', '_')} {step}")
        return [
            *small_run(tmp_path),
            "algorithm=grpo",
            f"dataflow={tmp_path}/own.py:Flow",
            f"trainer={{backend: ray, total_steps: {STEPS}, save_every: 1, eval_every: 0, samples_every: 0}}",
            f"trainer.run_dir={tmp_path}/run",
            *more,
        ]

    return words


def partial(folder: Path) -> list[str]:
    words = ["asynchrony={max_staleness: 2, partial_rollouts: true}", "data.max_response_tokens=60"]
    return [*words, f"rollout.engine={folder}/own.py:Engine"]


def assert_each_prompt_is_trained_on_once(folder: Path, ended: Ended) -> None:
    assert ended.status == 0, ended.said
    assert not (folder / "trap").exists(), "nothing was killed"
    run_dir = folder / "run"
    assert steps_of(run_dir) == list(range(STEPS + 1))
    last = metric_rows(run_dir)[-1]
    assert last["async/groups/consumed"] == GROUPS * STEPS and last["async/groups/discarded"] == 0
    assert last["async/tokens/generated"] == last["async/tokens/consumed"] > 0
    assert max(row["async/staleness/max"] for row in metric_rows(run_dir) if row["step"]) <= 2
    if (schedule := run_dir / SCHEDULE_FILE).exists():
        lines = [json.loads(line) for line in schedule.read_text().splitlines()]
        trained = {line["step"]: line["trained"] for line in lines if "step" in line}  # the last time that it was taken
        assert sorted(uid for uids in trained.values() for uid in uids) == list(range(GROUPS * STEPS))


@pytest.mark.parametrize(
    ("moment", "layout"),
    [
        pytest.param(moment, APART, id=moment, marks=[] if moment == "interrupted" else [pytest.mark.slow])
        for moment in MOMENTS
    ]
    + [pytest.param("running", [], id="running, in the actor's process", marks=pytest.mark.slow)],
)
def test_a_rollout_that_dies_with_groups_in_any_state(
    ray_backend: Backend, settings: Settings, tmp_path: Path, moment: str, layout: list[str]
):
    ended = run_here(settings("rollout", moment, 2, *partial(tmp_path), *layout))
    assert_each_prompt_is_trained_on_once(tmp_path, ended)
    [fault] = [json.loads(line) for line in (tmp_path / "run" / FAULTS_FILE).read_text().splitlines()]
    assert fault["fault"] == "WorkerDied" and fault["pools"] == ("generate" if layout else "main")


@pytest.mark.parametrize(
    "moment",
    [pytest.param(moment, marks=[] if moment == "finished" else [pytest.mark.slow]) for moment in MOMENTS],
)
def test_a_driver_that_dies_with_groups_in_any_state_resumes(
    ray_backend: Backend, processes: Processes, settings: Settings, tmp_path: Path, moment: str
):
    words, address = settings("driver", moment, 3, *partial(tmp_path), *APART), ray.get_runtime_context().gcs_address
    ended = processes.run(words, RAY_ADDRESS=address)
    assert ended.status == KILLED, ended.said
    ended = processes.run(words, RAY_ADDRESS=address)
    assert "resumed checkpoint=" in ended.said or "continues" in ended.words, ended.said
    assert_each_prompt_is_trained_on_once(tmp_path, ended)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "moment", "number"),
    [
        pytest.param("itself", "reset", 1, id="others wait"),
        pytest.param("itself", "first reply", 1, id="running"),
        pytest.param("itself", "reset", 12, id="others have finished"),
        pytest.param("environment", "trained", 2, id="all of them, during an update"),
        pytest.param("environment", "published", 2, id="all of them, after an update"),
    ],
)
def test_environments_that_die_while_batches_are_generated_ahead(
    ray_backend: Backend, settings: Settings, tmp_path: Path, victims: str, moment: str, number: int
):
    """Their episodes start again, whether the processes are idle or not."""
    words = ["asynchrony={max_staleness: 2, ahead: 2}", "reward.functions=[environment]", *APART]
    words += [f"environment.name={tmp_path}/own.py:Twice", "environment.processes=3", "environment.max_turns=2"]
    words += ["data.max_response_tokens=24", "environment.max_turn_tokens=4"]
    ended = run_here(settings(victims, moment, number, *words))
    assert_each_prompt_is_trained_on_once(tmp_path, ended)
    rows = metric_rows(tmp_path / "run")
    assert sum(row.get("environment/retries", 0.0) for row in rows) >= 1.0
    assert sum(row.get("environment/failures", 0.0) for row in rows) == 0.0
    assert not (tmp_path / "run" / FAULTS_FILE).exists()
