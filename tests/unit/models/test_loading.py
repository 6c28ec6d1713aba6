"""Loading and saving Hugging Face directories; weights that are not finite are refused."""

import json
import math
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from hybridflow.config.model import Dtype
from hybridflow.errors import EngineError
from hybridflow.models.heads import load_value_model, save_value_model
from hybridflow.models.loading import (
    check_finite,
    copy_description,
    load_causal_lm,
    quiet_transformers,
    resolve_model_path,
    save_causal_lm,
    torch_dtype,
)
from hybridflow.models.shard_files import read_into
from hybridflow.parallel.layout import WeightShard
from tests.unit.models.conftest import MODELS

IDS = torch.arange(24).view(2, 12) + 2
ALL = ["llama", "llama tied", "qwen2", "qwen3", "qwen3_moe"]


@pytest.mark.parametrize("name", ALL)
def test_a_loaded_model_computes_what_transformers_computes(name, model_dir):
    ours = load_causal_lm(model_dir(name), dtype=torch.float32, device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(model_dir(name), dtype=torch.float32)
    assert not ours.training
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


def test_loaded_weights_are_aligned_and_share_no_memory(model_dir):
    model = load_causal_lm(model_dir("llama"), dtype=torch.float32, device="cpu")
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    assert len({storage.data_ptr() for storage in storages}) == len(storages)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
    assert all(s.nbytes() == p.nbytes for s, p in zip(storages, model.parameters(), strict=True))


def test_tied_weights_stay_tied(model_dir):
    model = load_causal_lm(model_dir("llama tied"), dtype=torch.float32, device="cpu")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", ALL)
def test_saving_and_loading_changes_no_bit(name, model_dir, tmp_path):
    model = load_causal_lm(model_dir(name), dtype=torch.float32, device="cpu")
    save_causal_lm(model, tmp_path / "saved", tokenizer_from=model_dir(name))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == "float32"
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").pad_token == "<pad>"


def test_a_bfloat16_model_says_so_in_its_config(model_dir, tmp_path):
    model = load_causal_lm(model_dir("llama"), dtype=torch_dtype(Dtype.bfloat16), device="cpu")
    save_causal_lm(model, tmp_path / "saved", tokenizer_from=model_dir("llama"))
    assert json.loads((tmp_path / "saved/config.json").read_text())["dtype"] == "bfloat16"
    assert next(iter(load_file(tmp_path / "saved/model.safetensors").values())).dtype == torch.bfloat16


def test_parameters_that_are_views_of_one_buffer_are_saved_whole(model_dir, tmp_path):
    model = load_causal_lm(model_dir("llama tied"), dtype=torch.float32, device="cpu")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffer = torch.empty(sum(parameter.numel() for parameter in model.parameters()))
    start = 0
    for parameter in model.parameters():
        view = buffer[start : start + parameter.numel()].view_as(parameter)
        parameter.data = view.copy_(parameter.data)
        start += parameter.numel()
    save_causal_lm(model, tmp_path / "saved", tokenizer_from=model_dir("llama tied"))
    again = load_causal_lm(tmp_path / "saved", dtype=torch.float32, device="cpu")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_a_generation_config_that_transformers_calls_invalid_can_still_be_saved(model_dir, tmp_path):
    source = Path(shutil.copytree(model_dir("llama"), tmp_path / "source"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "temperature": 0.6, "top_p": 0.9}))
    model = load_causal_lm(source, dtype=torch.float32, device="cpu")
    save_causal_lm(model, tmp_path / "saved", tokenizer_from=source)
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert (saved["eos_token_id"], saved["temperature"]) == (1, 0.6)


def without_a_norm(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def of_another_shape(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def torn(directory: Path) -> None:
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[: len(whole) // 2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_a_norm, r"model\.norm\.weight.*complete Hugging Face directory"),
        (of_another_shape, "files that belong together"),
        (without_weights, r"must hold config\.json and the weights"),
        (torn, "cannot be loaded"),
    ],
)
def test_a_damaged_model_is_an_error_that_says_what_is_wrong(model_dir, tmp_path, damage, words):
    broken = Path(shutil.copytree(model_dir("llama"), tmp_path / "broken"))
    damage(broken)
    with pytest.raises(EngineError, match=words):
        load_causal_lm(broken, dtype=torch.float32, device="cpu")


def test_a_model_path_may_be_a_directory_or_builtin(model_dir):
    assert resolve_model_path(str(model_dir("llama"))) == model_dir("llama").resolve()
    assert resolve_model_path("builtin:calculator").name == "model"


def test_a_path_without_a_model_is_an_error_that_says_what_it_lacks(model_dir, tmp_path):
    with pytest.raises(EngineError, match=r"Nearest model directory: .*/llama"):
        resolve_model_path(str(model_dir("llama").parent / "lama"))
    with pytest.raises(EngineError, match=r"builtin:calculator\.$"):
        resolve_model_path(str(model_dir("llama").parent / "other"))
    with pytest.raises(EngineError, match=r"config\.json.*Give a Hugging Face directory"):
        resolve_model_path(str(tmp_path))


def test_a_hub_name_that_cannot_be_had_is_an_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EngineError, match="neither a directory nor in the Hugging Face cache"):
        resolve_model_path("nobody/no-such-model")


