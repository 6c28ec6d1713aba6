"""The token ids of conversations: prompts only grow, and rendering the whole conversation gives the same ids."""

import random
from copy import copy

import pytest

from hybridflow.data.chat_template import rendered
from hybridflow.environments.conversation_format import ConversationFormat, tool_call
from hybridflow.environments.messages import call_id
from hybridflow.environments.transcript import SampledTokens, Transcript
from hybridflow.errors import DataError
from tests.unit.environments.families import FAMILIES, TEMPLATES, end_id, tokenizer_of

WORDS = ["the", "maze", "has", "a", "door", "north", "50", "lower", "\n", "{}", "<b>", "\u00e9", "\u4f60", "<|x|>"]


def format_of(name, end_ids=None):
    return ConversationFormat(tokenizer_of(name), end_ids or [end_id(name)], is_chat=True)


def reply_of(ids, version=3):
    """Sampled tokens with some log-probabilities."""
    return SampledTokens(ids, [-0.5] * len(ids), [version] * len(ids))


def words(draw, most=8):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most))).strip() or "x"


def sampled(draw, name):
    """A reply as a model may sample it: tokens in no canonical order of merges, mostly ended by the end of turn."""
    tokenizer = tokenizer_of(name)
    ids = [token for word in words(draw).split() for token in tokenizer.encode(word, add_special_tokens=False)]
    return [*ids, end_id(name)] if draw.random() < 0.8 else ids


def played(name, draw, num_turns):
    """A random conversation, and the prompt of each of its turns."""
    text_format = format_of(name)
    system = [{"role": "system", "content": words(draw)}] if name != "mistral" and draw.random() < 0.5 else []
    transcript = Transcript(text_format, [*system, {"role": "user", "content": words(draw)}])
    prompts, replies = [], []
    for turn in range(num_turns):
        prompts.append(transcript.prompt_ids)
        replies.append(sampled(draw, name))
        reply = {"role": "assistant", "content": text_format.decoded(replies[-1])}
        transcript.add_reply(reply_of(replies[-1]), reply)
        if turn + 1 < num_turns:
            transcript.extend([*transcript.messages, {"role": "user", "content": words(draw)}])
    return transcript, prompts, replies


@pytest.mark.parametrize("name", FAMILIES)
def test_each_prompt_begins_with_the_previous_prompt_and_the_sampled_tokens(name):
    for seed in range(25):
        transcript, prompts, replies = played(name, random.Random(seed), num_turns=4)
        assert transcript.num_forks == 0
        for prompt, reply, following in zip(prompts, replies, prompts[1:], strict=False):
            assert following[: len(prompt) + len(reply)] == prompt + reply
            assert len(following) > len(prompt) + len(reply)


