"""Saving, finding and verifying checkpoints."""

import json
import logging
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.driver_state import dumps, loads
from hybridflow.elastic.manifest import MANIFEST, read_manifest, verify
from hybridflow.errors import CheckpointError
from tests.unit.elastic.victim import save


def store_with(run_dir: Path, *steps: int, keep: int = 10) -> CheckpointStore:
    store = CheckpointStore(run_dir, keep=keep, world=4)
    for step in steps:
        save(store, step)
    return store


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def names(store: CheckpointStore) -> list[str]:
    return [path.name for path in store.paths()]


def test_a_run_without_checkpoints_has_no_latest(tmp_path):
    assert CheckpointStore(tmp_path / "new").latest() is None


def test_the_latest_is_the_one_of_the_highest_step(tmp_path):
    store = store_with(tmp_path, 8, 9, 10)
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.path) == (10, tmp_path / "checkpoints" / "step_10")
    assert latest.driver_state() == {"step": 10, "loss": 1.0}


def test_the_manifest_lists_every_file_and_who_wrote_it(tmp_path):
    store = store_with(tmp_path, 1)
    manifest = read_manifest(store.paths()[0])
    assert (manifest.step, manifest.world, manifest.format) == (1, 4, 1)
    assert set(manifest.files) == {"actor/weights.bin", "driver.json"}
    assert manifest.files["actor/weights.bin"].bytes == 4096


def test_a_damaged_checkpoint_is_passed_over_with_a_warning_that_names_the_file(tmp_path, caplog):
    store = store_with(tmp_path, 1, 2, 3)
    flip_a_bit(store.paths()[2] / "actor/weights.bin")
    (store.paths()[1] / "driver.json").unlink()
    latest = store.latest()
    assert latest is not None and latest.step == 1
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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "files": {"a": 3}}', "\x00\xff"])
def test_a_damaged_manifest_is_an_error_that_names_it(text, tmp_path):
    path = store_with(tmp_path, 1).paths()[0]
    (path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged.*another checkpoint"):
        verify(path)


def test_a_manifest_of_a_newer_format_asks_for_an_upgrade(tmp_path):
    path = store_with(tmp_path, 1).paths()[0]
    raw = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(raw | {"format": 2}))
    with pytest.raises(CheckpointError, match="Upgrade hybridflow"):
        verify(path)


def test_only_the_newest_are_kept(tmp_path):
    store = store_with(tmp_path, 1, 2, 3, 4, keep=2)
    assert names(store) == ["step_3", "step_4"]


@pytest.mark.parametrize("keep", [0, 1])
def test_the_only_whole_one_is_never_deleted(keep, tmp_path):
    assert names(store_with(tmp_path, 1, 2, keep=keep)) == ["step_2"]


def test_damaged_ones_do_not_count_among_those_kept(tmp_path):
    store = store_with(tmp_path, 1, 2, 3)
    (store.paths()[1] / "driver.json").unlink()
    (store.paths()[2] / MANIFEST).unlink()
    store.keep = 2
    save(store, 4)
    assert names(store) == ["step_1", "step_2", "step_3", "step_4"]
    save(store, 5)
    assert names(store) == ["step_4", "step_5"]


def test_a_failed_save_deletes_nothing(tmp_path):
    store = store_with(tmp_path, 1, 2, keep=2)

    def write(directory: Path) -> None:
        raise ValueError("a worker failed")

    with pytest.raises(ValueError, match="a worker failed"):
        store.save(3, write, {})
    assert names(store) == ["step_1", "step_2"]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = store_with(tmp_path, 1)
    store.save(1, lambda directory: None, {"again": True})
    latest = store.latest()
    assert latest is not None and latest.driver_state() == {"again": True}


numbers = st.floats() | st.integers() | st.booleans() | st.none() | st.text() | st.binary()
keys = st.text().filter(lambda key: key not in ("__tuple__", "__bytes__"))
states = st.dictionaries(
    keys,
    st.recursive(
        numbers,
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
        max_leaves=5,
    ),
)


@given(states)
def test_the_driver_state_comes_back_exactly(state):
    # repr tells apart what == does not: -0.0 and 0.0, nan, 1 and 1.0 and True, tuples and lists.
    assert repr(loads(dumps(state))) == repr(state)


def test_the_random_state_of_python_comes_back():
    source = random.Random(1)
    copy = random.Random()
    copy.setstate(loads(dumps({"random": source.getstate()}))["random"])
    assert [copy.random() for _ in range(700)] == [source.random() for _ in range(700)]


def test_extreme_floats_come_back():
    values = [5e-324, 1.7976931348623157e308, 0.1 + 0.2, -0.0, math.inf]
    assert [value.hex() for value in loads(dumps({"x": values}))["x"]] == [value.hex() for value in values]


@pytest.mark.parametrize("value", [{1: "int key"}, {3, 4}, object(), {"__tuple__": []}])
def test_a_state_that_json_would_change_is_an_error_that_says_where(value, tmp_path):
    with pytest.raises(CheckpointError, match=r"state\['loader'\]\[1\].*dicts with string keys"):
        CheckpointStore(tmp_path).save(1, lambda directory: None, {"loader": [0, value]})
    assert not any(tmp_path.iterdir())


def test_checkpoints_need_neither_torch_nor_ray():
    code = "import sys, hybridflow.elastic; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
