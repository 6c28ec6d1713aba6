"""Token ids of prompts, and of prompts with the completions to learn."""

import logging

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hybridflow.data.tokenization import PromptCompletion, completion_token_ids, prompt_token_ids
from hybridflow.errors import DataError
from hybridflow.observability import slow_work
from tests.unit.data.conftest import CHAT_TEMPLATE, character_tokenizer, texts

USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", "<bos>ab"),
        (USER, "[user:hi]<eos>[assistant:"),
        ([*USER, {"role": "assistant", "content": "He"}], "[user:hi]<eos>[assistant:He"),
    ],
)
def test_a_prompt_opens_the_reply_or_continues_it(chat_tokenizer, prompt, expected):
    found = texts(chat_tokenizer, prompt_token_ids(["a", prompt, "b"], chat_tokenizer))
    assert found == ["<bos>a", expected, "<bos>b"]


@pytest.mark.parametrize(("settings", "text"), [({}, "ab\n"), ({"before": "<bos>", "behind": "<eos>"}, "<bos>ab\n")])
def test_a_text_has_the_beginning_that_the_tokenizer_adds_and_no_end(settings, text):
    tokenizer = character_tokenizer(**settings)
    assert texts(tokenizer, prompt_token_ids(["ab\n"], tokenizer)) == [text]


def test_a_character_that_the_tokenizer_does_not_know_is_an_error_if_it_has_no_token_for_one():
    inner = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    with pytest.raises(DataError, match=r"The tokenizer cannot read a text: .*UNK.*model\.tokenizer_path"):
        prompt_token_ids(["b"], tokenizer)


def test_a_text_that_is_far_too_long_is_not_tokenized_to_its_end(tokenizer):
    (ids,) = prompt_token_ids(["1+1" * 5_000_000], tokenizer, max_tokens=8)
    assert 8 < len(ids) < 1000
    words = "ab" * 100
    assert prompt_token_ids([words], tokenizer, max_tokens=8) == prompt_token_ids([words], tokenizer)


def test_a_text_that_fits_is_never_cut_though_its_beginning_alone_has_more_tokens():
    merges = [("a" * size, "a" * size) for size in (1, 2, 4, 8, 16, 32)]
    vocabulary = ["b", "</s>", "a", *("".join(merge) for merge in merges)]
    inner = Tokenizer(models.BPE({text: number for number, text in enumerate(vocabulary)}, merges))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    (ids,) = prompt_token_ids(["b" + "a" * 64], tokenizer, max_tokens=2)
    assert tokenizer.convert_ids_to_tokens(ids) == ["b", "a" * 64]
    (ids,) = prompt_token_ids(["b" + "a" * 1_000_000], tokenizer, max_tokens=2)
    assert 2 < len(ids) < 1000


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def shown(found, tokenizer, row=0):
    """Prompt, and the response with what is to be learnt in braces."""
    prompt = "".join(tokenizer.convert_ids_to_tokens(found.prompts[row]))
    text, inside = "", False
    for token, weight in zip(tokenizer.convert_ids_to_tokens(found.responses[row]), found.masks[row], strict=True):
        text += ("{" if weight and not inside else "}" if inside and not weight else "") + token
        inside = bool(weight)
    return prompt, text + ("}" if inside else "")


@pytest.mark.parametrize(
    ("turns_of_prompt", "response"), [(1, "{yo]<eos>}[user:so?]<eos>[assistant:{no]<eos>}"), (3, "{no]<eos>}")]
)
def test_every_assistant_turn_after_the_prompt_is_learnt(chat_tokenizer, turns_of_prompt, response):
    conversation = turns("hi", "yo", "so?", "no")
    row = PromptCompletion(conversation[:turns_of_prompt], conversation[turns_of_prompt:])
    found = completion_token_ids([row], chat_tokenizer)
    assert shown(found, chat_tokenizer)[1] == response
    whole = chat_tokenizer.apply_chat_template(conversation, return_dict=False)
    assert found.prompts[0] + found.responses[0] == whole


