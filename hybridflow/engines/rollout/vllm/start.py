"""Starts vLLM inside a training process: its settings, its ranks, and its weights in our memory."""

import json
import socket
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from vllm import LLM

from hybridflow.config.model import Model
from hybridflow.config.rollout import DEFAULT_SEQUENCES, Rollout
from hybridflow.engines.rollout.memory import WeightBuffer
from hybridflow.engines.rollout.vllm.compat import (
    after_loading,
    avoid_compilation,
    guest,
    keep_plain_weights,
    keep_process_groups,
    leave_memory_unbound,
    placed,
)
from hybridflow.engines.rollout.vllm.memory import gpu_memory
from hybridflow.errors import EngineError
from hybridflow.models.loading import torch_dtype
from hybridflow.parallel.collectives import all_gather_bytes
from hybridflow.parallel.groups import Ranks
from hybridflow.process import uncollected

DEFAULT_CPU_CACHE_MB = 256
CPU_BLOCK_TOKENS = 32
"""Tokens per cache block, the minimum of its kernels. With vLLM's default of 128, the prefix cache keeps no shorter
prompt for other samples of it, and a small model with short responses takes 18% more time."""


def start_vllm(
    directory: Path,
    model: Model,
    rollout: Rollout,
    *,
    limit_tokens: int,
    device: torch.device,
    ranks: Ranks,
    reads_weights: bool,
) -> tuple[LLM, nn.Module, WeightBuffer]:
    """A running vLLM, its model on this rank, and the buffer with the model's weights."""
    is_cpu, replica = device.type == "cpu", _replica(ranks)
    keep_process_groups()
    if is_cpu:
        keep_plain_weights()
        avoid_compilation()
        leave_memory_unbound()
    device_ids, local_rank = ([], 0) if is_cpu else replica_devices(device, replica)
    settings: dict = _settings(rollout, is_cpu=is_cpu) | _layout(ranks)
    settings |= {"dtype": torch_dtype(model.dtype), "device_ids": device_ids or None}
    if not is_cpu:
        device_bytes = torch.cuda.get_device_properties(device).total_memory
        settings |= gpu_memory(directory, model, rollout, device_bytes=device_bytes, limit_tokens=limit_tokens)
    loaded: list[tuple[nn.Module, WeightBuffer]] = []

    def take_weights(module: nn.Module) -> None:
        loaded.append((module, WeightBuffer(module.parameters(), copy=reads_weights)))

    try:
        with uncollected(), guest(), placed(replica, local_rank), after_loading(take_weights):
            llm = LLM(
                str(directory),
                trust_remote_code=model.trust_remote_code,
                skip_tokenizer_init=True,
                max_model_len=limit_tokens,
                load_format="auto" if reads_weights else "dummy",
                **settings,
            )
    except (ValueError, RuntimeError) as error:
        raise EngineError(
            f"rollout.engine=vllm cannot start with the model in {directory}: {error}",
            remedy="If it lacks memory, change rollout.vllm.kv_cache_mb or rollout.vllm.gpu_memory_fraction; "
            "if it does not support the model, set rollout.engine=transformers.",
        ) from error
    ((module, buffer),) = loaded
    return llm, module, buffer


def _settings(rollout: Rollout, *, is_cpu: bool) -> dict:
    config = rollout.vllm
    cache_mb = config.kv_cache_mb or DEFAULT_CPU_CACHE_MB
    return {
        "max_num_seqs": rollout.max_sequences or DEFAULT_SEQUENCES,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
        "enforce_eager": is_cpu if config.enforce_eager is None else config.enforce_eager,
        "block_size": CPU_BLOCK_TOKENS if is_cpu else None,
        "kv_cache_memory_bytes": cache_mb << 20,  # on a CPU
        "enable_sleep_mode": not is_cpu,
        # The backend that keeps experts as loaded; others reorder them, so they could not be updated in place.
        "moe_backend": "auto" if is_cpu else "triton",
    }


def _layout(ranks: Ranks) -> dict:
    """Settings for the ranks of a replica: each runs its own scheduler on the same requests."""
    tensor, pipeline = ranks.mesh.axis_size("tensor"), ranks.mesh.axis_size("pipeline")
    if tensor * pipeline == 1:
        return {}
    return {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "distributed_executor_backend": "external_launcher",
    }


def replica_devices(device: torch.device, replica: list[int]) -> tuple[list[int], int]:
    """The GPUs of a replica's ranks on this node, in rank order, and the position of this rank's GPU among them.

    vLLM numbers a replica's GPUs from 0, and maps these numbers with this list to visible devices. Its custom
    all-reduce looks up the other ranks' GPUs on every rank: with one visible GPU, that is an IndexError.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    own = (socket.gethostname(), index)
    places = [own] * len(replica)
    if len(replica) > 1:
        group = dist.new_group(replica, backend="gloo", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), f"rank {dist.get_rank()} is not among {replica}"
        places = [(node, number) for node, number in map(json.loads, all_gather_bytes(json.dumps(own).encode(), group))]
        dist.destroy_process_group(group)
    on_node = [place for place in places if place[0] == own[0]]
    return [index for _, index in on_node], on_node.index(own)


def _replica(ranks: Ranks) -> list[int]:
    """The world ranks that hold one model together with this rank; a one-rank mesh may be part of a larger world."""
    if ranks.mesh.size == 1:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return ranks.mesh.subgroup(ranks.rank, ("pipeline", "tensor"))
