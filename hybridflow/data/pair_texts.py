"""Pairs of responses as people write them down: with the prompt apart, inside conversations, or common to two texts."""

from dataclasses import dataclass

from hybridflow.data.chat import Message, Prompt, prompt_flaw
from hybridflow.data.responses import Response, check_end, fault, is_blank, response_of

_REPLY_BEGINS = "\n\nAssistant:"
"""Anthropic's HH texts: the last of these in the common beginning ends the prompt."""


@dataclass(frozen=True)
class Pair:
    """A prompt, the response that is preferred, and the other; `place` is for errors: `row 3 of 'pairs.jsonl'`."""

    place: str
    prompt: Prompt
    chosen: Response
    rejected: Response

    @property
    def is_blank(self) -> bool:
        """One of the responses is white space alone."""
        return is_blank(self.chosen) or is_blank(self.rejected)

    @property
    def is_even(self) -> bool:
        """Both responses are the same."""
        return self.chosen == self.rejected


def pair_of(prompt: object, chosen: object, rejected: object, *, place: str) -> Pair:
    """The pair of a row; `prompt` is None where it is inside both responses."""
    good = response_of(chosen, what="chosen response", place=place)
    bad = response_of(rejected, what="rejected response", place=place)
    if isinstance(good, list) is not isinstance(bad, list):
        raise fault(place, "has one response as text and one as messages", "Write both the same way.")
    if prompt is not None:
        flaw = prompt_flaw(prompt)
        if flaw is not None or not isinstance(prompt, str | list):
            raise fault(place, f"has a prompt that {flaw}", "Give text, or messages with role and content.")
        return _with_prompt(Pair(place, prompt, good, bad))
    if isinstance(good, str) and isinstance(bad, str):
        cut = common_beginning(good, bad)
        found = Pair(place, good[:cut], good[cut:], bad[cut:])
    else:
        assert isinstance(good, list) and isinstance(bad, list), "texts were seen to"
        cut = _common_turns(good, bad)
        found = Pair(place, good[:cut], good[cut:], bad[cut:])
    return found if found.is_even and not found.prompt else _checked(found)


def common_beginning(chosen: str, rejected: str) -> int:
    """Characters of the prompt that two texts begin with.

    Up to the last "Assistant:" of both (HH), else up to the word in which they part, without the spaces before it.
    """
    same = min(len(chosen), len(rejected))
    cut = next((i for i in range(same) if chosen[i] != rejected[i]), same)
    reply = chosen[:cut].rfind(_REPLY_BEGINS)
    if reply >= 0:
        return reply + len(_REPLY_BEGINS)
    while cut > 0 and chosen[cut - 1].isalnum():
        cut -= 1
    while cut > 0 and chosen[cut - 1] == " ":
        cut -= 1
    return cut


def _with_prompt(pair: Pair) -> Pair:
    """The pair of a prompt that stands apart; conversations may hold it once more, or begin a text prompt's reply."""
    prompt, chosen, rejected = pair.prompt, pair.chosen, pair.rejected
    if isinstance(chosen, list) and isinstance(rejected, list):
        if isinstance(prompt, str) and chosen[0]["role"] != "assistant":
            cut = _common_turns(chosen, rejected)
            return _checked(Pair(pair.place, chosen[:cut], chosen[cut:], rejected[cut:]))
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        held = len(turns) if chosen[: len(turns)] == turns == rejected[: len(turns)] else 0
        return _checked(Pair(pair.place, turns, chosen[held:], rejected[held:]))
    return _checked(pair)


def _checked(pair: Pair) -> Pair:
    """Both responses end with the assistant's words, and follow a prompt."""
    if not pair.prompt:
        raise fault(pair.place, "has no prompt: its texts have no beginning in common", "Add a prompt column.")
    check_end(pair.chosen, what="chosen response", place=pair.place)
    check_end(pair.rejected, what="rejected response", place=pair.place)
    return pair


def _common_turns(chosen: list[Message], rejected: list[Message]) -> int:
    """Turns of the prompt: those that are the same in both; of two conversations alike, all but the last."""
    shorter = min(len(chosen), len(rejected))
    same = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter)
    return same - 1 if chosen == rejected else same
