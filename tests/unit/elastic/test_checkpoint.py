"""Saving, finding and verifying checkpoints."""

import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.elastic import manifest
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.driver_state import dumps, loads
from hybridflow.elastic.manifest import MANIFEST, Manifest, Parts, read_manifest, verify
from hybridflow.elastic.retention import Retention
from hybridflow.errors import CheckpointError
from hybridflow.parallel.file_records import FileRecord, record_files
from tests.unit.elastic.mounts import run_with_mount
from tests.unit.elastic.test_storage import A_DEAD_PROCESS, aside
from tests.unit.elastic.victim import save, store_with, written_by

SAVE_TWO_MORE = """
import sys
from pathlib import Path
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.retention import Retention
from tests.unit.elastic.victim import save
store = CheckpointStore(Path(sys.argv[1]), keep=Retention(1))
save(store, 2)
save(store, 3)
"""


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def forge(path: Path, **changes: object) -> None:
    """Changes fields of a manifest and gives it the digest that fits."""
    raw = json.loads((path / MANIFEST).read_text()) | changes
    files = {name: FileRecord(**record) for name, record in raw["files"].items()}
    forged = Manifest(**raw | {"files": files})
    (path / MANIFEST).write_text(manifest._text(replace(forged, digest=manifest._digest(forged))))


def names(store: CheckpointStore) -> list[str]:
    return [path.name for path in store.paths()]


def latest_step(store: CheckpointStore) -> int | None:
    latest = store.latest()
    return latest and latest.step


def test_the_latest_is_the_one_of_the_highest_step_and_its_manifest_lists_every_file(tmp_path):
    latest = store_with(tmp_path, 8, 9, 10).latest()
    assert latest is not None
    assert (latest.step, latest.path) == (10, tmp_path / "checkpoints" / "step_10")
    assert latest.driver_state() == {"step": 10, "loss": 1.0}
    found = latest.manifest
    assert (found.step, found.world, found.format, found.parts) == (10, 4, 2, ["actor"])
    assert set(found.files) == {"actor/weights.bin", "driver.json"}
    assert found.files["actor/weights.bin"].bytes == 4096


def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_the_file(tmp_path, caplog):
    store = store_with(tmp_path, 1, 2, 3)
    flip_a_bit(store.paths()[2] / "actor/weights.bin")
    (store.paths()[1] / "driver.json").unlink()
    assert latest_step(store) == 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "step_3/actor/weights.bin is damaged: its SHA-256" in warnings[0]
    assert "step_2/driver.json is damaged: it is missing" in warnings[1]


def test_sizes_alone_find_a_torn_file_but_not_a_flipped_bit(tmp_path):
    path = store_with(tmp_path, 1).paths()[0]
    flip_a_bit(path / "actor/weights.bin")
    verify(path, full=False)
    with pytest.raises(CheckpointError, match=r"weights\.bin is damaged.*trainer\.resume=auto"):
        verify(path)
    (path / "actor/weights.bin").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="5 bytes instead of 4096"):
        verify(path, full=False)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 2}', '{"format": 2, "hybridflow": "0", "files": {"a": 3}}', "\x00\xff", "[" * 200_000],
    ids=["empty", "a brace", "a list", "no fields", "no record", "no text", "brackets"],
)
def test_a_damaged_manifest_is_an_error_that_names_it(text, tmp_path):
    path = store_with(tmp_path, 1).paths()[0]
    (path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged.*another checkpoint"):
        verify(path)


@pytest.mark.parametrize("other", [1, 3])
def test_a_manifest_of_another_format_names_the_version_that_reads_it_and_its_model(other, tmp_path):
    path = store_with(tmp_path, 1).paths()[0]
    raw = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(raw | {"format": other, "hybridflow": "9.9"}))
    with pytest.raises(CheckpointError, match=rf"format {other} \(written by hybridflow 9\.9\).*actor/huggingface"):
        verify(path)


def test_a_bit_flipped_anywhere_in_the_manifest_is_found(tmp_path):
    path = store_with(tmp_path, 14).paths()[0]
    text = (path / MANIFEST).read_bytes()
    for place in range(0, 8 * len(text), 3):
        changed = bytearray(text)
        changed[place // 8] ^= 1 << place % 8
        (path / MANIFEST).write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"manifest\.json (is damaged|has format)"):
            read_manifest(path)


