"""Every rule across sections: what breaks it is named, with what to do."""

import pytest

from hybridflow.algorithms.kl import ESTIMATORS
from hybridflow.config.algorithm import Correction, CorrectionLevel, KLPlacement, OldLogprobs
from hybridflow.config.checks import KL_ESTIMATORS, check
from hybridflow.config.faults import FaultPolicy
from hybridflow.config.guards import GuardAction
from hybridflow.config.placement import Pool
from hybridflow.config.roles import Role, RoleKind
from hybridflow.errors import ConfigError
from tests.unit.config.experiments import experiment

TOKEN = CorrectionLevel.token
TWO_FILES = {"data.train_files": ["a.jsonl", "b.jsonl"]}


def correction(**settings: object) -> dict[str, object]:
    return {"algorithm.correction": Correction(**settings)}


CONFLICTS = [
    ({"actor.guards.non_finite": GuardAction.warn}, "actor.guards.non_finite=warn is not possible", "skip or fault"),
    ({"trainer.faults.hang": FaultPolicy.retry}, "trainer.faults.hang=retry is not possible", "respawn or stop"),
    ({"critic.guards.replicas": GuardAction.skip}, "critic.guards.replicas=skip is not possible", "warn or fault"),
    ({"algorithm.aggregation": "token_mean"}, "algorithm.aggregation=token_mean is unknown", "'token-mean'?"),
    ({"algorithm.kl.estimator": "k4"}, "algorithm.kl.estimator=k4 is unknown", "Choose from: k1, kl, abs"),
    ({"algorithm.kl.estimator": "k3++"}, "algorithm.kl.estimator=k3++ is unknown", "Did you mean 'k3+'?"),
    ({"model.path": None}, "model.path is empty", "builtin:calculator"),
    ({"trainer.checkpoint_url": "s3:///"}, "trainer.checkpoint_url='s3:///' is not a URL", "s3://bucket/runs/x"),
    ({"trainer.checkpoint_url": "memory://x"}, "is the memory of this process, and lost", "s3://bucket/runs/x"),
    ({"trainer.experiment": "../../x"}, "trainer.experiment=../../x is a path", "use trainer.run_dir"),
    ({"trainer.experiment": "a\\b"}, "is a path", "a plain name"),
    ({"trainer.experiment": ".."}, "trainer.experiment=.. is not a name", "a plain name"),
    ({"trainer.experiment": ""}, "trainer.experiment= is not a name", "a plain name"),
    ({"trainer.experiment": "a\x1b[31m"}, "trainer.experiment=a\\x1b[31m has control characters", "a plain name"),
    ({"trainer.experiment": "a" * 101}, "aaa... has 101 characters", "at most 100 characters"),
    ({"data.train_files": []}, "data.train_files is empty", "builtin:calculator/train"),
    ({"reward.weights": [1.0, 2.0]}, "2 numbers for 0 reward.functions", "one weight per function"),
    ({"roles": {"judge": Role(weights=[1.0])}}, "1 numbers for 0 roles.judge.functions", "one weight per function"),
    ({"algorithm.pretraining_coefficient": 0.5}, "=0.5, but data.pretraining_files is empty", "files=[path,...]"),
    (
        {"data.pretraining_files": ["builtin:calculator/train"], "model.path": "my/model"},
        "are texts for the built-in model, but model.path=my/model",
        "data.pretraining_files=[path,...]",
    ),
    (
        {
            "roles": {
                "cost": Role(kind=RoleKind.reward_function, functions=["hybridflow.rewards.functions.far_off.far_off"])
            },
            "model.path": "my/model",
        },
        "scores the sums of the built-in task, but model.path=my/model is another model",
        "roles.cost={kind: reward_model",
    ),
    (
        {"algorithm.kl.placement": KLPlacement.loss, "algorithm.kl.estimator": "k1"},
        "algorithm.kl.placement=loss with algorithm.kl.estimator=k1 does not keep the policy",
        "use k2, k1+ or k3+, whose gradient is that of the divergence. algorithm.kl.allow_k1_loss=true permits k1",
    ),
    ({"algorithm.kl.placement": KLPlacement.loss, "algorithm.kl.estimator": "kl"}, "kl does not keep", "k1+ or k3+"),
    ({"algorithm.kl.target": 0.1}, "algorithm.kl.placement=none", "algorithm.kl.placement=reward"),
    (
        {"algorithm.kl.target": 0.1, "algorithm.kl.placement": KLPlacement.reward, "algorithm.kl.horizon": 12},
        "algorithm.kl.horizon=12 is too short for 64 sequences",
        "Use 640 or more",
    ),
    ({"placement.roles": {"critic": "judges"}}, "placement.roles.critic=judges: there is no such pool", "main or cpus"),
    ({"roles": {"judge": Role(pool="far")}}, "roles.judge.pool=far: there is no such pool", "main or cpus"),
    (
        {"placement.pools": {"a": Pool(), "b": Pool()}},
        "The pools use 2 devices, but the run has 1",
        "Set trainer.devices=2",
    ),
    ({**TWO_FILES, "data.mixture": [1.0]}, "1 numbers for 2 data.train_files", "one number per file"),
    ({**TWO_FILES, "data.mixture": [0.7, 0.0]}, "not above 0", "[0.7,0.3]"),
    ({"data.curriculum_steps": 5}, "needs a column with the difficulty", "data.difficulty_key="),
    (
        {**TWO_FILES, "data.curriculum_steps": 5, "data.difficulty_key": "level", "data.mixture": [0.5, 0.5]},
        "both determine the order",
        "Leave one out",
    ),
    (correction(weights=TOKEN, upper=2.0, lower=2.5), "nothing lies between", "upper above 1"),
    (correction(reject=TOKEN, reject_upper=2.0, reject_lower=2.0), "nothing lies between", "reject_upper above 1"),
    (correction(reject=TOKEN, reject_upper=0.5), "nothing lies between", "reject_upper above 1"),
    (correction(lower=0.5), "lower has no effect without weights", "algorithm.correction.weights=token"),
    (correction(normalize=True), "normalize has no effect without", "algorithm.correction.weights=token"),
    (
        {**correction(weights=CorrectionLevel.sequence), "algorithm.old_logprobs": OldLogprobs.rollout},
        "old_logprobs=rollout with algorithm.correction.weights=sequence",
        "algorithm.correction.weights=none, or algorithm.old_logprobs=auto. For a policy gradient",
    ),
]
FINE = [
    {},
    {"algorithm.kl.estimator": "low_var_kl+", "algorithm.kl.placement": KLPlacement.loss},
    {"algorithm.kl.estimator": "k1+", "algorithm.kl.placement": KLPlacement.loss},
    {"algorithm.kl.estimator": "k1", "algorithm.kl.placement": KLPlacement.reward},
    {"algorithm.kl.estimator": "k1", "algorithm.kl.placement": KLPlacement.loss, "algorithm.kl.allow_k1_loss": True},
    {"actor.guards.non_finite": GuardAction.skip, "critic.guards.replicas": GuardAction.fault},
    {"trainer.faults.user_code": FaultPolicy.retry, "trainer.faults.numeric": FaultPolicy.roll_back},
    {"trainer.threads": 1, "trainer.eval_every": 0, "trainer.save_every": 0, "actor.minibatch_size": 16},
    {"algorithm.dual_clip": 3.0, "algorithm.value_clip": None, "rollout.eval_sampling.temperature": 0.0},
    {"placement.pools": {"a": Pool(), "b": Pool()}, "trainer.devices": 2, "placement.roles": {"critic": "b"}},
    {**TWO_FILES, "data.mixture": [7.0, 3.0]},
    {"data.difficulty_key": "level", "data.curriculum_steps": 9},
    correction(weights=TOKEN, lower=0.5, normalize=True),
    correction(reject=CorrectionLevel.geometric, reject_upper=1.001),
]


@pytest.mark.parametrize(("settings", "message", "remedy"), CONFLICTS, ids=[message for _, message, _ in CONFLICTS])
def test_a_conflict_is_explained(settings, message, remedy):
    with pytest.raises(ConfigError) as caught:
        check(experiment(settings))
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert caught.value.key or caught.value.among


@pytest.mark.parametrize("settings", FINE, ids=[", ".join(settings) or "defaults" for settings in FINE])
def test_what_can_work_passes(settings):
    check(experiment(settings))


def test_names_of_choices_are_those_that_the_algorithms_know():
    assert set(KL_ESTIMATORS) == {name + suffix for name in ESTIMATORS for suffix in ("", "+")}
