"""Attacks on the sandbox and its judge: those that end soon on every run of the tests, all among the slow ones."""

import platform
import sys

import pytest

from hybridflow.rewards.sandbox import runs
from tests.attacks.escapes import KINDS
from tests.attacks.sandbox import cases, is_refused, table

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the programs call Linux by x86_64's numbers"
)


@pytest.fixture(params=[6, 1], ids=["landlock_6", "landlock_1"])
def landlock(request, monkeypatch):
    """As on this kernel, and as on Linux 5.13."""
    monkeypatch.setattr(runs, "_LANDLOCK_VERSION", request.param)


CASES = cases(1)
FOR_LONG = ("time", "processor", "memory", "many_files", "open_files", "mapped_files")


def test_the_seed_chooses_the_programs():
    assert [case.program for case in cases(2)] == [case.program for case in cases(2)]
    assert [case.program for case in cases(2)] != [case.program for case in CASES]


@pytest.mark.parametrize("landlock", [1], indirect=True)  # forbids least
@pytest.mark.parametrize("case", [case for case in CASES if case.kind in KINDS and case.name not in FOR_LONG], ids=str)
def test_a_program_has_no_effect_outside(case, landlock):
    assert is_refused(case)


@pytest.mark.parametrize("case", [case for case in CASES if case.kind not in KINDS], ids=str)
def test_a_program_does_not_deceive_its_judge(case):
    assert is_refused(case)


OPEN_WITHOUT = [
    ("files", "read"),
    ("files", "append"),
    ("network", "tcp"),
    ("processes", "kill"),
    ("signals", "siocspgrp"),
]


@pytest.mark.parametrize(("kind", "name"), OPEN_WITHOUT)
def test_what_is_refused_would_be_open_without_the_sandbox(kind, name):
    (case,) = [case for case in cases(3) if (case.kind, case.name) == (kind, name)]
    assert not is_refused(case, is_confined=False)


@pytest.mark.slow
def test_all_are_refused(landlock):
    results = {case: is_refused(case) for case in cases(1)}
    assert all(results.values()), table(results)
