"""Asynchronous runs that are refused, and what older samples are compared with."""

import pytest

from hybridflow.config.algorithm import OldLogprobs
from hybridflow.errors import ConfigError
from hybridflow.launch.rules.asynchrony import asynchrony_problems, interpolation_problems
from hybridflow.launch.rules.partial_rollouts import partial_rollout_problems
from hybridflow.launch.rules.unused_settings import unused_settings
from tests.unit.launch.plans import judged, planned

STALE = "asynchrony.max_staleness=1"
STEP_ALONE = """
from hybridflow.dataflows.grpo import GRPO

class Mine(GRPO):
    def step(self, prompts):
        return super().step(prompts)
"""
WHOLE = """
class Whole:
    def __init__(self, setup): ...
    def generate(self, prompts, sampling, *, max_response_tokens, seed): ...
    def weight_slots(self): ...
    def pause(self, *, keep_cache=False): ...
    def resume(self, *, version): ...
    def sleep(self, kept=()): ...
    def wake(self): ...
"""
DERIVED = """
from hybridflow.engines.rollout.custom import CustomEngine

class Derived(CustomEngine):
    def respond(self, prompts, sampling, *, max_response_tokens, seeds): ...
"""
FILTERS = """
from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.grpo import GRPO

class Mine(GRPO):
    def filter_out(self, batch, *, num_filtered, groups_per_step):
        return []

class Longer(DAPO):
    pass
"""
ONES = """
def plain(logprobs, advantages, mask):
    return -logprobs * advantages * mask
"""


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (
            ["dataflow=sft"],
            "dataflow=sft does not learn from samples of a rollout",
            "Leave asynchrony.max_staleness out.",
        ),
        (["dataflow={folder}/mine.py:Mine"], "has its own step", "Divide the step into 'collect(self, prompts)'"),
        (
            ["algorithm=grpo", "algorithm.old_logprobs=recompute"],
            "algorithm.old_logprobs=recompute: the weights move after samples are drawn",
            "Use algorithm.old_logprobs=auto",
        ),
        (
            ["algorithm=grpo", "algorithm.policy_loss=gpg"],
            "algorithm.policy_loss=gpg has no trust region",
            "algorithm.correction.weights=token",
        ),
        (
            ["algorithm=grpo", "algorithm.policy_loss={folder}/loss.py:plain"],
            "has no trust region",
            "use asynchrony.max_staleness=0",
        ),
        (["algorithm=grpo", "algorithm.policy_loss=kl_cov"], "has no trust region", "algorithm.policy_loss=ppo"),
    ],
)
def test_t8_what_cannot_learn_from_older_samples_is_refused(tmp_path, words, message, remedy):
    (tmp_path / "mine.py").write_text(STEP_ALONE)
    (tmp_path / "loss.py").write_text(ONES)
    words = [word.format(folder=tmp_path) for word in words]
    judged(planned(*words), asynchrony_problems)
    with pytest.raises(ConfigError) as caught:
        judged(planned(*words, STALE), asynchrony_problems)
    assert caught.value.message.startswith(STALE) and message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax", "dapo", "safe_rlhf", "pf_ppo"])
def test_every_dataflow_that_samples_may_run_ahead(algorithm):
    assert not list(asynchrony_problems(planned(f"algorithm={algorithm}", STALE)))


def test_old_logprobs_are_the_rollouts_unless_the_loss_is_weighted():
    weighted = "algorithm.correction.weights=token"
    for words, expected, wants in (
        (["algorithm=grpo"], OldLogprobs.auto, None),
        (["algorithm=grpo", STALE], OldLogprobs.rollout, False),
        (["algorithm=grpo", STALE, weighted], OldLogprobs.auto, True),
        (["algorithm=grpo", STALE, weighted, "algorithm.policy_loss=gpg"], OldLogprobs.auto, True),
        (["algorithm=grpo", STALE, weighted, "algorithm.old_logprobs=recompute"], OldLogprobs.recompute, True),
    ):
        plan = planned(*words)
        assert not judged(plan, asynchrony_problems)
        assert plan.config.algorithm.old_logprobs is expected
        assert wants is None or plan.wants_old_logprobs is wants


