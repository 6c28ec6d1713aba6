"""Shell completion: a shell is asked as a terminal asks it, and answers in time."""

import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.cli.completion import SCRIPTS
from hybridflow.cli.main import main

MOST_SECONDS = 0.3

PRESS_TAB = r"""
source completion.bash
COMP_LINE={line!r}
COMP_POINT=${{#COMP_LINE}}
compopt() {{ echo "open"; }}
_hybridflow
printf '%s\n' "${{COMPREPLY[@]}}"
"""


def answers(shell: str, line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    assert main(["complete", shell, line]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "there", "absent"),
    [
        ("hybridflow ", ["ppo", "sft", "reward-model", "grpo", "run", "show", "export", "--version"], ["complete"]),
        ("hybridflow gr", ["grpo", "grpo_passk"], ["ppo"]),
        ("hybridflow ppo ", ["trainer.", "algorithm=", "algorithm.", "task=", "mine.yaml"], ["notes.txt", "folder/"]),
        ("hybridflow ppo trainer.to", ["trainer.total_steps="], ["trainer.seed="]),
        ("hybridflow ppo actor.opt", ["actor.optimizer.learning_rate="], ["actor.optimizer."]),
        ("hybridflow ppo placement.", ["placement.pools.", "placement.roles."], []),
        ("hybridflow grpo trainer.device=", ["trainer.device=auto", "trainer.device=cuda"], []),
        ("hybridflow grpo rollout.engine=n", ["rollout.engine=null"], []),
        ("hybridflow grpo rollout.engine=v", ["rollout.engine=vllm"], ["rollout.engine=transformers"]),
        ("hybridflow ppo data.shuffle=", ["data.shuffle=true", "data.shuffle=false"], ["data.shuffle=null"]),
        ("hybridflow ppo trainer.threads=", ["trainer.threads=null"], []),
        ("hybridflow ppo algorithm=g", ["algorithm=grpo", "algorithm=gspo"], ["algorithm=ppo"]),
        ("hybridflow ppo task=calc", ["task=calculator", "task=calculator_pairs"], ["task=none"]),
        ("hybridflow ppo dataflow=", ["dataflow=safe_rlhf", "dataflow=dpo"], []),
        ("hybridflow dpo algorithm.preference.loss=", ["algorithm.preference.loss=ipo"], []),
        (
            "hybridflow ppo reward.functions=[gsm8k,",
            ["reward.functions=[gsm8k,math"],
            ["reward.functions=[gsm8k,gsm8k"],
        ),
        ("hybridflow ppo data.train_files=fold", ["data.train_files=folder/"], []),
        ("hybridflow ppo 'data.train_files=[folder/", ["data.train_files=[folder/rows.jsonl"], []),
        ("hybridflow run fold", ["folder/"], []),
        ("hybridflow run folder/", ["folder/run.yml"], ["folder/rows.jsonl"]),
        ("hybridflow --help actor.lo", ["actor.lora.rank", "actor.lora.alpha"], ["actor.lora.rank="]),
        ("hybridflow ppo -m --jo", ["--jobs"], []),
        ("hybridflow ppo -m --jobs ", ["local", "ray"], ["trainer."]),
        ("hybridflow launch --on ", ["slurm", "kuberay"], ["trainer."]),
        ("hybridflow launch --pa", ["--partition"], ["--on"]),
        ("hybridflow ppo --help ", ["all", "trainer."], []),
        ("hybridflow ppo --d", ["--dry-run"], ["--help"]),
        ("hybridflow ppo --cfg ", ["job"], ["trainer."]),
        ("hybridflow export fold", ["folder/"], []),
        ("hybridflow show algorithm=gr", ["algorithm=grpo"], []),
        ("hybridflow evaluate fold", ["folder/"], []),
        ("hybridflow evaluate folder reward.functions=gs", ["reward.functions=gsm8k"], []),
        ("hybridflow completion ", ["bash", "zsh", "fish"], ["folder/"]),
        ("hybridflow ppo nothing.like.this", [], ["trainer."]),
    ],
)
def test_a_word_is_completed(line, there, absent, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("mine.yaml", "notes.txt", "folder/run.yml", "folder/rows.jsonl"):
        (tmp_path / name).write_text("")
    found = answers("zsh", line, capsys)
    assert set(there) <= set(found) and not set(absent) & set(found)
    assert len(found) == len(set(found)) and (there or not found)


def test_every_option_of_a_training_command_is_completed(capsys):
    assert main(["ppo", "--help", "all"]) == 0
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert options == set(answers("zsh", "hybridflow ppo -", capsys))


@pytest.mark.parametrize("command", ["evaluate", "generate", "report", "export", "watch", "show"])
def test_every_option_of_a_command_that_does_not_train_is_completed(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    options = set(re.findall(r"^  (?:-[a-z](?: FILE)?, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert "--help" in options and options == set(answers("zsh", f"hybridflow {command} folder -", capsys))


@pytest.fixture
def shell_path(tmp_path, monkeypatch) -> Path:
    """A directory with the scripts, and with `hybridflow` on the path."""
    command = tmp_path / "hybridflow"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hybridflow "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path('/usr/bin')}:{Path('/bin')}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    for shell, script in SCRIPTS.items():
        (tmp_path / f"completion.{shell}").write_text(script)
    return tmp_path


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("hybridflow ppo trainer.total_st", ["open", "trainer.total_steps="]),
        ("hybridflow ppo rollout.engine=vl", ["vllm"]),  # bash replaces the part after the = alone
        ("hybridflow ppo reward.functions=[gsm", ["[gsm8k"]),
        ("hybridflow rlo", ["rloo"]),
    ],
)
def test_bash_inserts_the_part_of_the_word_that_it_replaces(shell_path, line, replies):
    answer = subprocess.run(
        ["bash", "--norc", "-c", PRESS_TAB.format(line=line)],
        cwd=shell_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.split() == replies and answer.stderr == ""


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_of_a_shell_is_printed_and_valid(shell, shell_path, capsys):
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == SCRIPTS[shell]
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n", str(shell_path / f"completion.{shell}")], check=True)


def test_an_answer_takes_less_than_a_third_of_a_second_of_work():
    # The best of several: the machine may be busy, and only the quickest says what an answer costs.
    seconds = []
    for line in (
        "hybridflow ppo actor.optimizer.l",
        "hybridflow ppo algorithm=",
        "hybridflow ppo trainer.",
        "hybridflow ",
    ):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "hybridflow", "complete", "bash", line]
        answer = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert answer.stdout
    assert min(seconds) < MOST_SECONDS
