"""Every method that has a name has been seen to learn, by `benchmarks/algorithms.py`, with all its seeds."""

from benchmarks.algorithms import LONGEST_SECONDS, METHODS, lines
from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES

PROGRAMS = {"dapo", "pf_ppo", "ppo_ptx", "safe_rlhf"}
"""What a method is that is more than an estimator and a loss."""


def test_every_method_is_run():
    # The loss of PPO is that of all estimators.
    assert {method.name for method in METHODS} == {*ADVANTAGES, *POLICY_LOSSES, *PROGRAMS} - {"ppo"}


def test_every_run_has_come_from_below_the_threshold_to_above_it_in_time():
    found = {(outcome.method, outcome.seed): outcome for outcome in lines()}
    wanted = {(method.name, seed): method for method in METHODS for seed in range(method.seeds)}
    assert wanted.keys() <= found.keys()
    for key, method in wanted.items():
        outcome = found[key]
        assert outcome.is_good, key
        assert outcome.seconds <= LONGEST_SECONDS, key
        assert (outcome.steps, outcome.settings) == (method.steps, method.added), key
