"""Names of other systems lead to settings that exist, and are not settings here themselves."""

import re

import pytest

from docs.reference_pages import names_page
from hybridflow.config.fields import find
from hybridflow.config.other_names import counterpart, other_names

ALL = [(system, theirs, row.here) for system, names in other_names().items() for theirs, row in names.items()]


@pytest.mark.parametrize(("system", "theirs", "here"), ALL)
def test_what_is_named_instead_exists(system, theirs, here):
    assert find(theirs) is None
    keys = re.findall(r"(?<![\w./\[])((?:[a-z_]+\.)+[a-z_0-9]+)", here.replace(".*", ""))
    keys = [key for key in keys if not key.endswith((".py", ".jsonl"))]
    assert keys or here.startswith(("none: ", "algorithm="))
    assert [key for key in keys if find(key) is None] == []


def test_prefixes_and_dashes_of_other_command_lines_are_understood():
    said = "Instead of verl's rollout.n, use rollout.samples_per_prompt."
    assert counterpart("actor_rollout_ref.rollout.n") == counterpart("rollout.n") == said
    assert (
        counterpart("n-samples-per-prompt")
        == "Instead of OpenRLHF's n_samples_per_prompt, use rollout.samples_per_prompt."
    )
    assert counterpart("actor_rollout_ref.model.path") == (
        "Instead of verl's actor_rollout_ref.model.path, use model.path."
    )
    assert counterpart("algorithm.filter_groups.enable") is not None
    assert counterpart("trainer.sed") is None


@pytest.mark.parametrize(
    ("theirs", "here"),
    [
        ("algorithm.adv_estimator", "algorithm=NAME"),
        ("trainer.logger", "trainer.trackers"),
        ("custom_reward_function.path", "reward.functions"),
        (
            "beta",
            "algorithm.kl.coefficient with algorithm.kl.placement=loss for GRPO and PPO, algorithm.preference.beta for",
        ),
        ("total_episodes", "trainer.total_steps"),
        ("ray_kwargs.ray_init.num_gpus", "RAY_ADDRESS"),
        ("trainer.n_gpus_per_node", "trainer.devices"),
        ("gradient_accumulation_steps", "actor.microbatch_tokens"),
        ("actor.use_kl_loss", "algorithm.kl.placement=loss"),
        ("dataset_name", "data.train_files"),
        ("--actor-learning-rate", "actor.optimizer.learning_rate"),
        ("rollout.multi_turn.enable", "no counterpart"),
    ],
)
def test_the_usual_names_of_a_first_day_lead_to_their_counterpart_not_to_the_nearest_key(theirs, here):
    assert here in (counterpart(theirs.lstrip("-")) or "")


def test_the_page_lists_every_name():
    page = names_page()
    assert all(f"| `{theirs}` |" in page for _, theirs, _ in ALL)
    assert "| `use_wandb` | `trainer.trackers=[console,jsonl,wandb]` |" in page
    assert "| `rollout.n` | `rollout.samples_per_prompt` |" in page