def test_a_manifest_with_other_line_ends_is_damaged(tmp_path):
    [path] = store_with(tmp_path, 1).paths()
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(CheckpointError, match="its text is not as it was written"):
        read_manifest(path)


def test_added_weights_are_refused_and_other_files_are_not(tmp_path):
    [path] = store_with(tmp_path, 1).paths()
    (path / "notes.md").write_text("the best one")
    verify(path)
    (path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="index.json is not in the manifest"):
        verify(path)


def test_only_the_name_of_a_step_names_it(tmp_path):
    store = store_with(tmp_path, 4)
    for name in ("step_04", "step_\u0664", "step_+4", "step_"):
        (store.directory / name).mkdir()
    assert names(store) == ["step_4"]


@pytest.mark.parametrize("step", ["14", None, True, -1, 14.0])
def test_a_step_that_is_no_number_of_steps_is_refused_even_with_a_digest_that_fits(step, tmp_path):
    path = store_with(tmp_path, 14).paths()[0]
    forge(path, step=step)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged.*step is"):
        verify(path)


@pytest.mark.parametrize(("wrong", "what"), [("name", "its name"), ("manifest", "its name"), ("state", "driver.json")])
def test_a_step_that_is_not_the_same_everywhere_is_refused(wrong, what, tmp_path):
    store = store_with(tmp_path, 14)
    path = store.paths()[0]
    if wrong == "name":
        path = path.rename(path.with_name("step_94"))
    elif wrong == "manifest":
        forge(path, step=94)
    else:
        (path / "driver.json").write_text(dumps({"step": 94}))
        records = record_files(path, ["actor/weights.bin", "driver.json"])
        forge(path, files={name: asdict(record) for name, record in records.items()})
    with pytest.raises(
        CheckpointError, match=rf"{what} says step (14|94), its manifest.*name under which it was saved"
    ):
        store.open(path)
    assert store.latest() is None


@pytest.mark.parametrize("state", ["[]", "null", "{", '{"__bytes__": 5}', "\udcff", None])
def test_a_checkpoint_without_the_drivers_state_is_passed_over_even_if_its_manifest_fits(state, tmp_path, caplog):
    store = store_with(tmp_path, 1, 2)
    path, names = store.paths()[1], ["actor/weights.bin", "driver.json"]
    if state is None:
        (path / names.pop()).unlink()
    else:
        (path / "driver.json").write_bytes(state.encode(errors="surrogateescape"))
    forge(path, files={name: asdict(record) for name, record in record_files(path, names).items()})
    assert latest_step(store) == 1
    assert "is damaged: " in caplog.text and "driver.json" in caplog.text


@pytest.mark.parametrize("empty", [{"parts": []}, {"parts": [], "files": {}}, {"files": {}}])
def test_a_checkpoint_of_nothing_is_not_intact(empty, tmp_path):
    store = store_with(tmp_path, 1, 2)
    forge(store.paths()[1], **empty)
    assert latest_step(store) == 1 and store.newest_whole() == store.paths()[0]


def test_a_checkpoint_under_a_name_of_its_own_is_taken(tmp_path):
    store = store_with(tmp_path, 14)
    assert store.open(store.paths()[0].rename(tmp_path / "best")).step == 14


def test_a_manifest_that_is_no_file_is_refused_at_once(tmp_path):
    store = store_with(tmp_path, 1)
    (store.paths()[0] / MANIFEST).unlink()
    os.mkfifo(store.paths()[0] / MANIFEST)
    assert store.latest() is None


def test_a_checkpoint_that_lacks_a_roles_part_is_not_whole_and_keeps_nothing_from_being_kept(tmp_path, caplog):
    store = store_with(tmp_path, 1, 2)
    files = read_manifest(store.paths()[1]).files
    forge(store.paths()[1], files={"driver.json": asdict(files["driver.json"])})
    assert latest_step(store) == 1
    assert "step_2 lacks the state of the role 'actor'" in caplog.text
    store.keep = Retention(2)
    save(store, 3)
    assert names(store) == ["step_1", "step_2", "step_3"]


