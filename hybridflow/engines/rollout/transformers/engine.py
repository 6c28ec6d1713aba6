"""The rollout engine that runs wherever transformers runs."""

from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel

from hybridflow.batch import Batch, Ragged
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.responses import checked_prompts, response_batch
from hybridflow.engines.rollout.sampling import row_keys, uniform_draws
from hybridflow.engines.rollout.slots import write_shards
from hybridflow.engines.rollout.transformers.attention import use_decoding_attention
from hybridflow.engines.rollout.transformers.decode import decode
from hybridflow.errors import EngineError
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh

_CACHED_LAYERS = {"full_attention", "sliding_attention"}


class TransformersEngine:
    """A Hugging Face causal language model on one device; implements `RolloutEngine`.

    The slots are the model's own parameters, so a training engine that binds to them leaves one copy of the weights.
    Nothing is kept between two calls of `generate` but the weights, so there is nothing to put to sleep.
    """

    def __init__(self, model: PreTrainedModel, *, max_sequences: int, eos_token_ids: tuple[int, ...]) -> None:
        self.mesh = ParallelMesh({"data": 1})
        self._model = model.eval().requires_grad_(False)
        self._max_sequences = max_sequences
        self._eos_token_ids = eos_token_ids
        self._version = 0
        text = model.config.get_text_config().to_dict()
        self._limit_tokens: int = text.get("max_position_embeddings") or 1 << 30
        if foreign := set(text.get("layer_types") or ()) - _CACHED_LAYERS:
            raise EngineError(
                f"rollout.engine=transformers keeps keys and values; the model has layers of {sorted(foreign)}.",
                remedy="Use rollout.engine=vllm for this model.",
            )
        use_decoding_attention(model)

    def generate(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> Batch:
        """See `RolloutEngine.generate`; `max_sequences` rows at once, the rest wait."""
        ids = checked_prompts(prompts, max_response_tokens=max_response_tokens, limit_tokens=self._limit_tokens)
        keys = row_keys(seed, prompts.row("uid"), prompts.row("sample_index"))
        uniforms = uniform_draws(keys, max_response_tokens)
        ends = () if sampling.ignore_eos else self._eos_token_ids
        tokens, logprobs, truncated = [Ragged.from_rows([], torch.int64)], [Ragged.from_rows([], torch.float32)], []
        for start in range(0, len(prompts), self._max_sequences):
            stop = min(start + self._max_sequences, len(prompts))
            decoded = decode(self._model, ids.slice(start, stop), uniforms[start:stop], sampling, eos_token_ids=ends)
            lengths = decoded.lengths.cpu()
            tokens.append(Ragged.from_padded(decoded.tokens.cpu(), lengths))
            logprobs.append(Ragged.from_padded(decoded.logprobs.cpu(), lengths))
            truncated.append(decoded.truncated.cpu())
        return response_batch(
            Ragged.concat(tokens),
            Ragged.concat(logprobs),
            torch.cat([torch.zeros(0, dtype=torch.bool), *truncated]),
            version=self._version,
            sampling=sampling,
        )

    def weight_slots(self) -> Mapping[str, WeightShard]:
        """See `RolloutEngine.weight_slots`: the parameters themselves."""
        return {name: WeightShard.full(name, parameter.data) for name, parameter in self._model.named_parameters()}

    def load_weights(self, shards: Iterable[WeightShard]) -> None:
        """See `RolloutEngine.load_weights`."""
        write_shards(self.weight_slots(), shards)

    def weights_changed(self, *, version: int) -> None:
        """See `RolloutEngine.weights_changed`."""
        self._version = version

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`: gives a GPU's cached memory back; the weights stay, as others use them."""
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
