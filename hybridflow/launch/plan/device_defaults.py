"""Fills in the settings whose default depends on the device, once the device is known."""

import logging
from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec

from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import Device
from hybridflow.config.model import Dtype, Model
from hybridflow.config.rollout import DEFAULT_SEQUENCES, Rollout, RolloutKind
from hybridflow.config.section import Section, sealed
from hybridflow.config.training import Training
from hybridflow.engines.rollout.traits import ROLLOUT_ENGINES
from hybridflow.launch.compose.compose import Composed

logger = logging.getLogger(__name__)

DEVICE_ORIGIN = "device"
"""The origin of a value that follows from the device."""


def with_device_defaults(composed: Composed, device: str) -> Composed:
    """The same run with every default that depends on the device (`cpu` or `cuda`). Logs the choice on GPUs."""
    config = resolved(composed.config, device)
    before, after = composed.flat(), replace(composed, config=config).flat()
    chosen = {key: value for key, value in after.items() if key in before and before[key] != value}
    if device == "cuda":
        rollout = None if config.rollout.engine is None else config.rollout.engine.name
        logger.info(
            "defaults on a GPU: model.dtype=%s actor.gradient_checkpointing=%s rollout.engine=%s",
            after["model.dtype"], str(after["actor.gradient_checkpointing"]).lower(), rollout,
        )  # fmt: skip
    return replace(composed, config=config, origins={**composed.origins, **dict.fromkeys(chosen, DEVICE_ORIGIN)})


def resolved(config: Experiment, device: str) -> Experiment:
    """The configuration with null replaced: on GPUs bfloat16, gradient checkpointing, a sleeping rollout, and vLLM
    where it is installed.

    On CPUs float32, no checkpointing, no sleep, and transformers. A rollout that divides its model uses vLLM on both.
    `trainer.device` becomes the device, if it was `auto`.
    """
    on_gpu = device == "cuda"
    sizes = config.rollout.parallelism
    uses_vllm = sizes.tensor * sizes.pipeline > 1 or (on_gpu and find_spec("vllm") is not None)
    rollout = config.rollout.engine or (RolloutKind.vllm if uses_vllm else RolloutKind.transformers)
    defaults = {
        (Model, "dtype"): Dtype.bfloat16 if on_gpu else Dtype.float32,
        (Training, "gradient_checkpointing"): on_gpu,
        (Rollout, "engine"): rollout,
        (Rollout, "max_sequences"): ROLLOUT_ENGINES[rollout].sequences_on_gpus if on_gpu else DEFAULT_SEQUENCES,
        (Rollout, "sleep"): on_gpu,
    }
    filled = _filled(config, defaults)
    assert isinstance(filled, Experiment), f"made a {type(filled)}"
    return sealed(replace(filled, trainer=replace(filled.trainer, device=Device[device])))


def _filled(value: object, defaults: dict[tuple[type, str], object]) -> object:
    """A section with its nulls, and those of the sections in it, replaced by the defaults of their fields."""
    if isinstance(value, dict):
        return {name: _filled(item, defaults) for name, item in value.items()}
    if not (isinstance(value, Section) and is_dataclass(value)):
        return value
    found = {field.name: _filled(vars(value)[field.name], defaults) for field in fields(value)}
    found |= {
        name: default for (kind, name), default in defaults.items() if kind is type(value) and found[name] is None
    }
    return replace(value, **found)
