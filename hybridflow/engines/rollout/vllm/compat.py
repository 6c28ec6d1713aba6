"""Everything that depends on the internals of vLLM 0.32; check it again with each new version.

vLLM assumes that it has the process to itself. Here it shares the process with a training engine, so the process-wide
state that it changes is restored.
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
from transformers import PreTrainedTokenizerBase
from vllm import LLM
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import cpu_communicator
from vllm.logprobs import FlatLogprobs
from vllm.model_executor.layers import utils as linear_layers
from vllm.model_executor.layers import vocab_parallel_embedding as embedding
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized as expert_kernels
from vllm.model_executor.model_loader import dummy_loader
from vllm.v1.engine import core
from vllm.v1.executor import uniproc_executor
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
    """Computes experts one by one on plain weights of any size: w1 [E, 2I, H] (gate, then up), w2 [E, H, I]."""

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
        """Writes the weighted sum of each token's experts; with tensor parallelism, this rank's partial sum."""
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
    """Samples the next token of all requests at once, from each request's row key and its position in the response.

    vLLM's own sampler has one generator per seeded request, and samples row by row. This one applies the same function
    to the same random numbers as the transformers rollout, so that both engines sample the same tokens.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        super().__init__("processed_logprobs")
        self._runner = runner
        self._requests: list[str] = []
        self._settings: list[tuple[Sampling, Tensor | None]] = []
        """The sampling settings in the batch, with the rows that use each; None for all rows."""
        self._keys = self._prompt_lengths = torch.empty(0, dtype=torch.int64)

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: object, **kwargs: object
    ) -> SamplerOutput:
        """A token for each row of `logits` [requests, vocab], with its log-probability but without its rank."""
        self._read_requests(logits.device)
        # A partially prefilled prompt samples at a negative position, and vLLM discards the token.
        positions = self._runner.seq_lens[: len(logits)].long() - self._prompt_lengths
        uniforms = uniforms_at(self._keys, positions)
        tokens, logprobs = torch.empty_like(self._keys), torch.empty(len(logits), device=logits.device)
        for sampling, rows in self._settings:
            if rows is None:
                tokens, logprobs = draw(logits, uniforms, sampling)
            else:
                tokens[rows], logprobs[rows] = draw(logits[rows], uniforms[rows], sampling)
        column = tokens.int()[:, None]
        return SamplerOutput(column, LogprobsTensors(column, logprobs[:, None], torch.zeros_like(tokens.int())))

    def _read_requests(self, device: torch.device) -> None:
        """Reads row keys and prompt lengths again if the requests in the batch, or their order, have changed."""
        requests = self._runner.input_batch.req_ids
        if requests == self._requests:
            return
        self._requests = list(requests)
        keys, settings = [], []
        for name in requests:
            params = self._runner.requests[name].sampling_params
            assert params is not None and params.extra_args is not None, f"request {name} has no row key"
            keys.append(params.extra_args["row_key"])
            settings.append(params.extra_args["sampling"])
        self._settings = [(settings[0], None)]
        if distinct := [sampling for row, sampling in enumerate(settings) if settings.index(sampling) == row][1:]:
            rows = [[row for row, own in enumerate(settings) if own == other] for other in (settings[0], *distinct)]
            self._settings = [(settings[own[0]], torch.tensor(own, device=device)) for own in rows]
        lengths = self._runner.input_batch.num_prompt_tokens[: len(requests)]
        self._keys = torch.tensor(keys, device=device)
        self._prompt_lengths = torch.from_numpy(lengths.astype("int64")).to(device)


def draw_all_rows_at_once(llm: LLM) -> bool:
    """Installs `RowSampler` and returns True, or returns False if vLLM's model runner does not need it.

    The V2 model runner, which vLLM uses on GPUs without pipeline parallelism, samples all rows in one kernel, from each
    request's seed and position.
    """
    if llm.llm_engine.vllm_config.use_v2_model_runner:
        return False

    def install(worker: gpu_worker.Worker) -> None:
        worker.model_runner.sampler = RowSampler(worker.model_runner)

    llm.collective_rpc(install)
    return True


def schedules_ahead(llm: LLM) -> bool:
    """Whether vLLM schedules a step before it knows the tokens of the previous one."""
    return bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)


def sampled_so_far(llm: LLM) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of the unfinished requests, by the number that is their name."""
    found = {}
    for state in llm.llm_engine.output_processor.request_states.values():
        assert state.detokenizer is not None and state.logprobs_processor is not None
        logprobs = state.logprobs_processor.logprobs
        assert isinstance(logprobs, FlatLogprobs)
        found[int(state.external_req_id)] = list(state.detokenizer.output_token_ids), list(logprobs.logprobs)
    return found


def read_text_with(tokenizer: PreTrainedTokenizerBase | None, llm: LLM) -> None:
    """Gives vLLM, which was started without one, a tokenizer for the stop strings of requests that have some."""
    vars(llm.llm_engine.output_processor)["tokenizer"] = tokenizer


def keep_plain_weights() -> None:
    """Makes CPU layers use their parameters directly.

    After loading, vLLM packs each weight for oneDNN (and experts for a grouped product), and leaves an empty or
    reordered parameter. Writing weights in place would then fail or, for tied weights, silently have no effect.
    """

    def use_plain_product(layer: nn.Module, remove_weight: bool) -> None:
        layer.__dict__["cpu_linear"] = F.linear

    linear_layers.dispatch_cpu_unquantized_gemm = use_plain_product
    expert_kernels.__dict__["backend_to_kernel_cls"] = lambda backend: [PlainExperts]


def avoid_compilation() -> None:
    """Disables a `torch.compile` that vLLM applies even in eager mode: 2 to 10 s at the first token on a CPU."""
    name = "get_masked_input_and_mask"
    embedding.__dict__[name] = inspect.unwrap(vars(embedding)[name])


def leave_memory_unbound() -> None:
    """Prevents vLLM from binding all memory of this process, including training's, to one NUMA node."""
    torch.ops._C.__dict__["init_cpu_memory_env"] = lambda nodes: None


