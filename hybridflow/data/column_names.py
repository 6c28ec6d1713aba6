"""Names of columns that hold texts: prompts, completions and answers."""

from collections.abc import Collection

from hybridflow.config.data import Data
from hybridflow.config.templates import template_parts

PROMPTS = ("prompt", "question", "problem", "instruction", "input")
"""Columns that may hold the prompt; the first that a file has is taken."""

COMPLETIONS = ("completion", "response", "output")
"""Columns that may hold a completion to learn."""

ANSWERS = ("answer", "ground_truth", "label", "target", "solution")
"""Columns that may hold the reference answer."""

LABELS = ("label", "kto_tag")
"""Columns that may say whether a completion is good."""

_OTHERS = ("text", "chosen", "rejected", "context", "Body", "Question", "Answer")


def text_columns(names: Collection[str], config: Data | None = None) -> set[str]:
    """The columns of a file without types (CSV) that are texts even if all their values look like numbers.

    They have a known name, or `data.prompt_key`, `data.answer_key` or `data.prompt_template` names them. If there is a
    completion or a conversation, `label` says whether it is good.
    """
    known = {*PROMPTS, *COMPLETIONS, *ANSWERS, *_OTHERS}
    if any(name in names for name in (*COMPLETIONS, "messages", "conversations")):
        known -= {"label"}
    if config is not None:
        template = template_parts(config.prompt_template) if config.prompt_template else []
        known |= {name for name in (config.prompt_key, config.answer_key, *(key for _, key in template)) if name}
    return known.intersection(names)
