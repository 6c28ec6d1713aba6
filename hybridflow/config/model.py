"""Settings of a model."""

from dataclasses import dataclass
from enum import Enum

from hybridflow.config.section import Section


class Dtype(Enum):
    """Data type of weights and activations."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class Model(Section):
    """A Hugging Face causal language model."""

    path: str | None = None
    """A Hugging Face directory or Hub name, or `builtin:calculator`; null means `model.path`."""

    tokenizer_path: str | None = None
    """A directory with the tokenizer; null means the model's directory."""

    pad_token: str | None = None
    """Padding token for a tokenizer without one; the end-of-sequence token is a common choice."""

    dtype: Dtype | None = None
    """Data type of weights and activations; null: bfloat16 on GPUs, float32 on CPUs. Training in bfloat16 keeps float32
    master weights."""

    trust_remote_code: bool = False
    """Run Python code from the model's directory. Only for models you trust."""
