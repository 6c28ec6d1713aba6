"""Beside the weights a directory holds what transformers writes there itself."""

import json

import pytest
import torch

from hybridflow.errors import EngineError
from hybridflow.models.description import copy_description
from hybridflow.models.heads import load_value_model, save_value_model
from hybridflow.models.loading import load_causal_lm, save_causal_lm
from tests.unit.models.conftest import CONFIGS


def files_of(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.suffix != ".safetensors"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
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
    with pytest.raises(EngineError, match="cannot be read") as caught:
        copy_description(tmp_path, tmp_path / "copy", head="language", dtype=torch.float32, tokenizer_from=tmp_path)
    assert "config.json" in caught.value.remedy
