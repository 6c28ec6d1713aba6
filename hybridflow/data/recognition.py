"""Which columns of a table are the prompt and the answer: the layouts of the ecosystem, known by their columns."""

import logging
from dataclasses import dataclass

from hybridflow.batch.columns import COLUMNS
from hybridflow.config.nearest import did_you_mean
from hybridflow.data.dialogues import last_reply_begins
from hybridflow.data.table import Table
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

_ANSWERS = ("answer", "ground_truth", "label", "target", "solution")
_COMPLETIONS = ("completion", "response", "output")


@dataclass(frozen=True)
class Layout:
    """A way of writing prompts down: the columns it is known by, its prompt, and where an answer may be.

    A dot reaches into a column of objects: `reward_model.ground_truth`.
    """

    name: str
    known_by: tuple[str, ...]
    prompt: str
    answers: tuple[str, ...] = _ANSWERS


# The first that fits is taken, so the more particular stand first.
LAYOUTS = (
    Layout("verl", ("prompt", "reward_model"), "prompt", ("reward_model.ground_truth",)),
    Layout("SkyRL", ("prompt", "reward_spec"), "prompt", ("reward_spec.ground_truth",)),
    Layout("DeepSpeed-Chat", ("prompt", "chosen", "rejected"), "prompt", ("answer",)),
    Layout("trl_prompt", ("prompt",), "prompt"),
    Layout("GSM8K", ("question",), "question"),
    Layout("MATH", ("problem",), "problem"),
    Layout("OpenRLHF", ("input",), "input", ("label", *_ANSWERS)),
    Layout("messages", ("messages",), "messages"),
    Layout("text", ("text",), "text"),
    Layout("HH", ("chosen", "rejected"), "chosen", ()),
)


@dataclass(frozen=True)
class PromptColumns:
    """The prompts of a table (unchecked), their answers (None where there are none), and all columns for rewards."""

    prompts: list
    answers: list
    data_sources: list
    extras: dict[str, list]


def recognise_prompts(table: Table, *, prompt_key: str | None = None, answer_key: str | None = None) -> PromptColumns:
    """Prompts and answers of a table, by the keys given or by its layout; one log line says what was taken.

    A trailing assistant turn of a `messages` column is the answer, and what precedes it the prompt; so it is, without
    the answer, in dialogues of which one is preferred (HH).
    """
    layout = _layout(table, prompt_key)
    prompts = column(table, prompt_key or layout.prompt, key="data.prompt_key")
    answer_name = answer_key or next((n for n in layout.answers if _has(table, n) and not _is_opinion(table, n)), None)
    answers = column(table, answer_name, key="data.answer_key") if answer_name else [None] * len(table)
    if layout.name in ("messages", "HH"):
        prompts, replies = zip(*(_before_last_reply(conversation) for conversation in prompts), strict=True)
        if answer_name is None and layout.name == "messages":
            answer_name, answers = "last_assistant_turn", list(replies)
    sources = table.columns.get("data_source", [None] * len(table))
    data_sources = [table.data_source if source is None else str(source) for source in sources]
    extras = _extras(table, {prompt_key or layout.prompt, answer_name, "data_source"})
    logger.info(
        "data=%s rows=%d recognised=%s prompt=%s answer=%s extra=%s read_as=prompts",
        table.name, len(table), layout.name, prompt_key or layout.prompt, answer_name or "-", ",".join(extras) or "-",
    )  # fmt: skip
    return PromptColumns(list(prompts), answers, data_sources, extras)


def column(table: Table, name: str, *, key: str) -> list:
    """A column by name, or by a dotted path into a column of objects; an unknown one is answered with the nearest."""
    if name in table.columns:
        return table.columns[name]
    outer, _, inner = name.partition(".")
    if inner and outer in table.columns:
        return [value.get(inner) if isinstance(value, dict) else None for value in table.columns[outer]]
    raise DataError(
        f"{key}={name}: '{table.name}' has no such column.",
        remedy=f"{did_you_mean(name, table.columns)}Its columns are: {', '.join(table.columns)}.",
    )


def _layout(table: Table, prompt_key: str | None) -> Layout:
    for layout in LAYOUTS:
        if all(name in table.columns for name in layout.known_by) and prompt_key in (None, layout.prompt):
            return layout
    if prompt_key is not None:
        return Layout("prompt_key", (), prompt_key)
    raise DataError(
        f"No column of '{table.name}' is known to hold prompts; its columns are: {', '.join(table.columns)}.",
        remedy="Name the column with data.prompt_key=... (and data.answer_key=...).",
    )


def _has(table: Table, name: str) -> bool:
    return name in table.columns or name.partition(".")[0] in table.columns


def _is_opinion(table: Table, name: str) -> bool:
    """Whether a column says of a response beside it that people like it, or not (KTO), and so is no answer."""
    beside = name == "label" and any(other in table.columns for other in _COMPLETIONS)
    return beside and all(isinstance(value, bool | int | float) and value in (0, 1) for value in table.columns[name])


def _before_last_reply(conversation: object) -> tuple[object, object]:
    if isinstance(conversation, list) and conversation and isinstance(conversation[-1], dict):
        if conversation[-1].get("role") == "assistant":
            return conversation[:-1], conversation[-1].get("content")
    if isinstance(conversation, str) and (begins := last_reply_begins(conversation)):
        return conversation[:begins], conversation[begins:]
    return conversation, None


def _extras(table: Table, used: set[str | None]) -> dict[str, list]:
    """All columns under their own names, but those whose names mean something else here."""
    taken = [name for name in table.columns if name in COLUMNS and name not in used]
    if taken:
        logger.warning(
            "data=%s columns=%s do not reach the reward functions: the names are the system's own; rename them",
            table.name, ",".join(taken),
        )  # fmt: skip
    return {name: values for name, values in table.columns.items() if name not in COLUMNS}
