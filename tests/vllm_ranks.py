"""Rank programs with a vLLM engine: what each rank holds and says, for tests to hold against transformers."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from hybridflow.batch import Batch
from hybridflow.config.model import Model
from hybridflow.config.placement import RolloutParallelism
from hybridflow.config.rollout import Rollout, RolloutKind, Sampling, Vllm
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.errors import EngineError
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.parallel.boxes import Box
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh
from tests.unit.engines.rollout.rows import prompt_rows, responses, write_slots

TOKENS = 8
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
SAMPLED = Sampling(ignore_eos=True)


@dataclass(frozen=True)
class Seen:
    """What one rank's engine held and answered."""

    greedy: list[list[int]]
    logprobs: list[list[float]]
    sampled: list[list[int]]
    interrupted: list[list[int]]
    """The same rows, submitted in two parts and interrupted."""

    boxes: dict[str, Box]
    wrong: list[str]
    """Slots that do not hold the checkpoint's weight, bit by bit."""


def engine_on(
    rank: int, directory: Path, axes: Mapping[str, int], *, reads_weights: bool = True, cache_mb: int = 16
) -> RolloutEngine:
    """The engine of one rank of a generation mesh."""
    rollout = Rollout(
        engine=RolloutKind.vllm,
        parallelism=RolloutParallelism(tensor=axes["tensor"]),
        max_sequences=16,
        vllm=Vllm(kv_cache_mb=cache_mb),
    )
    return make_rollout_engine(
        Model(path=str(directory)),
        rollout,
        limit_tokens=64 + TOKENS,
        eos_token_ids=(1,),
        device=torch.device("cpu"),
        ranks=Ranks(rank, ParallelMesh(axes)),
        reads_weights=reads_weights,
    )


def all_prompts() -> Batch:
    """Eight rows of unequal lengths: four prompts, two samples each."""
    return prompt_rows((5, 2, 40, 7), samples=2)


def answered(engine: RolloutEngine, prompts: Batch, sampling: Sampling = GREEDY) -> list[list[int]]:
    """Response tokens, row by row."""
    return responses(engine.generate(prompts, sampling, max_response_tokens=TOKENS, seed=5))


def interrupted(engine: RolloutEngine, prompts: Batch) -> list[list[int]]:
    """Response tokens of rows that are submitted while others run, and interrupted; in order."""
    found = []
    for part in prompts.split([1, len(prompts) - 1]):
        engine.submit(part, SAMPLED, max_response_tokens=TOKENS, seed=5)
        found.append(engine.poll(max_tokens=3))
        engine.pause()
        engine.resume(version=0)
    while engine.num_running:
        found.append(engine.poll())
    both = Batch.concat([batch for batch in found if len(batch)])
    order = sorted(range(len(both)), key=lambda row: (int(both.row("uid")[row]), int(both.row("sample_index")[row])))
    return responses(both.select(order))


def checkpoint_shards(directory: Path) -> dict[str, WeightShard]:
    """The whole weights of a checkpoint, read by transformers."""
    model = load_causal_lm(directory, dtype=torch.float32, device="cpu")
    named = model.named_parameters()
    return {s.name: s for name, p in named for s in views(p.data, parts_of(name, p.shape))}


def seen(engine: RolloutEngine, directory: Path, prompts: Batch) -> Seen:
    """Asks an engine everything that tests compare."""
    greedy = engine.generate(prompts, GREEDY, max_response_tokens=TOKENS, seed=5)
    slots, whole = engine.weight_slots(), checkpoint_shards(directory)
    cut = {n: whole[n].tensor[tuple(slice(*interval) for interval in slot.layout.box)] for n, slot in slots.items()}
    return Seen(
        responses(greedy),
        [row.tolist() for row in greedy.tokens("rollout_logprobs").rows()],
        answered(engine, prompts, SAMPLED),
        interrupted(engine, prompts),
        {name: slot.layout.box for name, slot in slots.items()},
        [name for name, slot in slots.items() if not torch.equal(slot.tensor, cut[name])],
    )


def each_model(rank: int, directories: Mapping[str, Path], axes: Mapping[str, int]) -> dict[str, Seen]:
    """A rank program: one engine after another, on all prompts; the world survives each."""
    found = {}
    for name, directory in directories.items():
        engine = engine_on(rank, directory, axes)
        found[name] = seen(engine, directory, all_prompts())
        del engine
        if dist.is_initialized():
            total = torch.ones(1)
            dist.all_reduce(total)
            assert int(total) == dist.get_world_size()
    return found


