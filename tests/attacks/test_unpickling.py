"""A live Ray run: none of our code unpickles, nothing listens to other machines, and no file is a pickle."""

import pickle
import zipfile

import pytest
import torch

from tests.attacks.unpickling import Watched, is_pickle, watch

pytestmark = pytest.mark.ray

UNPICKLES = """
import pickle
from fractions import Fraction

def score(completions, answer, **columns):
    return [float(pickle.loads(pickle.dumps(Fraction(a == b)))) for a, b in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A run of one step whose reward function unpickles, which the watch must see."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "rewards.py").write_text(UNPICKLES)
    return watch(
        folder, [f"reward.functions=[{folder}/rewards.py:score]", "trainer={save_every: 1, eval_every: 0}"], steps=1
    )


@pytest.mark.slow
def test_only_the_processes_of_reward_functions_unpickle(watched):
    assert any("/rewards.py:" in caller for caller in watched.callers)  # the watch sees what is there
    assert any(caller.startswith("ray/") for caller in watched.callers)
    assert watched.ours() == {f"hybridflow/rewards/runners/{name}.py" for name in ("forkserver", "processes")}
    assert watched.problems() == []


@pytest.mark.slow
def test_every_port_is_on_the_loopback_interface(watched):
    names = " ".join(name for name, _ in watched.listeners)
    assert "raylet" in names and "gcs_server" in names and "RayHost" in names
    assert watched.listeners.total() > 10
    assert {address.removeprefix("::ffff:") for _, address in watched.listeners} == {"127.0.0.1"}


@pytest.mark.slow
def test_no_file_of_the_run_is_a_pickle(watched):
    assert watched.files > 10 and watched.pickles == []


def test_pickles_are_told_from_other_files(tmp_path):
    contents = {"new": pickle.dumps([1]), "old": b"cos\nsystem\n(S'id'\ntR.", "text": b'{"a": 1}\n', "empty": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "torch")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("a", "text")
    assert {path.name for path in tmp_path.iterdir() if is_pickle(path)} == {"new", "old", "torch"}


def test_what_must_not_be_is_a_problem():
    found = Watched()
    found.callers["hybridflow/elastic/store.py:load"] += 1
    found.callers["hybridflow/rewards/runners/forkserver.py:main"] += 1
    found.callers["ray/_private/serialization.py:_deserialize_pickle5_data"] += 1
    found.listeners["raylet", "::"] += 1
    found.listeners["raylet", "::ffff:127.0.0.1"] += 1
    assert found.problems() == ["hybridflow/elastic/store.py unpickles", "raylet listens at ::"]