INTERPOLATE = ["algorithm=grpo", "algorithm.old_logprobs=interpolate"]
AHEAD = ["asynchrony.max_staleness=2", "asynchrony.ahead=2"]
WEIGHTS = "algorithm.correction.weights=token"


def test_an_interpolation_of_samples_that_are_two_versions_old_is_accepted():
    plan = planned(*INTERPOLATE, *AHEAD, WEIGHTS)
    assert not judged(plan, interpolation_problems) and not judged(plan, asynchrony_problems)
    assert plan.config.algorithm.old_logprobs is OldLogprobs.interpolate


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        ([WEIGHTS], "max_staleness=0 asynchrony.ahead=1: samples are at most one version old", "asynchrony.ahead=2"),
        ([WEIGHTS, "asynchrony.max_staleness=3"], "gives the rollout's log-probabilities", "old_logprobs=auto"),
        (AHEAD, "without importance weights", "algorithm.correction.weights=token"),
        ([*AHEAD, WEIGHTS, "algorithm.correction.normalize=true"], "correction.normalize", "correction.normalize"),
        ([*AHEAD, WEIGHTS, "algorithm.correction.reject=token"], "correction.reject", "correction.reject"),
        ([*AHEAD, WEIGHTS, "algorithm.correction.veto=1e-4"], "correction.veto", "Leave out"),
        ([*AHEAD, WEIGHTS, "algorithm.policy_loss=clip_cov"], "policy_loss=clip_cov, which chooses", "policy_loss=ppo"),
    ],
)
def test_an_interpolation_without_what_it_needs_is_refused(words, message, remedy):
    with pytest.raises(ConfigError) as caught:
        judged(planned(*INTERPOLATE, *words), interpolation_problems)
    assert message in caught.value.message
    assert remedy in caught.value.remedy


def test_a_run_says_where_nothing_overlaps(caplog):
    caplog.set_level("INFO")
    judged(planned("algorithm=grpo", STALE), asynchrony_problems)
    assert "with trainer.backend=local, nothing overlaps" in caplog.text
    caplog.clear()
    judged(planned("algorithm=grpo", STALE, "trainer.devices=2"), asynchrony_problems)
    assert "the rollout is in the actor's processes" in caplog.text
    caplog.clear()
    pools = "placement={pools: {a: {devices: 1}, b: {devices: 1}}, roles: {rollout: b}}"
    judged(planned("algorithm=grpo", STALE, "trainer.devices=2", pools), asynchrony_problems)
    assert "reward shares a pool with a trained role" in caplog.text
    assert "placement.roles.reward=b" in caplog.text
    caplog.clear()
    pools = pools.replace("rollout: b", "rollout: b, reward: b")
    judged(planned("algorithm=grpo", STALE, "trainer.devices=2", pools), asynchrony_problems)
    assert "overlap" not in caplog.text


def test_how_far_a_synchronous_run_goes_ahead_has_no_effect():
    [advice] = judged(planned("algorithm=grpo", "asynchrony.ahead=3"), unused_settings)
    assert advice.message.startswith("asynchrony.ahead=3 has no effect")
    assert not judged(planned("algorithm=grpo", "asynchrony.ahead=3", "asynchrony.max_staleness=3"), unused_settings)


def test_generating_further_ahead_than_samples_may_be_old_is_refused():
    with pytest.raises(ConfigError) as caught:
        planned("algorithm=grpo", "asynchrony.ahead=3", "asynchrony.max_staleness=2")
    assert "asynchrony.ahead=3 is above asynchrony.max_staleness=2" in caught.value.message
    assert "asynchrony.ahead=2, or asynchrony.max_staleness=3" in caught.value.remedy


def test_a_staleness_that_is_never_reached_is_said():
    alone = ["algorithm=grpo", "asynchrony.max_staleness=2"]
    [advice] = judged(planned(*alone), asynchrony_problems)
    assert advice.message.startswith(
        "asynchrony.max_staleness=2 with asynchrony.ahead=1: no sample is more than 1 version"
    )
    assert "Set asynchrony.ahead=2 as well" in advice.remedy
    for further in (["asynchrony.ahead=2"], ["asynchrony.partial_rollouts=true"]):
        assert not judged(planned(*alone, *further), asynchrony_problems)


