"""Run files: settings in YAML, checked and composed as the command line is."""

import os
from itertools import pairwise
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.errors import ConfigError, Problems
from hybridflow.launch.compose.command_line import CommandLine, parse_command_line
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.compose.help import config_text
from hybridflow.launch.compose.run_files import read_run_files
from hybridflow.launch.compose.trainers import TrainingCommand, find_command


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**files: str) -> None:
    for name, text in files.items():
        Path(f"{name}.yaml").write_bytes(text.encode(errors="surrogateescape"))


def line(*words: str) -> CommandLine:
    """The words after `hybridflow`."""
    return parse_command_line(words[1:], program="p", command=find_command(words[0]))


def composed(*words: str, problems: Problems | None = None) -> Composed:
    typed = line(*words)
    problems = problems or Problems()
    return compose_run(typed.typed(problems), config_name=typed.config_name, problems=problems)


def test_nested_and_dotted_keys_are_the_settings_of_the_command_line():
    write(
        run="algorithm: grpo\nalgorithm.kl.placement: loss\ntrainer: {seed: 7, experiment: mine}\n"
        "rollout.sampling: {temperature: 0.5}\nreward.functions: gsm8k\nactor.optimizer.learning_rate: 1e-5\n"
        "roles: {judge: {kind: reward_function, functions: [length]}}\ntask: none\n"
        "model.path: m\ndata.train_files: [a]\n"
    )
    typed = [
        *("algorithm=grpo", "algorithm.kl.placement=loss", "trainer={seed: 7, experiment: mine}", "task=none"),
        *("rollout.sampling.temperature=0.5", "reward.functions=gsm8k", "actor.optimizer.learning_rate=1e-5"),
        *("roles.judge={kind: reward_function, functions: [length]}", "model.path=m", "data.train_files=[a]"),
    ]
    from_file, from_line = composed("ppo", "run.yaml"), composed("ppo", *typed)
    assert from_file.config == from_line.config and from_file.user_keys == from_line.user_keys
    assert from_file.origins["trainer.seed"] == from_file.origins["roles.judge.kind"] == "run file"
    assert from_line.origins["trainer.seed"] == "command line"
    assert from_file.origins["critic.epochs"] == "default"


def test_names_are_taken_as_they_are_written():
    for text in ("no", "0123", "1:30", "1e5", "x"):
        write(run=f"trainer: {{experiment: {text}}}\n")
        assert composed("ppo", "run.yaml").config.trainer.experiment == text


