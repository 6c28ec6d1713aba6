"""Conversations draw what plain generation draws: one turn bit for bit, later turns as if all was read again."""

import random

import pytest
import torch
from transformers import AutoTokenizer

from hybridflow.batch import Batch, Ragged
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, RolloutKind, Sampling, Vllm
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.engines.rollout.transformers.engine import TransformersEngine
from hybridflow.engines.rollout.transformers.prompts import PASS_TOKENS
from hybridflow.environments.interface import ModelInfo
from hybridflow.environments.play import EpisodePlayer
from hybridflow.workers.row_sampler import RowSampler
from tests.parity.test_interruption import EXACT, SAMPLED
from tests.toys import toy_model
from tests.unit.engines.rollout.rows import responses
from tests.unit.environments.players import FILE, prompts_of
from tests.unit.environments.test_play import same

KINDS = [RolloutKind.transformers, pytest.param(RolloutKind.vllm, marks=pytest.mark.vllm)]
ENDS = (1, 9)
STRIDE = 1 << 32
"""Between the sample indices of the turns of a conversation."""

TOKENS = 12
MOST_TOKENS = TOKENS + 4


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def engine(request, toy_dir) -> RolloutEngine:
    """An engine with fewer places than conversations."""
    return make_rollout_engine(
        Model(path=str(toy_dir("llama", max_position_embeddings=512))),
        Rollout(engine=request.param, max_sequences=5, vllm=Vllm(kv_cache_mb=64)),
        limit_tokens=512,
        eos_token_ids=ENDS,
        device=torch.device("cpu"),
    )


