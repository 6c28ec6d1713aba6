"""The loop after a fault: from the beginning of the step, a copy in memory, a checkpoint, or the start."""

import json
import time
from collections.abc import Collection
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from hybridflow.batch import Batch
from hybridflow.config.faults import KINDS, FaultPolicy, Faults
from hybridflow.config.loop import Trainer
from hybridflow.controller.backends.interface import Broken
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.failures import call_failed
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.loop import Loop
from hybridflow.dataflows.run import Run
from hybridflow.dataflows.snapshots import Snapshot, Snapshots
from hybridflow.elastic.checkpoint import step_of
from hybridflow.elastic.fault_recovery import FaultRecovery, kind_of
from hybridflow.elastic.mirror import Mirror
from hybridflow.elastic.remote import RemoteCheckpoints
from hybridflow.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    NodeLost,
    NumericError,
    OutputLost,
    RewardError,
    WorkerDied,
    WorkerError,
    WorkerHangs,
    WorkerOutOfMemory,
)
from hybridflow.models.shard_files import PlannedDirectory
from hybridflow.observability.metrics import Metrics, last
from tests.unit.dataflows.programs import numbers, weights
from tests.unit.dataflows.test_loop import run_of

PLACE = {"remedy": "none", "role": "actor", "rank": 0, "node": "here", "method": "update"}


class Mortal(GRPO):
    """Dies once: in its fourth step, before the update or after it."""

    dies = ""

    def step(self, prompts: Batch) -> Metrics:
        dies = self.dies if self.iteration == 3 else ""
        if dies == "before the update":
            self.dies = ""
            raise WorkerDied("a process died", **PLACE)
        metrics = super().step(prompts)
        if dies:
            self.dies = ""
            raise WorkerDied("a process died", **PLACE)
        return metrics


class Restarts:
    """A stand-in for Ray's processes, of which none dies here: says what a fault would have changed."""

    def __init__(self, *, is_unchanged: bool) -> None:
        self.is_unchanged = is_unchanged
        self.respawned: list[set[str]] = []

    def broken(self, seconds: float) -> Broken:
        return Broken(frozenset({"rewards"}), self.is_unchanged)

    def respawn(self, pools: Collection[str]) -> None:
        self.respawned.append(set(pools))


def mortal(
    directory,
    run_dir,
    restarts: Restarts,
    *,
    dies: str,
    snapshots: float = 0.9,
    save_every: int = 2,
    policies: Faults | None = None,
) -> Run:
    settings = {"total_steps": 6, "save_every": save_every, "snapshot_fraction": snapshots}
    trainer = Trainer(eval_every=0, samples_every=0, async_save=False, **settings)  # no copies while one is written
    run = run_of(directory, run_dir, trainer, Mortal, evaluated=False)
    run.dataflow.dies = dies
    recovery = FaultRecovery(
        restarts,
        trainer=trainer,
        learner_pools={"main"},
        pool_of={"actor": "main"},
        reconnect=lambda: None,
        ledger=run_dir / "faults.jsonl",
    )
    return replace(run, recovery=recovery)


@pytest.mark.parametrize(
    ("dies", "snapshots", "resumed"),
    [("before the update", 0.9, 3), ("after the update", 0.9, 3), ("after the update", 0.0, 2)],
    ids=["from the beginning of the step", "from memory", "from a checkpoint"],
)
def test_the_run_after_a_fault_is_the_run_without_one(toy_dir, tmp_path, dies, snapshots, resumed):
    (tmp_path / "whole").mkdir()
    whole = mortal(toy_dir(), tmp_path / "whole", Restarts(is_unchanged=True), dies="")
    Loop(whole).run()
    (tmp_path / "hurt").mkdir()
    restarts = Restarts(is_unchanged=dies == "before the update")
    hurt = mortal(toy_dir(), tmp_path / "hurt", restarts, dies=dies, snapshots=snapshots)
    assert Loop(hurt).run().steps == 6
    assert numbers(hurt) == numbers(whole) and len(numbers(whole)) >= 6
    assert all(map(torch.equal, weights(hurt), weights(whole)))
    assert restarts.respawned == [{"rewards"}]
    assert f'"resumed_step": {resumed}' in (tmp_path / "hurt" / "faults.jsonl").read_text()


