"""Adapters on disk, in peft's format: `adapter_config.json` and `adapter_model.safetensors`."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from hybridflow.config.json_text import read_json_object
from hybridflow.errors import CheckpointError, EngineError
from hybridflow.models.adapters.lora import DOWN, UP, Adapter, is_adapter_weight
from hybridflow.models.adapters.merging import MergedShard
from hybridflow.models.heads import ValueModel, load_value_model, save_value_model
from hybridflow.models.loading import load_causal_lm, save_causal_lm
from hybridflow.models.names.huggingface import canonical_name
from hybridflow.models.shard_files import PlannedDirectory, plan_directory, read_into
from hybridflow.optional import require
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard

ADAPTER_DIRECTORY = "adapter"
"""The adapter's directory in a checkpoint, next to the optimizer's state."""

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""peft's prefix of the canonical names."""

VALUE_HEAD = "score"
_ONE_FILE_BYTES = 1 << 62


@dataclass(frozen=True)
class SavedAdapter:
    """The settings in `adapter_config.json` that must agree with those of a model's adapter."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    has_value_head: bool

    @staticmethod
    def of(adapter: Adapter) -> "SavedAdapter":
        """The settings of a model's adapter."""
        settings = adapter.settings
        return SavedAdapter(settings.rank, settings.alpha, tuple(sorted(adapter.targets)), adapter.has_value_head)

    @staticmethod
    def read(directory: Path) -> "SavedAdapter":
        """The settings of the adapter in a directory."""
        try:
            found = read_json_object(directory / CONFIG_FILE)
            has_head = VALUE_HEAD in (found["modules_to_save"] or ())
            return SavedAdapter(found["r"], found["lora_alpha"], tuple(sorted(found["target_modules"])), has_head)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"There is no adapter to read in {directory} ({type(error).__name__}: {error}).",
                remedy=f"It must hold {CONFIG_FILE} and {WEIGHTS_FILE}, as peft writes them.",
            ) from error

    def __str__(self) -> str:
        return f"lora.rank={self.rank} lora.alpha={self.alpha:g} lora.targets=[{','.join(self.targets)}]"


def plan_adapter(
    adapter: Adapter, shards: Iterable[WeightShard], directory: Path, ranks: Ranks, *, base_model: str
) -> PlannedDirectory:
    """Plans the files of an adapter with all ranks; see `plan_directory`.

    `shards` are all weights of a rank, and `base_model` is the path or hub name of the adapter's base model.
    """
    peft = require("peft")
    config = peft.LoraConfig(
        r=adapter.settings.rank,
        lora_alpha=adapter.settings.alpha,
        target_modules=sorted(adapter.targets),
        modules_to_save=[VALUE_HEAD] if adapter.has_value_head else None,
        task_type="TOKEN_CLS" if adapter.has_value_head else "CAUSAL_LM",
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
    return plan_directory(
        _trained(shards),
        directory,
        ranks,
        write_rest=config.save_pretrained,
        largest_file_bytes=_ONE_FILE_BYTES,
        stem=Path(WEIGHTS_FILE).stem,
    )


def load_adapter(adapter: Adapter, shards: Iterable[WeightShard], directory: Path) -> None:
    """Reads an adapter that `plan_adapter` wrote in any layout into this rank's shards."""
    if not (directory / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{directory.parent} has no adapter: it was written by a run with actor.lora.rank=0.",
            remedy="Resume with actor.lora.rank=0, or start over from its huggingface/ directory as model.path.",
        )
    saved, own = SavedAdapter.read(directory), SavedAdapter.of(adapter)
    if saved != own:
        raise CheckpointError(
            f"The adapter in {directory} was trained with {saved}; this run has {own}.",
            remedy="Resume with the settings it was trained with.",
        )
    read_adapter(directory, shards)


def read_adapter(directory: Path, shards: Iterable[WeightShard]) -> None:
    """Reads the adapter's weights into those of the shards that are trained, without comparing settings."""
    read_into(directory, _trained(shards))


@torch.no_grad()
def merged_directory(
    adapter_directory: Path,
    base_directory: Path,
    out: Path,
    *,
    tokenizer_from: Path | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Writes a Hugging Face directory of a model with an adapter merged into its weights, in the adapter's dtype.

    These are the weights that the rollout generated with. Weights are merged one by one, in one copy of the model in
    host memory; peft is not needed. The adapter of a value model gives a token-classification model with one label.
    """
    saved = SavedAdapter.read(adapter_directory)
    try:
        additions = load_file(adapter_directory / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"The adapter in {adapter_directory} cannot be read: {error}", remedy=f"It must hold {WEIGHTS_FILE}."
        ) from error
    dtype = next(tensor.dtype for name, tensor in additions.items() if is_adapter_weight(name))
    load = load_value_model if saved.has_value_head else load_causal_lm
    model = load(base_directory, dtype=dtype, device="cpu", trust_remote_code=trust_remote_code)
    for parameter_name, parameter in model.named_parameters():
        name = PREFIX + canonical_name(parameter_name)
        path = name.removesuffix(".weight")
        if f"{path}.{UP}.weight" in additions:
            up, down = (additions.pop(f"{path}.{kind}.weight") for kind in (UP, DOWN))
            shard = WeightShard.full(name, parameter.data)
            parameter.copy_(MergedShard(shard, up, down, saved.alpha / saved.rank).tensor)
        elif name in additions:
            parameter.copy_(additions.pop(name))
    if additions:
        raise EngineError(
            f"The model in {base_directory} has no layer for the adapter's '{next(iter(additions))}'.",
            remedy="Give the model that the adapter was trained on.",
        )
    if isinstance(model, ValueModel):
        save_value_model(model, out, tokenizer_from=tokenizer_from or base_directory)
    else:
        save_causal_lm(model, out, tokenizer_from=tokenizer_from or base_directory)


def is_trained(name: str) -> bool:
    """Whether a weight of a model with an adapter is trained: it is the adapter's, or a value head's."""
    return is_adapter_weight(name) or name.startswith(f"{VALUE_HEAD}.")


def _trained(shards: Iterable[WeightShard]) -> list[WeightShard]:
    """The shards of the adapter and a value head, under their names on disk."""
    named = [shard for shard in shards if is_trained(shard.name)]
    return [WeightShard(PREFIX + shard.name, shard.tensor, shard.layout) for shard in named]
