import pytest

from hybridflow.config.data import Data
from hybridflow.data.conversations import as_conversation, text_flaw

USER = [{"role": "user", "content": "hi"}]
SYSTEM = {"role": "system", "content": "Be brief"}


@pytest.mark.parametrize(
    ("value", "flaw"),
    [
        (None, "is missing"),
        ("", "is empty"),
        ([], "is empty"),
        (7, "is of type int"),
        ([{"role": "user"}], "without role and content"),
        (["hi"], "without role and content"),
        ("hi", None),
        (USER, None),
    ],
)
def test_a_text_or_messages_have_no_flaw(value, flaw):
    found = text_flaw(value)
    assert found is None if flaw is None else found is not None and flaw in found


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
