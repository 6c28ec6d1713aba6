"""The list of waivers has a reason for every entry and only gets shorter."""

import subprocess

import pytest

from tests.architecture.source import ROOT
from tests.architecture.waivers import WAIVERS_FILE, waivers


def git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)
    return answer.stdout if answer.returncode == 0 else ""


def version_before_the_last_change() -> str | None:
    """The list as it was before its last change, committed or not; None where the history does not reach back."""
    path = WAIVERS_FILE.relative_to(ROOT).as_posix()
    current = WAIVERS_FILE.read_text(encoding="utf-8")
    versions = (git("show", f"{commit}:{path}") for commit in git("log", "--format=%H", "--", path).split())
    return next((version for version in versions if version and version != current), None)


def test_every_waiver_gives_a_reason():
    for waived, reason in waivers(WAIVERS_FILE.read_text(encoding="utf-8")).items():
        assert len(reason.split()) >= 4, f"{waived} needs a reason, not '{reason}'"


def test_the_list_only_gets_shorter():
    before = version_before_the_last_change()
    if before is None:
        pytest.skip("no earlier version of the list in this history")
    added = waivers(WAIVERS_FILE.read_text(encoding="utf-8")).keys() - waivers(before).keys()
    assert not added, f"New waivers {sorted(added)}: change the code instead."
