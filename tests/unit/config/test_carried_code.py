"""The user's code on a node that does not have it. In processes of their own, for they change where imports look."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DRIVER = """
import json, sys
from hybridflow.config.carried_code import imported_user_files, keep_code
from hybridflow.config.user_code import load_member
from pathlib import Path
load_member("mine/reward.py:score", key="reward.functions")
files = imported_user_files()
keep_code(files, Path(sys.argv[1]))
print(json.dumps([str(file) for file in files]))
"""
WORKER = """
import json, os, subprocess, sys
from pathlib import Path
from hybridflow.config.carried_code import use_code
from hybridflow.config.user_code import load_member
used = use_code(Path(sys.argv[1]))
score = load_member(sys.argv[2], key="reward.functions")
print(json.dumps([used, score(), score.__globals__["__file__"], sys.modules["helpers.numbers"].__file__]))
"""


def python(program: str, *arguments: object, cwd: Path, path: Path) -> list:
    command, environment = [sys.executable, "-P", "-c", program, *map(str, arguments)], {"PYTHONPATH": f"{path}:{ROOT}"}
    done = subprocess.run(command, cwd=cwd, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def user(tmp_path):
    """A directory of a user's: a reward in a file, and a package that it imports, in part only when it is called."""
    user = tmp_path / "user"
    for folder in ("mine", "helpers"):
        (user / folder).mkdir(parents=True)
    (user / "mine" / "reward.py").write_text(
        "from helpers.numbers import one\n\ndef score():\n    from helpers.late import two\n    return one() + two()\n"
    )
    (user / "helpers" / "__init__.py").write_text("")
    (user / "helpers" / "numbers.py").write_text("def one():\n    return 1\n")
    (user / "helpers" / "late.py").write_text("def two():\n    return 2\n")
    (user / "notes.txt").write_text("not code")
    return user


def test_the_files_that_were_imported_and_those_beside_them_are_kept(user, tmp_path):
    files = python(DRIVER, tmp_path / "code", cwd=user, path=user)
    expected = ["helpers/__init__.py", "helpers/late.py", "helpers/numbers.py", "mine/reward.py"]
    assert files == [str(user / name) for name in expected]
    kept = tmp_path / "code" / user.relative_to("/")
    assert sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()) == expected


def test_a_node_with_the_same_files_uses_its_own(user, tmp_path):
    python(DRIVER, tmp_path / "code", cwd=user, path=user)
    setting = f"{user}/mine/reward.py:score"
    found = python(WORKER, tmp_path / "code", setting, cwd=tmp_path, path=user)
    assert found == [False, 3, f"{user}/mine/reward.py", f"{user}/helpers/numbers.py"]


@pytest.mark.parametrize("node", ["has none", "has an older helper", "lacks one"])
def test_any_other_node_uses_the_copies_also_for_what_is_imported_later(user, tmp_path, node):
    python(DRIVER, tmp_path / "code", cwd=user, path=user)
    if node == "has none":
        user.rename(tmp_path / "elsewhere")
    elif node == "lacks one":
        (user / "helpers" / "late.py").unlink()
    else:
        (user / "helpers" / "numbers.py").write_text("def one():\n    return 100\n")
    setting = f"{user}/mine/reward.py:score"
    copies = tmp_path / "code" / user.relative_to("/")
    found = python(WORKER, tmp_path / "code", setting, cwd=tmp_path, path=user)
    assert found == [True, 3, f"{copies}/mine/reward.py", f"{copies}/helpers/numbers.py"]