def test_later_files_win_over_earlier_ones_and_those_they_extend_and_the_command_line_over_all():
    Path("shared").mkdir()
    write(
        first="trainer: {seed: 1, experiment: first, keep_checkpoints: 9}\ndata.batch_size: 8\n",
        second="extends: [shared/base.yaml, shared/more.yaml]\ntrainer.seed: 2\n",
    )
    Path("shared/base.yaml").write_text("trainer: {seed: 3, experiment: base, sample_rows: 3}\nalgorithm: rloo\n")
    Path("shared/more.yaml").write_text("trainer: {sample_rows: 4, samples_every: 5}\nalgorithm: grpo\n")
    found = composed("ppo", "trainer.samples_every=6", "first.yaml", "second.yaml")
    trainer = found.config.trainer
    assert (trainer.seed, trainer.experiment, trainer.keep_checkpoints) == (2, "base", 9)
    assert (trainer.sample_rows, trainer.samples_every, found.config.dataflow) == (4, 6, "grpo")
    assert (found.origins["trainer.seed"], found.origins["trainer.samples_every"]) == ("run file", "command line")
    assert found.origins["actor.minibatch_size"] == "data.batch_size", "as for a batch size that is typed"
    assert composed("rloo", "second.yaml").config.algorithm.advantage == "rloo", "the command's own algorithm is typed"


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("a: 1\n", "run.yaml, line 1: There is no setting 'a'", "--help all"),
        ("\n\ntrainer:\n  seed: 1\n  sed: 2\n", "run.yaml, line 5: There is no setting 'trainer.sed'", "trainer.seed?"),
        ("rollout.n: 4\n", "line 1: There is no setting 'rollout.n'", "use rollout.samples_per_prompt."),
        ("trainer: {seed: x}\n", "line 1: trainer.seed has the wrong type", "takes a whole number"),
        ("trainer:\n  total_steps: -0.5\n", "line 2: trainer.total_steps=-0.5 is too small", "Use 0 or more"),
        ("data: {batch_size: 0}\n", "line 1: data.batch_size=0 is too small", "Use 1 or more"),
        ("# x\nalgorithm: grp0\n", "line 2: There is no algorithm=grp0", "Did you mean 'grpo'?"),
        ("task: 3\n", "line 1: task=3 is not a single task name", "Write task: NAME"),
        ("defaults: [ppo]\n", "line 1: 'defaults' belongs to Hydra's", "Write 'extends: FILE'"),
        ("command: pppo\n", "line 1: There is no trainer or algorithm 'pppo'", "Did you mean 'ppo'?"),
        (
            "command: sft\n",
            "line 1: this file is for hybridflow sft, not hybridflow ppo",
            "Use hybridflow run run.yaml",
        ),
        ("extends: 3\n", "line 1: extends must name files", "extends: FILE"),
        ("extends: nowhere.yaml\n", "There is no file 'nowhere.yaml'", "relative to "),
        ("extends: run.yaml\n", "run.yaml extends itself", "Remove it from extends"),
        ("[1, 2]\n", "run.yaml must hold settings by name", "name: value"),
        ("trainer: {seed: 1\n", "run.yaml: ", "--help all"),
        ("trainer: &a\n  x: *a\n", "run.yaml is nested too deeply", "Write each setting once"),
        ("{a: " * 900 + "}" * 900, "run.yaml is nested too deeply", "Write each setting once"),
        (
            "a: &a [0]\n" + "".join(f"{y}: &{y} [{', '.join([f'*{x}'] * 9)}]\n" for x, y in pairwise("abcdefghi")),
            "run.yaml is nested too deeply or too large",
            "Write each setting once",
        ),
        ("\udcff", "can't decode byte 0xff", "--help all"),
        (
            "trainer:\n  seed: 1\nx: 2\ntrainer.seed: 3\n",
            "run.yaml, line 4: trainer.seed is set in line 2 already",
            "Remove one of the two",
        ),
        ("trainer: 5\n", "line 1: trainer=5 has the wrong type", "settings of its own"),
    ],
)
def test_a_mistake_is_told_with_its_file_and_line(text, message, remedy):
    write(run=text)
    with pytest.raises(ConfigError) as caught:
        composed("ppo", "run.yaml")
    assert message in caught.value.message and remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("words", "files", "message"),
    [
        (["run", "run.yaml"], {"run": "extends: base.yaml\ncommand: grpo\n", "base": "command: sft\n"},
         "run.yaml, line 2: this file is for hybridflow ppo, but base.yaml, line 1 is for hybridflow sft"),
        (["run", "base.yaml", "run.yaml"], {"run": "command: grpo\n", "base": "command: sft\n"},
         "run.yaml, line 1: this file is for hybridflow ppo, but base.yaml, line 1 is for hybridflow sft"),
    ],
)  # fmt: skip
def test_files_for_different_commands_do_not_go_together(words, files, message):
    write(**files)
    with pytest.raises(ConfigError, match=message) as caught:
        composed(*words)
    assert "a file without 'command'" in caught.value.remedy


def test_a_file_that_is_not_there_is_answered_with_the_nearest():
    write(calculator="")
    with pytest.raises(ConfigError, match=r"no file 'calcualtor\.yaml'") as caught:
        composed("ppo", "calcualtor.yaml")
    assert "Did you mean 'calculator.yaml'?" in caught.value.remedy


