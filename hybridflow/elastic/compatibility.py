"""Which settings may change when a run is resumed, and which would make the checkpoint mean something else."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.errors import CheckpointError

FIXED = (
    "model.path",
    "model.tokenizer_path",
    "model.pad_token",
    "actor.model.path",
    "critic.model.path",
    "actor.lora.rank",
    "actor.lora.alpha",
    "actor.lora.targets",
    "critic.lora.rank",
    "critic.lora.alpha",
    "critic.lora.targets",
    "dataflow",
    "algorithm.advantage",
    "data.train_files",
    "data.batch_size",
    "data.shuffle",
    "data.mixture",
    "data.difficulty_key",
    "data.curriculum_steps",
    "data.pretraining_files",
    "data.max_prompt_tokens",
    "data.drop_long_prompts",
    "data.prompt_key",
    "data.answer_key",
    "trainer.seed",
)
"""Settings on which the saved weights, data position or random states depend."""


@dataclass(frozen=True)
class Change:
    """A setting that is not what it was."""

    key: str
    saved: object
    now: object


def flat(config: Mapping[str, object]) -> dict[str, object]:
    """A nested configuration by dotted keys; lists are values, and so is an empty section."""
    out: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            out |= {f"{key}.{inner}": found for inner, found in flat(value).items()}
        else:
            out[key] = value
    return out


def compare(saved: Mapping[str, object], now: Mapping[str, object]) -> list[Change]:
    """The settings that differ between two nested configurations; one that is absent counts as None."""
    before, after = flat(saved), flat(now)
    keys = sorted(before.keys() | after.keys())
    return [Change(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def check_compatible(saved: Mapping[str, object], now: Mapping[str, object]) -> list[Change]:
    """The settings that changed since a checkpoint was written. Raises `CheckpointError` if one of `FIXED` did."""
    changes = compare(saved, now)
    # One that the checkpoint does not know yet, and that is still empty, is as it was.
    fixed = [change for change in changes if change.key in FIXED and (change.saved or change.now)]
    if fixed:
        told = "; ".join(f"{change.key} was {change.saved!r} and is {change.now!r}" for change in fixed)
        raise CheckpointError(
            f"The checkpoint was made with other settings: {told}.",
            remedy="Set them back to resume, or start over with trainer.resume=never (the old run is set aside);"
            " model.path may then be the checkpoint's actor/huggingface.",
        )
    return changes