@pytest.mark.parametrize("what", ["nothing", "elsewhere", "short"])
def test_what_the_driver_does_not_find_as_it_was_written_is_never_published(what, tmp_path):
    store = store_with(tmp_path / "run", 1, 2, keep=2)

    def write(directory: Path) -> Parts:
        seen_by_worker = tmp_path / "elsewhere" if what == "elsewhere" else directory
        (seen_by_worker / "actor").mkdir(parents=True)
        (seen_by_worker / "actor" / "weights.bin").write_bytes(b"weights")
        parts = written_by(seen_by_worker, "actor")
        if what == "short":
            (directory / "actor" / "weights.bin").write_bytes(b"we")
        return {"actor": {}} if what == "nothing" else parts

    with pytest.raises(CheckpointError, match="a directory that every node of the run shares"):
        store.save(3, write, {})
    assert names(store) == ["step_1", "step_2"]
    assert len(list(store.directory.iterdir())) == 2


def test_a_run_that_trains_a_role_which_the_checkpoint_lacks_is_told_before_it_starts(tmp_path):
    checkpoint = store_with(tmp_path, 1).latest()
    assert checkpoint is not None
    checkpoint.check_parts(["actor"])
    with pytest.raises(CheckpointError, match=r"no state of the role 'critic'; it has: actor.*trainer\.resume=never"):
        checkpoint.check_parts(["actor", "critic"])


@pytest.mark.parametrize(
    ("keep", "kept"), [(2, ["step_3", "step_4"]), (1, ["step_4"]), (0, ["step_4"])], ids=["two", "one", "never none"]
)
def test_only_the_newest_are_kept(keep, kept, tmp_path):
    assert names(store_with(tmp_path, 1, 2, 3, 4, keep=keep)) == kept


def test_damaged_ones_do_not_count_among_those_kept(tmp_path):
    store = store_with(tmp_path, 1, 2, 3)
    (store.paths()[1] / "driver.json").unlink()
    (store.paths()[2] / MANIFEST).unlink()
    store.keep = Retention(2)
    save(store, 4)
    assert names(store) == ["step_1", "step_2", "step_3", "step_4"]
    save(store, 5)
    assert names(store) == ["step_4", "step_5"]


numbers = st.floats() | st.integers() | st.booleans() | st.none() | st.text() | st.binary()
keys = st.text().filter(lambda key: key not in ("__tuple__", "__bytes__"))
states = st.dictionaries(
    keys,
    st.recursive(
        numbers, lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner), max_leaves=5
    ),
)


@given(states)
def test_the_driver_state_comes_back_exactly(state):
    # repr tells apart what == does not: -0.0 and 0.0, nan, 1 and 1.0 and True, tuples and lists.
    assert repr(loads(dumps(state))) == repr(state)


@pytest.mark.parametrize("value", [{1: "int key"}, {3, 4}, object(), {"__tuple__": []}])
def test_a_state_that_json_would_change_is_an_error_that_says_where(value, tmp_path):
    with pytest.raises(CheckpointError, match=r"state\['loader'\]\[1\].*dicts with string keys"):
        CheckpointStore(tmp_path).save(1, lambda directory: {}, {"loader": [0, value]})
    assert not any(tmp_path.iterdir())


def test_an_expired_symbolic_link_goes_without_its_target(tmp_path, caplog):
    store = store_with(tmp_path / "run", 1, keep=1)
    moved = store.paths()[0].rename(tmp_path / "moved")
    (store.directory / "step_1").symlink_to(moved)
    with caplog.at_level("INFO", logger="hybridflow"):
        save(store, 2)
    assert names(store) == ["step_2"]
    assert [path.name for path in store.directory.iterdir()] == ["step_2"]
    assert store.open(moved.rename(tmp_path / "step_1")).step == 1
    assert f"step_1 was a link to {moved}: deleted the link" in caplog.text


def test_a_checkpoint_that_cannot_be_deleted_stays_with_a_warning(tmp_path, caplog):
    """A directory in which something is mounted can neither be renamed away nor emptied."""
    store = store_with(tmp_path, 1)
    first = store.paths()[0]
    log = run_with_mount(f"mount --bind {first} {first}", SAVE_TWO_MORE, tmp_path)
    assert f"checkpoint={first} could not be deleted: [Errno 16]" in log
    assert names(store) == ["step_1", "step_3"]


def test_a_reader_leaves_a_save_under_way_alone(tmp_path):
    """Whatever a process elsewhere can tell of the writer: here its number is that of no process."""
    store = store_with(tmp_path, 1)
    writing = aside(store.directory / "step_2", "partial", pid=A_DEAD_PROCESS.pid)
    assert latest_step(CheckpointStore(tmp_path)) == 1
    assert writing.is_dir()
    store.settle()
    assert not writing.exists()
