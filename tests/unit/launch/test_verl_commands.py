"""`python -m hybridflow.trainer.main_ppo` with the overrides of `verl.trainer.main_ppo`."""

import json
import re

import pytest
import yaml

from benchmarks.translated_commands import quickstart
from hybridflow.cli.main import main
from hybridflow.trainer import main_ppo
from tests.architecture.source import ROOT

PROMPTS = ROOT / "hybridflow" / "assets" / "calculator" / "train.jsonl"
HERE = {"rollout.name": "hf", "data.max_prompt_length": "32", "data.max_response_length": "8"}
"""What a CPU and the built-in model need."""


@pytest.fixture
def overrides(tmp_path) -> list[str]:
    """verl's quickstart with the built-in model, 40 prompts, and batches of 8."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f"{line}\n" for line in PROMPTS.read_text().splitlines()[:40]))
    small = HERE | {"data.train_files": str(data), "data.val_files": str(data), "data.train_batch_size": "8"}
    small |= {"model.path": "builtin:calculator", "actor.ppo_mini_batch_size": "4"}
    words = []
    for word in quickstart().split():
        key = word.partition("=")[0]
        name = key.removeprefix("actor_rollout_ref.").replace("critic.model", "model")
        words.append(f"{key}={small[name]}" if name in small else word)
    return words


def test_the_quickstart_of_verl_runs_with_another_module_name(overrides, tmp_path, capsys):
    more = [f"trainer.default_local_dir={tmp_path}/run", "trainer.total_training_steps=2", "trainer.save_freq=-1"]
    assert main_ppo.main([*overrides, *more]) == 0
    said = capsys.readouterr().err
    assert said.count("verl: actor_rollout_ref.actor.ppo_mini_batch_size=4 -> actor.minibatch_size=4\n") == 1
    assert "verl: default critic.cliprange_value=0.5 -> algorithm.value_clip=0.5\n" in said
    assert "verl: trainer.val_before_train has no effect: the model is also evaluated before the first step\n" in said
    assert json.loads((tmp_path / "run" / "ending.json").read_text())["how"] == "done"
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["algorithm"]["dual_clip"], config["critic"]["optimizer"]["learning_rate"]) == (3.0, 1e-5)
    assert (config["actor"]["microbatch_tokens"], config["trainer"]["total_steps"]) == (4 * 40, 2)


def test_settings_of_hybridflow_may_follow_and_win(overrides, capsys):
    assert main_ppo.main(["--cfg", "job", *overrides, "data.batch_size=16", "trainer.seed=7"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["data"]["batch_size"], config["trainer"]["seed"]) == (16, 7)


def test_options_of_hydra_choose_megatron_and_other_options_stay(overrides, capsys):
    for words in (
        ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml"],
        ["--config-name", "ppo_megatron_trainer"],
    ):
        assert main_ppo.main([*words, "--cfg", "job", *overrides]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["actor"]["engine"] == "megatron"
    assert main_ppo.main(["--config-name=mine", "--cfg", "job", *overrides]) == 2
    assert "--config-name=mine: settings in files of your own are not translated" in capsys.readouterr().err


def test_settings_that_change_the_results_are_errors_that_say_what_to_do(overrides, capsys):
    words = [*overrides, "trainer.critic_warmup=20", "+actor_rollout_ref.actor.nonsense=1", "~trainer.logger"]
    assert main_ppo.main([*words, "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "These settings of verl are not translated:" in said
    assert "trainer.critic_warmup=20: the actor learns from the first step" in said
    assert "actor_rollout_ref.actor.nonsense=1: hybridflow does not know this setting of verl." in said
    assert "~trainer.logger: settings cannot be removed" in said
    assert "What to do: Replace each by the setting here that it names, or leave it out." in said


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("actor_rollout_ref.actor.shuffle=True", "minibatches keep the order of the batch"),
        ("actor_rollout_ref.actor.megatron.context_parallel_size=2", "context parallelism is not implemented"),
        ("algorithm.adv_estimator=mine", "choose from:"),
        ("actor_rollout_ref.actor.use_kl_loss=True", "the divergence is in the reward or in the loss"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "set actor.optimizer.warmup_steps"),
        ("data.image_key=images", "models read text"),
        ("reward_model.enable=True", "use reward.model.path"),
    ],
)
def test_what_cannot_be_kept_is_rejected(overrides, word, reason, capsys):
    assert main_ppo.main(["--cfg", "job", *overrides, word, "algorithm.use_kl_in_reward=True"]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_single_names_of_verl_are_still_errors_with_the_name_to_use(capsys):
    assert main_ppo.main(["trainer.n_gpus_per_node=8"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Instead of verl's trainer.n_gpus_per_node, use trainer.devices." in said
    assert main(["ppo", "actor_rollout_ref.rollout.n=4"]) == 2
    assert re.search(r"Instead of verl's rollout.n, use\s+rollout.samples_per_prompt.", capsys.readouterr().err)