def test_a_reply_begun_in_the_prompt_goes_on(chat_tokenizer):
    prompt = turns("hi", "He")
    for completion in ("llo", [{"role": "assistant", "content": "llo"}]):
        found = completion_token_ids([PromptCompletion(prompt, completion)], chat_tokenizer)
        assert shown(found, chat_tokenizer) == ("[user:hi]<eos>[assistant:He", "{llo]<eos>}")


def test_texts_and_conversations_may_be_mixed_and_keep_their_order(chat_tokenizer):
    rows = [PromptCompletion("a", "b"), PromptCompletion(turns("hi"), "yo"), PromptCompletion("", "cd")]
    found = completion_token_ids(rows, chat_tokenizer)
    assert [shown(found, chat_tokenizer, row) for row in range(3)] == [
        ("<bos>a", "{b<eos>}"),
        ("[user:hi]<eos>[assistant:", "{yo]<eos>}"),
        ("<bos>", "{cd<eos>}"),
    ]


FORGETS_THOUGHT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ '[assistant:' + m['content'].split('|')[-1] + ']' }}"
    "{% else %}{{ '[' + m['role'] + ':' + m['content'] + ']' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant:' }}{% endif %}"
)
COUNTS = "{{ messages | length }}" + CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("template", "turn", "before", "after"),
    [(FORGETS_THOUGHT, 4, "[assistant:think|yo]", "[assistant:yo]"), (COUNTS, 2, "1[user:hi]", "2[user:hi]")],
)
def test_a_template_that_does_not_keep_prefixes_is_an_error_that_shows_where(template, turn, before, after):
    tokenizer = character_tokenizer(chat_template=template)
    conversation = turns("hi", "think|yo", "so?", "no")
    with pytest.raises(DataError, match="is not prefix-preserving") as caught:
        completion_token_ids([PromptCompletion(conversation[:1], conversation[1:], "row 7 of 'a.jsonl'")], tokenizer)
    assert f"turn {turn} of row 7 of 'a.jsonl'" in caught.value.message
    assert before in caught.value.message and after in caught.value.message
    assert "data.chat_template=FILE" in caught.value.remedy


def test_a_template_that_forgets_serves_a_single_reply():
    tokenizer = character_tokenizer(chat_template=FORGETS_THOUGHT)
    found = completion_token_ids([PromptCompletion(turns("hi"), "think|yo")], tokenizer)
    assert shown(found, tokenizer) == ("[user:hi][assistant:", "{think|yo]<eos>}")


def test_a_turn_that_ends_as_the_model_stops_gets_no_second_end(chat_tokenizer):
    template = "{% for m in messages %}{{ m['role'][0] + m['content'] + '|' }}{% endfor %}"
    tokenizer = character_tokenizer(chat_template=template + "{% if add_generation_prompt %}{{ 'a' }}{% endif %}")
    end_of_turn = tokenizer.convert_tokens_to_ids("|")
    rows = [PromptCompletion(turns("hi"), "yo"), PromptCompletion("hi", "yo")]
    found = completion_token_ids(rows, tokenizer, stop_ids=(end_of_turn,))
    assert [shown(found, tokenizer, row)[1] for row in range(2)] == ["{yo|}", "{yo<eos>}"]
    assert shown(completion_token_ids(rows, tokenizer), tokenizer)[1] == "{yo|<eos>}"


def test_tokenization_and_templates_that_take_long_say_how_far_they_are(chat_tokenizer, caplog, monkeypatch):
    prompts = [[{"role": "user", "content": "hi"}]] * 2100
    monkeypatch.setattr(slow_work, "_QUIET_SECONDS", 3600.0)
    with caplog.at_level(logging.INFO):
        quick = prompt_token_ids(prompts, chat_tokenizer)
    assert caplog.messages == []
    monkeypatch.setattr(slow_work, "_QUIET_SECONDS", 0.0)
    with caplog.at_level(logging.INFO):
        assert prompt_token_ids(prompts, chat_tokenizer) == quick
    assert "applying the chat template to 2100 conversations ... 50%" in caplog.messages
    assert caplog.messages[-2:] == ["tokenizing 2100 texts ... 48%", "tokenizing 2100 texts ... 97%"]
