"""What a node does not see is told before anything is loaded."""

import shutil
from pathlib import Path

import pytest

from hybridflow.config import storage_token
from hybridflow.controller.backends import BackendOptions, make_backend
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.errors import ConfigError, ResourceError
from hybridflow.launch.rules.resources import run_directory_problems
from hybridflow.launch.shared_storage import meet_nodes, read_directories
from hybridflow.workers.storage_check import sizes_of
from tests.unit.launch.plans import judged, planned

SETTINGS = ["task=calculator", "algorithm=grpo"]


@pytest.fixture
def model(tmp_path):
    """A model's directory, as a relative path from the current one."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "model"


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def meet(run_dir: Path, read, **pools: int) -> None:
    backend = make_backend("local", BackendOptions(threads=1))
    roles = {role: ResourcePool(role, devices) for role, devices in pools.items()}
    meet_nodes(backend, roles, run_dir, read)


def test_processes_that_see_everything_leave_nothing_but_the_users_code(run_dir, model):
    meet(run_dir, {"model.path": (model, sizes_of(model))}, actor=2, reward=1)
    assert [path.name for path in run_dir.iterdir()] == ["code"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("gone", "No such file or directory"),
        ("incomplete", "model.safetensors is missing"),
        ("another", "model.safetensors has 5 bytes instead of 7"),
    ],
)
def test_a_model_that_a_process_does_not_see_is_named_with_its_setting_and_what_to_do(run_dir, model, damage, words):
    read = {"actor.model.path": (model, sizes_of(model))}
    if damage == "gone":
        shutil.rmtree(model)
    elif damage == "incomplete":
        (model / "model.safetensors").unlink()
    else:
        (model / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ResourceError, match=f"node .* does not see actor.model.path={model} .*: {words}") as caught:
        meet(run_dir, read, actor=1)
    assert "copy it to that path on every node; a name on the Hugging Face hub" in caught.value.remedy
    assert list(run_dir.glob(".meeting*")) == []


def test_a_process_that_cannot_write_to_the_run_directory_is_named(run_dir, monkeypatch):
    monkeypatch.setattr(storage_token, "PATIENCE_SECONDS", 0.1)
    (run_dir / "code").mkdir()
    with pytest.raises(ResourceError, match="does not see trainer.run_dir=.*cannot be written") as caught:
        meet(run_dir, {}, **{"a/b": 1})  # no file can have that name
    assert "on storage that all nodes mount under the same path" in caught.value.remedy


def test_only_what_the_roles_read_from_this_file_system_is_looked_for(model, run_dir, monkeypatch):
    monkeypatch.chdir(model.parent)
    shutil.copytree(model, model.with_name("unused"))
    words = ["model.path=model", "critic.model.path=unused", "model.tokenizer_path=org/name"]  # GRPO has no critic
    found = read_directories(planned(*SETTINGS, *words), None)
    assert found == {"model.path": (model, {"config.json": 2, "model.safetensors": 7})}


def test_a_run_directory_in_a_submitted_jobs_copy_of_its_working_directory_is_refused(tmp_path):
    copy = tmp_path / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    words = ["algorithm=grpo", "task=calculator"]
    with pytest.raises(ConfigError, match="Ray makes on each node for this job.*absolute trainer.run_dir on storage"):
        judged(planned(*words, f"trainer.run_dir={copy / 'runs' / 'first'}"), run_directory_problems)
    judged(planned(*words, f"trainer.run_dir={tmp_path / 'runs' / 'first'}"), run_directory_problems)
