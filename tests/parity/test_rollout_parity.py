"""Both rollout engines against plain transformers, on one toy: the same answers, probabilities and weights.

One engine of each kind for the whole file, as vLLM takes seconds to start; what changes weights puts them back.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hybridflow.batch import Batch
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, RolloutKind, Sampling, Vllm
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.errors import EngineError, StaleWeightsError
from hybridflow.models.loading import load_causal_lm
from hybridflow.parallel.layout import WeightShard
from tests.oracles import sampling as oracle
from tests.oracles.training import response_logprobs, rows_of
from tests.unit.engines.rollout.rows import greedy_answers, prompt_rows, responses, same_prompt, write_slots

ENDS = (1, 9)
TOKENS = 16
GREEDY = Sampling(temperature=0.0)
TOLERANCE = 1e-4
"""float32 sums in another order; a wrong position, mask or weight moves log-probabilities by 1e-1."""

LONGEST = 200
"""Prompts of several blocks of vLLM's cache: less than a block is not kept for later."""

RARE = 3.9
"""Standard deviations of a chi-square statistic that 1 seed in 10,000 exceeds; the seeds are fixed."""


@dataclass(frozen=True)
class Pair:
    """A rollout engine, and the same model in plain transformers."""

    rollout: RolloutEngine
    plain: PreTrainedModel

    def generate(
        self, prompts: Batch, sampling: Sampling | None = None, *, tokens: int = TOKENS, seed: int = 0
    ) -> Batch:
        return prompts.join(
            self.rollout.generate(prompts, sampling or Sampling(), max_response_tokens=tokens, seed=seed)
        )

    def largest_difference(self, batch: Batch, temperature: float = 1.0) -> float:
        """Between the log-probabilities returned and those of a full forward pass of the plain model."""
        with torch.no_grad():
            return max(
                float((response_logprobs(self.plain, row, temperature)[0] - row["rollout_logprobs"]).abs().max())
                for row in rows_of(batch)
            )


def pair_of(kind: RolloutKind, directory: Path) -> Pair:
    if kind == RolloutKind.vllm and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    rollout = make_rollout_engine(
        Model(path=str(directory)),
        Rollout(engine=kind, max_sequences=96, vllm=Vllm(kv_cache_mb=64)),
        limit_tokens=LONGEST + TOKENS,
        eos_token_ids=ENDS,
        device=torch.device("cpu"),
    )
    return Pair(rollout, load_causal_lm(directory, dtype=torch.float32, device="cpu"))


@pytest.fixture(
    scope="module",
    params=[RolloutKind.transformers, pytest.param(RolloutKind.vllm, marks=pytest.mark.vllm)],
    ids=lambda kind: kind.name,
)
def pair(request, toy_dir) -> Pair:
    return pair_of(request.param, toy_dir("llama", max_position_embeddings=256))


@contextmanager
def other_weights(pair: Pair, seed: int) -> Iterator[None]:
    """Noise is added to every weight, in the slots and in the plain model; both get their own back afterwards."""
    slots, parameters = pair.rollout.weight_slots(), dict(pair.plain.named_parameters())
    generator, kept = torch.Generator().manual_seed(seed), {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            kept[name] = parameter.clone()
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            slots[name].tensor.copy_(parameter)
        yield
        for name, parameter in parameters.items():
            parameter.copy_(kept[name])
            slots[name].tensor.copy_(parameter)
    pair.rollout.pause()
    pair.rollout.resume(version=0)


def plain_shards(pair: Pair) -> list[WeightShard]:
    return [WeightShard.full(name, parameter.data) for name, parameter in pair.plain.named_parameters()]


def test_greedy_answers_are_those_of_transformers(pair):
    prompts = prompt_rows((5, 5, 2, 7, 1, 150))
    free = pair.generate(prompts, Sampling(temperature=0.0, ignore_eos=True))
    assert responses(free) == greedy_answers(pair.plain, prompts, tokens=TOKENS)
    assert free.row("truncated").all()
    assert pair.largest_difference(free) < TOLERANCE
    assert free.meta["temperature"] == 1.0


def test_a_response_ends_with_the_first_end_of_sequence(pair):
    prompts = prompt_rows([3] * 40)
    ended = pair.generate(prompts, GREEDY)
    answers = responses(ended)
    assert answers == greedy_answers(pair.plain, prompts, tokens=TOKENS, ends=ENDS)
    assert {answer[-1] for answer in answers} >= set(ENDS)
    assert ended.row("truncated").tolist() == [answer[-1] not in ENDS for answer in answers]
    assert 0 < int(ended.row("truncated").sum()) < 40


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward_pass(pair, temperature):
    batch = pair.generate(prompt_rows((5, 5, 2, 150, 1, 4), samples=4), Sampling(temperature=temperature))
    assert pair.largest_difference(batch, temperature) < TOLERANCE
    assert batch.meta["temperature"] == temperature
    assert len({tuple(answer) for answer in responses(batch)}) > 20


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=4), Sampling(top_p=0.6, top_k=20)]
)
def test_frequencies_and_logprobs_follow_the_restricted_distribution(pair, sampling):
    draws = 3000
    prompts = same_prompt(draws)
    batch = pair.generate(prompts, sampling, tokens=1)
    with torch.no_grad():
        logits = pair.plain(prompts.tokens("prompt_ids").row(0)[None]).logits[0, -1]
    expected = torch.tensor(
        oracle.distribution(
            logits.tolist(), temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        )
    )
    tokens = batch.tokens("response_ids").values
    assert torch.allclose(batch.tokens("rollout_logprobs").values, expected.log()[tokens], atol=TOLERANCE)
    common = expected > 5 / draws
    counts, wanted = torch.bincount(tokens, minlength=64)[common].float(), draws * expected[common]
    freedom = max(1, int(common.sum()) - 1)
    assert float(((counts - wanted) ** 2 / wanted).sum() - freedom) < RARE * (2 * freedom) ** 0.5


