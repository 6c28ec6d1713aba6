"""Which data, and how much of it at a time."""

from dataclasses import dataclass, field

from hybridflow.config.section import Section


@dataclass
class Data(Section):
    """Prompts for training and evaluation."""

    train_files: list[str] = field(default_factory=list)
    """Files (.jsonl, .json, .parquet, also .gz), Hugging Face dataset directories, or `builtin:` names."""

    eval_files: list[str] = field(default_factory=list)
    """Held-out prompts; an empty list turns evaluation off."""

    batch_size: int = 64
    """Prompts a training step, over all devices."""

    eval_limit: int | None = 256
    """Prompts an evaluation, from the first; null takes all."""

    max_prompt_tokens: int = 512
    """Longest prompt."""

    max_response_tokens: int = 512
    """Longest response."""

    drop_long_prompts: bool = False
    """Leave out prompts over `max_prompt_tokens` (counted and reported); otherwise they are an error."""

    shuffle: bool = True
    """A new order each epoch, from the run's seed."""

    prompt_key: str | None = None
    """Column that holds the prompt, where it is not recognised."""

    answer_key: str | None = None
    """Column that holds the answer, where it is not recognised."""
