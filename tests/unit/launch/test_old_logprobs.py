"""When a step spends a forward pass on old log-probabilities, and what becomes of the settings that said so."""

import pytest

from hybridflow.errors import ConfigError
from hybridflow.launch.compose.trainers import known_command
from hybridflow.launch.plan.dataflow import find_dataflow, make_settings
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.step_trace import trace_step
from tests.unit.launch import plans

ONE_STEP = ("actor.minibatch_size=null", "actor.epochs=1")
POLICIES = ("ppo", "grpo", "remax", "dapo", "pf_ppo", "ppo_ptx", "safe_rlhf")
ROLLOUT = "algorithm.old_logprobs=rollout"


def planned(*overrides: str, algorithm: str = "grpo"):
    command = known_command(algorithm)
    return plans.planned(*command.overrides, *ONE_STEP, *overrides, name=command.trainer)


def has_the_pass(plan: RunPlan) -> bool:
    return ("actor", "logprobs") in {(call.role, call.method) for call in trace_step(plan).calls}


@pytest.mark.parametrize("algorithm", POLICIES)
def test_one_optimizer_step_per_batch_needs_no_pass_in_any_dataflow(algorithm):
    assert not has_the_pass(planned(algorithm=algorithm))
    assert has_the_pass(planned("algorithm.old_logprobs=recompute", algorithm=algorithm))
    assert has_the_pass(planned("actor.minibatch_size=32", algorithm=algorithm))
    assert not has_the_pass(planned("actor.minibatch_size=32", ROLLOUT, algorithm=algorithm))


@pytest.mark.parametrize(
    ("overrides", "by_auto", "by_rollout"),
    [
        ((), False, False),
        (("actor.epochs=2",), True, False),
        (("algorithm.kl.placement=loss",), False, False),
        (("algorithm.kl.placement=reward", "rollout.engine=vllm"), True, False),
        (("algorithm.kl.placement=reward", "rollout.engine=transformers"), False, False),
        (("algorithm.kl.placement=reward", "rollout.engine=transformers", "actor.engine=megatron"), True, False),
        (("algorithm.kl.placement=reward", "rollout.engine=transformers", "actor.epochs=2"), True, False),
        (("algorithm.kl.placement=reward", "rollout.engine=transformers", "actor.lora.rank=4"), True, False),
        (("algorithm.kl.placement=reward", "rollout.engine=transformers", "model.dtype=bfloat16"), True, False),
        (("algorithm.kl.placement=reward", "rollout.engine=transformers", "rollout.sampling.top_p=0.9"), True, True),
        (("algorithm.correction.reject=geometric", "algorithm.correction.reject_upper=1.01"), True, True),
        (("algorithm.correction.veto=1e-4",), True, True),
        (("algorithm=optimal_token_baseline",), True, True),
        (("algorithm=clip_cov",), True, False),
    ],
    ids=str,
)
def test_the_pass_is_made_where_something_reads_it_before_the_update(overrides, by_auto, by_rollout):
    assert planned(*overrides).wants_old_logprobs is by_auto
    assert planned(*overrides, ROLLOUT).wants_old_logprobs is by_rollout
    assert planned(*overrides, "algorithm.old_logprobs=recompute").wants_old_logprobs


def test_weights_compare_and_need_the_pass():
    assert planned("algorithm.correction.weights=token").wants_old_logprobs


def test_an_interpolation_needs_no_pass_whatever_the_weights_and_the_optimizer_steps():
    words = ["algorithm.old_logprobs=interpolate", "algorithm.correction.weights=token", "actor.epochs=2"]
    assert not has_the_pass(planned(*words, "asynchrony.max_staleness=2", "asynchrony.ahead=2"))


def test_an_estimator_of_the_users_own_gets_what_it_names(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "def plain(rewards, mask):\n    return rewards\n\n\n"
        "def looks_back(rewards, mask, old_logprobs=None):\n    return rewards - old_logprobs\n"
    )
    assert not planned(f"algorithm.advantage={file}:plain").wants_old_logprobs
    assert planned(f"algorithm.advantage={file}:looks_back").wants_old_logprobs


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "reward_model"])
def test_what_samples_nothing_is_left_alone(algorithm):
    assert plans.planned(name=algorithm).wants_old_logprobs


def test_a_setting_that_was_renamed_names_its_successor():
    with pytest.raises(ConfigError, match=r"no setting 'dataflow_settings\.recompute_logprobs'") as caught:
        make_settings(find_dataflow("grpo"), {"recompute_logprobs": False})
    assert "algorithm.old_logprobs=recompute" in caught.value.remedy


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("actor.epochs=2",), "a separate forward pass of the actor before the update"),
        (
            ("algorithm.kl.placement=reward", "rollout.engine=transformers"),
            "no separate forward pass; the KL penalty in the reward uses the rollout's log-probabilities",
        ),
        ((), "no separate forward pass; the update uses the log-probabilities of its own forward pass"),
        ((ROLLOUT,), None),
        (("algorithm.old_logprobs=recompute",), None),
    ],
    ids=str,
)
def test_the_log_says_what_auto_became(overrides, line, caplog):
    caplog.set_level("INFO", "hybridflow")
    planned(*overrides)
    assert [record.getMessage() for record in caplog.records] == (
        [] if line is None else [f"algorithm.old_logprobs=auto: {line}"]
    )
