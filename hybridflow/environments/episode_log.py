"""Log messages about episodes: how the template continues them, why they fail, and where they reach limits."""

import logging
from collections import Counter
from collections.abc import Mapping

from hybridflow.batch.episode_counts import CUT_CALLS
from hybridflow.batch.row_names import RowName
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.conversation_format import Continuation, TemplateCheck
from hybridflow.errors import EpisodeError

logger = logging.getLogger(__name__)
_QUIET = logging.getLogger(f"{__name__}.quiet")
_QUIET.setLevel(logging.CRITICAL + 1)

LIMITS = {
    "max_turns": "raise environment.max_turns, or let the environment end its episodes earlier",
    "max_response_tokens": "raise data.max_response_tokens, which counts all replies and observations of an episode, or"
    " lower environment.max_turn_tokens",
}
"""The limits of an episode, and what to do if most episodes reach one."""

_ENOUGH = 8
"""The fewest episodes of which the log says that most have reached a limit."""

_SHOWN_CHARACTERS = 300


class EpisodeLog:
    """Logs each kind of event once, except failures, and raises `EpisodeError` for too many of these.

    One that `is_quiet` only counts: another rank logs the same events.
    """

    def __init__(self, config: EnvironmentSettings, max_response_tokens: int, *, is_quiet: bool = False) -> None:
        self._config = config
        self._logger = _QUIET if is_quiet else logger
        self._max_response_tokens = max_response_tokens
        self.has_template = False
        """Whether the log says how the chat template continues conversations."""

        self._logged: set[str] = set()
        self._num_failures = 0
        self._limited: Counter[str] = Counter()
        self._num_ended = 0

    def template(self, found: TemplateCheck) -> None:
        """How the chat template continues conversations."""
        self.has_template = True
        words = f"continuation={found.continuation.value} {found.detail}".rstrip()
        self._logger.info("%s %s", self._config.chosen, words)
        when = (
            "drops <think>...</think> from earlier replies, so what follows such a reply"
            if found.drops_thoughts
            else ""
        )
        if found.continuation is Continuation.fork:
            when = "changes earlier turns, so each turn"
        if when:
            self._logger.warning(
                "%s: the chat template %s is a sequence of its own, with the whole conversation as its prompt. This"
                " costs time, and counts towards data.max_response_tokens; data.chat_template=FILE sets another one",
                self._config.chosen,
                when,
            )

    def retry(self, name: RowName, reason: str) -> None:
        """An episode starts again."""
        self._logger.warning("%s uid=%d sample_index=%d starts again: %s", self._config.chosen, *name, reason)

    def failure(self, name: RowName, turns: int, reason: str) -> None:
        """An episode has failed. Raises `EpisodeError` if more have than `environment.error_budget` allows.

        Logs the first ten failures, then every tenth up to the hundredth, every hundredth up to the thousandth, etc.
        """
        self._num_failures += 1
        failures, budget = self._num_failures, self._config.error_budget
        where = f"uid={name[0]} sample_index={name[1]}, replies so far: {turns}"
        if failures > budget:
            raise EpisodeError(
                f"{self._config.chosen} failed ({where}): {reason} Failed episodes of this rank so far: {failures};"
                f" environment.error_budget={budget} allows {budget}.",
                remedy="Fix the environment, or raise environment.error_budget.",
            )
        if failures % 10 ** (len(str(failures)) - 1) == 0:
            words = "environment failures=%d environment.error_budget=%d (%s): %s"
            self._logger.warning(words, failures, budget, where, reason)

    def limits(self, limited: Mapping[str | None, int], num_ended: int) -> None:
        """Warns of each limit that most episodes have reached."""
        self._limited.update({limit: limited.get(limit, 0) for limit in LIMITS})
        self._num_ended += num_ended
        if self._num_ended < _ENOUGH:
            return
        settings = {
            "max_turns": f"environment.max_turns={self._config.max_turns}",
            "max_response_tokens": f"data.max_response_tokens={self._max_response_tokens}",
        }
        for limit, setting in settings.items():
            if 2 * self._limited[limit] > self._num_ended:
                words = "%d of %d episodes ended at %s before they were done; %s"
                self._once(limit, words, self._limited[limit], self._num_ended, setting, LIMITS[limit])
        self._limited.clear()
        self._num_ended = 0

    def cut_call(self, max_turn_tokens: int) -> None:
        """A limit cut off a tool call."""
        self._once(
            "cut_call",
            "a tool call was cut off by environment.max_turn_tokens=%d or data.max_response_tokens=%d, so no tool was"
            f" called; raise them if this happens often ({CUT_CALLS})",
            max_turn_tokens,
            self._max_response_tokens,
        )

    def special_token(self, token: str) -> None:
        """The model sampled a special token within a reply."""
        self._once(
            "special_token",
            "the model sampled the special token '%s' within a reply; it stays in the prompt as it is. Remove it from"
            " observations that repeat a reply, where it would be encoded as the same token",
            token,
        )

    def stderr(self, text: str) -> None:
        """The standard error of a finished episode's program."""
        if text:
            words = "the program of an episode wrote to its standard error (stderr in samples.jsonl): %s"
            self._once("stderr", words, text[-_SHOWN_CHARACTERS:], level=logging.INFO)

    def _once(self, key: str, words: str, *values: object, level: int = logging.WARNING) -> None:
        if key not in self._logged:
            self._logged.add(key)
            self._logger.log(level, f"%s: {words}", self._config.chosen, *values)
