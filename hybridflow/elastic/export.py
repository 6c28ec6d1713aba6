"""Exports a trained model from a run's checkpoint as a Hugging Face directory."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import yaml
from safetensors import safe_open
from torch import Tensor

from hybridflow.config.model import Dtype
from hybridflow.config.stored_inputs import found_in
from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore, step_of, steps_below
from hybridflow.elastic.compatibility import flat
from hybridflow.elastic.manifest import MANIFEST
from hybridflow.engines.training.state_files import MODEL_DIRECTORY, load_state
from hybridflow.errors import CheckpointError, ConfigError, ResourceError
from hybridflow.models.adapters.files import ADAPTER_DIRECTORY, CONFIG_FILE, SavedAdapter, merged_directory
from hybridflow.models.loading import copy_description, resolve_model_path, resolve_tokenizer_path, torch_dtype
from hybridflow.models.shard_files import save_directory
from hybridflow.models.shard_files.reading import weight_files
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard

_HEAD = "score."


def export_model(
    run_dir: Path,
    out: Path,
    *,
    step: int | None = None,
    role: str | None = None,
    dtype: Dtype | None = None,
    base_model: str | None = None,
) -> Path:
    """Writes the model of a role to `out`, a new or empty directory; returns the role's directory in the checkpoint.

    The default role is the actor, or the only trained role (a reward model's run has no actor). Uses the newest
    intact checkpoint, or that of `step`, fully verified. Merges an adapter into its base model, taken from the run's
    path or from `base_model`. With a `dtype`, converts weights one at a time; float32 weights come from the optimizer's
    float32 copies, so that no precision is lost.
    """
    checkpoint = checkpoint_of(run_dir, step)
    kinds = (MODEL_DIRECTORY, ADAPTER_DIRECTORY)
    roles = [path.name for path in sorted(checkpoint.path.iterdir()) if any((path / kind).is_dir() for kind in kinds)]
    role = role or (roles[0] if len(roles) == 1 else "actor")
    if role not in roles:
        raise ConfigError(
            f"{checkpoint.path} has no model of the role '{role}'.", remedy=f"Use --role with one of: {roles}."
        )
    source = checkpoint.path / role
    config = flat(checkpoint.driver_state().get("config", {}))
    trusts = bool(config.get("model.trust_remote_code"))
    with _appearing_whole(out) as target:
        model = source / MODEL_DIRECTORY
        if not model.is_dir():
            model = target / ".merged"
            _merge(source / ADAPTER_DIRECTORY, model, base_model, _tokenizer_path(checkpoint, config), trusts)
        if dtype is None:
            shutil.copytree(model, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".merged"))
        else:
            _convert(model, target, torch_dtype(dtype), state_of=source, trust_remote_code=trusts)
        shutil.rmtree(target / ".merged", ignore_errors=True)
    return source


def checkpoint_of(run_dir: Path, step: int | None) -> Checkpoint:
    """The newest intact checkpoint of a run, that of a step, or the checkpoint in the directory; fully verified."""
    store = CheckpointStore(run_dir)
    if (run_dir / MANIFEST).is_file() and step is None:
        return store.open(run_dir)
    steps = [step_of(path) for path in store.paths() if (path / MANIFEST).is_file()]
    if step in steps:
        return store.open(store.place(step))
    if step is not None and steps:
        raise CheckpointError(
            f"The run in {run_dir} has no checkpoint of step {step}.",
            remedy=f"Use --step with one of: {', '.join(map(str, steps))}. A run keeps its last"
            " trainer.keep_checkpoints checkpoints.",
        )
    if not run_dir.is_dir():
        raise CheckpointError(f"There is no directory '{run_dir}'.", remedy="Give the directory of a run (runs/NAME).")
    if (found := store.latest()) is None:
        runs = [path.parent.parent for path in sorted(run_dir.glob("*/checkpoints/step_*")) if path.is_dir()]
        nearest = f" Runs below it: {', '.join(map(str, dict.fromkeys(runs)))}." if runs else ""
        flaw = "has no complete checkpoint" if steps_below(store.directory) else "has no checkpoint"
        advice = "Give the directory of a run (runs/NAME)"
        if (run_dir / "metrics.jsonl").is_file() or (run_dir / "run.log").is_file():
            advice += " that has saved a checkpoint. Runs save every trainer.save_every steps; 0 disables saving"
        raise CheckpointError(f"The run in {run_dir} {flaw}.", remedy=f"{advice}.{nearest}")
    return found


def _tokenizer_path(checkpoint: Checkpoint, config: Mapping[str, object]) -> object:
    """The path of the run's tokenizer; the run's config.yaml has it in full, a checkpoint only as the user wrote it."""
    written = config.get("model.tokenizer_path")
    run_dir = checkpoint.path.parent.parent
    if written and (of_run := run_dir / "config.yaml").is_file():
        written = flat(yaml.safe_load(of_run.read_text())).get("model.tokenizer_path") or written
    return found_in(run_dir, written)


def _merge(adapter: Path, target: Path, base_model: str | None, tokenizer: object, trust_remote_code: bool) -> None:
    SavedAdapter.read(adapter)
    run_dir = adapter.parents[3]  # of run/checkpoints/step_N/role/adapter
    trained_on = json.loads((adapter / CONFIG_FILE).read_text())["base_model_name_or_path"]
    base = resolve_model_path(base_model or str(found_in(run_dir, trained_on)), key="--base-model")
    tokenizer_from = resolve_tokenizer_path(str(tokenizer)) if tokenizer else base
    merged_directory(adapter, base, target, tokenizer_from=tokenizer_from, trust_remote_code=trust_remote_code)


def _convert(source: Path, target: Path, dtype: torch.dtype, *, state_of: Path, trust_remote_code: bool) -> None:
    """Converts the weights to a dtype, except a value head, which stays in float32."""
    with ExitStack() as stack:
        tensors = _opened(source, stack)
        if dtype is torch.float32:
            widened = {name: tensor.float() for name, tensor in tensors.items() if tensor.dtype is not dtype}
            if source.parent == state_of:
                copies = [WeightShard.full(name, tensor) for name, tensor in widened.items()]
                load_state(state_of, [], Ranks.alone(), own_copies=copies)
            tensors |= widened
        shards = [WeightShard.full(name, tensor) for name, tensor in tensors.items()]
        save_directory(
            shards,
            target,
            Ranks.alone(),
            write_rest=lambda directory: copy_description(
                source,
                directory,
                head="value" if any(name.startswith(_HEAD) for name in tensors) else "language",
                dtype=dtype,
                tokenizer_from=source,
                trust_remote_code=trust_remote_code,
            ),
            dtype_of=lambda name: torch.float32 if name.startswith(_HEAD) else dtype,
        )


def _opened(source: Path, stack: ExitStack) -> dict[str, Tensor]:
    """The weights of a directory, loaded lazily from its files."""
    files = weight_files(source)
    opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(set(files.values()))}
    return {name: opened[path].get_tensor(name) for name, path in files.items()}


@contextmanager
def _appearing_whole(out: Path) -> Iterator[Path]:
    """A temporary directory that is renamed to `out` when the block ends, or deleted if the block fails."""
    out = out.expanduser().absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty directory.", remedy="Use a new directory.")
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        os.rename(partial, out)
    except OSError as error:
        raise ResourceError(
            f"{out} could not be written: {error}.", remedy="Use a writable directory with enough free space."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
