"""Stop strings and stop tokens end the same responses in both rollout engines, on a small trained model."""

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, RolloutKind, Sampling, Vllm
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.models.loading import load_causal_lm
from hybridflow.models.tokenizers import load_tokenizer
from tests.unit.engines.rollout.rows import greedy_answers, responses

pytestmark = pytest.mark.skipif("HYBRIDFLOW_ASSETS" not in os.environ, reason="needs HYBRIDFLOW_ASSETS")
TOKENS = 60
NEVER = ["never in a story"]
STARTS = ("Once upon a time", "Lily and Tom", "The big dog", "One day, a bird")


@dataclass(frozen=True)
class Stories:
    """A rollout engine, its tokenizer, and the greedy answers of plain transformers without any end."""

    engine: RolloutEngine
    tokenizer: PreTrainedTokenizerBase
    prompts: Batch
    free: list[list[int]]

    def generate(self, sampling: Sampling) -> Batch:
        return self.engine.generate(self.prompts, sampling, max_response_tokens=TOKENS, seed=0)

    def text(self, row: int, answer: list[int]) -> str:
        """What a response adds to the text of its prompt."""
        prompt = self.prompts.tokens("prompt_ids").row(row).tolist()
        return str(self.tokenizer.decode(prompt + answer))[len(self.tokenizer.decode(prompt)) :]

    def cut(self, answers: list[list[int]], stop: list[str]) -> list[list[int]]:
        """Each answer up to the first token after which the whole text has a stop string."""
        found = []
        for row, answer in enumerate(answers):
            ends = [n for n in range(1, TOKENS) if any(s in self.text(row, answer[:n]) for s in stop)]
            found.append(answer[: ends[0]] if ends else answer)
        return found


@pytest.fixture(scope="module")
def plain() -> tuple[Path, PreTrainedModel]:
    directory = Path(os.environ["HYBRIDFLOW_ASSETS"]) / "models" / "stories15M"
    return directory, load_causal_lm(directory, dtype=torch.float32, device="cpu")


@pytest.fixture(
    scope="module",
    params=[RolloutKind.transformers, pytest.param(RolloutKind.vllm, marks=pytest.mark.vllm)],
    ids=lambda kind: kind.name,
)
def stories(request, plain) -> Stories:
    directory, model = plain
    if request.param == RolloutKind.vllm and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    tokenizer = load_tokenizer(directory, pad_token="<unk>")
    engine = make_rollout_engine(
        Model(path=str(directory)),
        Rollout(engine=request.param, max_sequences=16, vllm=Vllm(kv_cache_mb=64)),
        limit_tokens=16 + TOKENS,
        eos_token_ids=(2,),
        tokenizer=tokenizer,
        device=torch.device("cpu"),
    )
    ids = Ragged.from_rows([tokenizer(start)["input_ids"] for start in STARTS], torch.int64)
    prompts = Batch.of(rows={"uid": torch.arange(len(STARTS))}, tokens={"prompt_ids": ids}).repeat(2)
    return Stories(engine, tokenizer, prompts, greedy_answers(model, prompts, tokens=TOKENS))


@pytest.mark.parametrize(
    "stop",
    [[". "], [" wan"], ["appy", "park. H"], ["\n"], NEVER],
    ids=["one token or two", "inside a token", "several, across tokens", "rarely", "never"],
)
def test_a_response_ends_with_the_token_that_completes_a_stop_string(stories, stop):
    batch = stories.generate(Sampling(temperature=0.0, stop=stop, ignore_eos=True))
    expected = stories.cut(stories.free, stop)
    assert responses(batch) == expected
    assert (max(map(len, expected)) > min(map(len, expected))) is (stop != NEVER)
    has_ended = [any(text in stories.text(row, answer) for text in stop) for row, answer in enumerate(expected)]
    assert batch.row("truncated").tolist() == [not ended for ended in has_ended]
    assert batch.tokens("rollout_logprobs").lengths.tolist() == [len(answer) for answer in expected]


def test_sampled_responses_are_those_without_stop_strings_up_to_the_first(stories):
    likely = Sampling(temperature=0.9, top_k=20, ignore_eos=True)  # rounding may choose between two unlikely tokens
    free = responses(stories.generate(likely))
    batch = stories.generate(replace(likely, stop=[",", "ay"]))
    assert responses(batch) == stories.cut(free, [",", "ay"])
    assert len({len(answer) for answer in responses(batch)}) > 3


def test_stop_tokens_end_a_response_also_where_the_end_of_sequence_does_not(stories):
    comma = stories.tokenizer.convert_tokens_to_ids(",")
    batch = stories.generate(Sampling(temperature=0.0, ignore_eos=True, stop_token_ids=[comma]))
    ends = [answer.index(comma) + 1 if comma in answer else TOKENS for answer in stories.free]
    assert responses(batch) == [answer[:end] for answer, end in zip(stories.free, ends, strict=True)]
    assert len(set(ends)) > 1 and batch.row("truncated").tolist() == [end == TOKENS for end in ends]