def test_the_same_seed_samples_the_same_and_another_does_not(pair):
    prompts = prompt_rows(samples=4)
    first, again, other = (responses(pair.generate(prompts, seed=seed)) for seed in (3, 3, 4))
    assert first == again
    assert sum(a != b for a, b in zip(first, other, strict=True)) > 20


def test_samples_do_not_depend_on_the_rest_of_the_batch_or_its_order(pair):
    prompts = prompt_rows(samples=4)
    whole = responses(pair.generate(prompts))
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0)).tolist()
    assert responses(pair.generate(prompts.select(order))) == [whole[row] for row in order]
    parts = [responses(pair.generate(part)) for part in prompts.split([1, 9, 14])]
    assert [answer for part in parts for answer in part] == whole


def test_more_rows_than_run_at_once_keep_their_order(pair):
    prompts = prompt_rows([3] * 50, samples=3)
    batch = pair.generate(prompts, tokens=4)
    assert pair.largest_difference(batch) < TOLERANCE


def test_written_slots_are_the_weights_that_answer(pair):
    prompts = prompt_rows((5, LONGEST))
    before = responses(pair.generate(prompts, GREEDY))
    with other_weights(pair, seed=1):
        pair.rollout.pause()
        pair.rollout.resume(version=7)
        batch = pair.generate(prompts, GREEDY)
        assert responses(batch) == greedy_answers(pair.plain, prompts, tokens=TOKENS, ends=ENDS) != before
        assert pair.largest_difference(batch) < TOLERANCE
        assert batch.row("weight_version").tolist() == [7, 7]
    assert responses(pair.generate(prompts, GREEDY)) == before


def test_slots_have_the_names_and_values_of_the_checkpoint(pair):
    slots = pair.rollout.weight_slots()
    expected = dict(pair.plain.named_parameters())
    assert set(slots) == set(expected)
    assert all(torch.equal(slots[name].tensor, expected[name]) for name in slots)
    assert not any(slot.tensor.requires_grad for slot in slots.values())


def test_a_prompt_too_long_is_refused(pair):
    with pytest.raises(EngineError, match=rf"a response of {TOKENS}.*data\.max_prompt_tokens"):
        pair.generate(prompt_rows([256]))


def test_no_rows_give_no_rows(pair):
    none = pair.generate(prompt_rows().slice(0, 0))
    assert len(none) == 0 and none.tokens("response_ids").values.dtype is torch.int64


def test_the_processes_random_state_and_threads_are_left_alone(pair):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    pair.generate(prompt_rows())
    assert torch.equal(torch.get_rng_state(), before)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_it_answers_after_a_sleep_that_kept_its_weights_as_before(pair):
    before = responses(pair.generate(prompt_rows()))
    released = pair.rollout.sleep(kept=pair.rollout.weight_slots().values())
    assert released.weight_bytes == 0
    with pytest.raises(EngineError, match=r"is asleep.*wake\(\)"):
        pair.generate(prompt_rows())
    pair.rollout.wake()
    assert responses(pair.generate(prompt_rows())) == before


def test_weights_given_back_in_a_sleep_are_not_used_before_they_are_written(pair):
    before = responses(pair.generate(prompt_rows()))
    released = pair.rollout.sleep()
    assert released.weight_bytes > 0.9 * sum(slot.tensor.nbytes for slot in pair.rollout.weight_slots().values())
    pair.rollout.wake()
    with pytest.raises(StaleWeightsError, match="freed.*resume"):
        pair.generate(prompt_rows())
    write_slots(pair.rollout, plain_shards(pair))
    with pytest.raises(StaleWeightsError, match="being written"):
        pair.generate(prompt_rows())
    pair.rollout.resume(version=3)
    assert responses(pair.generate(prompt_rows())) == before


def test_a_kept_weight_survives_a_sleep_that_gives_back_the_others(pair):
    slots = pair.rollout.weight_slots()
    kept = "model.layers.1.self_attn.k_proj.weight"
    pair.rollout.sleep(kept=[slots[kept]])
    assert torch.equal(slots[kept].tensor, dict(pair.plain.named_parameters())[kept])
    assert not slots["model.layers.0.mlp.gate_proj.weight"].tensor.any()
    pair.rollout.wake()
    write_slots(pair.rollout, plain_shards(pair))
    pair.rollout.resume(version=0)
    assert pair.largest_difference(pair.generate(prompt_rows())) < TOLERANCE


def test_nothing_is_answered_while_weights_are_being_written(pair):
    pair.rollout.pause()
    with pytest.raises(StaleWeightsError, match="transfer"):
        pair.generate(prompt_rows())
    pair.rollout.resume(version=1)
    assert pair.generate(prompt_rows()).row("weight_version").tolist() == [1] * 6
