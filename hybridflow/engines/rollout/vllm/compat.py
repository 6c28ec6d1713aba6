"""Everything that depends on how vLLM 0.32 is built inside: looked at again with each new version.

vLLM takes a process for its own. Here it is a guest beside a training engine, so what it changes is put back.
"""

import inspect
import os
import random
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)
from vllm import LLM
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import cpu_communicator
from vllm.model_executor.layers import utils as linear_layers
from vllm.model_executor.layers import vocab_parallel_embedding as embedding
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized as expert_kernels
from vllm.model_executor.model_loader import dummy_loader
from vllm.v1.engine import core
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample import sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.sampling import draw, uniforms_at
from hybridflow.errors import EngineError
from hybridflow.parallel.collectives import broadcast_bytes

_SHARED_MEMORY = Path("/dev/shm")


class PlainExperts(CPUUnquantizedExperts):
    """Experts one by one on plain weights: w1 [E, 2I, H] (gate above up), w2 [E, H, I]; any sizes."""

    @classmethod
    def _supports_grouped_gemm(cls, moe_config: FusedMoEConfig) -> tuple[bool, str | None]:
        return True, None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation is MoEActivation.SILU

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leaves the weights as they were loaded."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *args: object,
        **kwargs: object,
    ) -> None:
        """Writes the weighted sum of each token's experts; a partial sum where their inner size is divided."""
        assert kwargs.get("expert_map") is None, "every rank holds a part of all experts"
        total = torch.zeros_like(output, dtype=torch.float32)
        for expert in range(len(w1)):
            tokens, choices = (topk_ids == expert).nonzero(as_tuple=True)
            if len(tokens):
                gate, up = F.linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
                answers = F.linear(F.silu(gate) * up, w2[expert]).float()
                total.index_add_(0, tokens, answers * topk_weights[tokens, choices, None].float())
        output.copy_(total)


class RowSampler(sampler.Sampler):
    """Draws the next token of all requests at once, from each request's row key and its position in the response.

    vLLM's own sampler draws a seeded request from a generator of its own, row by row. This one applies the same
    function to the same numbers as the transformers rollout, so that both engines draw the same tokens.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        super().__init__("processed_logprobs")
        self._runner = runner
        self._requests: list[str] = []
        self._sampling = Sampling()
        self._keys = self._prompt_lengths = torch.empty(0, dtype=torch.int64)

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: object, **kwargs: object
    ) -> SamplerOutput:
        """A token for each row of `logits` [requests, vocab], and its log-probability; no rank is computed."""
        self._read_requests(logits.device)
        # A prompt that is not finished yet draws at a negative position, and vLLM throws the token away.
        positions = self._runner.seq_lens[: len(logits)].long() - self._prompt_lengths
        tokens, logprobs = draw(logits, uniforms_at(self._keys, positions), self._sampling)
        column = tokens.int()[:, None]
        return SamplerOutput(column, LogprobsTensors(column, logprobs[:, None], torch.zeros_like(tokens.int())))

    def _read_requests(self, device: torch.device) -> None:
        """Reads keys and lengths where the requests in the batch, or their order, have changed."""
        requests = self._runner.input_batch.req_ids
        if requests == self._requests:
            return
        self._requests = list(requests)
        keys = []
        for name in requests:
            params = self._runner.requests[name].sampling_params
            assert params is not None and params.extra_args is not None, f"request {name} has no row key"
            keys.append(params.extra_args["row_key"])
            self._sampling = params.extra_args["sampling"]  # one for all rows of a `generate`
        lengths = self._runner.input_batch.num_prompt_tokens[: len(requests)]
        self._keys = torch.tensor(keys, device=device)
        self._prompt_lengths = torch.from_numpy(lengths.astype("int64")).to(device)


def draw_all_rows_at_once(llm: LLM) -> bool:
    """Installs `RowSampler`, and says so; False where vLLM's model runner needs none.

    Its second runner, which it uses on GPUs unless the model is divided into pipeline stages, draws all rows in one
    kernel, from each request's seed and position.
    """
    if llm.llm_engine.vllm_config.use_v2_model_runner:
        return False

    def install(worker: gpu_worker.Worker) -> None:
        worker.model_runner.sampler = RowSampler(worker.model_runner)

    llm.collective_rpc(install)
    return True


def keep_plain_weights() -> None:
    """Makes CPU layers multiply with their own weights.

    vLLM packs each weight for oneDNN (and experts for a grouped product) after loading and leaves an empty or reordered
    parameter behind: writing weights in place then fails or, where they are tied, silently has no effect.
    """

    def use_plain_product(layer: nn.Module, remove_weight: bool) -> None:
        layer.__dict__["cpu_linear"] = F.linear

    linear_layers.dispatch_cpu_unquantized_gemm = use_plain_product
    expert_kernels.__dict__["backend_to_kernel_cls"] = lambda backend: [PlainExperts]


def avoid_compilation() -> None:
    """Leaves uncompiled what vLLM compiles even when asked not to: 2 to 10 s at the first token, on a CPU."""
    name = "get_masked_input_and_mask"
    embedding.__dict__[name] = inspect.unwrap(vars(embedding)[name])


def leave_memory_unbound() -> None:
    """Keeps vLLM from binding all memory of this process to one NUMA node, training's included."""
    torch.ops._C.__dict__["init_cpu_memory_env"] = lambda nodes: None


def keep_process_groups() -> None:
    """Keeps an engine that ends from destroying all process groups of the process: training's, other engines'."""
    core.__dict__["cleanup_dist_env_and_memory"] = lambda: None


