"""The files of a model directory other than weights: configurations, the tokenizer and custom code."""

import shutil
from pathlib import Path
from typing import Literal

import torch
from transformers import GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from hybridflow.models.loading import copy_tokenizer, mend_generation_config, read_description

Head = Literal["language", "value"]
_ARCHITECTURES = {
    "language": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "value": MODEL_MAPPING_NAMES | MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}


def copy_description(
    source: Path,
    target: Path,
    *,
    head: Head,
    dtype: torch.dtype,
    tokenizer_from: Path,
    trust_remote_code: bool = False,
) -> None:
    """Writes the files that `transformers` saves with the weights of the model in `source`, for this head and dtype."""
    target.mkdir(parents=True, exist_ok=True)
    config = read_description(source, trust_remote_code=trust_remote_code)
    config.dtype = str(dtype).removeprefix("torch.")
    architecture = _ARCHITECTURES[head].get(config.model_type)
    if isinstance(architecture, str):
        config.architectures = [architecture]
    if head == "value":
        config.num_labels = 1
    config.save_pretrained(target)
    if head == "language":
        _generation_config(source, config).save_pretrained(target)
    if trust_remote_code:
        for code in source.glob("*.py"):
            shutil.copyfile(code, target / code.name)
    copy_tokenizer(tokenizer_from, target)


def _generation_config(source: Path, config: PreTrainedConfig) -> GenerationConfig:
    if (source / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(source)
    else:
        generation = GenerationConfig.from_model_config(config)
    mend_generation_config(generation)
    return generation