class Conversations:
    """Conversations that take turns at random, while the engine is interrupted and generates other rows."""

    def __init__(self, engine: RolloutEngine, seed: int, *, count: int = 9, turns: int = 4, longest: int = 60) -> None:
        self.engine, self.choice, self.turns, self.longest = engine, random.Random(seed), turns, longest
        self.sampling = SAMPLED
        self.prompts = [self._tokens(self.choice.randint(1, 40)) for _ in range(count)]
        self.done = [0] * count
        self.ready = list(range(count))
        self.asked: dict[tuple[int, int], list[int]] = {}
        self.limits: dict[tuple[int, int], int] = {}
        self.answers: dict[tuple[int, int], tuple[list[int], list[float]]] = {}

    def _tokens(self, number: int) -> list[int]:
        return [self.choice.randrange(10, 60) for _ in range(number)]

    def run(self, *others) -> None:
        """Until all turns are done; `others` are further actions, from which one is chosen now and then."""
        while self.ready or self.engine.num_running:
            self.choice.choice([self.ask, self.ask, self.poll, self.poll, self.poll, *others])()

    def ask(self) -> None:
        self.choice.shuffle(self.ready)
        count, limit = self.choice.choice([2, 5]), self.choice.choice([TOKENS, MOST_TOKENS])
        chosen, self.ready = self.ready[:count], self.ready[count:]
        if chosen:
            names = [(row // 2, row % 2 + self.done[row] * STRIDE) for row in chosen]
            self.asked |= {name: list(self.prompts[row]) for name, row in zip(names, chosen, strict=True)}
            self.limits |= dict.fromkeys(names, limit)
            rows = batch_of(names, [self.prompts[row] for row in chosen])
            self.engine.submit(rows, self.sampling, max_response_tokens=limit, seed=0)

    def poll(self) -> None:
        found = self.engine.poll(max_tokens=self.choice.randint(1, 4))
        ids, logprobs = found.tokens("response_ids").rows(), found.tokens("rollout_logprobs").rows()
        for index in range(len(found)):
            uid, sample = int(found.row("uid")[index]), int(found.row("sample_index")[index])
            self.answers[uid, sample] = ids[index].tolist(), logprobs[index].tolist()
            row = 2 * uid + sample % STRIDE
            self.done[row] += 1
            self.prompts[row] += ids[index].tolist() + self._tokens(self.choice.randint(1, self.longest))
            if self.done[row] < self.turns:
                self.ready.append(row)

    def assert_as_if_read_again(self) -> None:
        names = [*self.answers]
        prompts = batch_of(names, [self.asked[name] for name in names])
        expected = self.engine.generate(prompts, self.sampling, max_response_tokens=MOST_TOKENS, seed=0)
        assert len(names) == len(self.prompts) * self.turns
        for index, name in enumerate(names):
            ids, logprobs = self.answers[name]
            limit = self.limits[name]
            assert ids == expected.tokens("response_ids").row(index).tolist()[:limit]
            gap = torch.tensor(logprobs) - expected.tokens("rollout_logprobs").row(index)[:limit]
            assert float(gap.abs().max()) < EXACT


def batch_of(names: list[tuple[int, int]], prompts: list[list[int]]) -> Batch:
    uids, samples = torch.tensor(names).T
    ids = Ragged.from_rows(prompts, torch.int64)
    rows = {"uid": uids.clone(), "sample_index": samples.clone(), "may_continue": torch.ones_like(uids) > 0}
    return Batch.of(rows=rows, tokens={"prompt_ids": ids})


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_turns_draw_what_they_draw_if_the_conversation_is_read_again(engine, seed):
    """Observations have 1 to 60 tokens, and there are more conversations than places."""
    conversations = Conversations(engine, seed)

    def interrupt() -> None:
        engine.pause(keep_cache=seed % 2 == 0)
        engine.resume(version=0)

    def generate() -> None:
        rows = batch_of([(70, 0), (71, 0)], [[5, 6], [7]])
        engine.generate(rows, Sampling(temperature=0.0), max_response_tokens=3, seed=0)

    conversations.run(*([interrupt] if seed > 1 else []), generate)
    conversations.assert_as_if_read_again()


def test_an_environment_of_one_turn_is_plain_generation_bit_for_bit(engine, toy_dir):
    """With fewer places than rows."""
    tokenizer = AutoTokenizer.from_pretrained(toy_dir("llama"))
    prompts = prompts_of(tokenizer, ["12+34=", "7+8=", "guess:"], samples=3)
    config = EnvironmentSettings(name=f"{FILE}:Once", max_turns=1, processes=0)
    player = EpisodePlayer(config, ModelInfo(tokenizer, 40, TOKENS, max_turns=1), ENDS)
    found = player.play(prompts, RowSampler(engine, SAMPLED, 3, TOKENS), seed=3)
    plain = engine.generate(prompts, SAMPLED, max_response_tokens=TOKENS, seed=3)
    assert len({*map(tuple, responses(plain))}) > 6
    same(found.only(plain.columns), plain)


@pytest.mark.parametrize(("architecture", "settings"), [("llama", {}), ("mistral", {"sliding_window": 7})])
def test_what_was_read_is_not_read_again(architecture, settings):
    model = toy_model(architecture, max_position_embeddings=512, **settings)
    conversations = Conversations(TransformersEngine(model, max_sequences=16, eos_token_ids=ENDS), seed=3)
    shapes: list[torch.Size] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    conversations.run()
    hook.remove()
    read = sum(rows * tokens for rows, tokens in shapes if tokens > 1)
    assert read < 0.5 * sum(len(ids) for ids in conversations.asked.values())
    conversations.assert_as_if_read_again()


@pytest.mark.parametrize(("architecture", "attention"), [("qwen2", "eager"), ("stablelm", "sdpa")])
def test_a_model_whose_attention_does_not_continue_reads_conversations_again(architecture, attention):
    """Nothing rests: its rows would be decoded in vain."""
    model = toy_model(architecture, max_position_embeddings=512)
    model.set_attn_implementation(attention)
    engine = TransformersEngine(model, max_sequences=16, eos_token_ids=ENDS)
    conversations = Conversations(engine, seed=3)
    rested: list[bool] = []
    play = conversations.poll
    conversations.poll = lambda: (play(), rested.extend(each.can_resume for each in engine._decodings))
    conversations.run()
    assert rested and not any(rested)
    conversations.assert_as_if_read_again()


def test_a_conversation_is_withdrawn_before_its_new_tokens_are_read():
    engine = TransformersEngine(toy_model("llama"), max_sequences=4, eos_token_ids=())
    names, prompts = [(0, 0), (1, 0)], [[11, 12, 13], [14, 15]]
    engine.submit(batch_of(names, prompts), Sampling(), max_response_tokens=4, seed=0)
    replies = engine.poll().tokens("response_ids").rows()
    following = [[*prompt, *reply.tolist(), 20, 21] for prompt, reply in zip(prompts, replies, strict=True)]
    rows = batch_of([(0, STRIDE), (1, STRIDE)], following)
    engine.submit(rows, Sampling(), max_response_tokens=4, seed=0)
    assert len(engine.withdraw(rows.select(torch.tensor([0]))).tokens("response_ids").values) == 0
    found = engine.poll()
    expected = engine.generate(rows, Sampling(), max_response_tokens=4, seed=0)
    assert found.tokens("response_ids").row(0).tolist() == expected.tokens("response_ids").row(1).tolist()


def test_stop_strings_are_searched_in_each_reply_alone(toy_dir):
    model, tokenizer = toy_model("llama", max_position_embeddings=512), AutoTokenizer.from_pretrained(toy_dir())
    engine = TransformersEngine(model, max_sequences=16, eos_token_ids=ENDS, tokenizer=tokenizer)
    conversations = Conversations(engine, seed=5, longest=8)
    conversations.sampling = Sampling(temperature=1.0, top_k=20, stop=("1", "+"))
    conversations.run()
    conversations.assert_as_if_read_again()


def test_after_new_weights_nothing_of_the_earlier_ones_is_used():
    model = toy_model("llama")
    engine = TransformersEngine(model, max_sequences=4, eos_token_ids=())
    engine.submit(batch_of([(0, 0)], [[11, 12, 13]]), Sampling(), max_response_tokens=4, seed=0)
    reply = engine.poll().tokens("response_ids").row(0).tolist()
    engine.pause(keep_cache=True)
    with torch.no_grad():
        for slot in engine.weight_slots().values():
            slot.tensor.mul_(1.3)
    engine.resume(version=1)
    following = batch_of([(0, STRIDE)], [[11, 12, 13, *reply, 20]])
    engine.submit(following, Sampling(), max_response_tokens=4, seed=0)
    found = engine.poll()
    expected = engine.generate(following, Sampling(), max_response_tokens=4, seed=0)
    assert torch.equal(found.tokens("response_ids").values, expected.tokens("response_ids").values)
    gap = found.tokens("rollout_logprobs").values - expected.tokens("rollout_logprobs").values
    assert float(gap.abs().max()) < EXACT


def test_a_row_that_ran_while_weights_changed_is_not_continued():
    model = toy_model("llama")
    engine = TransformersEngine(model, max_sequences=4, eos_token_ids=())
    engine.submit(batch_of([(0, 0)], [[11, 12, 13]]), Sampling(), max_response_tokens=8, seed=0)
    engine.poll(max_tokens=3)
    engine.pause(keep_cache=True)
    with torch.no_grad():
        for slot in engine.weight_slots().values():
            slot.tensor.mul_(1.3)
    engine.resume(version=1)
    reply = engine.poll().tokens("response_ids").row(0).tolist()
    following = batch_of([(0, STRIDE)], [[11, 12, 13, *reply, 20]])
    engine.submit(following, Sampling(), max_response_tokens=8, seed=0)
    found, expected = engine.poll(), engine.generate(following, Sampling(), max_response_tokens=8, seed=0)
    assert torch.equal(found.tokens("response_ids").values, expected.tokens("response_ids").values)


@pytest.mark.parametrize(("length", "passes"), [(40, 1), (PASS_TOKENS["cpu"] + 1, 2)])
def test_a_short_prompt_is_read_with_the_tokens_of_the_rows_that_run(length, passes):
    model = toy_model("llama", max_position_embeddings=512)
    engine = TransformersEngine(model, max_sequences=4, eos_token_ids=())
    engine.submit(batch_of([(0, 0), (1, 0)], [[11, 12], [13]]), Sampling(), max_response_tokens=20, seed=0)
    engine.submit(batch_of([(2, 0)], [[11, 12, 14]]), Sampling(), max_response_tokens=3, seed=0)
    engine.withdraw(batch_of([(0, 0)], [[11, 12]]))  # leaves a place
    new = batch_of([(3, 0)], [[20 + number % 30 for number in range(length)]])
    engine.submit(new, Sampling(), max_response_tokens=6, seed=0)
    num_passes: list[None] = []
    hook = model.register_forward_pre_hook(lambda *_: num_passes.append(None))
    engine.poll(max_tokens=1)
    hook.remove()
    assert len(num_passes) == passes
    replies = {}
    while engine.num_running:
        found = engine.poll()
        replies |= dict(zip(found.row("uid").tolist(), found.tokens("response_ids").rows(), strict=True))
    expected = engine.generate(new, Sampling(), max_response_tokens=6, seed=0)
    assert replies[3].tolist() == expected.tokens("response_ids").values.tolist()


def test_replies_of_one_token_keep_no_more_rows_than_there_are_places():
    engine = TransformersEngine(toy_model("llama"), max_sequences=2, eos_token_ids=())
    for uid in range(5):
        rows = batch_of([(uid, 0)], [[11, 12]])
        engine.submit(rows, Sampling(), max_response_tokens=1, seed=0)
        assert len(engine.poll()) == 1
    assert len(engine._decodings) == 1


def test_a_finished_row_keeps_its_place_no_longer_than_reading_it_again_would_cost():
    engine = TransformersEngine(toy_model("llama"), max_sequences=4, eos_token_ids=())
    engine.submit(batch_of([(0, 0)], [[11, 12]]), Sampling(), max_response_tokens=3, seed=0)
    engine.submit(batch_of([(1, 0)], [[11, 12]]), Sampling(), max_response_tokens=20, seed=0)
    assert len(engine.poll()) == 1
    (decoding,) = engine._decodings
    engine.poll(max_tokens=5)
    assert decoding.can_resume
    engine.poll(max_tokens=1)
    assert not decoding.can_resume
    engine.poll()
    engine.pause()
    assert not engine._decodings
