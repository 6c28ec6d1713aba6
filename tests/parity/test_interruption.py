"""Rows that come and go while others run, and weights that change in the middle of a response, in both engines.

T2, T3 and T7: interrupted with the same weights, interrupted with other weights, and prefixes across an update.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from hybridflow.batch import Batch
from hybridflow.batch.versions import token_versions
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, RolloutKind, Sampling, Vllm
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.errors import EngineError, StaleWeightsError
from tests.oracles.training import response_logprobs, rows_of
from tests.parity.test_rollout_parity import ENDS, LONGEST, TOKENS, Pair, other_weights, pair_of
from tests.unit.engines.rollout.rows import prompt_rows, responses

KINDS = [RolloutKind.transformers, pytest.param(RolloutKind.vllm, marks=pytest.mark.vllm)]
EXACT = 1e-5
"""float32: another order of sums; another token, weight or key moves log-probabilities by 1e-2 and more."""

PROMPTS = prompt_rows((5, 5, 2, 40, 1), samples=2)
SAMPLED = Sampling(temperature=1.0, top_k=20)
"""Unlikely tokens are left out: rounding may choose between two of them."""


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def pair(request, toy_dir) -> Pair:
    return pair_of(request.param, toy_dir("llama", max_position_embeddings=256))


def submit(engine: RolloutEngine, prompts: Batch, sampling: Sampling = SAMPLED, *, tokens: int = TOKENS) -> None:
    engine.submit(prompts, sampling, max_response_tokens=tokens, seed=0)


def steps(engine: RolloutEngine, count: int) -> list[Batch]:
    """What finishes within so many decoding steps."""
    return [engine.poll(max_tokens=1) for _ in range(count)]


def rest(engine: RolloutEngine) -> list[Batch]:
    found = []
    while engine.num_running:
        found.append(engine.poll())
        assert len(found[-1])
    return found


def ordered(prompts: Batch, found: Sequence[Batch]) -> Batch:
    """The prompts with the responses to each, which must be there once."""
    both = Batch.concat([batch for batch in found if len(batch)])
    names = list(zip(both.row("uid").tolist(), both.row("sample_index").tolist(), strict=True))
    expected = zip(prompts.row("uid").tolist(), prompts.row("sample_index").tolist(), strict=True)
    assert len(names) == len(set(names)) == len(prompts)
    return prompts.join(both.select([names.index(name) for name in expected]))


def assert_same(found: Batch, expected: Batch) -> None:
    assert responses(found) == responses(expected)
    assert found.row("truncated").tolist() == expected.row("truncated").tolist()
    gap = found.tokens("rollout_logprobs").values - expected.tokens("rollout_logprobs").values
    assert float(gap.abs().max()) < EXACT


def restart(engine: RolloutEngine, *, version: int = 0, keep_cache: bool = False) -> None:
    engine.pause(keep_cache=keep_cache)
    engine.resume(version=version)


@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(temperature=0.0, ignore_eos=True)], ids=["sampled", "greedy"])
def test_t2_interrupted_after_any_token_a_row_goes_on_as_if_it_were_not(pair, sampling):
    expected = pair.generate(PROMPTS, sampling)
    assert sampling.ignore_eos or len(set(map(len, responses(expected)))) > 3
    for count in range(TOKENS):
        submit(pair.rollout, PROMPTS, sampling)
        found = steps(pair.rollout, count)
        restart(pair.rollout)
        assert_same(ordered(PROMPTS, [*found, *rest(pair.rollout)]), expected)


def test_t2_interrupted_after_every_token(pair):
    submit(pair.rollout, PROMPTS)
    found = []
    while pair.rollout.num_running:
        found += steps(pair.rollout, 1)
        restart(pair.rollout)
    assert_same(ordered(PROMPTS, found), pair.generate(PROMPTS, SAMPLED))


def test_t2_with_its_cache_a_row_goes_on_bit_by_bit(pair):
    expected = pair.generate(PROMPTS, SAMPLED)
    for count in (0, 1, 7, 15):
        submit(pair.rollout, PROMPTS)
        found = steps(pair.rollout, count)
        restart(pair.rollout, keep_cache=True)
        batch = ordered(PROMPTS, [*found, *rest(pair.rollout)])
        assert_same(batch, expected)
        assert torch.equal(batch.tokens("rollout_logprobs").values, expected.tokens("rollout_logprobs").values)


def test_t2_a_sleep_interrupts_rows_that_go_on_afterwards(pair):
    submit(pair.rollout, PROMPTS)
    found = steps(pair.rollout, 5)
    pair.rollout.sleep(kept=pair.rollout.weight_slots().values())
    with pytest.raises(EngineError, match=r"asleep.*wake\(\)"):
        pair.rollout.poll()
    pair.rollout.wake()
    assert_same(ordered(PROMPTS, [*found, *rest(pair.rollout)]), pair.generate(PROMPTS, SAMPLED))


def exact_logprobs(pair: Pair, batch: Batch) -> list[torch.Tensor]:
    with torch.no_grad():
        return [response_logprobs(pair.plain, row, 1.0)[0] for row in rows_of(batch)]


@pytest.mark.parametrize("counts", [(1, 9), (6, 3)])
def test_t3_each_token_has_the_probability_of_the_weights_that_its_version_names(pair, counts):
    free = Sampling(ignore_eos=True)
    restart(pair.rollout)
    submit(pair.rollout, PROMPTS, free)
    steps(pair.rollout, counts[0])
    pair.rollout.pause()
    with other_weights(pair, seed=1):
        pair.rollout.resume(version=7)
        steps(pair.rollout, counts[1])
    pair.rollout.pause()  # no token is drawn between the two changes
    with other_weights(pair, seed=2):
        pair.rollout.resume(version=9)
        batch = ordered(PROMPTS, rest(pair.rollout))
        exact = {9: exact_logprobs(pair, batch)}
    with other_weights(pair, seed=1):
        exact[7] = exact_logprobs(pair, batch)
    exact[0] = exact_logprobs(pair, batch)

    first, second = counts[0], counts[0] + counts[1]
    runs = [row.tolist() for row in batch.tokens("version_runs").rows()]
    assert runs == [[[0, 0], [7, first], [9, second]]] * len(PROMPTS)
    assert batch.row("weight_version").tolist() == [0] * len(PROMPTS)
    lengths = batch.tokens("response_ids").lengths
    versions = token_versions(batch.tokens("version_runs"), lengths).rows()
    for row, logprobs in enumerate(batch.tokens("rollout_logprobs").rows()):
        expected = torch.stack([exact[int(version)][row][place] for place, version in enumerate(versions[row])])
        assert float((logprobs - expected).abs().max()) < EXACT
        for version in (7, 9):  # the versions differ by more than rounding
            assert float((exact[version][row] - exact[0][row]).abs().max()) > 0.1


def test_t3_rows_that_keep_their_cache_differ_from_those_that_do_not(pair):
    free, found = Sampling(ignore_eos=True), {}
    for keep_cache in (False, True):
        submit(pair.rollout, PROMPTS, free)
        steps(pair.rollout, 4)
        pair.rollout.pause(keep_cache=keep_cache)
        with other_weights(pair, seed=1):
            pair.rollout.resume(version=1)
            found[keep_cache] = ordered(PROMPTS, rest(pair.rollout))
    runs = [batch.tokens("version_runs").values for batch in found.values()]
    assert torch.equal(*runs) and runs[0].tolist() == [[0, 0], [1, 4]] * len(PROMPTS)
    at = found[True].tokens("response_ids").offsets[:-1] + 4  # the first token of the new weights
    gaps = [batch.tokens("rollout_logprobs").values[at] for batch in found.values()]
    assert float((gaps[0] - gaps[1]).abs().max()) > 0.01


@pytest.mark.parametrize("keep_cache", [False, True])
def test_t7_a_prefix_of_earlier_weights_is_not_used_after_an_update(pair, tmp_path, toy_dir, keep_cache):
    """Also while a row with that prefix, and its old keys and values, still runs. Prompts fill several blocks."""
    kind = RolloutKind.vllm if type(pair.rollout).__name__ == "VllmEngine" else RolloutKind.transformers
    prompts, free = prompt_rows((LONGEST, 150)), Sampling(ignore_eos=True)
    later = prompts.with_columns(rows={"uid": prompts.row("uid") + 10})
    pair.generate(prompts, free)
    submit(pair.rollout, prompts, free)
    steps(pair.rollout, 3)
    pair.rollout.pause(keep_cache=keep_cache)
    with other_weights(pair, seed=4):
        pair.rollout.resume(version=5)
        found = pair.generate(later, free)
        assert found.tokens("version_runs").values.tolist() == [[5, 0], [5, 0]]
        save_toy(pair, toy_dir("llama", max_position_embeddings=256), tmp_path)
        fresh = pair_of(kind, tmp_path).generate(later, free)
        assert_same(found, fresh)
        rest(pair.rollout)


def save_toy(pair: Pair, source: Path, target: Path) -> None:
    """The directory of a model with the weights that it has now."""
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    save_model(pair.plain, str(target / "model.safetensors"), metadata={"format": "pt"})


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def narrow(request, toy_dir) -> RolloutEngine:
    """An engine with fewer places than rows."""
    return make_rollout_engine(
        Model(path=str(toy_dir("llama", max_position_embeddings=256))),
        Rollout(engine=request.param, max_sequences=5, vllm=Vllm(kv_cache_mb=64)),
        limit_tokens=LONGEST + TOKENS,
        eos_token_ids=ENDS,
        device=torch.device("cpu"),
    )


class Schedule:
    """Random calls of an engine, until all rows of `prompts` have finished."""

    def __init__(self, engine: RolloutEngine, prompts: Batch, seed: int) -> None:
        self.engine, self.prompts = engine, prompts
        self.choice = random.Random(seed)
        self.expected = engine.generate(prompts, SAMPLED, max_response_tokens=TOKENS, seed=0)
        self.waiting = list(range(len(prompts)))
        self.choice.shuffle(self.waiting)
        self.found: list[Batch] = []

    def run(self) -> None:
        actions = [self.submit, self.submit, self.poll, self.poll, self.poll, self.pause, self.sleep, self.generate]
        while self.waiting or self.engine.num_running:
            self.choice.choice([*actions, self.withdraw])(self.choice.randint(1, 4))

    def submit(self, count: int) -> None:
        if self.waiting:
            submit(self.engine, self.prompts.select(self.waiting[:count]))
            del self.waiting[:count]

    def poll(self, count: int) -> None:
        self.found.append(self.engine.poll(max_tokens=count))

    def pause(self, count: int) -> None:
        restart(self.engine, keep_cache=count > 2)

    def sleep(self, count: int) -> None:
        self.engine.sleep(kept=self.engine.weight_slots().values())
        self.engine.wake()

    def generate(self, count: int) -> None:
        rows = [self.choice.randrange(len(self.prompts)) for _ in range(count)]
        sampling = self.choice.choice([SAMPLED, Sampling(temperature=0.0)])
        batch = self.engine.generate(self.prompts.select(rows), sampling, max_response_tokens=TOKENS, seed=0)
        if sampling == SAMPLED:
            assert_same(batch, self.expected.select(rows))

    def withdraw(self, count: int) -> None:
        """Rows that are withdrawn are submitted again."""
        if count == 1:
            partial = self.engine.withdraw()
            names = zip(partial.row("uid").tolist(), partial.row("sample_index").tolist(), strict=True)
            rows = [2 * uid + sample for uid, sample in names]
            for row, tokens in zip(rows, responses(partial), strict=True):
                assert responses(self.expected)[row][: len(tokens)] == tokens
            self.waiting += rows


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_rows_that_come_and_go_at_random_draw_what_they_draw_together(narrow, seed):
    prompts = prompt_rows(random.Random(seed).choices(range(1, 60), k=9), samples=2, seed=seed)
    schedule = Schedule(narrow, prompts, seed)
    schedule.run()
    batch = ordered(prompts, schedule.found)
    assert_same(batch, prompts.join(schedule.expected))
    assert batch.tokens("version_runs").values.tolist() == [[0, 0]] * len(prompts)


def test_poll_returns_at_the_first_step_in_which_a_row_finishes(pair):
    expected = pair.generate(PROMPTS, SAMPLED)
    shortest = min(map(len, responses(expected)))
    submit(pair.rollout, PROMPTS)
    assert sum(len(batch) for batch in steps(pair.rollout, shortest - 1)) == 0
    assert len(pair.rollout.poll()) == sum(len(row) == shortest for row in responses(expected))
    assert pair.rollout.num_running == len(PROMPTS) - sum(len(row) == shortest for row in responses(expected))
    rest(pair.rollout)
    assert len(pair.rollout.poll()) == 0


def test_withdrawn_rows_return_their_tokens_so_far_and_leave_the_others(pair):
    expected = pair.generate(PROMPTS, Sampling(ignore_eos=True))
    submit(pair.rollout, PROMPTS, Sampling(ignore_eos=True))
    steps(pair.rollout, 6)
    chosen = PROMPTS.select([1, 4, 7])
    partial = pair.rollout.withdraw(chosen)
    assert ordered(chosen, [partial]).tokens("response_ids").rows()[0].tolist() == responses(expected)[1][:6]
    assert partial.row("truncated").all() and partial.tokens("response_ids").lengths.tolist() == [6, 6, 6]
    pair.rollout.pause()
    assert len(pair.rollout.withdraw(PROMPTS.select([0]))) == 1
    pair.rollout.resume(version=0)
    left = [2, 3, 5, 6, 8, 9]
    assert_same(ordered(PROMPTS.select(left), rest(pair.rollout)), PROMPTS.select(left).join(expected.select(left)))


def test_misuse_is_refused_in_words(pair):
    engine = pair.rollout
    submit(engine, PROMPTS)
    with pytest.raises(EngineError, match=r"uid 1 and sample_index 0 is submitted twice") as caught:
        submit(engine, PROMPTS.select([2]))
    assert "Poll or withdraw" in caught.value.remedy
    with pytest.raises(EngineError, match="while others run with"):
        submit(engine, PROMPTS.with_columns(rows={"uid": PROMPTS.row("uid") + 90}), Sampling(temperature=0.5))
    with pytest.raises(EngineError, match="cannot sample 0 tokens"):
        engine.poll(max_tokens=0)
    with pytest.raises(EngineError, match="uid 70 and sample_index 0 is not running"):
        engine.withdraw(PROMPTS.with_columns(rows={"uid": PROMPTS.row("uid") + 70}))
    with pytest.raises(EngineError, match="not paused") as caught:
        engine.resume(version=1)
    assert "pause()" in caught.value.remedy
    engine.pause()
    for act in (engine.poll, lambda: submit(engine, PROMPTS), lambda: pair.generate(PROMPTS)):
        with pytest.raises(StaleWeightsError, match="being written"):
            act()
    engine.resume(version=0)
    assert len(engine.withdraw()) == len(PROMPTS) and engine.num_running == 0
    with pytest.raises(EngineError, match="submitted twice"):
        submit(engine, PROMPTS.select([2, 2]))
    assert engine.num_running == 0 and len(engine.withdraw()) == 0


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def speller(request, toy_dir, tmp_path_factory) -> RolloutEngine:
    """An engine whose only tokens are an end and five bytes, two of which are a character together."""
    alphabet = [ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(number)) for number in (97, 98)]
    assert [pieces[0][0] for pieces in alphabet] == ["a", "b"]
    first, second = ByteLevel(add_prefix_space=False).pre_tokenize_str("\u00e9")[0][0]
    names = ["<end>", "<pad>", first, second, "a", "b", "\u0120"]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return make_rollout_engine(
        Model(path=str(toy_dir("llama", vocab_size=len(names), max_position_embeddings=256, initializer_range=0.02))),
        Rollout(engine=request.param, max_sequences=64, vllm=Vllm(kv_cache_mb=64)),
        limit_tokens=64,
        eos_token_ids=(0,),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer),
        device=torch.device("cpu"),
    )


def test_stop_strings_end_a_response_across_interruptions_also_inside_a_character(speller):
    prompts = prompt_rows((3, 1, 4), samples=12)
    values = prompts.tokens("prompt_ids")
    prompts = prompts.with_columns(tokens={"prompt_ids": values.like(values.values % 5 + 2)})
    sampling = Sampling(stop=["\u00e9", "bab"], ignore_eos=True)
    expected = prompts.join(speller.generate(prompts, sampling, max_response_tokens=TOKENS, seed=0))
    ends = [row[-2:] == [2, 3] for row in responses(expected)]
    assert sum(ends) > 6 and len(set(map(len, responses(expected)))) > 4
    for count in range(1, 8):
        submit(speller, prompts, sampling)
        found = steps(speller, count)
        restart(speller)
        assert_same(ordered(prompts, [*found, *rest(speller)]), expected)
