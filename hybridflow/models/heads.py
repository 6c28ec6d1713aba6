"""Outputs of a model: hidden states, logits, and values per token."""

from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from hybridflow.errors import EngineError
from hybridflow.models.loading import copy_tokenizer, load_backbone, quiet_transformers
from hybridflow.models.packed_attention import is_packed
from hybridflow.models.packing import Packing
from hybridflow.models.shard_files import read_into
from hybridflow.parallel.layout import WeightShard


class ValueModel(nn.Module):
    """A causal language model's backbone and a linear head: one value per token, in float32.

    It is saved as a Hugging Face token-classification model with one label (`score.weight`, `score.bias`), which
    `AutoModelForTokenClassification` can load. Critics and reward models in that format can be loaded here.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        parameter = next(backbone.parameters())
        self.score = nn.Linear(_hidden_size(backbone), 1, device=parameter.device, dtype=torch.float32)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        position_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T"]:
        """The value of each position: the head on the hidden state there."""
        return self.values(hidden_states(self, input_ids, position_ids, attention_mask))

    def values(self, hidden: Float[Tensor, "*N H"]) -> Float[Tensor, "*N"]:
        """The head's values for hidden states."""
        return self.score(hidden.float()).squeeze(-1)


def load_value_model(
    directory: Path, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> ValueModel:
    """Loads a value model; without a saved head its head is zero, so that values start at 0."""
    backbone = load_backbone(directory, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    model = ValueModel(backbone)
    if any(directory.glob("*.safetensors")):
        head = [WeightShard.full(f"score.{name}", weight.data) for name, weight in model.score.named_parameters()]
        read_into(directory, head, zero_if_absent=("score.weight", "score.bias"))
    return model.eval()


def save_value_model(model: ValueModel, directory: Path, *, tokenizer_from: Path) -> None:
    """Writes the model to a directory that `load_value_model` and `AutoModelForTokenClassification` read."""
    directory.mkdir(parents=True, exist_ok=True)
    backbone = model.backbone
    prefix = backbone.base_model_prefix or "model"
    state = {f"{prefix}.{name}": tensor for name, tensor in backbone.state_dict().items()}
    state |= {f"score.{name}": tensor for name, tensor in model.score.state_dict().items()}
    backbone.config.num_labels = 1
    with quiet_transformers():
        backbone.save_pretrained(directory, state_dict=state)
    architecture = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(backbone.config.model_type)
    if architecture is not None:
        backbone.config.architectures = [architecture]
        backbone.config.save_pretrained(directory)
    copy_tokenizer(tokenizer_from, directory)


def hidden_states(
    model: PreTrainedModel | ValueModel,
    input_ids: Int[Tensor, "B T"],
    position_ids: Int[Tensor, "B T"] | None = None,
    attention_mask: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T H"]:
    """The backbone's last hidden state, after its final norm and before any head."""
    backbone = model.backbone if isinstance(model, ValueModel) else model.get_decoder()
    outputs = backbone(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False)
    return outputs.last_hidden_state


def packed_hidden_states(
    model: PreTrainedModel | ValueModel, input_ids: Int[Tensor, " N"], packing: Packing
) -> Float[Tensor, "N H"]:
    """The last hidden states of packed sequences, which do not influence one another.

    If `use_packed_attention` does not support the model, sequences are padded to the longest. The model is causal, so
    padding after a sequence does not change it.
    """
    backbone = model.backbone if isinstance(model, ValueModel) else model.get_decoder()
    if is_packed(backbone):
        outputs = backbone(
            input_ids=input_ids[None], position_ids=packing.position_ids[None], packing=packing, use_cache=False
        )
        return outputs.last_hidden_state[0]
    assert not packing.parents, "padded sequences share no prefixes"
    rectangle = packing.rectangle
    (shape,) = rectangle.shapes
    padded = input_ids if rectangle.take is None else input_ids[rectangle.take]
    positions = torch.arange(shape[1], device=input_ids.device)[None]
    hidden = hidden_states(model, padded.view(shape), positions).flatten(0, 1)
    return hidden if rectangle.back is None else hidden.index_select(0, rectangle.back)


def logits_of(model: PreTrainedModel, hidden: Float[Tensor, "*N H"]) -> Float[Tensor, "*N V"]:
    """The language head's logits for hidden states, with the scaling that some architectures apply to them.

    Gemma 2 soft-caps logits, Cohere multiplies them, and Granite divides them.
    """
    head = model.get_output_embeddings()
    assert head is not None, f"{type(model).__name__} has no language head"
    logits = head(hidden)
    config = model.config.get_text_config().to_dict()
    if config.get("final_logit_softcapping"):
        logits = torch.tanh(logits / config["final_logit_softcapping"]) * config["final_logit_softcapping"]
    if config.get("logit_scale"):
        logits = logits * config["logit_scale"]
    if config.get("logits_scaling"):
        logits = logits / config["logits_scaling"]
    return logits


def _hidden_size(backbone: PreTrainedModel) -> int:
    size = backbone.config.get_text_config().to_dict().get("hidden_size")
    if size is None:
        raise EngineError(
            f"The architecture {type(backbone).__name__} has no hidden_size in its configuration.",
            remedy="Use Llama, Qwen2, Qwen3, or another model whose config.json has hidden_size.",
        )
    return size