def files_of(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix != ".safetensors"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("head", ["language", "value"])
def test_the_files_are_those_of_a_model_saved_whole(model_dir, tmp_path, name, head, dtype):
    source = model_dir(name)
    load, save = (load_causal_lm, save_causal_lm) if head == "language" else (load_value_model, save_value_model)
    save(load(source, dtype=dtype, device="cpu"), tmp_path / "whole", tokenizer_from=source)
    copy_description(source, tmp_path / "copy", head=head, dtype=dtype, tokenizer_from=source)
    copied, expected = files_of(tmp_path / "copy"), files_of(tmp_path / "whole")
    assert copied.keys() == expected.keys()
    for file, content in expected.items():
        assert copied[file] == content, file


def test_how_a_model_generates_is_kept_even_where_transformers_would_refuse_it(model_dir, tmp_path):
    source = model_dir("llama")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_bytes((source / "config.json").read_bytes())
    settings = {"temperature": 0.6, "eos_token_id": [1, 2]}
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(settings))
    copy_description(
        tmp_path / "source", tmp_path / "copy", head="language", dtype=torch.float32, tokenizer_from=source
    )
    written = json.loads((tmp_path / "copy" / "generation_config.json").read_text())
    assert settings.items() <= written.items()


def test_code_that_comes_with_a_model_comes_along_where_it_is_trusted(model_dir, tmp_path):
    source = model_dir("qwen3")
    (source / "modeling_own.py").write_text("")
    for trusted in (True, False):
        target = tmp_path / str(trusted)
        settings = {"head": "language", "dtype": torch.float32, "tokenizer_from": source}
        copy_description(source, target, trust_remote_code=trusted, **settings)
        assert (target / "modeling_own.py").exists() == trusted
    (source / "modeling_own.py").unlink()


def test_a_directory_without_a_description_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"cannot be read.*config\.json"):
        copy_description(tmp_path, tmp_path / "copy", head="language", dtype=torch.float32, tokenizer_from=tmp_path)


NAME = "model.layers.1.mlp.down_proj.weight"
LOAD = {"dtype": torch.float32, "device": "cpu"}


@pytest.fixture(params=[math.nan, -math.inf])
def poisoned(request, toy_dir, tmp_path):
    """A model one of whose elements is not finite."""
    shutil.copytree(toy_dir(), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights[NAME][3, 5] = request.param
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model"


def test_a_model_is_refused_by_each_way_of_reading_it(poisoned):
    shard = WeightShard.full(NAME, torch.empty(64, 128))
    for read in (
        lambda: load_causal_lm(poisoned, **LOAD),
        lambda: load_value_model(poisoned, **LOAD),
        lambda: read_into(poisoned, [shard]),
    ):
        with pytest.raises(EngineError, match=r"down_proj\.weight' in .* is not finite.*use other weights"):
            read()


def test_what_is_finite_or_no_float_passes(tmp_path):
    for tensor in (torch.tensor([3e38, -3e38]), torch.empty(0), torch.tensor([1 << 40]), torch.empty(2, device="meta")):
        check_finite("w", tensor, tmp_path)
    check_finite("w", torch.tensor([6e4], dtype=torch.float16), tmp_path)
    with pytest.raises(EngineError, match="'w'"):
        check_finite("w", torch.tensor([1.0, math.inf], dtype=torch.bfloat16), tmp_path)


def test_the_verbosity_of_transformers_is_as_before_whichever_thread_ends_last():
    before = transformers_logging.get_verbosity()
    with ExitStack() as other:
        with quiet_transformers():
            other.enter_context(quiet_transformers())
        assert transformers_logging.get_verbosity() == transformers_logging.ERROR
    assert transformers_logging.get_verbosity() == before
