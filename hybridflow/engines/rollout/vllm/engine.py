"""The rollout engine on vLLM, in this process, on weights that are written in place."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM

from hybridflow.batch import Batch
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.engines.rollout.responses import checked_prompts, response_batch
from hybridflow.engines.rollout.sampling import request_seeds, row_keys
from hybridflow.engines.rollout.slots import write_shards
from hybridflow.engines.rollout.vllm.compat import (
    avoid_compilation,
    guest,
    inner_model,
    keep_plain_weights,
    leave_memory_unbound,
)
from hybridflow.engines.rollout.vllm.limits import unsupported_reason
from hybridflow.engines.rollout.vllm.requests import answers, sampling_params, token_prompts
from hybridflow.engines.rollout.vllm.weights import slots_of
from hybridflow.errors import ConfigError, EngineError
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)

DEFAULT_CPU_CACHE_MB = 256
CPU_BLOCK_TOKENS = 32
"""Tokens a block of the cache, the least its kernels take. vLLM's 128 keep no shorter prompt for its siblings, and
cost 18 % of the time of a small model with short responses."""


class VllmEngine:
    """vLLM on one device; implements `RolloutEngine`.

    The slots are views of vLLM's own (fused) tensors: what is written there is used by the next `generate`, once
    `weights_changed` has thrown away the keys and values of earlier weights.
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
    ) -> None:
        self.mesh = ParallelMesh({"data": 1})
        self._device = device
        self._limit_tokens = limit_tokens
        self._eos_token_ids = eos_token_ids
        self._version = 0
        self._has_slept = False
        config = AutoConfig.from_pretrained(directory, trust_remote_code=model.trust_remote_code)
        if reason := unsupported_reason(config.to_dict(), device.type):
            raise ConfigError(f"rollout.engine=vllm: {reason}", remedy="Set rollout.engine=transformers.")
        self._llm = _started(directory, model, rollout, limit_tokens=limit_tokens, is_cpu=device.type == "cpu")
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
        shapes = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
        self._slots = slots_of(inner_model(self._llm), shapes)
        logger.info("engine=vllm weights=%d limit_tokens=%d", len(self._slots), limit_tokens)

    def generate(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> Batch:
        """See `RolloutEngine.generate`."""
        ids = checked_prompts(prompts, max_response_tokens=max_response_tokens, limit_tokens=self._limit_tokens)
        seeds = request_seeds(row_keys(seed, prompts.row("uid"), prompts.row("sample_index")))
        params = sampling_params(
            sampling, seeds, max_response_tokens=max_response_tokens, eos_token_ids=self._eos_token_ids
        )
        # vLLM draws from the process's generator too, although every request has its own.
        with torch.random.fork_rng(devices=[]):
            outputs = self._llm.generate(token_prompts(ids), params, use_tqdm=False) if seeds else []
        tokens, logprobs, truncated = answers(outputs)
        return response_batch(tokens, logprobs, truncated, version=self._version, sampling=sampling)

    def weight_slots(self) -> Mapping[str, WeightShard]:
        """See `RolloutEngine.weight_slots`."""
        return self._slots

    def load_weights(self, shards: Iterable[WeightShard]) -> None:
        """See `RolloutEngine.load_weights`."""
        write_shards(self._slots, shards)

    def weights_changed(self, *, version: int) -> None:
        """See `RolloutEngine.weights_changed`."""
        self._llm.reset_prefix_cache()
        self._version = version

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`: on a GPU the cache is freed and the weights move to the host."""
        if self._device.type != "cpu":
            self._llm.sleep(level=1)
        elif not self._has_slept:
            logger.info("engine=vllm device=cpu sleep=nothing is freed: its cache and weights stay")
        self._has_slept = True

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        if self._device.type != "cpu":
            self._llm.wake_up()


def _started(directory: Path, model: Model, rollout: Rollout, *, limit_tokens: int, is_cpu: bool) -> LLM:
    config = rollout.vllm
    cache_mb = config.kv_cache_mb or (DEFAULT_CPU_CACHE_MB if is_cpu else None)
    if is_cpu:
        keep_plain_weights()
        avoid_compilation()
        leave_memory_unbound()
    try:
        with guest():
            return LLM(
                str(directory),
                dtype=model.dtype.name,
                trust_remote_code=model.trust_remote_code,
                skip_tokenizer_init=True,
                max_model_len=limit_tokens,
                max_num_seqs=rollout.max_sequences,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                seed=0,
                enforce_eager=is_cpu if config.enforce_eager is None else config.enforce_eager,
                block_size=CPU_BLOCK_TOKENS if is_cpu else None,
                kv_cache_memory_bytes=cache_mb << 20 if cache_mb else None,
                gpu_memory_utilization=config.gpu_memory_fraction,
                enable_sleep_mode=not is_cpu,
            )
    except (ValueError, RuntimeError) as error:
        raise EngineError(
            f"rollout.engine=vllm cannot start with the model in {directory}: {error}",
            remedy="Where it lacks memory, change rollout.vllm.kv_cache_mb or rollout.vllm.gpu_memory_fraction; "
            "where it does not know the model, set rollout.engine=transformers.",
        ) from error
