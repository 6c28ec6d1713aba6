"""Model directories that cannot work are refused before anything starts, in words that name the file and the value."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.errors import Advice, EngineError
from hybridflow.launch.rules.models import directory_problems, tokenizer_problems
from tests.unit.launch.plans import judged, planned

Edit = Callable[[dict], object]


def check(directory: Path) -> list[Advice]:
    words = ["algorithm=grpo", "task=calculator", "rollout.samples_per_prompt=2", f"model.path={directory}"]
    return judged(planned(*words), directory_problems, tokenizer_problems)


@pytest.fixture
def model(toy_dir, tmp_path) -> Path:
    shutil.copytree(toy_dir(), tmp_path / "model")
    return tmp_path / "model"


def write(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0, which is not a whole number from 1"),
        ({"num_attention_heads": 3}, r"attention heads \(3\)"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3, which is not a divisor of num_attention_heads=2"),
        ({"hidden_size": "64"}, "hidden_size=64, which is not a whole number"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": 64.5}, "hidden_size=64.5"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0"),
        ({"dtype": "evil"}, "cannot be"),
        ({"hidden_act": "evil"}, "cannot be"),
        ({"model_type": "evil"}, "evil"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\], which is not text"),
        ({"eos_token_id": 10**6}, "eos_token_id=1000000, but '1000000' is not a token of the model"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' with value '</s>'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"are quantized \(bitsandbytes\)"),
    ],
)
def test_a_wrong_config_is_refused(model, changes, found):
    write(model / "config.json", **changes)
    with pytest.raises(EngineError, match=found) as caught:
        check(model)
    assert caught.value.remedy and len(caught.value.message) < 700


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", ["[1]", "not JSON", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\udcff"])
def test_a_file_that_is_no_object_is_refused(model, name, content):
    (model / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(EngineError) as caught:
        check(model)
    assert caught.value.remedy and len(caught.value.message) < 700


@pytest.mark.parametrize("ids", [10**6, -1, "text", [1, 64], [[1]], True])
def test_ids_that_end_a_response_are_tokens_of_the_model(model, ids):
    write(model / "generation_config.json", eos_token_id=ids)
    with pytest.raises(EngineError, match=r"generation_config\.json has eos_token_id=.*is not a token") as caught:
        check(model)
    assert "from 0 to 63" in caught.value.remedy
    write(model / "generation_config.json", eos_token_id=[1, 63])
    check(model)


@pytest.mark.parametrize(
    "index", [[1], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../../a"}}]
)
def test_an_index_that_is_none_is_refused(model, index):
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EngineError, match=r"weights in .* cannot be read: .*(index|list)") as caught:
        check(model)
    assert "safetensors" in caught.value.remedy


def test_layers_that_the_config_does_not_have_are_named(model):
    write(model / "config.json", num_hidden_layers=1)
    (advice,) = check(model)
    assert "the weights have layers 1 to 1" in advice.message and "num_hidden_layers=1" in advice.message
