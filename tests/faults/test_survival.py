"""Runs on Ray whose worker processes die or hang: they continue, and give the numbers of a run without faults."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
import pytest

from hybridflow.controller import Backend
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.observability.fault_ledger import FAULTS_FILE
from tests.distributed.processes import Processes
from tests.distributed.runs import sample_rows, small_run, steps_of
from tests.distributed.trapped import ALGORITHMS, APART, Command

pytestmark = pytest.mark.ray

MakeCommand = Callable[[], Command]
MakeWhole = Callable[..., Command]
IN_STEP_4 = "6 SIGKILL 0"
"""Scored so far by the process: held-out prompts, two steps, held-out prompts, a step."""


@pytest.fixture
def command(processes: Processes, tmp_path: Path) -> MakeCommand:
    """A command of six steps."""
    return lambda: Command(processes, tmp_path, *ALGORITHMS["grpo"])


@pytest.fixture(scope="module")
def whole(ray_backend: Backend, processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> MakeWhole:
    """A function: words -> the run without faults."""

    @cache
    def of(*words: str) -> Command:
        run = Command(processes, tmp_path_factory.mktemp("whole"), *ALGORITHMS["grpo"])
        ended = run.here("trainer.backend=ray", *words)
        assert ended.status == 0, ended.said
        return run

    return of


def faults_of(run: Command) -> list[dict]:
    return [json.loads(line) for line in (run.run_dir / FAULTS_FILE).read_text().splitlines()]


def assert_is_whole(run: Command, whole: Command) -> None:
    assert steps_of(run.run_dir) == [0, 1, 2, 3, 4, 5, 6]
    assert run.rows() == whole.rows()
    assert sample_rows(run.run_dir) == sample_rows(whole.run_dir)


def test_a_trained_model_that_dies_is_restored_and_no_row_is_lost_or_repeated(
    ray_backend: Backend, command: MakeCommand, whole: MakeWhole
):
    run = command()
    run.trap.write_text(IN_STEP_4)
    ended = run.here("trainer.backend=ray")
    assert ended.status == 0, ended.said
    assert_is_whole(run, whole())
    fault, *_ = faults_of(run)
    assert (fault["fault"], fault["role"], fault["rank"], fault["pools"]) == ("WorkerDied", "actor+reward", 0, "main")
    assert fault["step"] == 4 and 1 <= fault["resumed_step"] <= 3
    assert "fault: The process of rank 0 of 'actor+reward'" in ended.words
    assert "recovered: new processes in pool=main" in ended.words


@pytest.mark.slow  # the quick case of the same rule: tests/faults/test_group_deaths.py
def test_a_rollout_that_dies_is_replaced_and_its_step_begins_again(
    ray_backend: Backend, command: MakeCommand, whole: MakeWhole
):
    run = command()
    run.trap.write_text(IN_STEP_4)
    ended = run.here("trainer.backend=ray", *APART)
    assert ended.status == 0, ended.said
    assert_is_whole(run, whole(*APART))
    [fault] = faults_of(run)
    assert (fault["pools"], fault["step"], fault["resumed_step"]) == ("generation", 4, 3)


@pytest.mark.slow
def test_a_run_ends_after_too_many_faults_and_says_so(ray_backend: Backend, command: MakeCommand):
    run = command()
    run.trap.write_text("1 SIGKILL 0")  # every process, in its first call
    ended = run.here("trainer.backend=ray", "trainer.max_faults=1")
    assert ended.status == 1
    assert f"The run ends here, after 2 faults within an hour (trainer.max_faults=1); {run.run_dir}" in ended.words
    assert [fault["step"] for fault in faults_of(run)] == [0, 0]


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced(ray_backend: Backend, command: MakeCommand, whole: MakeWhole):
    run = command()
    run.trap.write_text("6 SIGURG 5")  # nobody acts on it; the process then waits
    with run.stopped_in_trap():
        ended = run.here("trainer.backend=ray", "trainer.hang_timeout_seconds=12", *APART)
    assert ended.status == 0, ended.said
    assert_is_whole(run, whole(*APART))
    [fault] = faults_of(run)
    assert (fault["fault"], fault["pools"]) == ("WorkerHangs", "generation"), "the actor only waited for it"
    assert (fault["step"], fault["resumed_step"]) == (4, 3)


DIES_WHILE_WRITING = """
from hybridflow.models.shard_files import PlannedDirectory

write, dead = PlannedDirectory.write, pathlib.Path({dead!r})

