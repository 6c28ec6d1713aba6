"""The recipe of the built-in model, shortened: what it makes is complete, and its data are those that are shipped."""

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.config.paths import builtin_path
from recipes import tiny_calculator
from tests.distributed.runs import metric_rows, run_well

SHIPPED = builtin_path("builtin:calculator")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the recipe makes in three steps."""
    out = tmp_path_factory.mktemp("calculator") / "out"
    steps = "trainer={total_steps: 3, save_every: 3, eval_every: 3, device: cpu}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiny_calculator.py", str(out), steps, "data={batch_size: 32, eval_limit: 8}"])
        run_well([], command=lambda _: tiny_calculator.main() or 0)
    return out


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_the_data_are_those_shipped(made, name):
    assert (made / name).read_bytes() == (SHIPPED.parent / name).read_bytes()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"])
def test_the_model_directory_is_that_shipped_but_for_the_weights(made, name):
    versionless = [
        {key: value for key, value in json.loads((path / name).read_text()).items() if key != "transformers_version"}
        for path in (made / "model", SHIPPED)
    ]
    assert versionless[0] == versionless[1]
    if name == "tokenizer.json":
        assert (made / "model" / name).read_bytes() == (SHIPPED / name).read_bytes()


def test_the_model_directory_is_complete_and_plain_transformers_loads_it(made):
    assert {path.name for path in (made / "model").iterdir()} == {path.name for path in SHIPPED.iterdir()}
    model, shipped = (AutoModelForCausalLM.from_pretrained(path) for path in (made / "model", SHIPPED))
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in shipped.named_parameters()
    }
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    ids = tokenizer("12+34=", return_tensors="pt", return_token_type_ids=False)
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] <= 9


def test_it_learns_and_is_evaluated(made):
    rows = metric_rows(made / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[3]["train/loss"] < rows[1]["train/loss"]
    assert any(name.startswith("val-core/") for name in rows[3])
