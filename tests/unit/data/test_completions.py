import pytest
import torch

from hybridflow.data.completions import Demonstration, tokenised_completions
from hybridflow.errors import DataError
from tests.unit.data.conftest import CHAT_TEMPLATE, character_tokenizer


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


def test_every_assistant_turn_is_learnt_and_the_others_are_read(chat_tokenizer):
    conversation = turns("hi", "yo", "so?", "no")
    found = tokenised_completions([Demonstration(conversation[:1], conversation[1:])], chat_tokenizer)
    assert shown(found, chat_tokenizer) == (
        "[user:hi]<eos>[assistant:",
        "{yo]<eos>}[user:so?]<eos>[assistant:{no]<eos>}",
    )


def test_the_ids_of_a_conversation_are_those_of_its_template(chat_tokenizer):
    conversation = turns("hi", "yo", "so?", "no")
    found = tokenised_completions([Demonstration(conversation[:1], conversation[1:])], chat_tokenizer)
    whole = chat_tokenizer.apply_chat_template(conversation, return_dict=False)
    assert found.prompts[0] + found.responses[0] == whole


def test_assistant_turns_of_the_prompt_are_only_read(chat_tokenizer):
    conversation = turns("hi", "yo", "so?", "no")
    found = tokenised_completions([Demonstration(conversation[:3], conversation[3:])], chat_tokenizer)
    assert shown(found, chat_tokenizer)[1] == "{no]<eos>}"


def test_a_reply_begun_in_the_prompt_goes_on(chat_tokenizer):
    prompt = turns("hi", "He")
    for completion in ("llo", [{"role": "assistant", "content": "llo"}]):
        found = tokenised_completions([Demonstration(prompt, completion)], chat_tokenizer)
        assert shown(found, chat_tokenizer) == ("[user:hi]<eos>[assistant:He", "{llo]<eos>}")


def test_texts_and_conversations_may_be_mixed_and_keep_their_order(chat_tokenizer):
    rows = [Demonstration("a", "b"), Demonstration(turns("hi"), "yo"), Demonstration("", "cd")]
    found = tokenised_completions(rows, chat_tokenizer)
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
    with pytest.raises(DataError, match="does not keep prefixes") as caught:
        tokenised_completions([Demonstration(conversation[:1], conversation[1:], "row 7 of 'a.jsonl'")], tokenizer)
    assert f"turn {turn} of row 7 of 'a.jsonl'" in caught.value.message
    assert before in caught.value.message and after in caught.value.message
    assert "data.chat_template=FILE" in caught.value.remedy


def test_a_template_that_forgets_serves_a_single_reply():
    tokenizer = character_tokenizer(chat_template=FORGETS_THOUGHT)
    found = tokenised_completions([Demonstration(turns("hi"), "think|yo")], tokenizer)
    assert shown(found, tokenizer) == ("[user:hi][assistant:", "{think|yo]<eos>}")


def test_masks_are_as_long_as_responses(chat_tokenizer):
    rows = [Demonstration(turns("hi"), turns("hi", *"abcde"[: 2 * n + 1])[1:]) for n in range(3)]
    found = tokenised_completions(rows, chat_tokenizer)
    assert [len(mask) for mask in found.masks] == [len(response) for response in found.responses]
    assert torch.tensor(found.masks[2]).sum() == 3 * len("x]e")


def test_a_turn_that_ends_as_the_model_stops_gets_no_second_end(chat_tokenizer):
    template = "{% for m in messages %}{{ m['role'][0] + m['content'] + '|' }}{% endfor %}"
    tokenizer = character_tokenizer(chat_template=template + "{% if add_generation_prompt %}{{ 'a' }}{% endif %}")
    end_of_turn = tokenizer.convert_tokens_to_ids("|")
    rows = [Demonstration(turns("hi"), "yo"), Demonstration("hi", "yo")]
    found = tokenised_completions(rows, tokenizer, ends=(end_of_turn,))
    assert [shown(found, tokenizer, row)[1] for row in range(2)] == ["{yo|}", "{yo<eos>}"]
    assert shown(tokenised_completions(rows, tokenizer), tokenizer)[1] == "{yo|<eos>}"
