"""Which data, and how much of it at a time."""

from dataclasses import dataclass, field
from typing import Annotated

from hybridflow.config.ranges import AT_LEAST_0, AT_LEAST_1, at_least
from hybridflow.config.section import Section

_ROWS = at_least(1, "Use 1 or more, or null for all.")


@dataclass
class Data(Section):
    """Prompts, demonstrations or preferences for training and evaluation."""

    train_files: list[str] = field(default_factory=list)
    """Files (.jsonl, .json, .parquet, also .gz), datasets (a saved directory, or of the Hugging Face hub
    `owner/name?config=main&split=train`), `builtin:` or `reasoning_gym:TASK?size=500`."""

    eval_files: list[str] = field(default_factory=list)
    """Held-out rows, of a dataset with its split named; an empty list turns evaluation off."""

    batch_size: Annotated[int, AT_LEAST_1] = 64
    """Prompts per training step, over all devices."""

    eval_limit: Annotated[int | None, AT_LEAST_1] = 256
    """Rows per evaluation, from the first; null takes all."""

    max_prompt_tokens: Annotated[int, AT_LEAST_1] = 512
    """Longest prompt."""

    max_response_tokens: Annotated[int, AT_LEAST_1] = 512
    """Longest response; of a conversation with several replies, all that follows its prompt."""

    drop_long_prompts: bool = False
    """Leave out rows over the limits (counted and reported); otherwise they are an error."""

    shuffle: bool = True
    """A new order each epoch, from the run's seed."""

    prompt_key: str | None = None
    """Column that holds the prompt, where it is not recognised."""

    answer_key: str | None = None
    """Column that holds the answer, where it is not recognised."""

    mixture: list[float] = field(default_factory=list)
    """Shares in which rows of `train_files` are drawn, one number per file ([0.7,0.3]); empty lays them end to end."""

    filters: list[str] = field(default_factory=list)
    """Functions (`path/filters.py:f`, `my_lib.f`) that answer whether a row of `train_files` stays.

    They are called with the columns that their parameters name, or with all of them: `def f(prompt, **columns)`."""

    max_rows: Annotated[int | None, _ROWS] = None
    """Rows of each training file, from the first that the filters let stay; null takes all."""

    difficulty_key: str | None = None
    """Column of numbers (a dot reaches into objects) by which each epoch goes from easy to hard."""

    curriculum_steps: Annotated[int, AT_LEAST_0] = 0
    """Steps over which ever more of the harder rows are let in, before shuffled epochs; 0: easy to hard each epoch."""

    chat_template: str | None = None
    """A file with a Jinja chat template that takes the place of the tokenizer's own."""

    system_prompt: str | None = None
    """A system message before every conversation that has none."""

    as_chat: bool = False
    """Text prompts become the user's turn of a conversation; otherwise they are shown as they are."""

    pretraining_files: list[str] = field(default_factory=list)
    """Texts or demonstrations, known by their columns, for `algorithm.pretraining_coefficient` (PPO-ptx)."""
