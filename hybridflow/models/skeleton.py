"""A model's modules without weights, so that an engine can shard it before each rank reads only its own part."""

from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from hybridflow.errors import EngineError
from hybridflow.models.heads import ValueModel
from hybridflow.models.loading import one_line, quiet_transformers, read_description


def causal_lm_skeleton(directory: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model of a directory's config.json, with parameters on the meta device.

    Buffers (the frequencies of rotary embeddings) are real, on the host, because checkpoints do not have them.
    """
    return _skeleton(AutoModelForCausalLM, directory, dtype, trust_remote_code)


def value_model_skeleton(directory: Path, *, dtype: torch.dtype, trust_remote_code: bool = False) -> ValueModel:
    """A value model on the backbone of a directory's config.json, with parameters on the meta device."""
    return ValueModel(_skeleton(AutoModel, directory, dtype, trust_remote_code)).eval()


class _EmptyOnMeta(TorchFunctionMode):
    """Makes `torch.empty`, with which layers create their parameters, return meta tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def _skeleton(
    factory: type[AutoModel] | type[AutoModelForCausalLM], directory: Path, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    config = read_description(directory, trust_remote_code=trust_remote_code)
    try:
        with quiet_transformers(), _EmptyOnMeta():
            model = factory.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # as in `read_description`
        raise EngineError(
            f"The model in {directory} cannot be built: {one_line(error)}.",
            remedy="model.path must hold the config.json of a causal language model that transformers supports.",
        ) from error
    _drop_values(model)
    return model.eval()


def _drop_values(model: nn.Module) -> None:
    """Moves the remaining parameters, which were created with `torch.ones` and the like, to the meta device."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                module.register_parameter(name, empty)
