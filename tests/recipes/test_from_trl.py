"""The page for users of TRL: its snippets run, and the arguments of TRL in it are in the table of names."""

import ast
import json
import re
import shutil

import pytest

from docs.reference_pages import on_page_markdown
from hybridflow.cli.main import main
from hybridflow.config.other_names import other_names
from tests.architecture.source import ROOT

PAGE = (ROOT / "docs" / "how_to" / "from_trl.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
THEIRS = [block for block in BLOCKS if block.startswith("# TRL\n")]
OURS = [block for block in BLOCKS if block not in THEIRS]
ASSETS = ROOT / "hybridflow" / "assets" / "calculator"


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """The user's files, and a model in place of the one on the Hub."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ASSETS / "model", tmp_path / "model_of_the_hub")
    config = tmp_path / "model_of_the_hub" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    prompts = [json.loads(line) for line in (ASSETS / "train.jsonl").read_text().splitlines()[:48]]
    learned = [{"prompt": row["prompt"], "completion": row["answer"]} for row in prompts]
    files = {"prompts": prompts, "demonstrations": learned, "held_out": learned[:8]}
    files["labeled"] = [{**row, "label": number % 2 == 0} for number, row in enumerate(learned)]
    files["pairs"] = [json.loads(line) for line in (ASSETS / "pairs.jsonl").read_text().splitlines()[:48]]
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def shortened(text: str) -> str:
    """The same with a local model and few steps."""
    text = text.replace("Qwen/Qwen2.5-0.5B", "model_of_the_hub")
    text = re.sub(r'"trainer\.epochs": \d+', '"trainer.epochs": 1', text)
    return re.sub(r'("?trainer\.total_steps"?[:=]) ?\d+', r"\1 2" if '"trainer' in text else r"\g<1>2", text)


@pytest.mark.parametrize("block", OURS, ids=[re.findall(r'run_dir": "([^"]+)', block)[0] for block in OURS])
def test_a_snippet_runs(desk, block):
    assert "trl" not in block
    exec(compile(shortened(block), "from_trl.md", "exec"), {"__name__": "__main__"})
    for run_dir in re.findall(r'run_dir": "([^"]+)', block):
        assert json.loads((desk / run_dir / "ending.json").read_text())["how"] == "done"
    if "hybridflow.export" in block:
        assert (desk / "model" / "model.safetensors").is_file()


def test_the_command_runs(desk):
    (command,) = re.findall(r"```bash\nhybridflow (.*?)```", PAGE, re.DOTALL)
    words = [word.strip("'") for word in shortened(command.replace("\\\n", " ")).split()]
    assert main([*words, "data.batch_size=8", "trainer.run_dir=run"]) == 0


def test_every_trainer_of_trl_on_the_page_has_a_snippet_of_ours_beside_it_and_its_arguments_are_in_the_table():
    trainers, names = [], other_names()["TRL"]
    for block in THEIRS:
        calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
        for call in calls:
            called = ast.unparse(call.func)
            if called.endswith("Trainer"):
                trainers.append(called)
                assert f"`{called}`" in PAGE
            elif called.endswith("Config"):
                assert [word.arg for word in call.keywords if word.arg not in names] == []
    assert trainers == ["GRPOTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer"]
    page = on_page_markdown(PAGE)
    assert "| `num_generations` | `rollout.samples_per_prompt` |" in page and "<!--" not in page
