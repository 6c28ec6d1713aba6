"""A rollout engine that runs wherever transformers runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.batch import Ragged
from hybridflow.engines.rollout.memory import Released, WeightBuffer
from hybridflow.engines.rollout.requests import Request, Responses
from hybridflow.engines.rollout.shell import RolloutShell
from hybridflow.engines.rollout.transformers.attention import FULL, IMPLEMENTATION, SLIDING, use_decoding_attention
from hybridflow.engines.rollout.transformers.decode import Decoding
from hybridflow.engines.rollout.transformers.fixed import FixedMemory
from hybridflow.engines.rollout.transformers.graphs import Graphs, can_be_captured, run_eagerly
from hybridflow.errors import EngineError
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh


@dataclass
class _Waiting:
    """Requests that will start together."""

    requests: list[Request]
    needs_all_places: bool
    """They start once no other request runs: those made together with them have finished, as there were too many to
    run at once. Otherwise they start as soon as there are enough places."""


class TransformersEngine(RolloutShell):
    """A Hugging Face causal language model on one device; implements `RolloutEngine`.

    The slots are the model's own parameters (experts one by one), so a training engine that binds to them shares its
    weights. Rows join those that run as soon as there are places (`max_sequences`); on a GPU, with a `FixedMemory`,
    they wait until all of those have finished, and then start together. While no row runs, only the weights are kept
    on a CPU, and keys and values of rows that others may continue; on a GPU, memory for keys and values, and CUDA
    graphs are kept as well, until the engine sleeps.
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
        self._waiting: list[_Waiting] = []
        self._decodings: list[Decoding] = []
        """One for each sampling setting of the requests that run."""
        self._finished_here: list[Responses] = []
        use_decoding_attention(model)
        self._memory = _fixed_memory(model)
        if foreign := set(text.get("layer_types") or ()) - {FULL, SLIDING}:
            raise EngineError(
                f"rollout.engine=transformers supports layers with a key-value cache; the model has {sorted(foreign)}.",
                remedy="Use rollout.engine=vllm for this model.",
            )

    def pause(self, *, keep_cache: bool = False) -> None:
        """See `RolloutEngine.pause`: also forgets finished rows, which no row may continue with other weights."""
        super().pause(keep_cache=keep_cache)
        for decoding in self._decodings:
            decoding.forget()
        self._drop_empty()

    def sleep(self, kept: Iterable[WeightShard] = ()) -> Released:
        """See `RolloutEngine.sleep`: on a GPU all weights stay, and cached memory is freed."""
        released = super().sleep(kept)
        if self._model.device.type == "cuda":
            self._memory = None  # frees the cache and the graphs before the new memory is made
            self._memory = _fixed_memory(self._model)
            torch.cuda.empty_cache()
        return released

    def _start(self, requests: Sequence[Request]) -> None:
        """Requests that were made together also start together, `max_sequences` at a time.

        Requests that continue a conversation whose keys and values are kept do so at once.
        """
        for decoding in [each for each in self._decodings if requests and each.sampling == requests[0].sampling]:
            requests = decoding.resume(requests)
            if requests and not self._waiting and self._num_decoded + len(requests) <= self._max_sequences:
                self._finished_here += decoding.take()
                requests = [] if decoding.seat(requests, max_rows=self._max_sequences) else requests
        for start in range(0, len(requests), self._max_sequences):
            part = list(requests[start : start + self._max_sequences])
            self._waiting.append(_Waiting(part, needs_all_places=start > 0))

    def _step(self) -> int:
        num_finished = 0
        for decoding in self._decodings:
            if decoding.num_unfinished:
                decoding.advance()
                num_finished += decoding.check()
        self._drop_empty()
        while self._waiting and self._has_places(self._waiting[0]):
            requests = self._next_requests()
            try:
                new = self._decoding(requests)
            except BaseException:  # such as an interruption while their prompts are read
                self._waiting.insert(0, _Waiting(requests, needs_all_places=False))
                raise
            num_finished += new.check()
            others = [each for each in self._decodings if each.sampling == new.sampling]
            if others and new.num_unfinished:
                self._finished_here += [*others[0].take(), *new.take()]
                others[0].join(new, max_rows=self._max_sequences)
            elif others:  # nothing would advance it, so what it keeps would never be dropped
                self._finished_here += new.take()
            else:
                self._decodings.append(new)
            self._drop_empty()
        return num_finished

    def _decoding(self, requests: Sequence[Request]) -> Decoding:
        return Decoding(
            self._model,
            requests,
            eos_token_ids=self._eos_token_ids,
            memory=self._memory,
            tokenizer=self._tokenizer,
        )

    def _next_requests(self) -> list[Request]:
        """Takes the first requests that wait and those after them that have places: prompts are read together."""
        requests = list(self._waiting.pop(0).requests)
        while self._waiting and self._may_join(self._waiting[0], requests):
            requests += self._waiting.pop(0).requests
        return requests

    def _collect(self) -> list[Responses]:
        finished, self._finished_here = self._finished_here, []
        return finished + [responses for decoding in self._decodings for responses in decoding.take()]

    def _interrupt(self) -> None:
        """The requests of each `Decoding` start together again, before those that wait."""
        parts = []
        for decoding in self._decodings:
            requests = decoding.interrupt()
            self._finished_here += decoding.take()
            parts += [_Waiting(requests, needs_all_places=False)] if requests else []
        self._waiting[:0] = parts
        self._decodings.clear()

    def _so_far(self) -> Iterable[tuple[Request, int]]:
        yield from ((request, len(request.tokens)) for part in self._waiting for request in part.requests)
        for decoding in self._decodings:
            yield from decoding.so_far()

    def _removed(self, requests: Sequence[Request]) -> Responses:
        numbers, found = {request.number for request in requests}, []
        for decoding in self._decodings:
            if own := [request for request, _ in decoding.so_far() if request.number in numbers]:
                found.append(decoding.remove(own))
        for part in self._waiting:
            for request in [each for each in part.requests if each.number in numbers]:
                part.requests.remove(request)
                tokens, logprobs = Ragged.from_rows([request.tokens]), Ragged.from_rows([request.logprobs])
                found.append(Responses([request], tokens, logprobs, torch.ones(1, dtype=torch.bool)))
        self._waiting = [part for part in self._waiting if part.requests]
        self._drop_empty()
        return Responses.concat(found)

    def _may_join(self, part: "_Waiting", requests: Sequence[Request]) -> bool:
        """Whether those of `part` may start together with `requests`; in a fixed memory, all have as many tokens."""
        first, other = requests[0], part.requests[0]
        has_as_many = self._memory is None or len(first.tokens) == len(other.tokens)
        is_alike = first.sampling == other.sampling and has_as_many
        count = self._num_decoded + len(requests) + len(part.requests)
        return is_alike and not part.needs_all_places and count <= self._max_sequences

    def _has_places(self, part: "_Waiting") -> bool:
        """Whether requests may start. With a fixed memory they wait until those that run have finished."""
        if self._memory is not None or part.needs_all_places:
            return self._num_decoded == 0
        return self._num_decoded + len(part.requests) <= self._max_sequences

    @property
    def _num_decoded(self) -> int:
        """The number of requests whose tokens are being drawn."""
        return sum(decoding.num_unfinished for decoding in self._decodings)

    def _drop_empty(self) -> None:
        for decoding in [each for each in self._decodings if not each.num_unfinished]:
            self._finished_here += decoding.take()
            if not decoding.can_resume:
                self._decodings.remove(decoding)


def _fixed_memory(model: PreTrainedModel) -> FixedMemory | None:
    """Memory for decoding with CUDA graphs; None on a CPU, and for an attention implementation other than ours."""
    if model.device.type != "cuda" or model.config._attn_implementation != IMPLEMENTATION:
        return None
    is_captured = can_be_captured(model)
    return FixedMemory(model, lambda: Graphs(model.device) if is_captured else run_eagerly)
