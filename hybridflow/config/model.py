"""Which model, and how it is read."""

from dataclasses import dataclass
from enum import Enum

from hybridflow.config.section import Section


class Dtype(Enum):
    """Number format of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class Model(Section):
    """A Hugging Face causal language model."""

    path: str | None = None
    """A Hugging Face directory, or `builtin:calculator`; null means the model of the whole run (`model.path`)."""

    tokenizer_path: str | None = None
    """A directory with the tokenizer, where it is not beside the model."""

    pad_token: str | None = None
    """A token to pad with, for a tokenizer that has none; its end-of-sequence token is a common choice."""

    dtype: Dtype | None = None
    """Number format of weights and activations; null: bfloat16 on GPUs, float32 on CPUs. Training in bfloat16 keeps
    float32 copies of the weights."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models you trust."""