def test_a_dry_run_tells_all_mistakes_of_all_files_within_two_seconds_of_work(capsys):
    write(
        base="trainer.sed: 1\nalgorithm: grp0\n",
        run="command: grpo\nextends: base.yaml\ndata:\n  batch_sise: 2\n  shuffle: perhaps\ntrainer.epochs: -1\n",
    )
    began = sum(os.times()[:2])
    assert main(["run", "run.yaml", "--dry-run", "trainer.backend=locl"]) == 2
    assert sum(os.times()[:2]) - began < 2.0
    said = " ".join(capsys.readouterr().err.split())
    for words in (
        *("base.yaml, line 1: There is no setting 'trainer.sed'", "base.yaml, line 2: There is no algorithm=grp0"),
        *("run.yaml, line 4: There is no setting 'data.batch_sise'", "run.yaml, line 5: data.shuffle has the wrong"),
        *("run.yaml, line 6: trainer.epochs=-1", " ConfigError: trainer.backend=locl is unknown"),
        "6 problems; nothing was started",
    ):
        assert words in said
    assert said.count("grp0") == 1


@pytest.mark.parametrize(
    ("words", "trainer", "dataflow"),
    [
        (["ppo"], "ppo", "ppo"),
        (["grpo"], "ppo", "grpo"),
        (["reinforce++"], "ppo", "grpo"),
        (["reward-model"], "reward_model", "reward_model"),
        (["simpo"], "dpo", "dpo"),
        (["run", "dapo.yaml"], "ppo", "dapo"),
        (["run", "dapo.yaml", "later.yaml"], "ppo", "grpo"),
        (["ppo", "dapo.yaml"], "ppo", "dapo"),
    ],
)
def test_each_command_starts_from_its_trainers_settings(words, trainer, dataflow):
    write(dapo="command: dapo\n", later="algorithm: grpo\n")
    typed = line(*words)
    assert (typed.config_name, composed(*words).config.dataflow) == (trainer, dataflow)
    if words == ["simpo"]:
        assert composed(*words).config.algorithm.preference.loss == "simpo"


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["run"], "There is no run file", "hybridflow run FILE.yaml"),
        (["run", "rows.jsonl"], "'rows.jsonl' is not a run file.", "hybridflow run FILE.yaml"),
        (["grpo", "algorithm=GRPOTrainer"], "There is no algorithm=GRPOTrainer", "It is called grpo here."),
        (["grpo", "algorithm=DPO"], "There is no algorithm=DPO", "It has its own trainer: hybridflow dpo."),
        (["GRPO"], "There is no command 'GRPO'", "Did you mean 'grpo'?"),
        (
            ["evaluate", "nowhere"],
            "There is no model and no run 'nowhere'.",
            "Give the directory of a model or of a run",
        ),
        (["evaluate", "runs/sumz"], "There is no model and no run 'runs/sumz'.", "Did you mean 'runs/sums'?"),
        (
            ["evaluate", "nowhere", "--num-generations", "4"],
            "There is no option --num-generations",
            "rollout.samples_per",
        ),
        (["run", "bare.yaml"], "bare.yaml names no command", "hybridflow grpo bare.yaml"),
        (["bare.yaml"], "There is no command 'bare.yaml'", "Write hybridflow run bare.yaml."),
        (["pppo"], "There is no command 'pppo'", "Did you mean 'ppo'?"),
        (["trainer.seed=1"], "There is no command 'trainer.seed=1'", "Write hybridflow ppo trainer.seed=1."),
    ],
)
def test_a_command_that_cannot_be_found_is_answered_with_what_to_type(words, message, remedy, capsys):
    write(bare="trainer.seed: 1\n")
    Path("runs/sums").mkdir(parents=True)
    Path("runs/sums/config.yaml").write_text("")
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said and remedy in said


