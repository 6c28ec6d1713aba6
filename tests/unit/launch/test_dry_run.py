"""`--dry-run`: all problems at once, the roles of a run, and nothing started."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridflow.errors import ConfigError, Problems
from hybridflow.launch.compose.compose import compose_run
from hybridflow.trainer import main_reward_model
from tests.distributed.runs import run_here

MISTAKES = {
    "trainer.total_step=5": ("There is no setting 'trainer.total_step'", "Did you mean trainer.total_steps?"),
    "actor.engine=foo": ("actor.engine=foo is unknown", "auto, single, fsdp, megatron"),
    "algorithm.gamma=2": ("algorithm.gamma=2 is out of range", "Use a number from 0 to 1"),
    "algorithm.policy_loss=pppo": ("algorithm.policy_loss=pppo is unknown", "Did you mean 'ppo'?"),
    "rollout.sampling.temperature=0": ("always gives the same response", "Use 1.0 for training"),
    "algorithm.advantage=grpo": ("dataflow=ppo cannot use algorithm.advantage=grpo", "algorithm=grpo"),
    "data.train_files=[nope.jsonl]": ("No such file or directory: 'nope.jsonl'", "What to do"),
    "trainer.resume=nver": ("The checkpoint nver does not exist", "trainer.resume=auto"),
    "reward.functions=[exact_matc]": ("no built-in function 'exact_matc'", "Did you mean 'exact_match'?"),
}

HIDDEN = {
    "trainer.trackers=[wandbb]": "'wandbb', which is not a tracker",
    "reward.functions=[nofile.py:f]": "nofile.py:f: there is no file",
    "actor.minibatch_size=7": "actor.minibatch_size=7 does not divide data.batch_size=",
}
"""Problems that need no plan, and what is said of them."""


def test_every_problem_is_told_with_its_remedy_and_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run_here(["--dry-run", *MISTAKES])
    assert ended.status == 2 and f"{len(MISTAKES)} problems; nothing was started" in ended.words
    for message, remedy in MISTAKES.values():
        assert message in ended.words and remedy in ended.words
    assert ended.said.count("What to do: ") == len(MISTAKES)
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_problems_shows_its_roles_and_batches_in_lines_of_80_characters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vllm = ("rollout.engine=vllm", "rollout.parallelism.tensor=2")
    ended = run_here(["--dry-run", "trainer={devices: 4, device: cpu}", "algorithm.kl.placement=loss", *vllm])
    assert ended.status == 0 and "no errors found; nothing was started" in ended.words
    for row in (
        *("actor main 4 1.1M fsdp, data 4", "rollout main 4 vllm, in actor, replicas 2 x tensor 2"),
        *(
            "reward main 4 functions, data 4",
            "reference main 4 1.1M fsdp",
            "prompts per step 128, samples per prompt 4",
        ),
        "critic: optimizer steps per step 4, rows per optimizer step 128",
    ):
        assert row in ended.words
    own = [line for line in ended.said.splitlines() if not line.startswith("builtin:")]
    assert all(line == line.rstrip() and len(line) <= 80 for line in own)
    assert list(tmp_path.iterdir()) == []


def test_a_run_says_once_how_its_data_is_read_and_how_many_rows_are_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": "7" * count, "input": "", "answer": "2"} for count in (1, 2, 3, 99)]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    typed = ("data.train_files=a.jsonl", "data.batch_size=2", "actor.minibatch_size=2", "critic.minibatch_size=2")
    ended = run_here(["--dry-run", "trainer.device=cpu", "data.truncation=drop", "data.min_kept_fraction=0.5", *typed])
    lines = ended.said.splitlines()
    found = lines[lines.index("data") + 1 :]
    file = tmp_path / "a.jsonl"
    assert found[0].startswith(f"{file} rows=4 format=Alpaca prompt=prompt answer=answer "), ended.said
    assert found[1].startswith("Warning: data.truncation=drop leaves out 1 of 4 prompts longer than ")
    assert found[2] == f"Warning: {file} 3 of 4 prompts kept (75%)"
    assert found[3].startswith("builtin:calculator/eval rows=512 ")
    assert ended.said.count("a.jsonl rows=4") == 1 and ended.said.count("leaves out 1 of 4") == 1
    assert not caplog.records and logging.getLogger("hybridflow.data").propagate


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["task=calculatr", "algorithm=grppo", "trainer.x=2", "actor.parallelism.tensor=0", "dataflow=a.py:Mine"],
            ["no task=calc", "no algorithm=grp", "no setting 'trainer.x'", "tensor=0 is too small", "there is no file"],
        ),
        (
            ["actor={optimizer: {learning_rate: fast, lr: 1}, engine: fsd, epochs: 0}"],
            ["actor.optimizer.learning_rate has the wrong", "actor.optimizer.lr'", "engine=fsd", "epochs=0 is too"],
        ),
        (
            ["trainer={run_dir: ${nope}, x: 2, seed: ${data.shuffl}}", "roles.x.kind=${nope}", "data.max_rows=${data}"],
            [
                "run_dir cannot be set: Interpolation key 'nope'",
                "'trainer.x'",
                "seed cannot",
                "x.kind",
                "data.max_rows",
            ],
        ),
        (
            ["reward={functions: [${nope}], settings: {f: {a: '${nope'}}}", "dataflow=${nope}"],
            ["dataflow cannot", "reward.functions cannot", "reward.settings.f cannot"],
        ),
        (
            ["placement={roles: {actor: x, critic: y}, pools: {main: {devices: 3}}}", "model.path=''"],
            ["actor=x: there is", "critic=y: there is", "The pools use 3", "model.path is", "data.train_files is"],
        ),
    ],
)
def test_a_mistake_that_is_typed_hides_no_other(overrides, parts):
    problems = Problems(collects=True)
    compose_run(overrides, config_name="ppo", problems=problems)
    assert all(any(part in error.message for error in problems.found) for part in parts)
    assert len(problems.found) == len(parts)


LATE = (pytest.PytestUnraisableExceptionWarning, ResourceWarning)
"""Warnings about what an earlier test left behind in this process."""


@pytest.mark.parametrize(
    "defaults", ["[ppo, _self_]", "[ppo]", "[experimnt, _self_]", "[experiment, {task: calculatr}, _self_]"]
)
def test_every_mistake_in_a_file_is_told_once_with_the_file(defaults, tmp_path, recwarn):
    file, problems = tmp_path / "mine.yaml", Problems(collects=True)
    file.write_text(
        f"defaults: {defaults}\nalgorithm: {{gama: 1, advantage: gea, aggregation: x}}\ndata: {{mixture: [0]}}\n"
        "actor: {engine: fspd, epochs: 0, lr: 1}\ntrainer: {run_dir: '${nope}'}\ndataflow: no_file.py:Mine\n"
    )
    compose_run(["trainer.x=2"], config_name="mine", config_dir=tmp_path, problems=problems)
    in_file = [error.message.removeprefix(f"{file}: ") for error in problems.found if str(file) in error.message]
    parts = ("setting 'algorithm.gama'", "actor.engine=fspd is unknown", "actor.epochs=0 is too", "'actor.lr'")
    later = ("advantage=gea is", "aggregation=x is", "data.mixture=[0.0]", "run_dir cannot", "dataflow=no_file.py:Mine")
    for part in (*parts, *later):
        assert sum(part in message for message in in_file) == 1
    assert len(problems.found) == 10 + ("ppo" not in defaults)
    assert not [warning for warning in recwarn if not issubclass(warning.category, LATE)]


@pytest.mark.parametrize("is_base", [False, True])
def test_a_file_that_is_not_yaml_is_one_problem_and_hides_no_other(is_base, tmp_path):
    file, problems = tmp_path / "mine.yaml", Problems(collects=True)
    file.write_text("defaults: [ppo, _self_]\ntrainer: {devices: 2\n")
    (tmp_path / "other.yaml").write_text("defaults: [mine, _self_]\n")
    name = "other" if is_base else "mine"
    compose_run(["trainer.devices=-1", "task=none"], config_name=name, config_dir=tmp_path, problems=problems)
    assert [error.message for error in problems.found if "expected ',' or '}'" in error.message]
    assert sum(str(file) in error.message for error in problems.found) == 1
    assert any(error.key == "trainer.devices" for error in problems.found)


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        (["reward.weights=[1,2]", "data.mixture=[1,2]", "trainer.resume=nver"], 3),
        (["dataflow={0}:Mine", "reward.weights=[1,2]"], 1),
        (["placement.roles={{actor: x, critic: y}}", "trainer.seed=1"], 2),
        (["model.path=''", "trainer.seed=1"], 3),  # neither data nor a reward that fit it
        (["dataflow={0}:Exits", "data.batch_size=0"], 2),
        (["dataflow={0}.exits.py:Mine", "reward.functions=[{0}.exits.py:f]"], 2),
        (["reward.functions=[{0}.exits.py:f]"], 1),
    ],
    ids=str,
)
def test_what_one_rule_refuses_and_code_that_ends_python_are_problems_of_a_list(settings, number, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from hybridflow.dataflows.ppo import PPO\nclass Mine(PPO): pass\nclass Exits(PPO):\n"
        "    def step(self, prompts): raise SystemExit(3)\n"
    )
    Path(f"{file}.exits.py").write_text("import sys\nsys.exit(3)\n")
    ended = run_here(["--dry-run", "trainer.device=cpu", *(setting.format(file) for setting in settings)])
    assert ended.status == 2 and f"{number} problem{'s' * (number > 1)}; nothing was started" in ended.words
    assert ("called sys.exit: SystemExit: 3 (mine" in ended.words) == ("xits" in str(settings))


def test_an_interpolation_that_does_not_end_is_one_problem_among_those_of_its_file(tmp_path):
    file, problems = tmp_path / "mine.yaml", Problems(collects=True)
    file.write_text("defaults: [ppo, _self_]\ntrainer: {run_dir: '${nope', seed: x}\n")
    compose_run([], config_name="mine", config_dir=tmp_path, problems=problems)
    assert [error.key for error in problems.found] == ["trainer.run_dir", "trainer.seed"]
    assert all(str(file) in error.message for error in problems.found)


@pytest.mark.parametrize("value", ["-1", "fast", "'${nope}'"])
@pytest.mark.parametrize("is_typed", [True, False])
def test_a_value_that_cannot_be_used_leaves_what_the_run_has_without_it(value, is_typed, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo, _self_]\n")
    name = {"config_name": "mine", "config_dir": tmp_path}
    right = compose_run([], **name).config.actor.optimizer.learning_rate
    if not is_typed:
        (tmp_path / "mine.yaml").write_text(
            f"defaults: [ppo, _self_]\nactor: {{optimizer: {{learning_rate: {value}}}}}\n"
        )
    typed, problems = [f"actor.optimizer.learning_rate={value}"] * is_typed, Problems(collects=True)
    assert compose_run(typed, **name, problems=problems).config.actor.optimizer.learning_rate == right
    assert len(problems.found) == 1


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        (["placement.roles.actor=nopool"], "nopool: there is no such pool"),
        (["roles.x.pool=nopool"], "roles.x.pool=nopool: there is no such pool"),
        (["rollout.engine=vllm", "rollout.parallelism.tensor=3"], "tensor=3: 3 does not divide the 1 device "),
        (["trainer.device=cuda"], "but PyTorch finds no CUDA device here. What to do: Use trainer.device=cpu, or"),
        (["roles.x.functions=[f]"], "roles.x is not a role"),
    ],
    ids=str,
)
def test_a_run_whose_roles_cannot_be_laid_out_is_told_so_with_its_other_problems(settings, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    others = {**HIDDEN, "algorithm.advantage=grpo": "dataflow=ppo cannot use algorithm.advantage=grpo"}
    others |= {
        "roles.y.kind=critic": "roles.y is not a role",
        "dataflow_settings.n=1": "no setting 'dataflow_settings.n'",
    }
    ended = run_here(["--dry-run", *others, "critic.minibatch_size=5", *settings])
    for part in (found, *others.values(), "critic.minibatch_size=5 does not divide"):
        assert part in ended.words
    assert ended.status == 2
    assert "Models and data are checked once these problems are fixed" in ended.words


@pytest.mark.parametrize("dataflow", ["dataflow=nofile.py:Mine", "dataflow=mine.py:Absent"])
@pytest.mark.parametrize("is_typed", [True, False])
def test_a_dataflow_that_cannot_be_loaded_hides_no_problem_that_needs_none(dataflow, is_typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "own.yaml").write_text(f"defaults: [ppo, _self_]\n{dataflow.replace('=', ': ')}\n")
    chosen = [dataflow] if is_typed else ["--config-dir=.", "--config-name=own"]
    settings = ["algorithm.gamma=2", "trainer.total_step=5", "data.train_files=[nope.jsonl]", "model.path=/nowhere"]
    ended = run_here(["--dry-run", "trainer.device=cpu", *chosen, *settings, *HIDDEN])
    found = (dataflow, "algorithm.gamma=2 is", "'trainer.total_step'", "'nope.jsonl'", "model.path=/nowhere")
    assert all(part in ended.words for part in (*found, *HIDDEN.values())) and "8 problems" in ended.words
    assert "Models and data are checked once these problems are fixed" in ended.words


def test_every_role_that_the_dataflow_does_not_have_is_named_and_warnings_are_counted():
    ended = run_here(["--dry-run", "trainer.device=cpu", "roles={a: {process: true}, b: {process: true}}"])
    assert "roles.a is not a role" in ended.words and "roles.b is not a role" in ended.words
    ended = run_here(["--dry-run", "trainer={device: cpu, save_every: 0}", "critic.lora.alpha=3"])
    assert ended.words.count("Warning: ") == 2 and "no errors found, 2 warnings; nothing was started" in ended.words


def test_a_setting_that_was_left_out_has_no_warning():
    ended = run_here(["--dry-run", "trainer.device=cpu", "rollout.engine=sglang"], command=main_reward_model.main)
    assert "rollout.engine=sglang is unknown" in ended.words and "1 problem; nothing was started" in ended.words


def test_a_model_without_data_is_one_problem(toy_dir):
    words = [
        f"model.path={toy_dir()}",
        "reward.functions=[exact_match]",
        "data={max_prompt_tokens: 8, max_response_tokens: 4}",
    ]
    ended = run_here(["--dry-run", "trainer.device=cpu", *words])
    assert "data.train_files is empty" in ended.words and "1 problem; nothing was started" in ended.words


def test_a_mapping_of_settings_with_one_mistake_hides_no_mistake_found_later():
    ended = run_here(["--dry-run", "trainer.device=cpu", "data={batch_size: 0, train_files: [nope.jsonl]}"])
    assert "data.batch_size=0 is too small" in ended.words
    assert "No such file or directory: 'nope.jsonl'" in ended.words


@pytest.mark.parametrize(
    ("base", "module"), [("DAPO", "dapo"), ("DPO", "dpo"), ("KTO", "kto"), ("RewardModeling", "reward_model")]
)
def test_a_class_of_ones_own_that_the_settings_do_not_fit_is_one_problem(tmp_path, base, module):
    file = tmp_path / "mine.py"
    file.write_text(f"from hybridflow.dataflows.{module} import {base}\n\n\nclass Mine({base}):\n    pass\n")
    ended = run_here(["--dry-run", "trainer.device=cpu", f"dataflow={file}:Mine"])
    assert "1 problem; nothing was started" in ended.words
    assert base == "DAPO" or f"hybridflow {module.replace('_', '-')} dataflow={file}:Mine" in ended.words


@pytest.mark.parametrize(
    ("trainer", "mistakes"),
    [
        ("ppo", [*MISTAKES][:4]),
        (
            "kto",
            ["algorithm.preference.loss=o", "placement.pools.main.devices=3", "actor.engine=f", "data.mixture=[1,2]"],
        ),
    ],
)
def test_mistakes_of_settings_alone_are_listed_without_importing_torch(trainer, mistakes):
    program = (
        f"import sys; from hybridflow.trainer.main_{trainer} import main; status = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", program, "--dry-run", *mistakes]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 2 and "4 problems; nothing was started" in ended.stderr, ended.stderr
    assert "Models and data are checked once these problems are fixed" in ended.stderr


def test_an_error_met_twice_is_told_once_and_a_strict_run_raises_the_first():
    problems = Problems(collects=True)
    for _ in range(2):
        with problems.caught():
            raise ConfigError("a", remedy="b")
    assert len(problems.found) == 1
    with pytest.raises(ConfigError, match="a"), Problems().caught():
        raise ConfigError("a", remedy="b")
