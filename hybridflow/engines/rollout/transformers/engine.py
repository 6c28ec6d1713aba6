"""The rollout engine that runs wherever transformers runs."""

from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel

from hybridflow.batch import Batch, Ragged
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.memory import Released, WeightBuffer
from hybridflow.engines.rollout.responses import BEING_WRITTEN, GIVEN_BACK, Readiness, checked_prompts, response_batch
from hybridflow.engines.rollout.sampling import row_keys, uniform_draws
from hybridflow.engines.rollout.transformers.attention import IMPLEMENTATION, use_decoding_attention
from hybridflow.engines.rollout.transformers.decode import decode
from hybridflow.engines.rollout.transformers.fixed import FixedMemory
from hybridflow.engines.rollout.transformers.graphs import Graphs, can_be_captured, run_plainly
from hybridflow.errors import EngineError
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh

_CACHED_LAYERS = {"full_attention", "sliding_attention"}


class TransformersEngine:
    """A Hugging Face causal language model on one device; implements `RolloutEngine`.

    The slots are the model's own parameters, so a training engine that binds to them leaves one copy of the weights.
    On a CPU nothing is kept between two calls of `generate` but the weights, so only they have memory to give back.
    On a GPU keys, values and CUDA graphs are kept from call to call until the engine sleeps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_sequences: int,
        eos_token_ids: tuple[int, ...],
        mesh: ParallelMesh | None = None,
    ) -> None:
        self.mesh = mesh or ParallelMesh({"data": 1})
        self._model = model.eval().requires_grad_(False)
        self._buffer = WeightBuffer(model.parameters())
        self._slots = {
            slot.name: slot
            for name, parameter in model.named_parameters()
            for slot in views(parameter.data, parts_of(name, parameter.shape))
        }
        self._max_sequences = max_sequences
        self._eos_token_ids = eos_token_ids
        self._readiness = Readiness()
        use_decoding_attention(model)
        self._memory = _fixed_memory(model)
        text = model.config.get_text_config().to_dict()
        self._limit_tokens: int = text.get("max_position_embeddings") or 1 << 30
        if foreign := set(text.get("layer_types") or ()) - _CACHED_LAYERS:
            raise EngineError(
                f"rollout.engine=transformers keeps keys and values; the model has layers of {sorted(foreign)}.",
                remedy="Use rollout.engine=vllm for this model.",
            )

    def generate(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> Batch:
        """See `RolloutEngine.generate`; `max_sequences` rows at once, the rest wait."""
        self._readiness.check()
        ids = checked_prompts(prompts, max_response_tokens=max_response_tokens, limit_tokens=self._limit_tokens)
        keys = row_keys(seed, prompts.row("uid"), prompts.row("sample_index"))
        uniforms = uniform_draws(keys, max_response_tokens)
        ends = () if sampling.ignore_eos else self._eos_token_ids
        tokens, logprobs, truncated = [Ragged.from_rows([], torch.int64)], [Ragged.from_rows([], torch.float32)], []
        for start in range(0, len(prompts), self._max_sequences):
            stop = min(start + self._max_sequences, len(prompts))
            decoded = decode(
                self._model,
                ids.slice(start, stop),
                uniforms[start:stop],
                sampling,
                eos_token_ids=ends,
                memory=self._memory,
            )
            lengths = decoded.lengths.cpu()
            tokens.append(Ragged.from_padded(decoded.tokens.cpu(), lengths))
            logprobs.append(Ragged.from_padded(decoded.logprobs.cpu(), lengths))
            truncated.append(decoded.truncated.cpu())
        return response_batch(
            Ragged.concat(tokens),
            Ragged.concat(logprobs),
            torch.cat([torch.zeros(0, dtype=torch.bool), *truncated]),
            version=self._readiness.version,
            sampling=sampling,
        )

    def weight_slots(self) -> Mapping[str, WeightShard]:
        """See `RolloutEngine.weight_slots`: the parameters themselves, stacked experts one by one."""
        return self._slots

    def weights_changing(self) -> None:
        """See `RolloutEngine.weights_changing`."""
        self._readiness.lose_weights(BEING_WRITTEN)

    def weights_changed(self, *, version: int) -> None:
        """See `RolloutEngine.weights_changed`."""
        self._readiness.gain_weights(version)

    def sleep(self, kept: Iterable[WeightShard] = ()) -> Released:
        """See `RolloutEngine.sleep`: on a GPU all weights stay, and cached memory is given back."""
        released = self._buffer.release(shard.tensor for shard in kept)
        if released.weight_bytes:
            self._readiness.lose_weights(GIVEN_BACK)
        if self._model.device.type == "cuda":
            self._memory = None  # before the new one: its graphs and its cache go with it
            self._memory = _fixed_memory(self._model)
            torch.cuda.empty_cache()
        self._readiness.is_asleep = True
        return released

    def wake(self) -> None:
        """See `RolloutEngine.wake`; pages come back as they are written."""
        self._readiness.is_asleep = False


def _fixed_memory(model: PreTrainedModel) -> FixedMemory | None:
    """On a GPU, memory for decoding with CUDA graphs; for attention that we do not know, and on a CPU, none."""
    if model.device.type != "cuda" or model.config._attn_implementation != IMPLEMENTATION:
        return None
    is_captured = can_be_captured(model)
    return FixedMemory(model, lambda: Graphs(model.device) if is_captured else run_plainly)
