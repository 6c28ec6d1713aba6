"""A few attacks of each kind on every run of the tests, all of them among the slow ones."""

import platform
import random
import sys

import pytest

from hybridflow.rewards.sandbox import runs
from tests.attacks.sandbox import cases, is_refused, table

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the programs call Linux by x86_64's numbers"
)


@pytest.fixture(params=[6, 1], ids=["landlock_6", "landlock_1"])
def landlock(request, monkeypatch):
    """As on this kernel, and as on Linux 5.13."""
    monkeypatch.setattr(runs, "_LANDLOCK_VERSION", request.param)


def test_there_are_as_many_as_were_tried_before():
    found = cases(1)
    assert sum(case.tests is None and case.row is None for case in found) == 52 and len(found) == 84
    assert [case.program for case in cases(2)] == [case.program for case in cases(2)]
    assert [case.program for case in cases(2)] != [case.program for case in found]


def test_some_of_each_kind_are_refused():
    seed = 7
    chosen, rng = [], random.Random(seed)
    for kind in dict.fromkeys(case.kind for case in cases(seed)):
        own = [case for case in cases(seed) if case.kind == kind and case.name not in ("time", "processor")]
        chosen += rng.sample(own, min(2, len(own)))
    results = {case: is_refused(case) for case in chosen}
    assert all(results.values()), table(results)


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