@contextmanager
def guest() -> Iterator[None]:
    """Around the start of vLLM: leaves random states, `torch.set_num_threads` and garbage collection as they were."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with (
            torch.random.fork_rng(devices=devices),
            warnings.catch_warnings(),
            _replaced(core, "freeze_gc_heap", lambda: None),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        # On a CPU vLLM replaces it by a warning, to protect a thread binding that is not used here.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)


@contextmanager
def placed(replica: Sequence[int], local_rank: int) -> Iterator[None]:
    """Around the start of vLLM on one rank of a larger world: its groups are made inside `replica` alone.

    `replica` is the world's ranks that hold one model, in vLLM's order: tensor ranks next to one another, pipeline
    stages one behind the other. vLLM divides a world into runs of consecutive ranks; here it is given its place within
    the replica, and every group it makes is translated. Replicas then start without waiting for one another.
    """
    own = list(replica).index(dist.get_rank()) if dist.is_initialized() else 0
    make_world, make_group = parallel_state.init_world_group, parallel_state.init_model_parallel_group
    start_world = parallel_state.init_distributed_environment

    def world_group(ranks: list[int], *args, **kwargs):
        return make_world(list(replica), *args, **kwargs)

    def model_parallel_group(group_ranks: list[list[int]], *args, **kwargs):
        [line] = [ranks for ranks in group_ranks if own in ranks]
        # The queue that broadcasts a driver's work to its ranks is of no use where each rank has a scheduler.
        kwargs["use_message_queue_broadcaster"] = False
        return make_group([[replica[rank] for rank in line]], *args, **kwargs)

    def distributed_environment(*args, **kwargs) -> None:
        if parallel_state._WORLD is None:
            start_world(*args, **kwargs)
            return
        if parallel_state._WORLD.ranks != list(replica):
            raise EngineError(
                f"vLLM runs in this process over the ranks {parallel_state._WORLD.ranks}; now {list(replica)} are asked"
                " for.",
                remedy="Give all rollouts of a process one rollout.parallelism.",
            )
        # Groups outlive their engine. A model without experts made none for them; without data parallelism, which is
        # not used, it has the ranks of the tensor group.
        parallel_state._EP = parallel_state._EP or parallel_state._TP

    with ExitStack() as stack:
        if dist.is_initialized():
            local = partial(dist.new_group, use_local_synchronization=True)
            stack.enter_context(_replaced(dist, "new_group", local))
            stack.enter_context(_replaced(parallel_state, "init_world_group", world_group))
            stack.enter_context(_replaced(parallel_state, "init_model_parallel_group", model_parallel_group))
            stack.enter_context(_replaced(gpu_worker, "init_distributed_environment", distributed_environment))
        stack.enter_context(_environment(RANK=str(own), LOCAL_RANK=str(local_rank)))
        stack.enter_context(_own_segments())
        yield


@contextmanager
def _own_segments() -> Iterator[None]:
    """Names of vLLM's shared-memory segments that no other run or group has; unlinked once all have opened them.

    Its own name is the same in every run, so that the segments of a run that was killed stop the next one.
    """
    names: dict[int, str] = {}

    def group_name(communicator: cpu_communicator.CpuCommunicator) -> str:
        if id(communicator) not in names:
            name = f"hybridflow-{uuid.uuid4().hex}".encode()
            names[id(communicator)] = broadcast_bytes(name, communicator.cpu_group, source=0).decode()
        return names[id(communicator)]

    try:
        with _replaced(cpu_communicator._CPUSHMDistributed, "make_group_name", staticmethod(group_name)):
            yield
    finally:
        for name in names.values():
            for segment in _SHARED_MEMORY.glob(f"*{name}*"):
                segment.unlink(missing_ok=True)


@contextmanager
def after_loading(act: Callable[[nn.Module], None]) -> Iterator[None]:
    """Around the start of vLLM: calls `act` with the loaded model, before memory is measured or a graph captured.

    The weights stay outside the pool that vLLM's sleep empties. Where none are read, none are made up: memory that
    nobody writes to costs nothing.
    """
    load_model = gpu_worker.Worker.load_model
    memory_pool = gpu_worker.Worker._maybe_get_memory_pool_context

    def load(worker: gpu_worker.Worker, **kwargs: bool) -> None:
        load_model(worker, **kwargs)
        act(worker.model_runner.get_model())

    def pool(worker: gpu_worker.Worker, tag: str):
        return nullcontext() if tag == "weights" else memory_pool(worker, tag)

    with (
        _replaced(gpu_worker.Worker, "load_model", load),
        _replaced(gpu_worker.Worker, "_maybe_get_memory_pool_context", pool),
        _replaced(dummy_loader, "initialize_single_dummy_weight", lambda tensor: None),
    ):
        yield


def replica_group() -> dist.ProcessGroup:
    """All ranks that hold one model, for objects on the CPU."""
    return parallel_state.get_world_group().cpu_group


def cache_tensors(llm: LLM) -> list[Tensor]:
    """The memory of vLLM's keys and values: each allocation once, as bytes."""
    [caches] = llm.collective_rpc(lambda worker: worker.model_runner.kv_caches)
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
    return [torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages.values()]


@contextmanager
def _replaced(owner: ModuleType | type, name: str, value: object) -> Iterator[None]:
    """An attribute is another one meanwhile."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _environment(**settings: str) -> Iterator[None]:
    """Environment variables have other values meanwhile."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