def test_a_copy_that_is_lost_is_replaced_by_the_checkpoint(toy_dir, tmp_path, monkeypatch, caplog):
    hurt = mortal(toy_dir(), tmp_path, Restarts(is_unchanged=False), dies="after the update")
    lost = WorkerError("the object is lost", **PLACE)
    monkeypatch.setattr("hybridflow.workers.model_worker.ModelWorker.roll_back", _raises(lost))
    assert Loop(hurt).run().steps == 6
    assert "the copy of the trained state after step 3 is lost" in caplog.text
    assert '"resumed_step": 2' in (tmp_path / "faults.jsonl").read_text()


def test_without_any_copy_all_trained_models_start_from_scratch(toy_dir, tmp_path):
    restarts = Restarts(is_unchanged=False)
    hurt = mortal(toy_dir(), tmp_path, restarts, dies="after the update", snapshots=0.0, save_every=0)
    assert Loop(hurt).run().steps == 6
    assert restarts.respawned == [{"rewards", "main"}]
    assert '"resumed_step": 0' in (tmp_path / "faults.jsonl").read_text()


class Failing(GRPO):
    """Raises an error a few times in its fourth step, after the update."""

    error: Exception | None = None
    times = 1
    drawn: list[tuple[int, list]]

    def step(self, prompts: Batch) -> Metrics:
        metrics = super().step(prompts) | {"own/first": last(len(prompts.object("prompt")[0]))}
        self.drawn.append((self.iteration, prompts.object("prompt")))
        if self.iteration == 3 and self.times:
            self.times -= 1
            assert self.error is not None
            raise self.error
        return metrics


def failing(directory, run_dir, error: Exception | None, *, times: int = 1, save_every: int = 2, **policies) -> Run:
    """A run in one process whose fourth step fails; `policies` by kind of fault."""
    run_dir.mkdir()
    chosen = Faults(**{kind: FaultPolicy[policy] for kind, policy in policies.items()})
    settings = {"total_steps": 6, "save_every": save_every, "snapshot_fraction": 0.0, "faults": chosen}
    trainer = Trainer(eval_every=0, samples_every=0, **settings)
    run = run_of(directory, run_dir, trainer, Failing, evaluated=False)
    program = run.dataflow
    assert isinstance(program, Failing)
    program.drawn, program.error, program.times = [], error, times if error else 0
    assert isinstance(run.calls, LocalBackend)
    recovery = FaultRecovery(
        run.calls,
        trainer=trainer,
        learner_pools={"main"},
        pool_of={"actor": "main"},
        reconnect=lambda: None,
        ledger=run_dir / "faults.jsonl",
        respawns=False,
    )
    return replace(run, recovery=recovery)


def faults_of(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "faults.jsonl").read_text().splitlines()]


def test_a_step_is_retried_in_one_process_if_the_policy_says_so(toy_dir, tmp_path, caplog):
    whole = failing(toy_dir(), tmp_path / "whole", None)
    Loop(whole).run()
    hurt = failing(toy_dir(), tmp_path / "hurt", RewardError("no answer", remedy="wait"), user_code="retry")
    assert Loop(hurt).run().steps == 6
    assert numbers(hurt) == numbers(whole)
    [fault] = faults_of(tmp_path / "hurt")
    assert (fault["kind"], fault["policy"], fault["step"], fault["resumed_step"]) == ("user_code", "retry", 4, 2)
    lost = fault["cost_seconds"] - fault["seconds"]
    steps = [row["timing_s/step"] for step, row in whole.tracker.rows.items() if step in (3, 4)]
    assert lost > 0.2 * sum(steps), f"{fault} cost steps 3 and 4, which took {steps} s without it"
    assert "fault: In training step 4: no answer (step=4 kind=user_code policy=retry)" in caplog.text
    assert (
        "recovered: the step is repeated after" in caplog.text
        and "after step 2, from the checkpoint, 1 step back. The fault cost" in caplog.text
    )


