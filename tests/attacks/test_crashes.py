"""A few random kills and requests to end; the whole corpus is `python -m tests.attacks.crashes`."""

import signal

import pytest

from tests.attacks.crashes import attack


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM], ids=lambda kind: kind.name)
def test_interrupted_runs_end_as_the_uninterrupted_one(kind, tmp_path):
    chains = attack(kind, 4, seed=1, scratch=tmp_path)
    assert [chain.problems for chain in chains] == [[]] * len(chains)
    assert sum(chain.interruptions for chain in chains) == 4
