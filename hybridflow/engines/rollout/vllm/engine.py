"""The rollout engine on vLLM, in this process, with weights that are updated in place."""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase
from vllm import RequestOutput
from vllm.inputs.engine import tokens_input

from hybridflow.batch import Ragged
from hybridflow.config.json_text import read_json_object
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout
from hybridflow.engines.rollout.memory import Released, free_pages, trim_heap
from hybridflow.engines.rollout.requests import Request, Responses
from hybridflow.engines.rollout.shell import RolloutShell
from hybridflow.engines.rollout.vllm.compat import (
    cache_tensors,
    draw_all_rows_at_once,
    read_text_with,
    replica_group,
    sampled_so_far,
    schedules_ahead,
)
from hybridflow.engines.rollout.vllm.requests import responses, sampling_params
from hybridflow.engines.rollout.vllm.start import start_vllm
from hybridflow.engines.rollout.vllm.weights import held_weights, slots_of
from hybridflow.engines.vllm_limits import unsupported_reason
from hybridflow.errors import EngineError
from hybridflow.models.loading import resolve_model_path
from hybridflow.parallel.collectives import all_gather_bytes
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard

logger = logging.getLogger(__name__)


class VllmEngine(RolloutShell):
    """vLLM on the ranks of a replica; implements `RolloutEngine`.

    The slots are views of vLLM's own (fused) tensors, which are in one buffer. `pause` discards the cache of earlier
    weights; if running rows keep theirs, the prefix cache is salted, so that no later row finds it.
    """

    def __init__(
        self,
        model: Model,
        rollout: Rollout,
        *,
        limit_tokens: int,
        eos_token_ids: tuple[int, ...],
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        ranks: Ranks,
        reads_weights: bool,
    ) -> None:
        directory = resolve_model_path(str(model.path))
        reason = unsupported_reason(read_json_object(directory / "config.json"), device.type)
        assert reason is None, f"not checked before the start: {reason}"
        self._is_cpu = device.type == "cpu"
        self._eos_token_ids = eos_token_ids
        self._is_divided = ranks.mesh.count_along(("pipeline", "tensor")) > 1
        parts_of, layouts = held_weights(directory, ranks.mesh, ranks.rank, trust_remote_code=model.trust_remote_code)
        self._llm, module, buffer = start_vllm(
            directory,
            model,
            rollout,
            limit_tokens=limit_tokens,
            device=device,
            ranks=ranks,
            reads_weights=reads_weights,
        )
        slots = slots_of(module, parts_of, layouts)
        super().__init__(ranks.mesh, buffer, slots, limit_tokens=limit_tokens, has_weights=reads_weights)
        self._num_versions = 0
        self._outputs: list[RequestOutput] = []
        self._draws_rows = draw_all_rows_at_once(self._llm)
        read_text_with(tokenizer, self._llm)
        if self._is_cpu:
            self._free_cache()  # vLLM fills it with zeros; pages return as sequences need them
        logger.info("engine=vllm weights=%d bytes=%d", len(slots), buffer.num_bytes)

    def pause(self, *, keep_cache: bool = False) -> None:
        """See `RolloutEngine.pause`. Raises `EngineError` for `keep_cache` where vLLM schedules a step ahead (on GPUs):
        a token of the earlier weights would arrive after `resume`."""
        if keep_cache and schedules_ahead(self._llm):
            raise EngineError(
                "rollout.engine=vllm cannot keep the cache of running rows here: it schedules a step ahead.",
                remedy="Pause without keep_cache.",
            )
        super().pause(keep_cache=keep_cache)

    def resume(self, *, version: int) -> None:
        """See `RolloutEngine.resume`. Blocks that running rows have kept are never found by later rows."""
        super().resume(version=version)
        self._num_versions += 1

    def sleep(self, kept: Iterable[WeightShard] = ()) -> Released:
        """See `RolloutEngine.sleep`. On a GPU, vLLM frees its cache, and all weights stay (not yet run on a GPU)."""
        if self._is_cpu:
            cache_bytes = self._free_cache()
        else:
            cache_bytes = sum(cache.nbytes for cache in cache_tensors(self._llm))
            self._llm.sleep(level=1)
        released = replace(super().sleep(kept), cache_bytes=cache_bytes)
        trim_heap()
        return released

    def wake(self) -> None:
        if not self._is_cpu and self.is_asleep:
            self._llm.wake_up()
        super().wake()

    def _start(self, requests: Sequence[Request]) -> None:
        salt = str(self._num_versions)
        for request in requests:
            params = sampling_params(request, eos_token_ids=self._eos_token_ids, seeded=not self._draws_rows)
            prompt = tokens_input(request.prompt.tolist(), cache_salt=salt)
            self._llm.llm_engine.add_request(str(request.number), prompt, params)

    def _step(self) -> int:
        outputs = [output for output in self._llm.llm_engine.step() if isinstance(output, RequestOutput)]
        self._outputs += outputs
        return len(outputs)

    def _collect(self) -> list[Responses]:
        outputs, self._outputs = self._outputs, []
        return [responses(outputs, self._unfinished)] if outputs else []

    def _interrupt(self) -> None:
        """vLLM preempts its requests, and computes their keys and values again when it schedules them next."""
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def _so_far(self) -> Iterable[tuple[Request, int]]:
        return [(self._unfinished[number], len(tokens)) for number, (tokens, _) in sampled_so_far(self._llm).items()]

    def _removed(self, requests: Sequence[Request]) -> Responses:
        sampled = sampled_so_far(self._llm)
        self._llm.llm_engine.abort_request([str(request.number) for request in requests])
        found = [sampled.get(request.number, ([], [])) for request in requests]
        return Responses(
            requests,
            Ragged.from_rows([tokens for tokens, _ in found], torch.int64),
            Ragged.from_rows([logprobs for _, logprobs in found], torch.float32),
            torch.ones(len(found), dtype=torch.bool),
        )

    def _free_cache(self) -> int:
        """Frees the cache's pages, which then read as zeros, so all requests and the prefix cache leave it first."""
        self._interrupt()
        return sum(free_pages(cache) for cache in cache_tensors(self._llm))

    def _check_same(self, *parts: object) -> None:
        """Raises if the ranks of a replica received different work: they would wait for one another until a timeout."""
        if not self._is_divided:
            return
        own = hashlib.sha256(repr((parts, self.version)).encode()).digest()
        if len(set(all_gather_bytes(own, replica_group()))) > 1:
            raise EngineError(
                "The ranks of one rollout replica received different prompts, settings or weight versions.",
                remedy="Send the same rows, in the same order, to all ranks that differ only in tensor or pipeline.",
            )