@pytest.mark.parametrize(("deadline", "is_said"), [(64, True), (100, True), (63, False)])
def test_a_deadline_that_no_response_reaches_is_said(deadline, is_said):
    words = [STALE, "asynchrony.partial_rollouts=true", "data.max_response_tokens=64"]
    plan = planned("algorithm=grpo", *words, f"asynchrony.deadline_tokens={deadline}")
    found = judged(plan, partial_rollout_problems)
    assert [f"asynchrony.deadline_tokens={deadline} is not below" in advice.message for advice in found] == [
        True
    ] * is_said


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (
            ["dataflow={folder}/mine.py:Mine"],
            "true: dataflow={folder}/mine.py:Mine has its own step",
            "Divide the step",
        ),
        (
            [STALE, "environment=guess_number", "environment.processes=2", "asynchrony.replay={folder}"],
            "with environment=guess_number in processes",
            "environment.processes=0",
        ),
        ([STALE, "rollout.engine={folder}/engine.py:Whole"], "has no method submit", "CustomEngine"),
        ([STALE, "asynchrony.replay={folder}"], "there is no schedule.jsonl", "asynchrony.partial_rollouts=true"),
    ],
)
def test_partial_rollouts_that_cannot_work_are_refused(tmp_path, words, message, remedy):
    (tmp_path / "engine.py").write_text(WHOLE)
    (tmp_path / "mine.py").write_text(STEP_ALONE)
    words, message = [word.format(folder=tmp_path) for word in words], message.format(folder=tmp_path)
    with pytest.raises(ConfigError) as caught:
        judged(planned("algorithm=grpo", "asynchrony.partial_rollouts=true", *words), partial_rollout_problems)
    assert message in caught.value.message and remedy in caught.value.remedy


def test_a_deadline_for_an_engine_that_generates_rows_to_their_ends_is_a_warning(tmp_path):
    (tmp_path / "engine.py").write_text(DERIVED)
    engine = f"rollout.engine={tmp_path}/engine.py:Derived"
    words = ["algorithm=grpo", STALE, "asynchrony.partial_rollouts=true", engine]
    assert not judged(planned(*words), partial_rollout_problems)
    [advice] = judged(planned(*words, "asynchrony.deadline_tokens=4"), partial_rollout_problems)
    assert advice.message.startswith("asynchrony.deadline_tokens=4 cuts off no response")
    assert advice.remedy.startswith("Leave out asynchrony.deadline_tokens")


@pytest.mark.parametrize("staleness", [STALE, "asynchrony.max_staleness=0"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "remax", "dapo", "safe_rlhf", "pf_ppo"])
def test_every_dataflow_that_samples_may_have_partial_rollouts(algorithm, staleness):
    plan = planned(f"algorithm={algorithm}", staleness, "asynchrony.partial_rollouts=true")
    assert not judged(plan, asynchrony_problems, partial_rollout_problems)


def test_a_filter_that_nothing_calls_is_said_unless_the_step_fills_up_its_batch(tmp_path):
    (tmp_path / "mine.py").write_text(FILTERS)
    words = ["algorithm=grpo", f"dataflow={tmp_path}/mine.py:Mine"]
    for further in ([], [STALE]):
        [advice] = judged(planned(*words, *further), partial_rollout_problems)
        assert advice.message.startswith("Mine.filter_out has no effect: asynchrony.partial_rollouts=false")
        assert "Set asynchrony.partial_rollouts=true" in advice.remedy
    assert not judged(planned(*words, STALE, "asynchrony.partial_rollouts=true"), partial_rollout_problems)
    for own in (["algorithm=dapo"], ["algorithm=dapo", f"dataflow={tmp_path}/mine.py:Longer"], ["algorithm=grpo"]):
        assert not judged(planned(*own), partial_rollout_problems)


def test_what_becomes_of_single_groups_has_no_effect_on_whole_batches():
    words = ["asynchrony.when_stale=drop", "asynchrony.deadline_tokens=9"]
    [advice] = judged(planned("algorithm=grpo", STALE, *words), unused_settings)
    assert "asynchrony.deadline_tokens=9, asynchrony.when_stale=drop have no effect" in advice.message
    words = ["asynchrony.partial_rollouts=true", "asynchrony.on_deadline=replace"]
    [advice] = judged(planned("algorithm=grpo", STALE, *words), unused_settings)
    assert advice.message.startswith("asynchrony.on_deadline=replace has no effect")
