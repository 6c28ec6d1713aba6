"""What the page "From Python" shows works: as a script, on Ray, and in the notebook."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.architecture.source import ROOT

PAGE = ROOT / "docs" / "how_to" / "from_python.md"
NOTEBOOK = ROOT / "recipes" / "from_python.ipynb"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SCRIPT, *SNIPPETS = BLOCKS
OF_THE_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


AGAIN = """
objects = {"model": model, "tokenizer": tokenizer, "data": rows}
rewards = [digits, lambda completions, **columns: [1.0 for text in completions]]
settings |= {"trainer.experiment": "again", "trainer.total_steps": 1}
print("again", hybridflow.run("grpo", settings, reward=rewards, **objects).metrics["critic/score/mean"][0] > 1.0)
"""


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> Path:
    """A tokenizer like SmolLM2's: bytes and merges, single digits, and the markers of its chats."""
    made = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    special = [AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([PAGE.read_text()], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    ).save_pretrained(folder)
    return folder


def run_script(folder: Path, text: str) -> str:
    """The output of a script that is run as a user runs it."""
    (folder / "train.py").write_text(text)
    answer = subprocess.run([sys.executable, "train.py"], cwd=folder, check=False, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_the_script_has_at_most_12_statements_and_lines():
    lines = [line for line in SCRIPT.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 12


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])])
def test_the_script_trains_and_generates(tmp_path, tokenizer_dir, backend):
    own = SCRIPT.replace(OF_THE_HUB, str(tokenizer_dir))
    own = own.replace('{"trainer.total_steps": 5,', f'{{"trainer.total_steps": 3, "trainer.backend": "{backend}",')
    assert backend in own
    output = run_script(tmp_path, own + AGAIN)
    assert re.findall(r"^\d+ +(\d) +\d\.\d+$", output, re.MULTILINE) == ["1", "2", "3"]
    assert "\n1+1=" in output
    assert output.endswith("again True\n"), "a second run in the same process"
    assert f"backend: {backend}" in (tmp_path / "runs" / "run" / "config.yaml").read_text()


@pytest.mark.slow
def test_the_other_snippets_run_in_their_order(tmp_path):
    one_step = '"trainer.total_steps": 1'
    text = f'hybridflow.run("grpo", {{{one_step}, "trainer.experiment": "mine"}})\n' + "\n\n".join(SNIPPETS)
    text = text.replace('run("grpo", settings', f'run("grpo", {{{one_step}, "trainer.experiment": "a", **settings}}')
    text = text.replace('run("grpo", callbacks', f'run("grpo", {{{one_step}, "trainer.experiment": "b"}}, callbacks')
    text = re.sub(r'"trainer.total_steps": \d+', f'{one_step}, "data.batch_size": 8, "data.eval_limit": 8', text)
    assert run_script(tmp_path, f"import hybridflow\n{text}\nprint('end')").endswith("end\n")
    assert {"mine", "a", "b", "rate-0.0001", "rate-0.001"} <= {path.name for path in (tmp_path / "runs").iterdir()}


@pytest.mark.slow
@pytest.mark.notebook
def test_the_notebook_runs_and_shows_what_a_notebook_shows(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    shutil.copy(NOTEBOOK, tmp_path)
    notebook = nbformat.read(tmp_path / NOTEBOOK.name, as_version=4)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert "step  1/" in printed and " INFO " in printed and "\r" not in printed
    assert not [
        text
        for text in (output.get("text", "") for output in outputs if output.get("name") == "stderr")
        if " INFO " in text
    ]
    shown = [output["data"] for output in outputs if "data" in output]
    assert any("<iframe" in data.get("text/html", "") for data in shown), "the report does not show itself"
    assert any("<svg" in data.get("text/html", "") for data in shown), "the drawing does not show itself"
    assert any("12+34=" in data.get("text/plain", "") for data in shown)
    assert any("The run begins at step 1." in data.get("text/plain", "") for data in shown), "the plan does not"
    assert json.loads((tmp_path / "runs" / "loop" / "metrics.jsonl").read_text().splitlines()[-1])["notebook/step"] == 3


@pytest.mark.notebook
def test_the_kept_notebook_has_no_outputs():
    import nbformat

    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
