"""Settings of the data."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from hybridflow.config.ranges import AT_LEAST_0, AT_LEAST_1, FROM_0_TO_1, at_least
from hybridflow.config.section import Section

_ROWS = at_least(1, "Use 1 or more, or null for all.")


class Truncation(Enum):
    """Treatment of rows that exceed the length limits."""

    error = "error"
    drop = "drop"
    left = "left"
    right = "right"

    @property
    def cuts(self) -> bool:
        """Whether rows are cut."""
        return self in (Truncation.left, Truncation.right)


@dataclass
class Data(Section):
    """Prompts, demonstrations or preferences for training and evaluation."""

    train_files: list[str] = field(default_factory=list)
    """Files (.jsonl, .json, .csv and .tsv, also .gz; .parquet, .arrow, .feather), folders of them, patterns
    (`data/part-*.parquet`), datasets (a saved directory, or one of the Hugging Face Hub,
    `owner/name?config=main&split=train`), `builtin:` names or `reasoning_gym:TASK?size=500`."""

    eval_files: list[str] = field(default_factory=list)
    """Held-out rows; a dataset must name its split. An empty list turns evaluation off."""

    batch_size: Annotated[int, AT_LEAST_1] = 64
    """Prompts per training step, over all devices."""

    eval_limit: Annotated[int | None, AT_LEAST_1] = 256
    """Evaluate only the first N rows; null evaluates all."""

    max_prompt_tokens: Annotated[int, AT_LEAST_1] = 512
    """Maximum length of a prompt."""

    max_response_tokens: Annotated[int, AT_LEAST_1] = 512
    """Maximum length of a response; for a conversation with several replies, of everything after its prompt."""

    truncation: Truncation = Truncation.error
    """Action for rows that exceed the length limits: error, drop (leave them out), left or right (cut them; prompts
    lose their beginning or their end, responses always their end). The log counts them."""

    shuffle: bool = True
    """Shuffle the rows in each epoch, seeded by `trainer.seed`."""

    prompt_key: str | None = None
    """Column with the prompt; null recognizes the usual names."""

    answer_key: str | None = None
    """Column with the answer; null recognizes the usual names."""

    prompt_template: str | None = None
    """Text that makes the prompt from columns; null takes it from one. In a shell, quote it twice:
    `'data.prompt_template="{Body} {Question}"'`."""

    map: str | None = None
    """Function (`my.py:to_row`) that receives each row as a dict and returns the row to use, or None to leave it out.

    It is called before columns are recognized, for training and evaluation files alike, but not for built-in ones."""

    dataset: str | None = None
    """Class (`my.py:MyDataset`) that reads each entry of `train_files` and `eval_files`, which need not be files.

    Its rows, by `__len__` and `__getitem__` or by `__iter__`, are dicts of columns."""

    streaming: bool = False
    """Read the rows of `train_files` when they are used, for files larger than memory; only the first are checked
    before the run starts. Evaluation files are read whole, except by `hybridflow generate`."""

    min_kept_fraction: Annotated[float, FROM_0_TO_1] = 0.05
    """Smallest share of a file's rows that may be left when rows that are too long, blank or ties are left out; with
    fewer, the run does not start. 0 allows any."""

    mixture: list[float] = field(default_factory=list)
    """Sampling proportions of the files in `train_files`, one per file ([0.7,0.3]); empty concatenates them."""

    filters: list[str] = field(default_factory=list)
    """Functions (`path/filters.py:f`, `my_lib.f`) that decide whether a row of `train_files` is kept.

    They are called with the columns that their parameters name, or with all of them: `def f(prompt, **columns)`."""

    max_rows: Annotated[int | None, _ROWS] = None
    """Maximum number of rows per training file, counted after the filters; null takes all."""

    difficulty_key: str | None = None
    """Column of numbers by which each epoch is sorted from easy to hard; a dot reaches into objects."""

    curriculum_steps: Annotated[int, AT_LEAST_0] = 0
    """Steps over which harder rows are gradually added, followed by shuffled epochs; 0 sorts each epoch from easy to
    hard."""

    chat_template: str | None = None
    """A file with a Jinja chat template that replaces the tokenizer's own."""

    system_prompt: str | None = None
    """A system message to prepend to conversations without one."""

    as_chat: bool = False
    """Format text prompts as a user turn; otherwise they are used verbatim."""

    pretraining_files: list[str] = field(default_factory=list)
    """Texts or demonstrations (recognized by their columns) for `algorithm.pretraining_coefficient` (PPO-ptx)."""
