"""Every command in the README and the documentation works, or is listed here with the reason why it is not run."""

import json
import re
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hybridflow.cli.main import _COMMANDS
from hybridflow.cli.main import main as hybridflow_command
from hybridflow.trainer import main_dpo, main_kto, main_ppo, main_reward_model, main_sft
from recipes import full_pipeline, grpo_gsm8k, happy_stories
from tests.architecture.source import ROOT, tracked_files

ENTRY_POINTS = {
    f"hybridflow.trainer.{module.__name__.rpartition('.')[2]}": module.main
    for module in (main_dpo, main_kto, main_ppo, main_reward_model, main_sft)
}
ASSETS = ROOT / "hybridflow" / "assets" / "calculator"
PLACEHOLDERS = ("path/to/model", "MODEL", "my/model", "Qwen/Qwen2.5-0.5B", "/shared/models/mine", "...")
"""Stand for a user's model: here, the built-in one with longer sequences."""

NOT_RUN = {
    r"make (test|check|quickstart)\b": "what they run is run by every test session and by tests of the quickstart",
    r"(\S*pip|\.venv/bin/python -m pip) ": "changes the environment of the tests",
    r"(ray|export) ": "starts a cluster: tests/distributed/test_several_nodes.py does the same with two raylets",
    r"hybridflow export ": "needs a trained run: tests/unit/cli/test_export.py",
    r"hybridflow (evaluate|generate) (runs|models)/": "needs a trained run or a model: tests/unit/cli/test_evaluate.py",
    r"hybridflow run planned\.yaml": "needs the file that the command before it writes: tests/unit/cli/test_plan.py",
    r"hybridflow plan runs/": "needs a trained run: tests/unit/cli/test_plan.py",
    r"hybridflow .*devices\.yaml": "needs or writes a calibration: tests/unit/calibration/test_calibration.py",
    r"hybridflow completion bash": "writes to a shell's start file: tests/unit/cli/test_completion.py",
    r".*reward\.model\.path=runs/reward": "needs a trained reward model: tests/distributed/test_reward_models.py",
    r"(\.venv/bin/)?hybridflow doctor( --quick|$)": "depends on the machine: tests/unit/doctor/test_machine.py",
    r"hybridflow doctor --only ray": "starts a cluster: tests/unit/doctor/test_machine.py",
    r"hybridflow doctor runs/": "needs the directory of a run: tests/unit/doctor/test_runs.py",
    r"hybridflow (report|watch) ": "needs the directories of runs: tests/unit/cli/test_report.py",
    r"python recipes/custom_protocol\.py": "is a program of its own: tests/unit/controller/test_worker_group.py",
    r"python -m pdb ": "is interactive; the same command without pdb is run",
    r"'reward\.functions=": "is a pair of settings, not a command",
    r".*trainer\.checkpoint_url=s3:": "needs a bucket: tests/distributed/test_checkpoint_url.py",
    r".*environment\.mcp=": "starts a server: tests/unit/environments/test_mcp_servers.py",
    r".*trainer\.nodes=2": "needs two nodes: tests/distributed/test_several_nodes.py",
}
"""Patterns of commands that are not run, and the reason."""


def _commands() -> list[tuple[str, str]]:
    found = {}
    for page in tracked_files():
        if page.endswith(".md") and page != "CHANGELOG.md":
            for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
                for line in re.sub(r"\\\n\s*", "", block).splitlines():
                    command = re.split(r"\s+#\s", line)[0].strip()
                    if command and not command.startswith("#"):
                        found.setdefault(command, page)
    return [(page, command) for command, page in found.items()]


COMMANDS = _commands()
RUN = [each for each in COMMANDS if not any(re.match(pattern, each[1]) for pattern in NOT_RUN)]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A directory with a user's files, as the pages assume them."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    shutil.copytree(ASSETS / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (tmp_path / "larger.yaml").write_text("data.batch_size: 16\n")
    (tmp_path / "my_reward.py").write_text("def score(prompts, completions):\n    return [0.0] * len(prompts)\n")
    train, pairs = (ASSETS / "train.jsonl").read_text(), (ASSETS / "pairs.jsonl").read_text()
    rows = [json.loads(line) for line in train.splitlines()[:200]]
    labels = [{"prompt": row["prompt"], "completion": row["answer"], "label": row["answer"] > "5"} for row in rows]
    programs = [{**row, "tests": ["assert add(1, 1) == 2"]} for row in rows]
    demonstrations = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
    files = {"labeled.jsonl": labels, "problems.jsonl": programs}
    for name in ("train.jsonl", "test.jsonl", "a.jsonl", "prompts.jsonl", "my/train.jsonl"):
        files[name] = rows
    (tmp_path / "my").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    (tmp_path / "requirements.txt").write_text("math-verify\n")
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    for name in ("pairs.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text(pairs)
    return tmp_path


def _write_code(page: str, folder: Path) -> None:
    """Writes the code blocks of a page that begin with the name of a file."""
    for block in re.findall(r"```(?:python|yaml)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        if name := re.match(r"# ([\w/]+\.(?:py|yaml))\b", block):
            (folder / name[1]).write_text(block)


def _adapted(word: str, module: str) -> str:
    key, _, value = word.partition("=")
    if key.endswith("model.path") and value in PLACEHOLDERS:
        return f"{key}=model"
    if module.endswith("sft"):
        word = re.sub(r"\b(train|held_out)\.jsonl", "demonstrations.jsonl", word)
    return word


@pytest.mark.parametrize(("page", "command"), RUN, ids=[command for _, command in RUN])
def test_a_documented_command_works(desk, capsys, page, command):
    _write_code(page, desk)
    words = shlex.split(command.replace(".venv/bin/", ""))
    if words[0] == "hybridflow" and (words[1] in _COMMANDS or words[1:] == ["--help"]):
        with suppress(SystemExit):  # of --help
            assert hybridflow_command(words[1:]) == 0, capsys.readouterr().err
        return
    name, *rest = words[1:] if words[0] == "hybridflow" else words[words.index("-m") + 1 :]
    flags = [] if "--help" in rest or "--dry-run" in rest else ["--dry-run"]
    typed = [*flags, *(_adapted(word, name) for word in rest if word != "...")]
    status = ENTRY_POINTS[name](typed) if name in ENTRY_POINTS else hybridflow_command([name, *typed])
    assert status == 0, capsys.readouterr().err


def test_every_reason_is_that_of_a_command():
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command) for _, command in COMMANDS), f"{pattern} matches no command any more"


@pytest.mark.parametrize(
    ("recipe", "missing"), [(full_pipeline, "model, pairs"), (grpo_gsm8k, "model, data"), (happy_stories, "model")]
)
def test_a_recipe_without_its_arguments_explains_itself(monkeypatch, capsys, recipe, missing):
    monkeypatch.setattr(sys, "argv", [recipe.__name__])
    with pytest.raises(SystemExit) as ended:
        recipe.main()
    assert ended.value.code == 2
    assert f"the following arguments are required: {missing}" in capsys.readouterr().err