def keep_process_groups() -> None:
    """Prevents an engine that shuts down from destroying the process groups of training and other engines."""
    core.__dict__["cleanup_dist_env_and_memory"] = lambda: None


@contextmanager
def guest() -> Iterator[None]:
    """Restores random states, `torch.set_num_threads` and garbage collection after vLLM has started."""
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
        # On a CPU vLLM replaces it with a warning, to protect a thread binding that is not used here.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)


@contextmanager
def placed(replica: Sequence[int], local_rank: int) -> Iterator[None]:
    """Makes vLLM, while it starts on one rank of a larger world, create its process groups inside `replica` only.

    `replica` has the world ranks that hold one model, in vLLM's order: tensor ranks are adjacent within each pipeline
    stage. vLLM expects consecutive ranks, so it gets its rank within the replica, and the ranks of each group that it
    creates are translated. Replicas start independently of one another.
    """
    own = list(replica).index(dist.get_rank()) if dist.is_initialized() else 0
    make_world, make_group = parallel_state.init_world_group, parallel_state.init_model_parallel_group
    start_world = parallel_state.init_distributed_environment

    def world_group(ranks: list[int], *args, **kwargs):
        return make_world(list(replica), *args, **kwargs)

    def model_parallel_group(group_ranks: list[list[int]], *args, **kwargs):
        [line] = [ranks for ranks in group_ranks if own in ranks]
        # Every rank has its own scheduler, so there is no driver whose work must be broadcast.
        kwargs["use_message_queue_broadcaster"] = False
        return make_group([[replica[rank] for rank in line]], *args, **kwargs)

    def distributed_environment(*args, **kwargs) -> None:
        if parallel_state._WORLD is None:
            start_world(*args, **kwargs)
            return
        if parallel_state._WORLD.ranks != list(replica):
            raise EngineError(
                f"vLLM already runs in this process on the ranks {parallel_state._WORLD.ranks}; it cannot also run on"
                f" {list(replica)}.",
                remedy="Use the same rollout.parallelism for all rollouts of a process.",
            )
        # Groups outlive their engine, and a model without experts has not created theirs. Without vLLM's data
        # parallelism, which is not used here, it has the same ranks as the tensor group.
        parallel_state._EP = parallel_state._EP or parallel_state._TP

    with ExitStack() as stack:
        if dist.is_initialized():
            local = partial(dist.new_group, use_local_synchronization=True)
            stack.enter_context(_replaced(dist, "new_group", local))
            stack.enter_context(_replaced(parallel_state, "init_world_group", world_group))
            stack.enter_context(_replaced(parallel_state, "init_model_parallel_group", model_parallel_group))
            stack.enter_context(_replaced(gpu_worker, "init_distributed_environment", distributed_environment))
        stack.enter_context(_replaced(uniproc_executor, "get_file_store_init_method", _store_in_memory))
        stack.enter_context(_environment(RANK=str(own), LOCAL_RANK=str(local_rank)))
        stack.enter_context(_own_segments())
        yield


def _store_in_memory() -> str:
    """The address of the store of a world of one rank: a file in memory, which ends with the process.

    vLLM's own file would stay in the temporary directory if the process is killed.
    """
    return f"file:///proc/self/fd/{os.memfd_create('vllm_dist')}"


@contextmanager
def _own_segments() -> Iterator[None]:
    """Gives vLLM's shared-memory segments unique names, and unlinks them once all ranks have opened them.

    vLLM's own names are the same in every run, so segments that a killed run left behind would stop the next run.
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
    """Calls `act` with the loaded model while vLLM starts, before it measures memory or captures graphs.

    Weights are kept out of the memory pool that vLLM's sleep mode frees. Dummy weights are not initialized: memory that
    is never written costs nothing.
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
    """The CPU group of all ranks that hold one model."""
    return parallel_state.get_world_group().cpu_group


def cache_tensors(llm: LLM) -> list[Tensor]:
    """The memory of vLLM's KV cache: each allocation once, as bytes."""
    [caches] = llm.collective_rpc(lambda worker: worker.model_runner.kv_caches)
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in caches}
    return [torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages.values()]


@contextmanager
def _replaced(owner: ModuleType | type, name: str, value: object) -> Iterator[None]:
    """Replaces an attribute for the block."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _environment(**settings: str) -> Iterator[None]:
    """Sets environment variables for the block."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
