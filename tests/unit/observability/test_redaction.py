"""Secrets stay in the process."""

import pytest

from hybridflow.observability.redaction import redacted, redacted_leaves, redacted_text

SECRETS = [
    "http://user:s3cr3tpw@host:1/score",
    "https://s3cr3tpw@host/score",
    "http://host/score?user=me&token=s3cr3tpw&x=1",
    "http://host/score?api_key=s3cr3tpw#top",
    "http://host/score?X-Amz-Signature=s3cr3tpw",
    "{'Authorization': 'Bearer s3cr3tpw'}",
    "headers.Authorization=Basic s3cr3tpw",
    "Authorization: s3cr3tpw",
    "headers={Authorization: ${oc.env:TOKEN_OF_MINE,s3cr3tpw}}",
    "sent with bearer s3cr3tpw.abc",
    "the variable's value s3cr3t-of-environment, wherever it is",
]


@pytest.mark.parametrize("text", SECRETS)
def test_texts_tell_no_secrets(text, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-of-environment")
    found = redacted_text(text)
    assert "s3cr3t" not in found and "***" in found
    assert redacted_text(found) == found


@pytest.mark.parametrize(
    "text",
    [
        "http://host:8000/score?max_tokens=5&monkey=1",
        "model.pad_token=<pad> data.answer_key=solution microbatch_tokens=8192",
        "Basic settings of a bearer of news; user@example.com",
        "the token 'abc' is not in the vocabulary",
        "reward.settings.NAME.headers={Authorization: ${oc.env:VARIABLE}}.",
        'headers={Authorization: "Bearer ${oc.env:MY_TOKEN}"}',
        "no authorization: use ray",
    ],
)
def test_other_texts_stay_as_they_are(text, monkeypatch):
    monkeypatch.setenv("TOKEN", "abc")  # too short to be looked for
    monkeypatch.setenv("PWD", "Basic settings")
    assert redacted_text(text) == text


def test_a_configuration_without_its_secrets():
    config = {
        "model": {"pad_token": "<pad>", "path": "m"},
        "data": {"answer_key": "solution", "train_files": ["http://u:s3cr3t@host/x.jsonl"]},
        "reward": {
            "functions": ["http://host/score?token=s3cr3t"],
            "settings": {
                "score": {"headers": {"Authorization": "s3cr3t", "X-Own": "s3cr3t", "Accept": "a/b"}, "attempts": 3},
                "own": {"api_key": "s3cr3t", "password": None, "token": "s3cr3t"},
            },
        },
    }
    found = redacted(config)
    assert "s3cr3t" not in str(found)
    assert isinstance(found, dict)
    assert found["model"] == config["model"] and found["data"]["answer_key"] == "solution"
    assert found["reward"]["settings"]["score"]["headers"] == {"Authorization": "***", "X-Own": "***", "Accept": "a/b"}
    assert found["reward"]["settings"]["score"]["attempts"] == 3
    assert found["reward"]["settings"]["own"] == {"api_key": "***", "password": None, "token": "***"}
    leaves = {
        "reward.settings.score.headers.X-Own": "s3cr3t",
        "reward.settings.own.api_key": "s3cr3t",
        "model.pad_token": "<pad>",
    }
    assert list(redacted_leaves(leaves).values()) == ["***", "***", "<pad>"]
