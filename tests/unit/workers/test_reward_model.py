"""Reward models against `transformers`, a row at a time and without padding."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybridflow.batch import Batch, Ragged
from hybridflow.config.model import Model
from hybridflow.config.reward import Reward
from hybridflow.config.training import Training
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.training.interface import Part
from hybridflow.errors import ConfigError, RewardError
from hybridflow.models.heads import load_value_model
from hybridflow.models.tokenizers import load_tokenizer
from hybridflow.workers.reward_model import RewardModelWorker
from tests.reward_models import make_decoder, make_encoder

PROMPTS = ["12+34=", "7+8=", "90+9=", "1+1="]
RESPONSES = ["46", "1", "", "123"]
TRUNCATED = [False, True, True, False]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    return make_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def reward_model(
    directory: Path,
    policy: Path,
    *,
    role: str = "reward",
    microbatch_tokens: int = 20,
    offload=False,
    shares=True,
    **settings,
):
    return RewardModelWorker(
        WorkerContext(role),
        reward=Reward(model=Model(path=str(directory)), **settings),
        policy=Model(path=str(policy)),
        training=Training(microbatch_tokens=microbatch_tokens, offload_parameters=offload, share_prefixes=shares),
    )


def loaded(directory: Path):
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    return model, AutoTokenizer.from_pretrained(directory)


def answered(policy: Path, prompts: list = PROMPTS) -> Batch:
    """Responses of unequal lengths; the second broke off, the third is empty."""
    tokenizer = load_tokenizer(policy)
    texts = [prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt) for prompt in prompts]
    ids = [
        tokenizer(text, add_special_tokens=False).input_ids + ([] if broken else [tokenizer.eos_token_id])
        for text, broken in zip(RESPONSES, TRUNCATED, strict=True)
    ]
    responses = Ragged.from_rows(ids, torch.int64)
    return Batch.of(
        rows={"uid": torch.arange(4), "truncated": torch.tensor(TRUNCATED)},
        tokens={
            "prompt_ids": Ragged.from_rows([tokenizer(t, add_special_tokens=False).input_ids for t in texts]),
            "response_ids": responses,
            "response_mask": responses.like(torch.ones(len(responses.values))),
        },
        objects={"prompt": prompts, "answer": ["46", "15", "99", "2"]},
    )


def sequences(batch: Batch) -> list[torch.Tensor]:
    pairs = zip(batch.tokens("prompt_ids").rows(), batch.tokens("response_ids").rows(), strict=True)
    return [torch.cat(pair) for pair in pairs]


@torch.no_grad()
@pytest.mark.parametrize("microbatch_tokens", [1, 20, 1000])
def test_a_sequence_classification_model_scores_as_transformers_does(decoder, toy_dir, microbatch_tokens):
    batch = answered(toy_dir())
    plain = AutoModelForSequenceClassification.from_pretrained(decoder)
    expected = torch.stack([plain(row[None]).logits[0, 0] for row in sequences(batch)])
    scored = reward_model(decoder, toy_dir(), microbatch_tokens=microbatch_tokens).score(batch)
    torch.testing.assert_close(scored.row("scores"), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(scored.row("rewards/model"), scored.row("scores"))
    assert torch.equal(scored.row("components"), scored.row("scores")[:, None])
    assert len(set(scored.row("scores").tolist())) == 4


@pytest.mark.parametrize("process", [False, True], ids=["scores", "process"])
def test_scores_are_the_same_with_shared_prefixes_and_without(decoder, toy_dir, process):
    batch = answered(toy_dir(), ["12+34+56+78="] * 3 + ["12+34+56+70="])
    shared, apart = (
        reward_model(decoder, toy_dir(), microbatch_tokens=1000, shares=shares, process=process).score(batch)
        for shares in (True, False)
    )
    assert not torch.equal(shared.row("scores"), apart.row("scores")), "the prefixes were not shared"
    torch.testing.assert_close(shared.row("scores"), apart.row("scores"), atol=1e-5, rtol=1e-5)
    if process:
        found, expected = (scored.tokens("token_scores").values for scored in (shared, apart))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_process_reward_is_the_value_after_each_token(decoder, toy_dir):
    batch = answered(toy_dir())
    mask = batch.tokens("response_mask").values.clone()
    mask[1] = 0.0
    batch = batch.with_columns(tokens={"response_mask": batch.tokens("response_ids").like(mask)})
    plain = load_value_model(decoder, dtype=torch.float32, device="cpu")
    lengths = batch.tokens("response_ids").lengths.tolist()
    whole = [plain(row[None])[0] for row in sequences(batch)]
    expected = torch.cat([row[len(row) - n :] for row, n in zip(whole, lengths, strict=True)]) * mask
    scored = reward_model(decoder, toy_dir(), process=True, model_weight=0.5).score(batch)
    found = scored.tokens("token_scores")
    torch.testing.assert_close(found.values, 0.5 * expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.lengths, batch.tokens("response_ids").lengths)
    torch.testing.assert_close(scored.row("scores"), found.row_sums())
    assert scored.row("scores")[2] == 0.0  # an empty response has no token to score
    torch.testing.assert_close(scored.row("rewards/model"), 2 * found.row_sums())


@torch.no_grad()
def test_offloaded_weights_wait_outside_the_device_between_calls_and_score_the_same(decoder, toy_dir):
    plain, offloaded = (reward_model(decoder, toy_dir(), offload=offload) for offload in (False, True))
    batch = answered(toy_dir())
    for _ in range(2):
        assert torch.equal(offloaded.score(batch).row("scores"), plain.score(batch).row("scores"))
        assert offloaded._engine.away >= {Part.parameters}


def test_an_encoder_reads_the_text_in_its_own_tokens(encoder, toy_dir):
    plain, tokenizer = loaded(encoder)
    texts = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    expected = torch.stack([plain(**tokenizer(text, return_tensors="pt")).logits[0, 0] for text in texts])
    scored = reward_model(encoder, toy_dir()).score(answered(toy_dir()))
    torch.testing.assert_close(scored.row("scores"), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_of_two_labels_the_score_is_the_log_odds_of_the_second(toy_dir, tmp_path):
    make_encoder(tmp_path, labels=2)
    plain, tokenizer = loaded(tmp_path)
    chances = plain(**tokenizer("12+34=46", return_tensors="pt")).logits[0].softmax(0)
    scored = reward_model(tmp_path, toy_dir()).score(answered(toy_dir()))
    assert scored.row("scores")[0].item() == pytest.approx(float((chances[1] / chances[0]).log()), abs=1e-5)


@torch.no_grad()
def test_a_decoder_with_its_own_tokens_sees_an_end_only_where_there_was_one(toy_dir, tmp_path):
    """The same characters under other numbers: the model is shown its own, as transformers would give them."""
    make_decoder(tmp_path)
    config = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(
        config.replace('"1":', '"swap":').replace('"2":', '"1":').replace('"swap":', '"2":')
    )
    plain, own = load_value_model(tmp_path, dtype=torch.float32, device="cpu"), AutoTokenizer.from_pretrained(tmp_path)
    rows = [own(p + r, add_special_tokens=False).input_ids for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    rows = [row if broken else [*row, own.eos_token_id] for row, broken in zip(rows, TRUNCATED, strict=True)]
    expected = torch.stack([plain(torch.tensor([row]))[0, -1] for row in rows])
    batch = answered(toy_dir())
    assert sequences(batch)[0].tolist() != rows[0]
    scored = reward_model(tmp_path, toy_dir()).score(batch)
    torch.testing.assert_close(scored.row("scores"), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_conversation_goes_through_the_models_own_template(encoder, toy_dir, tmp_path):
    shutil.copytree(encoder, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    asked[3] = [*asked[3], {"role": "assistant", "content": "9"}]  # the reply goes on from here
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    texts = [f"user {p}\nassistant {r}\n" for p, r in zip(PROMPTS, [*RESPONSES[:3], "9123"], strict=True)]
    ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids for text in texts]
    expected = torch.stack([plain(row).logits[0, 0] for row in ids])
    scored = reward_model(tmp_path, toy_dir()).score(answered(toy_dir(), asked))
    torch.testing.assert_close(scored.row("scores"), expected, atol=1e-5, rtol=1e-5)


def test_functions_are_added_with_their_weights(decoder, toy_dir):
    alone = reward_model(decoder, toy_dir()).score(answered(toy_dir())).row("scores")
    both = reward_model(decoder, toy_dir(), role="helpful", functions=["exact_match"], weights=[3.0], model_weight=0.25)
    scored = both.score(answered(toy_dir()))
    right = torch.tensor([1.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(scored.row("scores"), 3.0 * right + 0.25 * alone)
    assert torch.equal(scored.row("rewards/exact_match"), right)
    assert torch.equal(scored.row("rewards/helpful"), alone)
    assert torch.equal(scored.row("components")[:, -1], alone)


def test_a_score_that_is_no_number_is_told_with_its_sample(decoder, toy_dir, tmp_path):
    shutil.copytree(decoder, tmp_path, dirs_exist_ok=True)
    saved = load_file(tmp_path / "model.safetensors")
    save_file(saved | {"score.weight": torch.full_like(saved["score.weight"], 3e38)}, tmp_path / "model.safetensors")
    with pytest.raises(
        RewardError, match=r"(?s)sample 0: its score is (?:nan|-?inf).*'12\+34='.*'46'.*4 of 4"
    ) as raised:
        reward_model(tmp_path, toy_dir()).score(answered(toy_dir()))
    assert "reward.model.dtype=float32" in raised.value.remedy
    with pytest.raises(RewardError, match="its score is (?:nan|-?inf)"):
        reward_model(tmp_path, toy_dir(), process=True).score(answered(toy_dir()))


def test_a_weighted_sum_beyond_the_bound_is_told_with_its_sample(decoder, toy_dir):
    settings = {"role": "helpful", "functions": ["exact_match"], "weights": [1e15], "model_weight": 1e15}
    with pytest.raises(RewardError, match=r"(?s)sample \d: the weighted sum of its scores .* not between") as raised:
        reward_model(decoder, toy_dir(), **settings).score(answered(toy_dir()))
    assert "roles.helpful.model_weight" in raised.value.remedy


def test_a_response_that_is_too_long_in_its_own_tokens_is_told(toy_dir, tmp_path):
    make_encoder(tmp_path, positions=9)
    with pytest.raises(RewardError, match=r"(?s)sample 0: it has 10 tokens, but the model reads at most 9") as raised:
        reward_model(tmp_path, toy_dir()).score(answered(toy_dir()))
    assert "data.max_response_tokens" in raised.value.remedy


def test_a_model_without_a_head_or_with_three_labels_is_refused(toy_dir, tmp_path):
    with pytest.raises(ConfigError, match="reward.model.path=.*LlamaForCausalLM has no head.*hybridflow reward-model"):
        reward_model(toy_dir(), toy_dir())
    make_decoder(tmp_path, labels=3)
    with pytest.raises(ConfigError, match=r"roles.cost.model.path=.* has 3 labels \(LABEL_0, LABEL_1.*one label"):
        reward_model(tmp_path, toy_dir(), role="cost")
