"""Minibatches divide batches, and every rank that takes part in a call is given a prompt."""

import pytest

from hybridflow.batch import Batch
from hybridflow.config.placement import Pool
from hybridflow.config.roles import Role, RoleKind
from hybridflow.config.training import TrainingEngine
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.data import RunData
from hybridflow.launch.rules.layouts import batch_problems, evaluation_problems
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.tokenizers import load_tokenizer
from tests.unit.config.experiments import experiment
from tests.unit.launch.plans import plan_of

GRPO = {"dataflow": "grpo", "rollout.samples_per_prompt": 2, "reward.functions": ["exact_match"]}
PPO = {"dataflow": "ppo", "reward.functions": ["exact_match"]}
TENSOR = {"trainer.devices": 4, "actor.engine": TrainingEngine.megatron, "actor.parallelism.tensor": 4}
COST = {
    "dataflow": "safe_rlhf",
    "reward.functions": ["exact_match"],
    "placement.pools": {"a": Pool(devices=1), "b": Pool(devices=4)},
    "trainer.devices": 5,
    "roles": {
        "cost": Role(kind=RoleKind.reward_function, functions=["exact_match"]),
        "cost_critic": Role(kind=RoleKind.critic, pool="b"),
    },
}
REFUSED = [
    (
        {**GRPO, "actor.minibatch_size": 48},
        ["actor.minibatch_size=48 does not divide data.batch_size=64"],
        "Use 32, or another",
    ),
    (
        {**GRPO, "data.batch_size": 10**12 + 39, "actor.minibatch_size": 3},  # a prime: trying all numbers takes hours
        ["actor.minibatch_size=3 does not divide data.batch_size=1000000000039"],
        "Use 1, or another",
    ),
    ({**PPO, "critic.minibatch_size": 128}, ["critic.minibatch_size=128 does not divide"], "Use 64"),
    (
        {**GRPO, "trainer.devices": 8, "data.batch_size": 8, "actor.minibatch_size": 4},
        ["actor.minibatch_size=4 prompts cannot be divided over the 8 data-parallel ranks of actor"],
        "Use 8 or more, or larger sizes in actor.parallelism",
    ),
    (
        {**PPO, "trainer.devices": 4, "critic.minibatch_size": 2},
        ["critic.minibatch_size=2 prompts cannot be divided over the 4 data-parallel ranks of critic"],
        "Use 4 or more, or larger sizes in actor.parallelism",
    ),
    (
        {**COST, "critic.minibatch_size": 2},
        ["critic.minibatch_size=2 prompts cannot be divided over the 4 data-parallel ranks of cost_critic"],
        "roles.cost_critic.parallelism",
    ),
    (
        {**GRPO, **TENSOR, "data.batch_size": 2},
        [
            "data.batch_size=2 prompts cannot be divided over the 4 rollout replicas",
        ],
        "Use 4 or more, or a larger rollout.parallelism.tensor",
    ),
]
FINE = [
    {"dataflow": "sft", "data.batch_size": 8, "critic.minibatch_size": 3},
    {**GRPO, "trainer.devices": 4, "data.batch_size": 4, "critic.minibatch_size": 3},
    {**COST, "critic.minibatch_size": 4},
]


def _found(settings: dict[str, object]) -> list[ConfigError]:
    config = experiment(settings)
    return list(batch_problems(plan_of(config)))


@pytest.mark.parametrize(("settings", "messages", "remedy"), REFUSED, ids=[messages[0] for _, messages, _ in REFUSED])
def test_a_batch_that_cannot_be_divided_is_refused_once_per_role(settings, messages, remedy):
    found = _found(settings)
    assert len(found) == len(messages)
    assert all(error.message.startswith(message) for error, message in zip(found, messages, strict=True))
    assert remedy in found[0].remedy


@pytest.mark.parametrize("settings", FINE, ids=lambda settings: settings["dataflow"])
def test_a_batch_that_can_be_divided_passes(settings):
    assert _found(settings) == []


def test_held_out_rows_are_enough_for_every_rank_that_answers_scores_or_measures():
    plan = plan_of(experiment({**GRPO, "trainer.devices": 4}))

    def found(questions: int, sources: list[str]) -> list[ConfigError]:
        asked, measured = (Batch.of(objects={"data_source": each}) for each in (["x"] * questions, sources))
        tokenizer = load_tokenizer(resolve_model_path("builtin:calculator"), pad_token=None)
        data = RunData({}, asked if questions else None, measured if sources else None, tokenizer, {})
        return list(evaluation_problems(plan, data))

    refused = found(3, ["many"] * 4 + ["one"])
    assert [error.message for error in refused] == [
        "data.eval_files: 3 prompts cannot be divided over the 4 ranks of 'rollout'.",
        "data.eval_files: 3 prompts cannot be divided over the 4 ranks of 'reward'.",
        "data.eval_files: 1 rows of 'one' cannot be divided over the 4 ranks of 'actor'.",
    ]
    assert refused[1].remedy.startswith("Give 4 prompts or more, or place reward on fewer devices")
    assert refused[2].remedy.startswith("Give 4 or more of each source, or place actor on fewer")
    assert not found(0, [])
