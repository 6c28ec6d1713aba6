"""Conversations continue with the token ids that verl's rollouts append (`make peers`), or differ as described here."""

import json
from functools import cache
from pathlib import Path

import pytest

from hybridflow.environments.conversation_format import ConversationFormat
from hybridflow.environments.transcript import SampledTokens, Transcript
from tests.unit.environments.families import FAMILIES, end_id, tokenizer_of

THEIRS = json.loads((Path(__file__).parent / "peers/verl_tokens.json").read_text())["families"]
REFUSED = {"llama2", "gemma3", "phi3_5"}
"""verl renders new messages after others of its own, which these templates do not allow."""

WITHOUT_NEWLINE = {"gemma4", "lfm2", "smollm2"}
"""verl does not append the newline with which these templates continue after the end of a turn."""

REPEATS_END = {"chatml"}
"""verl appends the end of the turn, although the reply has one: this template has it between messages."""

CASES = [(family, name) for family, conversations in THEIRS.items() for name in conversations]


def expected(family: str, added: list[int], *, has_ended: bool) -> list[int]:
    """The token ids between a reply and the next one, from those that verl appends."""
    if family in REPEATS_END:
        return added[1:] if has_ended else added
    newline = tokenizer_of(family).encode("\n") if FAMILIES[family].continuation == "bridge" else []
    if not has_ended:  # verl leaves the turn open
        return [end_id(family), *newline, *added]
    return [*newline, *added] if family in WITHOUT_NEWLINE else added


@cache
def format_of(family: str) -> ConversationFormat:
    return ConversationFormat(tokenizer_of(family), [end_id(family)], is_chat=True)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_conversation_continues_with_verl_s_token_ids(family, name):
    theirs = THEIRS[family][name]
    transcript = Transcript(format_of(family), theirs["messages"], theirs["tools"])
    assert transcript.prompt_ids == theirs["prompt_ids"]
    for turn in theirs["turns"]:
        reply_ids, known = turn["reply_ids"], transcript.prompt_ids + turn["reply_ids"]
        zeros = [0] * len(reply_ids)
        transcript.add_reply(SampledTokens(reply_ids, [0.0] * len(reply_ids), zeros), turn["message"])
        transcript.extend([*transcript.messages, *turn["messages"]], theirs["tools"])
        if FAMILIES[family].drops_thoughts and name == "thought":  # verl keeps the thought
            assert transcript.num_forks == 1 and transcript.prompt_ids[: len(known)] != known
            return
        assert transcript.prompt_ids[: len(known)] == known
        has_ended = reply_ids[-1] == end_id(family)
        assert transcript.prompt_ids[len(known) :] == expected(family, turn["added_ids"], has_ended=has_ended)
    row = transcript.as_row()
    assert sum(row.mask) == sum(len(turn["reply_ids"]) for turn in theirs["turns"])


def test_the_conversations_that_verl_refuses():
    refused = {(family, name) for family, name in CASES if "refused" in THEIRS[family][name]}
    always = {(family, name) for family, name in CASES if family in REFUSED}
    assert refused == always | {("mistral", "tool")}  # a message of the user after the result of a tool