def write_or_die(planned):
    "In the background, after the weights of step 4 and before the optimizer's state."
    if "step_4" in str(planned.directory) and planned.directory.name == "optimizer" and not dead.exists():
        dead.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    write(planned)

PlannedDirectory.write = write_or_die
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["trainer.snapshot_fraction=0"], id="from a checkpoint"),
        pytest.param(["trainer.devices=2"], id="one of two ranks"),
    ],
)
@pytest.mark.slow
def test_a_trained_model_that_dies_while_its_checkpoint_is_written_in_the_background_is_saved_again(
    ray_backend: Backend, command: MakeCommand, whole: MakeWhole, words: list[str], tmp_path: Path
):
    run = command()
    with (tmp_path / "judge.py").open("a") as judge:
        judge.write(DIES_WHILE_WRITING.format(dead=str(tmp_path / "dead")))
    ended = run.here("trainer.backend=ray", *words)
    assert ended.status == 0, ended.said
    assert (tmp_path / "dead").exists()
    fault, *_ = faults_of(run)
    assert (fault["fault"], fault["kind"]) == ("WorkerDied", "process") and fault["resumed_step"] <= fault["step"]
    if "trainer.snapshot_fraction=0" in words:
        assert fault["resumed_step"] == 2, "the checkpoint of step 4 is incomplete"
    assert_is_whole(run, whole(*(word for word in words if "devices" in word)))
    store = CheckpointStore(run.run_dir)
    latest = store.latest()
    assert latest is not None and latest.step == 6
    assert not [path for path in store.directory.iterdir() if path.name.startswith(".")], "nothing is left of it"


DIES_WHILE_RECEIVING = """
from hybridflow.resharding.resharder import Resharder

transfer, dead = Resharder.transfer, pathlib.Path({dead!r})

def transfer_or_die(self, version):
    if version == 4 and not dead.exists():
        dead.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return transfer(self, version)

Resharder.transfer = transfer_or_die
"""


@pytest.mark.slow
def test_a_rollout_that_dies_before_it_receives_weights_leaves_the_trained_model_in_place(
    ray_backend: Backend, command: MakeCommand, whole: MakeWhole, tmp_path: Path
):
    run = command()
    with (tmp_path / "judge.py").open("a") as judge:
        judge.write(DIES_WHILE_RECEIVING.format(dead=str(tmp_path / "dead")))
    ended = run.here("trainer.backend=ray", *APART)
    assert ended.status == 0, ended.said
    assert (tmp_path / "dead").exists()
    assert_is_whole(run, whole(*APART))
    [fault] = faults_of(run)
    assert (fault["pools"], fault["resumed_step"]) == ("generation", fault["step"]), "the sender has left its call"


DIES_IN_AN_UPDATE = """
import threading

judged, dead = right, pathlib.Path({dead!r})

def die():
    "Once the actor has begun its update, which takes some seconds."
    siblings = psutil.Process().parent().children()
    while not any("actor.update" in title(each) for each in siblings):
        time.sleep(0.01)
    dead.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.{signal})

def title(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""

def right(completions, answer, **columns):
    scores = judged(completions, answer, **columns)
    if calls == 6 and not dead.exists():
        threading.Thread(target=die, daemon=True).start()
    return scores
"""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="synchronous"),
        pytest.param(["asynchrony.max_staleness=1"], id="ahead"),
        pytest.param(["asynchrony={max_staleness: 1, partial_rollouts: true}"], id="partial rollouts"),
        pytest.param(["trainer.hang_timeout_seconds=2"], id="stopped"),
    ],
)
@pytest.mark.slow
def test_an_update_is_finished_although_the_rollout_dies(
    ray_backend: Backend, command: MakeCommand, whole: MakeWhole, words: list[str], tmp_path: Path
):
    stops = "trainer.hang_timeout_seconds=2" in words
    run, long_updates = command(), "actor.epochs=60"
    with (tmp_path / "judge.py").open("a") as judge:
        name = "SIGSTOP" if stops else "SIGKILL"
        judge.write(DIES_IN_AN_UPDATE.format(dead=str(tmp_path / "dead"), signal=name))
    ended = run.here("trainer.backend=ray", "trainer.snapshot_fraction=0", long_updates, *APART, *words)
    assert ended.status == 0, ended.said
    assert (tmp_path / "dead").exists()
    [fault] = faults_of(run)
    assert (fault["pools"], fault["kind"]) == ("generation", "hang" if stops else "process")
    assert "source" not in fault and not fault.get("repeated_steps"), "the trained model is kept"
    assert steps_of(run.run_dir) == [0, 1, 2, 3, 4, 5, 6]
    if stops or not words:
        assert fault["resumed_step"] == 4, "the update of step 4 counts"
        assert_is_whole(run, whole(long_updates, *APART))


