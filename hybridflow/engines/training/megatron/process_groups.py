"""Megatron-Core's process groups for several layouts in one process.

Megatron-Core keeps the groups of one layout in global variables. Engines with different layouts share a process here,
so the variables of each layout are saved, and restored before an engine calls Megatron-Core.
"""

import re

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch.distributed.distributed_c10d import ProcessGroup

from hybridflow.config.placement import Parallelism
from hybridflow.parallel.mesh import ParallelMesh

_ORDER = "tp-cp-ep-pp-dp"
"""rank = tensor + t * (pipeline + p * data), as in every training mesh."""

_VARIABLE = re.compile(r"_[A-Z0-9_]+")


_Sizes = tuple[int, int, int, int]


def activate(layout: Parallelism) -> None:
    """Makes Megatron-Core use a layout; the first call for it must be made on all ranks together.

    `expert` data-parallel ranks share the experts, which `tensor` shards like other weights.
    """
    key = (layout.tensor, layout.pipeline, layout.virtual_pipeline, layout.expert)
    if key not in _variables:
        _make_groups(layout)
        _variables[key] = _present()
    parallel_state.__dict__.update(_variables[key])


def tensor_group() -> ProcessGroup:
    """This rank's tensor-parallel group in the active layout."""
    group = parallel_state.get_tensor_model_parallel_group()
    assert isinstance(group, ProcessGroup), f"no tensor-parallel group: {group}"
    return group


def _present() -> dict[str, object]:
    return {name: value for name, value in vars(parallel_state).items() if _VARIABLE.fullmatch(name)}


_unset = _present()
_variables: dict[_Sizes, dict[str, object]] = {}


def _make_groups(layout: Parallelism) -> None:
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    parallel_state.__dict__.update(_unset)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        order=_ORDER,
        create_gloo_process_groups=False,
    )
    if layout.expert > 1:
        parallel_state.__dict__.update(_expert_groups(layout))
    tracker = get_cuda_rng_tracker()
    assert tracker is not None, "Megatron-Core makes its tracker of random states at the first call"
    if not tracker.is_initialized():
        with torch.random.fork_rng():
            model_parallel_cuda_manual_seed(0)


def _expert_groups(layout: Parallelism) -> dict[str, object]:
    """The expert-parallel groups inside pipeline stages, an order that Megatron-Core does not support itself."""
    data = dist.get_world_size() // (layout.tensor * layout.pipeline)
    replicas = data // layout.expert
    mesh = ParallelMesh(
        {"replica": replicas, "expert": layout.expert, "pipeline": layout.pipeline, "tensor": layout.tensor}
    )

    def group(*axes: str) -> object:
        return dist.new_subgroups_by_enumeration(mesh.subgroups(axes))[0]

    same_experts = group("replica")
    return {
        "_EXPERT_MODEL_PARALLEL_GROUP": group("expert"),
        "_EXPERT_MODEL_PARALLEL_RANKS": mesh.subgroup(dist.get_rank(), ("expert",)),
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": group("expert", "tensor"),
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": group("expert", "pipeline", "tensor"),
        "_EXPERT_DATA_PARALLEL_GROUP": same_experts,
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": same_experts,
    }
