"""What the driver itself holds of the data."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.derived import is_evaluated, max_sequence_tokens
from hybridflow.config.experiment import Experiment
from hybridflow.data.chat_template import with_chat_template
from hybridflow.data.demonstrations import load_demonstrations
from hybridflow.data.hub import check_splits_named
from hybridflow.data.labelled_responses import load_labelled
from hybridflow.data.length_limits import RowsTooLong
from hybridflow.data.loader import BatchStream, eval_batches, training_stream
from hybridflow.data.preferences import load_preferences
from hybridflow.data.prompts import load_prompts
from hybridflow.data.selection import unselected
from hybridflow.dataflows.interface import Dataflow
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.errors import ConfigError, DataError
from hybridflow.launch.plan.roles import policy_model
from hybridflow.models.geometry import read_geometry
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.tokenizers import decode_responses, eos_ids, load_tokenizer
from hybridflow.rewards.factory import all_need_answers, row_checks

logger = logging.getLogger(__name__)

Reader = Callable[..., Batch]

READERS: Mapping[str, Reader] = {
    "prompts": load_prompts,
    "demonstrations": load_demonstrations,
    "preferences": load_preferences,
    "labelled": load_labelled,
}
"""How files become rows, for each kind of data that a dataflow learns from."""

PRETRAINING = "pretraining"

_ALWAYS_THERE = ["prompt", "answer", "data_source"]
"""Columns of all prompts, whatever their files have."""


class Streams(dict[str, BatchStream]):
    """The training streams by name; one that a dataflow asks for and that has no files is a `ConfigError`."""

    def __missing__(self, name: str) -> BatchStream:
        if name == PRETRAINING:
            raise ConfigError(
                "The dataflow takes the stream 'pretraining', and data.pretraining_files is empty.",
                remedy="Name texts or demonstrations: data.pretraining_files=[path,...].",
            )
        raise ConfigError(f"There is no stream '{name}'.", remedy=f"Streams: {', '.join(('prompts', PRETRAINING))}.")


@dataclass(frozen=True)
class DrivenData:
    """What the driver itself holds: the training streams, the held-out rows, and how tokens become text."""

    streams: Mapping[str, BatchStream]
    """`prompts`, whatever the dataflow learns from, and `pretraining` where the configuration names such files."""

    questions: Batch | None
    """Held-out prompts, to be answered and judged; None where the run does not."""

    held_out: Batch | None
    """Held-out rows of the kind that the dataflow learns from, where it can say something of them."""

    tokenizer: PreTrainedTokenizerBase
    judged_columns: list[str]
    """Columns of all that reward functions will see."""

    def decode(self, ids: Ragged) -> list[str]:
        """Texts of token ids, one per row."""
        return decode_responses(self.tokenizer, ids)


def load_data(config: Experiment, dataflow: type[Dataflow], *, is_judged: bool) -> DrivenData:
    """Reads and checks all data files; raises before any process is started.

    Held-out rows are prompts to be answered where the run has a rollout and a reward (`is_judged`), and of the kind
    that the dataflow learns from where it has a measure of its own.
    """
    data, seed = config.data, config.trainer.seed
    if is_evaluated(config):
        check_splits_named(data.eval_files, key="data.eval_files")
    model = policy_model(config)
    tokenizer = with_chat_template(load_tokenizer(tokenizer_directory(model), pad_token=model.pad_token), data)
    judges = config.reward.functions if all_need_answers(config.reward) else []
    judged_prompts = partial(load_prompts, answer_functions=judges, row_checks=row_checks(_functions(config)))
    ends = eos_ids(tokenizer, resolve_model_path(str(model.path)))
    readers = {kind: partial(read, stop_ids=ends) for kind, read in READERS.items()} | {"prompts": judged_prompts}
    read = readers[dataflow.data]
    with _told_as("data.train_files", config):
        parts = [read([name], data, tokenizer) for name in data.train_files]
    if data.system_prompt is not None and any(isinstance(p, str) for part in parts for p in part.object("prompt")):
        logger.warning("data.system_prompt is without effect on prompts that are texts; set data.as_chat=true")
    stream = training_stream(parts, data, seed=seed)
    questions = _questions(config, dataflow, judged_prompts, tokenizer) if is_judged else None
    judged = [stream.columns] if dataflow.data == "prompts" else []
    judged += [] if questions is None else [questions.columns]
    common = [name for name in judged[0] if all(name in columns for columns in judged)] if judged else _ALWAYS_THERE
    streams = Streams(prompts=stream)
    if data.pretraining_files:
        plain = replace(unselected(data), train_files=data.pretraining_files, prompt_key=None, answer_key=None)
        with _told_as("data.pretraining_files", config):
            texts = [load_demonstrations([name], plain, tokenizer, ends) for name in data.pretraining_files]
        streams[PRETRAINING] = training_stream(texts, plain, seed=seed)
    held_out = None
    if dataflow.evaluate is not Dataflow.evaluate:
        held_out = _measured(config, read, tokenizer, is_judged=questions is not None)
    return DrivenData(streams, questions, held_out, tokenizer, common)


@contextmanager
def _told_as(key: str, config: Experiment) -> Iterator[None]:
    """What is wrong with data files names the setting that lists them; no remedy is longer than the model reads."""
    try:
        yield
    except DataError as found:
        error = found
        if isinstance(found, RowsTooLong):
            most = read_geometry(resolve_model_path(str(policy_model(config).path))).max_positions
            error = found.of_model(most, asked=max_sequence_tokens(config))
        if error is found and key in error.message:
            raise
        named = error.message if key in error.message else f"{key}: {error.message}"
        raise DataError(named, remedy=error.remedy) from found


def _held_out(config: Experiment, read: Reader, tokenizer: PreTrainedTokenizerBase) -> Batch | None:
    """The first rows of the evaluation files."""
    if not is_evaluated(config):
        return None
    with _told_as("data.eval_files", config):
        table = read(config.data.eval_files, unselected(config.data), tokenizer)
    return next(iter(eval_batches(table, len(table), limit=config.data.eval_limit)))


def _questions(
    config: Experiment, dataflow: type[Dataflow], read: Reader, tokenizer: PreTrainedTokenizerBase
) -> Batch | None:
    """Held-out prompts to be answered; none where no row has an answer to judge by and the dataflow can do without."""
    try:
        return _held_out(config, read, tokenizer)
    except DataError:
        if dataflow.data == "prompts" or dataflow.evaluate is Dataflow.evaluate:
            raise
        questions = _held_out(config, load_prompts, tokenizer)
        if questions is None or any(answer is not None for answer in questions.object("answer")):
            raise
    logger.warning(
        "data.eval_files have no answers, which reward.functions=[%s] compare with: responses are not judged; name a"
        " column of answers with data.answer_key",
        ",".join(config.reward.functions),
    )
    return None


def _measured(config: Experiment, read: Reader, tokenizer: PreTrainedTokenizerBase, *, is_judged: bool) -> Batch | None:
    """Held-out rows that the dataflow itself measures; files may hold prompts alone where answers are judged."""
    try:
        rows = _held_out(config, read, tokenizer)
    except DataError as error:
        if not is_judged:
            raise
        logger.warning("data.eval_files are answered and judged, but have no held-out loss: %s", error.message)
        return None
    if rows is not None and "is_chosen" in rows and len(rows) < 2:
        raise DataError(
            "One held-out response alone: KTO compares responses with those to other prompts.",
            remedy="Give two rows or more (data.eval_files, data.eval_limit), or trainer.eval_every=0.",
        )
    return rows


def _functions(config: Experiment) -> list[str]:
    """All reward functions of the run, those of further roles too."""
    return [*config.reward.functions, *(name for role in config.roles.values() for name in role.functions)]
