"""A rollout engine that runs wherever transformers runs."""

from collections.abc import Iterable

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.batch import Ragged
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.memory import Released, WeightBuffer
from hybridflow.engines.rollout.sampling import uniform_draws
from hybridflow.engines.rollout.shell import RolloutShell, ends_of
from hybridflow.engines.rollout.stop_strings import StopSearch
from hybridflow.engines.rollout.transformers.attention import IMPLEMENTATION, use_decoding_attention
from hybridflow.engines.rollout.transformers.decode import decode
from hybridflow.engines.rollout.transformers.fixed import FULL, SLIDING, FixedMemory
from hybridflow.engines.rollout.transformers.graphs import Graphs, can_be_captured, run_eagerly
from hybridflow.errors import EngineError
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh


class TransformersEngine(RolloutShell):
    """A Hugging Face causal language model on one device; implements `RolloutEngine`.

    The slots are the model's own parameters (experts one by one), so a training engine that binds to them shares its
    weights. On a CPU only the weights are kept between calls of `generate`. On a GPU keys, values and CUDA graphs are
    kept as well, until the engine sleeps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_sequences: int,
        eos_token_ids: tuple[int, ...],
        tokenizer: PreTrainedTokenizerBase | None = None,
        mesh: ParallelMesh | None = None,
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        buffer = WeightBuffer(model.parameters())
        slots = {
            slot.name: slot
            for name, parameter in model.named_parameters()
            for slot in views(parameter.data, parts_of(name, parameter.shape))
        }
        text = model.config.get_text_config().to_dict()
        limit_tokens = text.get("max_position_embeddings") or 1 << 30
        super().__init__(mesh or ParallelMesh({"data": 1}), buffer, slots, limit_tokens=limit_tokens)
        self._max_sequences = max_sequences
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        use_decoding_attention(model)
        self._memory = _fixed_memory(model)
        if foreign := set(text.get("layer_types") or ()) - {FULL, SLIDING}:
            raise EngineError(
                f"rollout.engine=transformers supports layers with a key-value cache; the model has {sorted(foreign)}.",
                remedy="Use rollout.engine=vllm for this model.",
            )

    def sleep(self, kept: Iterable[WeightShard] = ()) -> Released:
        """See `RolloutEngine.sleep`: on a GPU all weights stay, and cached memory is freed."""
        if self._model.device.type == "cuda":
            self._memory = None  # frees the cache and the graphs before the new memory is made
            self._memory = _fixed_memory(self._model)
            torch.cuda.empty_cache()
        return super().sleep(kept)

    def _sampled(
        self, prompts: Ragged, keys: Int64[Tensor, " B"], sampling: Sampling, max_response_tokens: int
    ) -> tuple[Ragged, Ragged, Tensor]:
        """At most `max_sequences` rows are decoded together."""
        uniforms = uniform_draws(keys, max_response_tokens)
        ends = ends_of(sampling, self._eos_token_ids)
        tokens, logprobs, truncated = [Ragged.from_rows([], torch.int64)], [Ragged.from_rows([], torch.float32)], []
        for start in range(0, len(prompts), self._max_sequences):
            stop = min(start + self._max_sequences, len(prompts))
            rows, search = prompts.slice(start, stop), None
            if sampling.stop:
                assert self._tokenizer is not None, "stop strings need a tokenizer"
                search = StopSearch(self._tokenizer, sampling.stop, rows)
            decoded = decode(
                self._model,
                rows,
                uniforms[start:stop],
                sampling,
                eos_token_ids=ends,
                memory=self._memory,
                search=search,
            )
            lengths = decoded.lengths.cpu()
            tokens.append(Ragged.from_padded(decoded.tokens.cpu(), lengths))
            logprobs.append(Ragged.from_padded(decoded.logprobs.cpu(), lengths))
            truncated.append(decoded.truncated.cpu())
        none = torch.zeros(0, dtype=torch.bool)
        return Ragged.concat(tokens), Ragged.concat(logprobs), torch.cat([none, *truncated])


def _fixed_memory(model: PreTrainedModel) -> FixedMemory | None:
    """Memory for decoding with CUDA graphs; None on a CPU, and for an attention implementation other than ours."""
    if model.device.type != "cuda" or model.config._attn_implementation != IMPLEMENTATION:
        return None
    is_captured = can_be_captured(model)
    return FixedMemory(model, lambda: Graphs(model.device) if is_captured else run_eagerly)