def own_rows(rank: int, axes: Mapping[str, int]) -> list[int]:
    """The rows of `all_prompts` that a rank's replica is given, as the driver divides them."""
    mesh, replicas = ParallelMesh(axes), ("data", "micro_tensor")
    parts = torch.arange(len(all_prompts())).tensor_split(mesh.count_along(replicas))
    return parts[mesh.index_along(rank, replicas)].tolist()


def own_part(rank: int, directory: Path, axes: Mapping[str, int]) -> Seen:
    """A rank program: each replica by itself, one after another, on its own rows."""
    mesh, replicas = ParallelMesh(axes), ("data", "micro_tensor")
    for replica in range(mesh.count_along(replicas)):
        if replica == mesh.index_along(rank, replicas):
            own = seen(engine_on(rank, directory, axes), directory, all_prompts().select(own_rows(rank, axes)))
        dist.barrier()
    return own


def weights_from_outside(
    rank: int, directories: Mapping[str, Path], axes: Mapping[str, int]
) -> dict[str, dict[str, object]]:
    """A rank program: engines whose weights are written, given back in a sleep, and written again."""
    return {name: _weights_from_outside(rank, directory, axes) for name, directory in directories.items()}


def _weights_from_outside(rank: int, directory: Path, axes: Mapping[str, int]) -> dict[str, object]:
    engine = engine_on(rank, directory, axes, reads_weights=False)
    found: dict[str, object] = {"unwritten": _refusal(engine, all_prompts())}
    for version in (3, 4):
        write_slots(engine, checkpoint_shards(directory).values())
        engine.resume(version=version)
        found[f"version {version}"] = answered(engine, all_prompts())
        found["released"] = engine.sleep()
        engine.wake()
        found["slept"] = _refusal(engine, all_prompts())
    engine.pause()
    engine.resume(version=5)
    found["different rows"] = _refusal(engine, all_prompts().select([rank]))
    found["another layout"] = _layout_refusal(rank, directory)
    return found


def _refusal(engine: RolloutEngine, prompts: Batch) -> str:
    try:
        engine.generate(prompts, GREEDY, max_response_tokens=TOKENS, seed=5)
    except EngineError as error:
        return str(error)
    return "none"


def _layout_refusal(rank: int, directory: Path) -> str:
    try:
        make_rollout_engine(
            Model(path=str(directory)),
            Rollout(engine=RolloutKind.vllm, vllm=Vllm(kv_cache_mb=16)),
            limit_tokens=64 + TOKENS,
            eos_token_ids=(1,),
            device=torch.device("cpu"),
        )
    except EngineError as error:
        return str(error)
    return "none"


def seen_by_vllm(peers: int) -> list[int]:
    """The visible indices of vLLM's logical GPUs, as its CUDA platform finds them."""
    from vllm.platforms.interface import Platform

    class Cuda(Platform):
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

    return [Cuda.logical_device_id_to_visible_device_id(peer) for peer in range(peers)]


def visible_devices(rank: int, axes: Mapping[str, int]) -> tuple[list[int], int]:
    """A rank program: the GPUs of the rank's replica as vLLM finds them, and the rank's own place among them.

    Each rank sees all four GPUs of its node, of which rank r has the one at index r.
    """
    from vllm.engine import arg_utils
    from vllm.platforms.interface import Platform, set_assigned_physical_gpu_ids

    from hybridflow.engines.rollout.vllm.start import replica_devices

    os.environ["CUDA_VISIBLE_DEVICES"] = "2,3,6,7"
    ids, own = replica_devices(torch.device("cuda", rank), ParallelMesh(axes).subgroup(rank, ("pipeline", "tensor")))
    arguments = SimpleNamespace(device_ids=ids, distributed_executor_backend="external_launcher")
    arg_utils.current_platform = type("Cuda", (Platform,), {"device_control_env_var": "CUDA_VISIBLE_DEVICES"})
    set_assigned_physical_gpu_ids(arg_utils.EngineArgs._resolve_device_ids(arguments))
    return seen_by_vllm(len(ids)), own
