"""The rollout engine on vLLM, in this process, with weights that are updated in place."""

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import replace

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Ragged
from hybridflow.config.json_text import read_json_object
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.engines.rollout.memory import Released, free_pages, trim_heap
from hybridflow.engines.rollout.shell import RolloutShell
from hybridflow.engines.rollout.vllm.compat import cache_tensors, draw_all_rows_at_once, read_text_with, replica_group
from hybridflow.engines.rollout.vllm.requests import answers, sampling_params, token_prompts
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

    The slots are views of vLLM's own (fused) tensors, which are in one buffer. The next `generate` uses the weights
    written there, after `weights_changed` has discarded the prefix cache of earlier weights.
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
        self._draws_rows = draw_all_rows_at_once(self._llm)
        read_text_with(tokenizer, self._llm)
        if self._is_cpu:
            self._free_cache()  # vLLM fills it with zeros; pages return as sequences need them
        logger.info("engine=vllm weights=%d bytes=%d", len(slots), buffer.num_bytes)

    def weights_changed(self, *, version: int) -> None:
        self._llm.reset_prefix_cache()
        super().weights_changed(version=version)

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

    def _sampled(
        self, prompts: Ragged, keys: Int64[Tensor, " B"], sampling: Sampling, max_response_tokens: int
    ) -> tuple[Ragged, Ragged, Tensor]:
        """Raises if the ranks of a replica received different rows."""
        row_keys = keys.tolist()
        self._check_same(
            prompts.values.numpy().tobytes(), prompts.offsets.tolist(), row_keys, sampling, max_response_tokens
        )
        params = sampling_params(
            sampling,
            row_keys,
            max_response_tokens=max_response_tokens,
            eos_token_ids=self._eos_token_ids,
            seeded=not self._draws_rows,
        )
        return answers(self._llm.generate(token_prompts(prompts), params, use_tqdm=False) if row_keys else [])

    def _free_cache(self) -> int:
        """Frees the cache's pages, which then read as zeros, so the prefix cache is discarded first."""
        self._llm.reset_prefix_cache()
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
