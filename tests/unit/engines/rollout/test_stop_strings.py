"""Stop strings in tokens that are bytes, where a character takes several."""

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.engines.rollout.stop_strings import StopSearch, check_reads_text
from hybridflow.errors import ConfigError
from hybridflow.models.tokenizers import load_tokenizer


@pytest.fixture(scope="module")
def by_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the 256 bytes, and a special token <|end|>."""
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("pieces", [(1,), (3, 2, 50)], ids=str)
@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [
        ("a b\n\nc", ["\n\n"], 5),
        ("für <b>", ["ü"], 3),  # the second of its two bytes
        ("日本語", ["本語", "x"], 9),
        ("ab<|end|>c", ["<|end|>"], 3),
        ("ab<|end|>c", ["d", "b<"], 3),
        ("abc", ["abcd"], None),
    ],
)
def test_the_token_that_completes_a_stop_string_is_found_however_the_tokens_arrive(
    by_bytes, text, stop, length, pieces
):
    ids = by_bytes(text)["input_ids"]
    search, count = StopSearch(by_bytes, stop, [66, 195]), 0
    while count < len(ids):
        end = min(len(ids), count + pieces[count % len(pieces)])
        search.read(ids[count:end])
        count = end
    assert search.length == length


def test_the_text_of_a_prompt_that_ends_inside_a_character_is_not_searched(by_bytes):
    prompt, response = by_bytes("end ü")["input_ids"], by_bytes(" and end")["input_ids"]
    search = StopSearch(by_bytes, ["end"], prompt[:-1])
    search.read([prompt[-1], *response])
    assert search.length == 1 + len(response)


def test_bytes_that_are_no_text_do_not_end_the_search(by_bytes):
    wrong = [by_bytes.convert_tokens_to_ids(letter) for letter in sorted(ByteLevel.alphabet())][128:250]
    tokens = [*wrong, *reversed(wrong), *by_bytes("stop")["input_ids"]]
    search = StopSearch(by_bytes, ["stop"], [65])
    search.read(tokens)
    assert search.length == len(tokens)


def test_evaluation_and_greedy_baselines_end_like_the_training_samples_unless_set():
    rollout = Rollout(sampling=Sampling(temperature=0.5, stop=["a"], stop_token_ids=[7]))
    assert rollout.sampling_for("train") is rollout.sampling
    assert rollout.sampling_for("eval") == Sampling(stop=["a"], stop_token_ids=[7])
    assert rollout.sampling_for("greedy") == Sampling(temperature=0.0, stop=["a"], stop_token_ids=[7])
    rollout.eval_sampling = Sampling(temperature=0.0, stop=["b"])
    assert rollout.sampling_for("eval") == Sampling(temperature=0.0, stop=["b"], stop_token_ids=[7])


def test_a_tokenizer_without_token_by_token_decoding_is_refused(toy_dir):
    from transformers import PreTrainedTokenizer

    with pytest.raises(
        ConfigError, match=r"rollout.sampling.stop needs a tokenizer of the tokenizers library"
    ) as caught:
        check_reads_text(object.__new__(PreTrainedTokenizer), key="rollout.sampling.stop")
    assert "stop_token_ids" in caught.value.remedy
    assert check_reads_text(load_tokenizer(toy_dir("llama")), key="")