def test_a_file_for_another_command_is_one_problem(capsys):
    write(c="command: grpo\ntrainer.total_steps: 2\n")
    assert main(["dpo", "c.yaml", "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "c.yaml, line 1: this file is for hybridflow grpo, not hybridflow dpo." in said
    assert "Use hybridflow run c.yaml." in said and "1 problem; nothing was started" in said


def test_sections_of_other_systems_are_answered_setting_by_setting(capsys):
    write(verl="command: grpo\nactor_rollout_ref:\n  rollout: {n: 4}\n  actor:\n    optim: {lr: 1e-6}\n")
    assert main(["run", "verl.yaml", "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "verl.yaml, line 3: There is no setting 'actor_rollout_ref.rollout.n'" in said
    assert "use rollout.samples_per_prompt" in said and "use actor.optimizer.learning_rate" in said
    assert "2 problems; nothing was started" in said


def test_an_option_that_does_not_exist_hides_no_other_problem_of_a_dry_run(capsys):
    words = ["pretrain=x", "n_samples_per_prompt=8", "--rollout_batch_size", "4", "--ptx-coef=1"]
    assert main(["grpo", "--dry-run", *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    for part in (
        "no setting 'pretrain'",
        "use rollout.samples",
        "no option --rollout_batch_size",
        "no option --ptx-coef",
    ):
        assert part in said
    assert "4 problems; nothing was started" in said


def test_the_help_of_run_is_about_files(capsys):
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: hybridflow run FILE.yaml ... [key=value ...]") and "command named in it" in said
    assert "--dry-run" in said and "reinforcement" not in said
    write(c="command: sft\n")
    assert main(["run", "c.yaml", "--help"]) == 0
    assert "Trains a language model on demonstrations" in capsys.readouterr().out


def test_the_record_of_a_run_is_a_run_file_that_says_who_set_each_value():
    write(mine="trainer: {epochs: 2}\nrollout.samples_per_prompt: 3\n")
    first = composed("grpo", "mine.yaml", "trainer.seed=5", "roles.judge.kind=reward_function")
    write(config=config_text(first))
    assert line("run", "config.yaml").config_name == "ppo"
    again = composed("run", "config.yaml")
    assert again.config == first.config
    assert again.user_keys == {"trainer.epochs", "rollout.samples_per_prompt", "trainer.seed", "roles.judge.kind"}
    assert again.origins["trainer.seed"] == "run file"
    assert {key: again.origins[key] for key in first.origins if key not in again.user_keys} == {
        key: origin for key, origin in first.origins.items() if key not in again.user_keys
    }
    with pytest.raises(ConfigError, match="this file is for hybridflow ppo, not hybridflow dpo"):
        composed("dpo", "config.yaml")


def test_what_a_run_computed_is_computed_again_from_its_record():
    write(
        config="command: ppo\ntrainer:\n  total_steps: 13  # origin: trainer.epochs\n"
        "  epochs: 2.0  # origin: run file\n  device: cuda  # origin: device\n"
        "actor:\n  optimizer:\n    schedule_steps: 13  # origin: trainer.total_steps\n"
    )
    found = composed("run", "config.yaml")
    assert (found.config.trainer.total_steps, found.config.trainer.epochs) == (120, 2.0)
    assert found.config.actor.optimizer.schedule_steps is None and found.config.trainer.device.name == "auto"


def test_a_secret_that_a_record_hides_must_be_given_again():
    settings = "reward.settings.api_key"
    write(config=config_text(composed("ppo", f"{settings}=abcdefgh12345678")))
    with pytest.raises(ConfigError, match=f"{settings} is a secret") as caught:
        composed("run", "config.yaml")
    assert caught.value.message.startswith("config.yaml, line ") and f"{settings}=..." in caught.value.remedy
    again = composed("run", "config.yaml", f"{settings}=abcdefgh12345678")
    assert again.config.reward.settings["api_key"] == "abcdefgh12345678"


def test_a_path_may_contain_an_equals_sign_and_an_environment_variable_is_read(monkeypatch):
    Path("lr=1").mkdir()
    Path("lr=1/config.yaml").write_text("trainer.experiment: ${oc.env:NAME_OF_RUN}\n")
    monkeypatch.setenv("NAME_OF_RUN", "from-the-environment")
    assert composed("ppo", "lr=1/config.yaml").config.trainer.experiment == "from-the-environment"


def test_files_are_read_together_for_other_callers():
    write(run="command: ipo\ntrainer.seed: 4\n")
    found = read_run_files([Path("run.yaml")])
    assert found.command == TrainingCommand("dpo", ("algorithm.preference.loss=ipo",))
    assert [(s.key, s.value, s.place) for s in found.typed.settings] == [
        ("algorithm.preference.loss", "ipo", "run.yaml, line 1"),
        ("trainer.seed", 4, "run.yaml, line 2"),
    ]
