"""A checkpoint that is written in the background: complete in the end, or not there."""

import errno
import os
import threading
from pathlib import Path

import pytest

from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.saving import Saving
from hybridflow.errors import CheckpointError, ResourceError, WorkerDied
from hybridflow.parallel.part_records import FOLDER, PartWriter
from tests.unit.elastic.victim import contents, store_with


def begun(store: CheckpointStore, step: int, state: dict | None = None) -> Saving:
    """A checkpoint to which a worker is writing."""
    saving = Saving(store, step, {} if state is None else state)
    (saving.directory() / "actor").mkdir()
    return saving


def write_part(directory: Path, step: int, *, may_write: threading.Event | None = None) -> PartWriter:
    def write() -> None:
        if may_write is not None:
            may_write.wait()
        (directory / "actor" / "weights.bin").write_bytes(contents(step))

    writer = PartWriter(write, directory, "actor", rank=0, num_ranks=1)
    writer.start()
    return writer


def only(store: CheckpointStore, *steps: int) -> None:
    assert sorted(path.name for path in store.directory.iterdir()) == [f"step_{step}" for step in steps]


def test_a_checkpoint_appears_when_its_workers_have_written_it(tmp_path):
    store, may_write = store_with(tmp_path, 1), threading.Event()
    state = {"loss": [0.5]}
    saving = begun(store, 2, state)
    write_part(saving.directory(), 2, may_write=may_write)
    saving.publish({"actor": 1})
    state["loss"][0] = 9.0  # training continues
    assert not saving.wait(0.05) and not saving.is_done and store.latest().step == 1
    may_write.set()
    assert saving.result() == store.directory / "step_2"
    latest = store.latest()
    assert latest is not None and latest.driver_state() == {"loss": [0.5], "step": 2}
    assert sorted(latest.manifest.files) == ["actor/weights.bin", "driver.json"]
    assert not (latest.path / FOLDER).exists() and saving.seconds > 0.04


def test_a_state_that_cannot_be_saved_is_told_before_anything_is_written(tmp_path):
    saving = Saving(CheckpointStore(tmp_path), 1, {"x": {3}})
    with pytest.raises(CheckpointError, match=r"state\['x'\] cannot be saved"):
        saving.directory()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("is_published", [False, True])
def test_an_error_deletes_what_was_written_and_keeps_earlier_checkpoints(is_published, tmp_path):
    store = store_with(tmp_path, 1)
    saving = begun(store, 2)
    if is_published:
        saving.publish({"actor": 2})
    saving.fail(WorkerDied("rank 1 is gone", remedy="", role="actor", rank=1, node="here", method="save"))
    with pytest.raises(WorkerDied, match="rank 1 is gone"):
        saving.result()
    assert saving.is_done
    only(store, 1)
    assert store.latest().step == 1


def test_a_full_disk_of_a_worker_is_told_as_one(tmp_path):
    store = store_with(tmp_path, 1)
    saving = begun(store, 2)
    saving.publish({"actor": 1})
    saving.fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(ResourceError, match=r"The disk is full: .*step_2 could not be written.*earlier checkpoints"):
        saving.result()
    only(store, 1)


def test_a_worker_that_still_writes_to_an_abandoned_checkpoint_does_not_disturb_the_next(tmp_path):
    store, may_write = store_with(tmp_path, 1), threading.Event()
    saving = begun(store, 2)
    late = write_part(saving.directory(), 3, may_write=may_write)
    saving.fail(CheckpointError("abandoned", remedy="None."))
    with pytest.raises(CheckpointError, match="abandoned"):
        saving.result()
    may_write.set()
    late.abandon()  # as `ModelWorker.save` does first
    again = begun(store, 2)
    write_part(again.directory(), 2)
    again.publish({"actor": 1})
    assert (again.result() / "actor" / "weights.bin").read_bytes() == contents(2)
    only(store, 1, 2)
