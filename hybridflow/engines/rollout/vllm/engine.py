"""The rollout engine on vLLM, in this process, with weights that are updated in place."""

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from hybridflow.batch import Batch
from hybridflow.config.json_text import read_json_object
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.engines.rollout.memory import Released, give_back, trim_heap
from hybridflow.engines.rollout.responses import (
    BEING_WRITTEN,
    GIVEN_BACK,
    UNWRITTEN,
    Readiness,
    checked_prompts,
    response_batch,
)
from hybridflow.engines.rollout.sampling import row_keys
from hybridflow.engines.rollout.vllm.compat import cache_tensors, draw_all_rows_at_once, replica_group
from hybridflow.engines.rollout.vllm.limits import unsupported_reason
from hybridflow.engines.rollout.vllm.requests import answers, sampling_params, token_prompts
from hybridflow.engines.rollout.vllm.start import Started
from hybridflow.engines.rollout.vllm.weights import held_weights, slots_of
from hybridflow.errors import EngineError
from hybridflow.parallel.collectives import all_gather_bytes
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard

logger = logging.getLogger(__name__)


class VllmEngine:
    """vLLM on the ranks of a replica; implements `RolloutEngine`.

    The slots are views of vLLM's own (fused) tensors, which are in one buffer of ours. The next `generate` uses what is
    written there, after `weights_changed` has discarded the prefix cache of earlier weights.
    """

    def __init__(
        self,
        directory: Path,
        model: Model,
        rollout: Rollout,
        *,
        limit_tokens: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        ranks: Ranks,
        reads_weights: bool,
    ) -> None:
        self.mesh = ranks.mesh
        self._device = device
        self._limit_tokens = limit_tokens
        self._eos_token_ids = eos_token_ids
        self._is_divided = ranks.mesh.count_along(("pipeline", "tensor")) > 1
        reason = unsupported_reason(read_json_object(directory / "config.json"), device.type)
        assert reason is None, f"not checked before the start: {reason}"
        held = held_weights(directory, ranks.mesh, ranks.rank, trust_remote_code=model.trust_remote_code)
        started = Started(
            directory,
            model,
            rollout,
            limit_tokens=limit_tokens,
            device=device,
            ranks=ranks,
            reads_weights=reads_weights,
        )
        self._llm, self._buffer = started.llm, started.buffer
        self._draws_rows = draw_all_rows_at_once(self._llm)
        self._slots = slots_of(started.model, held.parts_of, held.layouts)
        self._readiness = Readiness(None if reads_weights else UNWRITTEN)
        if device.type == "cpu":
            self._give_back_cache()  # vLLM fills it with zeros; pages return as sequences need them
        logger.info("engine=vllm weights=%d bytes=%d", len(self._slots), self._buffer.num_bytes)

    def generate(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> Batch:
        """See `RolloutEngine.generate`. Raises if the ranks of a replica received different rows."""
        self._readiness.check()
        ids = checked_prompts(prompts, max_response_tokens=max_response_tokens, limit_tokens=self._limit_tokens)
        keys = row_keys(seed, prompts.row("uid"), prompts.row("sample_index")).tolist()
        self._check_same(ids.values.numpy().tobytes(), ids.offsets.tolist(), keys, sampling, max_response_tokens)
        params = sampling_params(
            sampling,
            keys,
            max_response_tokens=max_response_tokens,
            eos_token_ids=self._eos_token_ids,
            seeded=not self._draws_rows,
        )
        outputs = self._llm.generate(token_prompts(ids), params, use_tqdm=False) if keys else []
        tokens, logprobs, truncated = answers(outputs)
        return response_batch(tokens, logprobs, truncated, version=self._readiness.version, sampling=sampling)

    def weight_slots(self) -> Mapping[str, WeightShard]:
        """See `RolloutEngine.weight_slots`."""
        return self._slots

    def weights_changing(self) -> None:
        """See `RolloutEngine.weights_changing`."""
        self._readiness.lose_weights(BEING_WRITTEN)

    def weights_changed(self, *, version: int) -> None:
        """See `RolloutEngine.weights_changed`."""
        self._llm.reset_prefix_cache()
        self._readiness.gain_weights(version)

    def sleep(self, kept: Iterable[WeightShard] = ()) -> Released:
        """See `RolloutEngine.sleep`. On a GPU, vLLM frees its cache, and all weights stay (not yet run on a GPU)."""
        if self._device.type == "cpu":
            cache_bytes = self._give_back_cache()
        else:
            cache_bytes = sum(cache.nbytes for cache in cache_tensors(self._llm))
            self._llm.sleep(level=1)
        released = replace(self._buffer.release(shard.tensor for shard in kept), cache_bytes=cache_bytes)
        if released.weight_bytes:
            self._readiness.lose_weights(GIVEN_BACK)
        trim_heap()
        self._readiness.is_asleep = True
        return released

    def wake(self) -> None:
        """See `RolloutEngine.wake`. On a CPU, pages return as they are written."""
        if self._device.type != "cpu" and self._readiness.is_asleep:
            self._llm.wake_up()
        self._readiness.is_asleep = False

    def _give_back_cache(self) -> int:
        """Frees the cache's pages, which then read as zeros, so the prefix cache is discarded first."""
        self._llm.reset_prefix_cache()
        return sum(give_back(cache) for cache in cache_tensors(self._llm))

    def _check_same(self, *parts: object) -> None:
        """Raises if the ranks of a replica received different work: they would wait for one another until a timeout."""
        if not self._is_divided:
            return
        own = hashlib.sha256(repr((parts, self._readiness.version)).encode()).digest()
        if len(set(all_gather_bytes(own, replica_group()))) > 1:
            raise EngineError(
                "The ranks of one rollout replica received different prompts, settings or weight versions.",
                remedy="Send the same rows, in the same order, to all ranks that differ only in tensor or pipeline.",
            )