RAISES_IN_AN_UPDATE = """
judged = right

def right(completions, answer, **columns):
    if calls == 6:
        raise ValueError("no answer")
    return judged(completions, answer, **columns)
"""


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ", partial_rollouts: true"])
def test_a_run_that_an_error_in_a_batch_of_a_later_step_ends_saves_its_last_step(
    ray_backend: Backend, command: MakeCommand, more: str, tmp_path: Path
):
    run = command()
    with (tmp_path / "judge.py").open("a") as judge:
        judge.write(RAISES_IN_AN_UPDATE)
    words = ["actor.epochs=40", "trainer.eval_every=1", "trainer.save_every=10"]
    ended = run.here("trainer.backend=ray", *APART, f"asynchrony={{max_staleness: 2, ahead: 2{more}}}", *words)
    assert ended.status == 1 and "no answer" in ended.words
    latest = CheckpointStore(run.run_dir).latest()
    assert latest is not None and latest.step == steps_of(run.run_dir)[-1] > 0


@pytest.mark.parametrize(
    ("call", "resumed"),
    [pytest.param(6, 2, id="in an evaluation"), pytest.param(7, 3, id="in a step, whose update counts")],
)
@pytest.mark.slow
def test_batches_that_were_generated_ahead_are_asked_for_again_after_a_fault(
    ray_backend: Backend, command: MakeCommand, whole: MakeWhole, call: int, resumed: int
):
    run = command()
    run.trap.write_text(f"{call} SIGKILL 0")
    ended = run.here("trainer.backend=ray", *APART, "asynchrony={max_staleness: 2, ahead: 2}", "actor.epochs=40")
    assert ended.status == 0, ended.said
    assert steps_of(run.run_dir) == [0, 1, 2, 3, 4, 5, 6]
    fault, *_ = faults_of(run)  # the new process has the same trap
    assert (fault["fault"], fault["pools"], fault["resumed_step"]) == ("WorkerDied", "generation", resumed)
    rows = [row for row in run.rows() if "async/groups/consumed" in row]
    assert [row["async/groups/consumed"] for row in rows] == [8 * step for step in range(1, 7)]
    assert [row["async/staleness/max"] for row in rows[:2]] == [0.0, 1.0]
    assert max(row["async/staleness/max"] for row in rows) <= 2.0
    drawn, expected = (
        CheckpointStore(each.run_dir).latest().driver_state()["streams"] for each in (run, whole(*APART))
    )
    assert drawn == expected


RAISING = """
from pathlib import Path

def right(prompts, completions, answer):
    if (trap := Path(__file__).with_name("trap")).exists():
        trap.unlink()
        raise RuntimeError("no answer")
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
"""


@pytest.mark.slow
def test_what_is_shown_of_a_fault_has_fewer_than_ten_lines(tmp_path: Path):
    def shown(name: str, when_started: Callable[[int], object]) -> list[str]:
        """The lines that a run of its own process prints; calls the function with its id after the second step."""
        folder = tmp_path / name
        folder.mkdir()
        (folder / "judge.py").write_text(RAISING)
        words = [*small_run(folder), *ALGORITHMS["grpo"], "trainer.total_steps=60", "trainer.backend=ray"]
        words += [f"trainer.run_dir={folder / 'run'}", f"reward.functions={folder}/judge.py:right"]
        words += ["trainer.faults.user_code=retry", "trainer.samples_every=0", "trainer.eval_every=0"]
        with (folder / "shown").open("wb") as file:
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
            command = [sys.executable, "-m", "hybridflow", "ppo", *words]
            with subprocess.Popen(command, env=environment, stdout=file, stderr=file) as run:
                metrics = folder / "run" / "metrics.jsonl"
                while run.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 2):
                    time.sleep(0.1)
                when_started(run.pid)
        lines = (folder / "shown").read_text().splitlines()
        assert run.returncode == 0, "\n".join(lines)
        return lines

    def kill(pid: int) -> None:
        workers = [each for each in psutil.Process(pid).children(recursive=True) if "ray::RayHost" in each.name()]
        workers[0].kill()

    usual = len(shown("whole", lambda pid: None))
    faults = {"killed": kill, "raising": lambda pid: (tmp_path / "raising" / "trap").touch()}
    for name, cause in faults.items():
        lines = shown(name, cause)
        assert sum("fault: " in line for line in lines) == 1, "\n".join(lines)
        assert len(lines) - usual < 10, "\n".join(lines)
