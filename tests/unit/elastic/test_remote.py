"""Checkpoints at a URL: only complete ones are found there, whatever fails while they are copied."""

import errno
import logging
import time
from pathlib import Path
from threading import Lock

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from hybridflow.config.loop import Trainer
from hybridflow.elastic import mirror
from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.elastic.manifest import Parts
from hybridflow.elastic.mirror import Mirror
from hybridflow.elastic.remote import RemoteCheckpoints, remote_checkpoints
from hybridflow.elastic.resuming import resolve_resume
from hybridflow.elastic.retention import Retention
from hybridflow.errors import CheckpointError, ResourceError
from hybridflow.parallel.file_records import FileRecord, record_files
from tests.unit.elastic.test_checkpoint import flip_a_bit, forge
from tests.unit.elastic.victim import save, store_with

OPERATIONS = ("put_file", "rm_file", "rm", "find", "cat_file", "ls")


class Failures:
    """Lets the operations of local files succeed a number of times, and then fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.failed = 1 << 30, 0
        self.error: OSError = PermissionError(errno.EACCES, "Access denied")
        for name in OPERATIONS:
            monkeypatch.setattr(LocalFileSystem, name, self._counted(getattr(LocalFileSystem, name)))

    def _counted(self, method):
        def counted(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                self.failed += 1
                raise self.error
            return method(*args, **kwargs)

        return counted


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> Failures:
    monkeypatch.setattr(mirror, "_FIRST_PAUSE_SECONDS", 0.01)
    return Failures(monkeypatch)


def remote_of(tmp_path: Path) -> RemoteCheckpoints:
    return RemoteCheckpoints(f"file://{tmp_path}/remote")


def upload(remote: RemoteCheckpoints, store: CheckpointStore, step: int) -> None:
    checkpoint = store.open(store.directory / f"step_{step}")
    remote.upload(checkpoint.path, checkpoint.manifest, remote.complete())


def files_of(directory: Path) -> dict:
    return record_files(directory, [str(path.relative_to(directory)) for path in directory.rglob("*.*")])


def write_roles(directory: Path, actor: str, critic: str) -> Parts:
    found: dict[str, dict[str, FileRecord]] = {}
    for role, text in (("actor", actor), ("critic", critic)):
        (directory / role).mkdir()
        (directory / role / "weights").write_text(text)
        records = record_files(directory / role, ["weights"])
        found[role] = {f"{role}/{name}": record for name, record in records.items()}
    return found


@pytest.mark.parametrize("fails", [None, NotImplementedError, ValueError])
def test_what_has_not_changed_is_copied_at_the_url(tmp_path, monkeypatch, fails):
    store, remote, put = CheckpointStore(tmp_path, keep=Retention(9)), remote_of(tmp_path), list[str]()
    original, copy = LocalFileSystem.put_file, LocalFileSystem.cp_file

    def cp_file(self, source: str, target: str) -> None:
        if fails is not None and "/remote/" in source:
            raise fails
        copy(self, source, target)

    monkeypatch.setattr(LocalFileSystem, "cp_file", cp_file)
    monkeypatch.setattr(
        LocalFileSystem, "put_file", lambda self, here, there: (put.append(there), original(self, here, there))
    )
    for step, critic in ((1, "a"), (2, "b")):
        store.save(step, lambda directory, critic=critic: write_roles(directory, "same", critic), {})
        put.clear()
        upload(remote, store, step)
    names = [path.rpartition("step_2/")[2] for path in put]
    expected = ["critic/weights", "driver.json", "manifest.json", *(["actor/weights"] if fails else [])]
    assert sorted(names) == sorted(expected)
    assert files_of(tmp_path / "remote" / "step_2") == files_of(store.place(2))


def test_a_file_that_is_cut_at_the_url_is_sent_again(tmp_path):
    store, remote = CheckpointStore(tmp_path, keep=Retention(9)), remote_of(tmp_path)
    for step in (1, 2):
        store.save(step, lambda directory: write_roles(directory, "same", "same"), {})
    upload(remote, store, 1)
    (tmp_path / "remote" / "step_1" / "actor" / "weights").write_text("sa")
    upload(remote, store, 2)
    assert files_of(tmp_path / "remote" / "step_2") == files_of(store.place(2))


@pytest.mark.parametrize("url", ["memory://bucket/run", "file://{}/remote/"])
def test_the_newest_checkpoint_at_a_url_is_copied_as_it_was(tmp_path, url):
    store, new = store_with(tmp_path / "a", 8, 9, 10), CheckpointStore(tmp_path / "b")
    remote = RemoteCheckpoints(url.format(tmp_path))
    remote.check()
    assert remote.newer(new, than=0) is None
    for step in (8, 10, 9):
        upload(remote, store, step)
    assert list(remote.complete()) == [8, 9, 10]
    assert remote.newer(new, than=10) is None
    found = remote.newer(new, than=9)
    assert found is not None and found.path == new.directory / "step_10"
    assert files_of(found.path) == files_of(store.directory / "step_10")
    upload(remote, store, 9)
    remote.delete(10)
    assert list(remote.complete()) == [8, 9]


def test_the_check_of_a_url_leaves_nothing_behind(tmp_path):
    for folder in (tmp_path, tmp_path / "remote"):
        folder.mkdir(exist_ok=True)
        RemoteCheckpoints(f"file://{tmp_path}/remote/runs/x").check()
        assert not list(folder.rglob("*"))


@pytest.mark.parametrize(
    ("url", "remedy"),
    [("file:///proc/run", "Check the path,"), ("foo://run", "Use a protocol that"), ("zip://run", "Check the URL,")],
)
def test_a_url_that_cannot_be_used_has_the_remedy_of_its_protocol(url, remedy):
    with pytest.raises(CheckpointError, match=f"trainer.checkpoint_url={url} cannot be") as caught:
        RemoteCheckpoints(url).check()
    assert caught.value.remedy.startswith(remedy) and "AWS" not in caught.value.remedy


@pytest.mark.parametrize("url", ["s3://", "s3:///", "runs/x", "://x"])
def test_a_text_that_is_no_url_has_no_checkpoints_so_that_only_the_configuration_is_wrong(url):
    assert remote_checkpoints(Trainer(checkpoint_url=url)) is None


def test_an_upload_that_fails_anywhere_leaves_no_checkpoint_or_a_complete_one(tmp_path, failures):
    store, remote = store_with(tmp_path, 1, 2), remote_of(tmp_path)
    upload(remote, store, 1)
    save(store, 1)  # again, with another manifest, which replaces the one that is there
    for most in range(100):
        failures.left = most
        is_whole = True
        try:
            upload(remote, store, 1)
            upload(remote, store, 2)
        except CheckpointError as error:
            is_whole = False
            assert "Access denied" in error.message or "None bytes there" in error.message
            assert "may read, write and delete there" in error.remedy and "AWS" not in error.remedy
        failures.left = 1 << 30
        for step in remote.complete():
            fresh = CheckpointStore(tmp_path / f"fresh_{most}_{step}")
            found = remote.newer(fresh, than=step - 1)
            assert found is not None, "what is found is complete"
        remote.delete(2)
        if is_whole:
            break
    assert is_whole and 12 < most < 99


def test_a_damaged_checkpoint_at_a_url_is_passed_over(tmp_path, caplog):
    store, remote = store_with(tmp_path, 1, 2, 3), remote_of(tmp_path)
    for step in (1, 2, 3):
        upload(remote, store, step)
    flip_a_bit(tmp_path / "remote" / "step_3" / "manifest.json")
    flip_a_bit(next((tmp_path / "remote" / "step_2" / "actor").iterdir()))
    new = CheckpointStore(tmp_path / "new")
    found = remote.newer(new, than=0)
    assert found is not None and found.step == 1
    assert "step_3 is skipped" in caplog.text and "step_2 is skipped" in caplog.text
    assert [path.name for path in new.paths()] == ["step_1"]


def test_a_checkpoint_at_a_url_writes_nothing_outside_its_own_directory(tmp_path, caplog):
    store, remote = store_with(tmp_path, 1), remote_of(tmp_path)
    upload(remote, store, 1)
    record = {"bytes": 4, "sha256": "0" * 64}
    forge(tmp_path / "remote" / "step_1", files={"actor/x": record, "driver.json": record, "../../../evil": record})
    (tmp_path / "evil").write_text("evil")
    assert remote.newer(CheckpointStore(tmp_path / "a" / "b"), than=0) is None
    assert "its manifest has the file '../../../evil'" in caplog.text


def test_a_run_does_not_begin_at_an_earlier_step_because_of_the_connection(tmp_path, monkeypatch):
    store, remote = store_with(tmp_path, 1, 2), remote_of(tmp_path)
    upload(remote, store, 2)

    def lost(*args, **kwargs):
        raise TimeoutError("no answer")

    monkeypatch.setattr(LocalFileSystem, "get_file", lost)
    with pytest.raises(CheckpointError, match="cannot be read: TimeoutError: no answer"):
        resolve_resume("auto", CheckpointStore(tmp_path / "new"), 9, remote)


def test_an_error_names_no_password_that_it_quotes_without_the_protocol(monkeypatch):
    remote = RemoteCheckpoints("memory://user:s3cr3t%2Fpw@bucket/run")

    def refused(*args, **kwargs):
        raise ValueError('Invalid bucket name "user:s3cr3t/pw@bucket", s3cr3t%2Fpw@bucket')

    monkeypatch.setattr(MemoryFileSystem, "ls", refused)
    with pytest.raises(CheckpointError, match=r'memory://\*\*\*@bucket/run .* name "\*\*\*@bucket", \*\*\*@bucket\.'):
        remote.complete()


def test_a_later_checkpoint_here_is_preferred_and_one_beyond_the_last_step_is_refused(tmp_path):
    store, remote = store_with(tmp_path, 1, 2), remote_of(tmp_path)
    upload(remote, store, 1)
    found = resolve_resume("auto", store, 9, remote)
    assert found is not None and found.path == store.directory / "step_2"
    upload(remote, store, 2)
    described = tmp_path / "described"
    for where in (described, None):
        with pytest.raises(CheckpointError, match=f"{remote.url}/step_2 is at step 2, beyond trainer.total_steps=1"):
            resolve_resume("auto", CheckpointStore(tmp_path / "new"), 1, remote, only_described_in=where)
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_at_a_url_is_checked_before_it_is_copied_and_damaged_settings_are_passed_over(tmp_path, caplog):
    store, remote = store_with(tmp_path, 1, 2), remote_of(tmp_path)
    for step in (1, 2):
        upload(remote, store, step)
    (tmp_path / "remote" / "step_2" / "driver.json").write_text("{")
    new, checked = CheckpointStore(tmp_path / "new"), []

    def check(checkpoint: Checkpoint) -> None:
        checked.append(checkpoint.driver_state()["step"])
        assert not new.run_dir.exists()

    found = resolve_resume("auto", new, 9, remote, check=check)
    assert found is not None and found.path == new.directory / "step_1"
    assert checked == [1] and "step_2 is skipped: its driver.json is damaged" in caplog.text


def test_a_full_disk_while_a_checkpoint_is_copied_here_is_reported(tmp_path, monkeypatch):
    store, remote = store_with(tmp_path, 1), remote_of(tmp_path)
    upload(remote, store, 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "get_file", full)
    with pytest.raises(ResourceError, match="The disk is full"):
        remote.newer(CheckpointStore(tmp_path / "new"), than=0)


def test_a_mirror_has_what_the_run_keeps_also_from_before_and_deletes_the_rest(tmp_path):
    remote, earlier = remote_of(tmp_path), store_with(tmp_path / "earlier", 1, 2)
    for step in (1, 2):
        upload(remote, earlier, step)
    (tmp_path / "remote" / "step_3").mkdir()
    store = CheckpointStore(tmp_path / "later", keep=Retention(latest=2, every=4))
    copy = Mirror(store, remote)
    copy.finish()
    assert list(remote.complete()) == [1, 2], "the run has no checkpoints yet"
    for step, there in ((4, [2, 4]), (5, [4, 5]), (6, [4, 5, 6]), (7, [4, 6, 7])):
        save(store, step)
        copy.update()
        copy.finish()
        assert list(remote.complete()) == there and not (tmp_path / "remote" / "step_3").exists()
        assert sorted(path.name for path in (tmp_path / "remote").iterdir()) == [f"step_{each}" for each in there]


def test_a_failed_upload_is_tried_again_and_an_outage_is_reported_once(tmp_path, failures, caplog):
    store, remote = store_with(tmp_path, 1), remote_of(tmp_path)
    failures.left = 0
    copy = Mirror(store, remote)
    while failures.failed < 2:
        time.sleep(0.01)
    failures.left = 1 << 30
    copy.finish()
    assert list(remote.complete()) == [1]
    [outage] = copy.outages()
    assert "Access denied" in outage.error.message and outage.seconds > 0 and not copy.outages()
    assert sum("will be retried" in record.message for record in caplog.records) == 1


def test_an_upload_that_never_succeeds_is_an_error_at_the_end_that_says_where_the_checkpoint_is(tmp_path, failures):
    store, remote = store_with(tmp_path, 1), remote_of(tmp_path)
    failures.left = 0
    copy = Mirror(store, remote)
    with pytest.raises(CheckpointError, match="were not all copied to .*Access denied") as caught:
        copy.finish()
    assert f"They are complete in {store.directory}" in caught.value.remedy
    assert failures.failed >= 3 and store.latest() is not None
    failures.left = 1 << 30
    copy.finish()
    assert list(remote.complete()) == [1]


def test_after_its_end_a_mirror_that_fails_writes_nothing_more(tmp_path, failures):
    store, failures.left = store_with(tmp_path, 1), 0
    copy = Mirror(store, remote_of(tmp_path))
    while not failures.failed:
        time.sleep(0.001)
    copy.end()
    failures.left = 1 << 30
    copy.update()
    time.sleep(0.1)
    assert failures.left == 1 << 30 and not remote_of(tmp_path).complete()


def test_a_checkpoint_is_not_deleted_here_while_it_is_copied(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    store, remote, put, first = store_with(tmp_path, 1), remote_of(tmp_path), LocalFileSystem.put_file, Lock()

    def slow(*args, **kwargs):
        if first.acquire(blocking=False):  # files are copied in several threads
            save(CheckpointStore(store.run_dir, keep=Retention(latest=1)), 2)
        return put(*args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "put_file", slow)
    copy = Mirror(store, remote)
    copy.finish()
    assert 1 in remote.complete() and "step_1 is being loaded" in caplog.text