def test_forks_have_places_in_the_history_until_their_question_is_forgotten():
    opening, again = [{"role": "user", "content": "door"}], [{"role": "user", "content": "again"}]
    transcript = Transcript(format_of("qwen2_5"), opening)

    def reply():
        transcript.add_reply(reply_of([end_id("qwen2_5")]), {"role": "assistant", "content": ""})

    def begins():
        return [transcript.history[place] for place in transcript.fork_places]

    reply()
    transcript.extend([*transcript.messages, *again])
    assert transcript.fork_places == []
    reply()
    transcript.extend(again)
    reply()
    assert begins() == again and transcript.fork_places == [4]
    transcript.extend(opening)
    reply()
    assert begins() == again + opening
    assert transcript.forget_reply() and begins() == again
    transcript.extend_ids([5, 6])
    reply()
    assert [message["role"] for message in begins()] == ["user", "user"] and transcript.fork_places == [4, 6]
    transcript.select([5, 6], [end_id("qwen2_5")], [1])
    assert begins() == []


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_and_log_probabilities_mark_exactly_the_sampled_tokens(name):
    for seed in range(10):
        transcript, prompts, replies = played(name, random.Random(seed), num_turns=3)
        (row,) = transcript.rows
        assert row.prompt_ids == prompts[0]
        assert len(row.response_ids) == len(row.mask) == len(row.logprobs) == len(row.versions)
        assert [row.response_ids[start:end] for start, end in row.replies] == replies
        inside = {position for start, end in row.replies for position in range(start, end)}
        assert [position for position, one in enumerate(row.mask) if one] == sorted(inside)
        assert all(logprob == -0.5 * one for logprob, one in zip(row.logprobs, row.mask, strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_are_those_of_the_rendered_conversation_if_replies_are_encoded_as_the_tokenizer_does(name):
    tokenizer, text_format = tokenizer_of(name), format_of(name)
    transcript = Transcript(text_format, [{"role": "user", "content": "Go north."}])
    space = " " if name in ("mistral", "llama2") else ""  # part of the reply in these templates
    end = " " if name == "llama2" else ""
    for text, answer in (("then south", "a door"), ("the maze", "lower")):
        ids = [*tokenizer.encode(f"{space}{text}{end}", add_special_tokens=False), end_id(name)]
        transcript.add_reply(reply_of(ids), {"role": "assistant", "content": text})
        transcript.extend([*transcript.messages, {"role": "user", "content": answer}])
    whole = rendered(transcript.messages, tokenizer, add_generation_prompt=True)
    assert transcript.prompt_ids == tokenizer.encode(whole, add_special_tokens=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_check_finds_how_a_template_continues(name):
    found, family = format_of(name).check(), FAMILIES[name]
    assert (found.continuation.value, found.detail) == (family.continuation, family.detail)
    assert found.drops_thoughts is family.drops_thoughts


def test_the_template_of_glm_4_is_reported_as_a_fork():
    """It begins a reply with `<think></think>` only once it has been given."""
    template = (TEMPLATES / "glm4moe.jinja").read_text(encoding="utf-8")
    text_format = ConversationFormat(with_template(tokenizer_of("chatml"), template), [0], is_chat=True)
    found = text_format.check()
    assert found.continuation == "fork" and "<think></think>" in found.detail and found.drops_thoughts


def test_a_template_that_rewrites_earlier_turns_forks_at_each_turn():
    tokenizer = tokenizer_of("chatml")
    text_format = ConversationFormat(with_template(tokenizer, COUNTS_DOWN), [end_id("chatml")], is_chat=True)
    found = text_format.check()
    assert found.continuation == "fork" and "turn 1" in found.detail and "turn 2" in found.detail
    transcript = Transcript(text_format, [{"role": "user", "content": "first"}])
    for _ in range(3):
        transcript.add_reply(reply_of([1, 2]), {"role": "assistant", "content": "xy"})
        transcript.extend([*transcript.messages, {"role": "user", "content": "next"}])
    assert transcript.num_forks == 3
    assert [row.mask for row in transcript.rows] == [[1, 1], [1, 1], [1, 1], []]
    assert transcript.rows[1].prompt_ids == text_format.prompt_ids(transcript.messages[:3])


def test_forks_are_sequences_of_one_row_and_their_messages_are_kept():
    transcript = Transcript(format_of("qwen2_5"), [{"role": "user", "content": "first"}])
    transcript.add_reply(reply_of([5, 6]), {"role": "assistant", "content": "xy"})
    transcript.extend([{"role": "user", "content": "a summary"}])
    prompt = transcript.prompt_ids
    transcript.add_reply(reply_of([7], version=4), {"role": "assistant", "content": "z"})
    assert transcript.num_response_tokens == 2 + len(prompt) + 1
    transcript.extend([{"role": "user", "content": "another"}])  # without a reply
    row = transcript.as_row()
    assert row.prompt_ids == transcript.rows[0].prompt_ids and row.response_ids == [5, 6, *prompt, 7]
    assert row.mask == [1, 1, *[0] * len(prompt), 1] and row.logprobs == [-0.5, -0.5, *[0.0] * len(prompt), -0.5]
    assert row.versions == [3, 3, *[0] * len(prompt), 4]
    assert row.fork_starts == [2] and row.replies == [(0, 2), (2 + len(prompt), 3 + len(prompt))]
    assert transcript.reply_places == [1, 3] and [m["content"] for m in transcript.history][1::2] == ["xy", "z"]
    assert len(transcript.rows[0].response_ids) == 2 and transcript.num_forks == 2


def test_a_thinking_reply_forks_where_the_template_drops_thoughts():
    transcript = Transcript(format_of("qwen3"), [{"role": "user", "content": "first"}])
    for text, forks in (("plain", 0), ("<think>\nwell\n</think>\n\n50", 1), ("plain again", 1)):
        ids = [*tokenizer_of("qwen3").encode(text), end_id("qwen3")]
        transcript.add_reply(reply_of(ids), {"role": "assistant", "content": text})
        transcript.extend([*transcript.messages, {"role": "user", "content": "next"}])
        assert transcript.num_forks == forks
    assert "well" not in tokenizer_of("qwen3").decode(transcript.prompt_ids)


@pytest.mark.parametrize(
    "change",
    [
        lambda messages: [messages[0], {"role": "user", "content": "a summary"}],
        lambda messages: messages[:1],
        lambda messages: messages,
        lambda messages: [messages[0], {"role": "assistant", "content": "not what was said"}, messages[0]],
    ],
)
def test_a_conversation_that_is_not_continued_begins_a_new_row(change):
    text_format = format_of("qwen2_5")
    transcript = Transcript(text_format, [{"role": "user", "content": "first"}])
    transcript.add_reply(reply_of([5, 6]), {"role": "assistant", "content": "xy"})
    messages = change(transcript.messages)
    transcript.extend(messages)
    assert transcript.num_forks == 1 and transcript.prompt_ids == text_format.prompt_ids(messages)
    assert transcript.rows[0].response_ids == [5, 6]


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "mistral"])
@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_tool_call_and_its_result_continue_the_conversation(name, num_calls):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    tokenizer, text_format = tokenizer_of(name), format_of(name)
    transcript = Transcript(text_format, [{"role": "user", "content": "12+12?"}], tools)
    ids = [*tokenizer.encode('<tool_call>{"name": "add"}</tool_call>'), end_id(name)]
    prompt = transcript.prompt_ids
    calls = [tool_call("add", {"a": 12}, index) for index in range(num_calls)]
    transcript.add_reply(reply_of(ids), {"role": "assistant", "content": "", "tool_calls": calls})
    results = [
        {"role": "tool", "content": f"result {index}", "tool_call_id": call_id(index)} for index in range(num_calls)
    ]
    transcript.extend([*transcript.messages, *results], tools)
    if name == "mistral":  # it repeats the tools before the last message of the user, which is still the same one
        assert "[AVAILABLE_TOOLS]" in tokenizer.decode(prompt)
    assert transcript.num_forks == 0 and transcript.prompt_ids[: len(prompt) + len(ids)] == prompt + ids
    added = tokenizer.decode(transcript.prompt_ids[len(prompt) + len(ids) :])
    assert all(f"result {index}" in added for index in range(num_calls)) and "add" not in added
    assert sum(transcript.rows[0].mask) == len(ids)


def test_a_reply_that_another_token_ended_gets_the_template_s_end_of_turn():
    other = tokenizer_of("qwen2_5").convert_tokens_to_ids("<|endoftext|>")
    end = end_id("qwen2_5")
    transcript = Transcript(format_of("qwen2_5", [end, other]), [{"role": "user", "content": "first"}])
    transcript.add_reply(reply_of([5, other]), {"role": "assistant", "content": "x"})
    transcript.extend([*transcript.messages, {"role": "user", "content": "next"}])
    assert transcript.rows[0].response_ids[:3] == [5, other, end] and transcript.rows[0].mask[:3] == [1, 1, 0]


@pytest.mark.parametrize(
    ("sampled_end", "added_end", "has_ended"),
    [
        (["<|endoftext|>", "<|im_end|>"], [], True),
        (["<|endoftext|>"], ["<|im_end|>"], False),  # cut off between the two
        ([], ["<|endoftext|>", "<|im_end|>"], False),
        (["<|im_end|>"], ["<|endoftext|>", "<|im_end|>"], True),  # the second one alone
    ],
)
def test_two_tokens_that_end_a_turn_are_not_repeated(sampled_end, added_end, has_ended):
    tokenizer, end = with_template(tokenizer_of("chatml"), ENDS_WITH_TWO_TOKENS), end_id("chatml")
    text_format = ConversationFormat(tokenizer, [end], is_chat=True)
    assert text_format.check().continuation == "append"
    transcript = Transcript(text_format, [{"role": "user", "content": "first"}])
    prompt = transcript.prompt_ids
    ids = [*tokenizer.encode("lower"), *tokenizer.convert_tokens_to_ids(sampled_end)]
    reply = {"role": "assistant", "content": text_format.decoded(ids)}
    transcript.add_reply(reply_of(ids), reply)
    transcript.extend([*transcript.messages, {"role": "user", "content": "next"}])
    whole = text_format.prompt_text([{"role": "user", "content": "first"}, {"role": "user", "content": "next"}])
    following = tokenizer.encode(whole)[tokenizer.encode(whole).index(end) + 1 :]
    assert transcript.prompt_ids == prompt + ids + tokenizer.convert_tokens_to_ids(added_end) + following
    if len(sampled_end) == 2:
        assert reply["content"] == "lower" and text_format.special_token(ids) is None
    assert (ids[-1] == end) is has_ended


def test_plain_texts_are_concatenated():
    tokenizer = tokenizer_of("chatml")
    text_format = ConversationFormat(tokenizer, [end_id("chatml")], is_chat=False)
    transcript = Transcript(text_format, [{"role": "user", "content": "guess:"}], prompt_ids=[7, 8])
    transcript.add_reply(reply_of([9, end_id("chatml")]), {"role": "assistant", "content": "50"})
    transcript.extend([*transcript.messages, {"role": "user", "content": " lower"}])
    assert transcript.prompt_ids == [7, 8, 9, end_id("chatml"), *tokenizer.encode(" lower")]
    assert text_format.check().continuation == "append"


def test_a_tokenizer_without_a_template_is_an_error():
    text_format = ConversationFormat(with_template(tokenizer_of("chatml"), None), [0], is_chat=True)
    with pytest.raises(DataError, match="no chat template") as found:
        text_format.check()
    assert "data.chat_template" in found.value.remedy


ENDS_WITH_TWO_TOKENS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}:{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|endoftext|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
"""As the templates of Cohere's models, which end replies with <|END_RESPONSE|><|END_OF_TURN_TOKEN|>."""

COUNTS_DOWN = (
    "{% for m in messages %}turn {{ messages | length - loop.index0 }} {{ m['role'] }}: {{ m['content'] }}<|im_end|>"
    "{% endfor %}"
)


def with_template(tokenizer, template):
    other = copy(tokenizer)
    other.chat_template = template
    return other


def test_known_texts_are_rendered_again_once_the_cache_is_cleared():
    tokenizer = copy(tokenizer_of("llama2"))
    text_format = ConversationFormat(tokenizer, [end_id("llama2")], is_chat=True)
    greeting = [{"role": "user", "content": "Hello"}]
    before = text_format.prompt_text(greeting)
    tokenizer.chat_template = "today: {{ messages[0].content }}"
    assert text_format.prompt_text(greeting) == before
    text_format.clear_cache()
    assert text_format.prompt_text(greeting) == "today: Hello"


def test_messages_that_json_cannot_represent_and_long_ones_are_rendered_each_time():
    tokenizer = copy(tokenizer_of("llama2"))
    tokenizer.chat_template = "{{ messages[0].content }}"
    text_format = ConversationFormat(tokenizer, [end_id("llama2")], is_chat=True)
    for content in ("x" * 5000, [{"image": object}]):
        first = text_format.prompt_text([{"role": "user", "content": content}])
        tokenizer.chat_template = f"again {tokenizer.chat_template}"
        assert text_format.prompt_text([{"role": "user", "content": content}]) == f"again {first}"


def test_a_refused_conversation_stays_refused():
    text_format = format_of("llama2")
    for _ in range(2):
        with pytest.raises(DataError, match="the role 'asistant'"):
            text_format.prompt_text([{"role": "asistant", "content": "x"}])


def test_the_ids_of_a_continuation_belong_to_the_caller():
    text_format = format_of("llama2")
    found = [text_format._continuation_ids("next") for _ in range(2)]
    assert found[0] == found[1] and found[0] is not found[1]