@pytest.mark.parametrize("save_every", [2, 0], ids=["to a checkpoint", "to the start"])
def test_a_roll_back_leaves_out_the_batch_of_its_step(toy_dir, tmp_path, caplog, save_every):
    error = NumericError("the loss is nan", remedy="lower")
    run = failing(toy_dir(), tmp_path / "run", error, save_every=save_every, numeric="roll_back")
    assert Loop(run).run().steps == 6
    [fault] = faults_of(tmp_path / "run")
    assert (fault["kind"], fault["resumed_step"]) == ("numeric", 2 if save_every else 0)
    assert "the batch of step 4 is left out" in caplog.text
    assert isinstance(run.dataflow, Failing)
    drawn = run.dataflow.drawn
    first = next(texts for step, texts in drawn if step == 3)
    *again, fourth = [texts for step, texts in drawn if step == 3]
    assert again == [first] and fourth != first
    whole = failing(toy_dir(), tmp_path / "whole", None)
    Loop(whole).run()
    assert isinstance(whole.dataflow, Failing)
    usual = [texts for _, texts in whole.dataflow.drawn]
    assert [texts for step, texts in drawn if step < 3][:3] == usual[:3]
    assert [texts for step, texts in drawn if step >= 4] == [*usual[5:], drawn[-1][1]]
    assert {step: row for step, row in numbers(run).items() if step <= 3} == {
        step: row for step, row in numbers(whole).items() if step <= 3
    }


def test_a_fault_that_repeats_ends_the_run_with_the_history(toy_dir, tmp_path, monkeypatch):
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append)
    monkeypatch.setattr("hybridflow.elastic.fault_recovery.time", clock)
    run = failing(toy_dir(), tmp_path / "run", RewardError("no", remedy="wait"), times=9, user_code="retry")
    with pytest.raises(RewardError) as caught:
        Loop(run).run()
    assert "The run ends here, after 4 faults in step 4" in caught.value.message
    assert caught.value.message.count("step 4, user_code (RewardError)") == 4
    assert [fault["policy"] for fault in faults_of(tmp_path / "run")] == ["retry"] * 4
    assert pauses == [1.0, 2.0, 4.0]


class Dying:
    """A trained role whose process dies when it is to restore a copy."""

    def roll_back(self, kept: BatchRef) -> None:
        raise WorkerDied("a process died", **PLACE)


def test_a_copy_during_whose_restoration_a_process_died_is_used_once_more(toy_dir, tmp_path):
    run = replace(failing(toy_dir(), tmp_path / "run", None), learners={"actor": Dying()})
    copies = Snapshots(run)
    copies.last = kept = Snapshot(3, {}, {"actor": BatchRef.of(Batch({}), run.calls)})
    for expected in (kept, None):
        with pytest.raises(WorkerDied):
            copies.restore()
        assert copies.last is expected


@pytest.mark.parametrize(
    ("error", "policies"),
    [
        (RewardError("no", remedy="wait"), {}),
        (ConfigError("wrong", remedy="right"), {"user_code": "retry"}),
        (WorkerDied("died", **PLACE), {}),
        (ZeroDivisionError("of a dataflow"), {}),
    ],
    ids=["by default", "an error of the configuration", "no process can be replaced", "any exception"],
)
def test_an_error_ends_the_run_as_it_is_if_no_policy_handles_it(toy_dir, tmp_path, error, policies):
    run, said = failing(toy_dir(), tmp_path / "run", error, **policies), str(error)
    with pytest.raises(type(error)) as caught:
        Loop(run).run()
    assert str(caught.value).removeprefix("In training step 4: ") == said
    assert [fault["policy"] for fault in faults_of(tmp_path / "run")] == ["stop"]


@pytest.mark.parametrize(("is_updated", "newest"), [(False, "step_3"), (True, "step_2")])
def test_an_error_of_the_users_code_saves_the_last_step_unless_the_model_has_changed_since(
    toy_dir, tmp_path, is_updated, newest
):
    class Raising(GRPO):
        def step(self, prompts: Batch) -> Metrics:
            if self.iteration == 3 and not is_updated:
                raise RewardError("no", remedy="wait")
            metrics = super().step(prompts)
            if self.iteration == 3:
                raise RewardError("no", remedy="wait")
            return metrics

    trainer = Trainer(eval_every=0, samples_every=0, total_steps=6, save_every=2)
    run = run_of(toy_dir(), tmp_path, trainer, Raising, evaluated=False)
    with pytest.raises(RewardError):
        Loop(run).run()
    assert [path.name for path in run.checkpoints.paths()][-1] == newest
    assert [row for row in run.tracker.rows if row] == [1, 2, 3]


