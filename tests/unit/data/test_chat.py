import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hybridflow.config.data import Data
from hybridflow.data.chat import as_conversation, prompt_flaw, prompt_token_ids, with_chat_template
from hybridflow.errors import DataError
from tests.unit.data.conftest import CHAT_TEMPLATE, character_tokenizer

USER = [{"role": "user", "content": "hi"}]


def texts(tokenizer, rows):
    return ["".join(tokenizer.convert_ids_to_tokens(row)) for row in rows]


def test_text_is_tokenised_as_it_is(tokenizer):
    assert texts(tokenizer, prompt_token_ids(["12+3=", " a\n"], tokenizer)) == ["12+3=", " a\n"]


def test_text_gets_a_beginning_only_where_the_tokenizer_adds_one(chat_tokenizer):
    assert texts(chat_tokenizer, prompt_token_ids(["ab"], chat_tokenizer)) == ["<bos>ab"]


def test_an_appended_end_of_sequence_is_taken_off_for_a_reply_follows():
    tokenizer = character_tokenizer(before="<bos>", behind="<eos>")
    assert texts(tokenizer, prompt_token_ids(["ab"], tokenizer)) == ["<bos>ab"]


def test_messages_go_through_the_chat_template_with_the_reply_opened(chat_tokenizer):
    assert texts(chat_tokenizer, prompt_token_ids([USER], chat_tokenizer)) == ["[user:hi]<eos>[assistant:"]


def test_messages_agree_with_the_tokenizers_own_template(chat_tokenizer):
    (ids,) = prompt_token_ids([USER], chat_tokenizer)
    assert ids == chat_tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)


def test_a_last_assistant_turn_is_continued(chat_tokenizer):
    prompt = [*USER, {"role": "assistant", "content": "He"}]
    (found,) = texts(chat_tokenizer, prompt_token_ids([prompt], chat_tokenizer))
    assert found == "[user:hi]<eos>[assistant:He"


def test_text_and_messages_may_be_mixed_and_keep_their_order(chat_tokenizer):
    found = texts(chat_tokenizer, prompt_token_ids(["a", USER, "b"], chat_tokenizer))
    assert found == ["<bos>a", "[user:hi]<eos>[assistant:", "<bos>b"]


def test_messages_without_a_chat_template_are_an_error(tokenizer):
    with pytest.raises(DataError, match="no chat template") as caught:
        prompt_token_ids([USER], tokenizer)
    assert "plain text" in caught.value.remedy


def test_a_conversation_the_template_refuses_is_shown():
    strict = character_tokenizer(chat_template="{{ raise_exception('system role not supported') }}" + CHAT_TEMPLATE)
    with pytest.raises(DataError, match=r"system role not supported.*'content': 'hi'") as caught:
        prompt_token_ids([USER], strict)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("prompt", "flaw"),
    [
        (None, "is missing"),
        ("", "is empty"),
        (7, "is a int"),
        ([], "is an empty conversation"),
        ([{"role": "user"}], "without role and content"),
        (["hi"], "without role and content"),
        ("hi", None),
        (USER, None),
    ],
)
def test_what_is_wrong_with_a_prompt(prompt, flaw):
    found = prompt_flaw(prompt)
    assert found is None if flaw is None else found is not None and flaw in found


SYSTEM = {"role": "system", "content": "Be brief"}


@pytest.mark.parametrize(
    ("prompt", "settings", "shown"),
    [
        ("hi", {}, "hi"),
        ("hi", {"system_prompt": "Be brief"}, "hi"),
        ("hi", {"as_chat": True}, USER),
        ("hi", {"as_chat": True, "system_prompt": "Be brief"}, [SYSTEM, *USER]),
        (USER, {"as_chat": True, "system_prompt": "Be brief"}, [SYSTEM, *USER]),
        ([{**SYSTEM, "content": "Own"}, *USER], {"system_prompt": "Be brief"}, [{**SYSTEM, "content": "Own"}, *USER]),
    ],
)
def test_prompts_are_shown_as_the_settings_say(prompt, settings, shown):
    assert as_conversation(prompt, Data(**settings)) == shown


def test_a_template_from_a_file_takes_the_place_of_the_tokenizers_own(tmp_path, chat_tokenizer):
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    other = with_chat_template(chat_tokenizer, Data(chat_template=str(tmp_path / "own.jinja")))
    assert texts(other, prompt_token_ids([USER], other)) == ["<hi>"]
    assert texts(chat_tokenizer, prompt_token_ids([USER], chat_tokenizer)) == ["[user:hi]<eos>[assistant:"]
    assert with_chat_template(chat_tokenizer, Data()) is chat_tokenizer


@pytest.mark.parametrize(
    ("content", "found"), [(None, "cannot be read"), (b"\xff", "cannot be read"), (b"{% for %}", "refuses")]
)
def test_a_template_that_cannot_be_used_is_an_error(tmp_path, chat_tokenizer, content, found):
    if content is not None:
        (tmp_path / "own.jinja").write_bytes(content)
    with pytest.raises(DataError, match=found) as caught:
        with_chat_template(chat_tokenizer, Data(chat_template=str(tmp_path / "own.jinja")))
    assert caught.value.remedy


def test_a_character_that_the_tokenizer_does_not_know_is_told_where_it_has_no_token_for_one():
    inner = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    with pytest.raises(DataError, match="The tokenizer cannot read a text: .*UNK") as caught:
        prompt_token_ids(["b"], tokenizer)
    assert "model.tokenizer_path" in caught.value.remedy


def test_a_text_that_is_far_too_long_is_not_tokenised_to_its_end(tokenizer):
    text = "1+1" * 5_000_000
    (ids,) = prompt_token_ids([text], tokenizer, most_tokens=8)
    assert 8 < len(ids) < 1000
    words = "ab" * 100
    assert prompt_token_ids([words], tokenizer, most_tokens=8) == prompt_token_ids([words], tokenizer)
