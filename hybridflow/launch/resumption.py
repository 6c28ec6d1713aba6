"""What has changed since a checkpoint was written: refused before anything is loaded, or said once the run resumes."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from hybridflow.config.absolute_paths import path_settings
from hybridflow.config.loop import ResumeChanged
from hybridflow.data.loader import BatchStream
from hybridflow.elastic.checkpoint import Checkpoint
from hybridflow.elastic.compatibility import (
    Fingerprints,
    check_compatible,
    check_unchanged,
    compare,
    flat,
    with_moves_undone,
    words_of,
)
from hybridflow.errors import CheckpointError
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.plan.data_streams import PRETRAINING
from hybridflow.observability.redaction import redacted_leaves

logger = logging.getLogger(__name__)

_LEARNT_FROM = ("data.train_files", "data.pretraining_files")


@dataclass(frozen=True)
class Changes:
    """What differs from the run that wrote the checkpoint, as log lines: changed settings are `notes`, changed contents
    `warnings`."""

    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def log(self) -> None:
        """Says it, once nothing refuses the resume any more."""
        for note in self.notes:
            logger.info("%s", note)
        for warning in self.warnings:
            logger.warning("%s (trainer.resume_changed=accept)", warning)


def check_resumable(
    checkpoint: Checkpoint,
    composed: Composed,
    inputs: Fingerprints,
    streams: Mapping[str, BatchStream],
    trained: Collection[str],
) -> Changes:
    """What has changed since the checkpoint. Raises `CheckpointError` for what keeps the run from resuming."""
    policy, state = composed.config.trainer.resume_changed, checkpoint.driver_state()
    saved, now, before = redacted_leaves(state["config"]), composed.redacted(), state.get("inputs", {})
    in_place = with_moves_undone(saved, now, path_settings(composed.config), before, inputs)
    settings = check_compatible(saved, in_place, policy)
    written = flat(now)
    named = {key: set(words_of(written[key])) for key in (*_LEARNT_FROM, "data.eval_files")}
    only_evaluated = named["data.eval_files"].difference(*(named[key] for key in _LEARNT_FROM))
    shown = {name: files for name, files in inputs.items() if name in only_evaluated}
    files = check_unchanged(before, {name: inputs[name] for name in inputs.keys() - shown.keys()}, policy)
    rows = changed_rows(state["streams"], streams, policy)
    checkpoint.check_parts(trained)
    moves = compare(in_place, now)
    said = [(change, f"resuming with {change.key}={change.now!r} (was {change.saved!r})") for change in settings]
    return Changes(
        notes=[
            *(words for change, words in said if not change.is_of_inputs and change.key != "trainer.resume_changed"),
            *(
                f"resuming although '{name}' of data.eval_files has changed: later evaluations are of other rows"
                for name in check_unchanged(before, shown, ResumeChanged.accept)
            ),
            *(f"resuming with {move.key}={move.now!r} (was {move.saved!r}, with the same contents)" for move in moves),
        ],
        warnings=[
            *(words for change, words in said if change.is_of_inputs),
            *(f"resuming although '{name}' has changed" for name in files),
            *rows,
        ],
    )


def changed_rows(
    saved: Mapping[str, Mapping[str, int]], streams: Mapping[str, BatchStream], policy: ResumeChanged
) -> list[str]:
    """For each stream that has another number of rows than in the checkpoint, where it goes on.

    A stream keeps its position: the number of rows that it has handed out. The order of the present rows says which
    rows follow. Raises `CheckpointError`, unless the policy is `accept`.
    """
    found = []
    for name, stream in streams.items():
        rows, before = len(stream), saved[name]["rows"]
        if rows == before:
            continue
        key = "data.pretraining_files" if name == PRETRAINING else "data.train_files"
        if policy is ResumeChanged.refuse:
            raise CheckpointError(
                f"{key} gives {rows} rows; when the checkpoint was written it gave {before}.",
                remedy="Restore the data, or the settings that choose rows from it (data.filters, data.max_rows); go on"
                " with the present rows (trainer.resume_changed=accept); or start over (trainer.resume=never).",
            )
        position = saved[name]["position"]
        found.append(
            f"resuming with {rows} rows of {key} (there were {before}): {position} rows were handed out, so the run"
            f" goes on at {stream.place(position)}"
        )
    return found