def test_uploads_that_fail_for_a_time_are_faults_that_cost_nothing(toy_dir, tmp_path, monkeypatch):
    put, failed = LocalFileSystem.put_file, []

    def put_later(*args, **kwargs):
        if len(failed) < 2:
            failed.append(args)
            raise PermissionError(13, "Access denied")
        return put(*args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "put_file", put_later)
    monkeypatch.setattr("hybridflow.elastic.mirror._FIRST_PAUSE_SECONDS", 0.01)
    run, remote = failing(toy_dir(), tmp_path / "run", None), RemoteCheckpoints(f"file://{tmp_path}/remote")
    run = replace(run, mirror=Mirror(run.checkpoints, remote))
    assert Loop(run).run().steps == 6 and len(failed) == 2
    assert list(remote.complete()) == [step_of(path) for path in run.checkpoints.paths()]
    [fault] = faults_of(tmp_path / "run")
    assert (fault["kind"], fault["policy"], fault["cost_seconds"]) == ("storage", "retry", 0.0)
    assert fault["step"] == fault["resumed_step"] and "Access denied" in fault["message"]
    assert any("perf/checkpoint_upload_seconds" in row for row in run.tracker.rows.values())


def test_a_run_whose_last_checkpoint_cannot_be_uploaded_fails_at_its_end_and_keeps_it(toy_dir, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Access denied")

    monkeypatch.setattr(LocalFileSystem, "put_file", refuse)
    monkeypatch.setattr("hybridflow.elastic.mirror._FIRST_PAUSE_SECONDS", 0.01)
    run, remote = failing(toy_dir(), tmp_path / "run", None), RemoteCheckpoints(f"file://{tmp_path}/remote")
    run = replace(run, mirror=Mirror(run.checkpoints, remote))
    with pytest.raises(CheckpointError, match="were not all copied to file:.*Access denied") as caught:
        Loop(run).run()
    assert "the same command copies them" in caught.value.remedy
    latest = run.checkpoints.latest()
    assert latest is not None and latest.step == 6 and not remote.complete()


def raised(error: Exception) -> WorkerError:
    """An error as a worker sends it to the driver."""
    return call_failed(error, role="actor", rank=0, node="here", method="update").error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkerHangs("hangs", **PLACE), "hang"),
        (WorkerOutOfMemory("killed", **PLACE), "memory"),
        (raised(torch.OutOfMemoryError("CUDA out of memory")), "memory"),
        (NodeLost("gone", **PLACE), "lost_node"),
        (OutputLost("gone", **PLACE), "lost_node"),
        (WorkerDied("killed", **PLACE), "process"),
        (raised(NumericError("nan", remedy="")), "numeric"),
        (raised(BatchError("rows", remedy="")), "data"),
        (raised(OSError(28, "full")), "storage"),
        (raised(RewardError("no", remedy="")), "user_code"),
        (raised(ZeroDivisionError()), "user_code"),
        (ValueError("of a dataflow"), "user_code"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_fault_has_its_kind(error, kind):
    assert kind_of(error).name == kind


def test_each_kind_has_a_setting_whose_default_can_handle_it():
    assert {kind.name for kind in KINDS} == {field.name for field in fields(Faults)}
    assert all(getattr(Faults(), kind.name) in kind.policies for kind in KINDS)


def _raises(error: Exception):
    def roll_back(self: object, kept: Batch) -> None:
        raise error

    return roll_back


def test_after_a_checkpoint_that_is_lost_while_training_continues_the_next_step_is_saved(
    toy_dir, tmp_path, monkeypatch
):
    run, write, failed = failing(toy_dir(), tmp_path / "run", None, storage="retry"), PlannedDirectory.write, []

    def write_at_second_attempt(planned):
        if "step_4" in str(planned.directory) and not failed:
            failed.append(planned)
            raise OSError(28, "No space left on device")
        write(planned)

    monkeypatch.setattr(PlannedDirectory, "write", write_at_second_attempt)
    assert Loop(run).run().steps == 6
    [fault] = faults_of(tmp_path / "run")
    assert (fault["kind"], fault["fault"], fault["policy"]) == ("storage", "ResourceError", "retry")
    found = [path.name for path in run.checkpoints.paths()]
    assert found in (["step_2", "step_5", "step_6"], ["step_2", "step_6"]), "the fault was noticed before step 5 or 6"
