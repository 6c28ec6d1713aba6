"""Secrets stay in the process."""

import json
import time
from dataclasses import asdict
from html import unescape
from urllib.parse import quote

import pytest

from hybridflow.config.experiment import Experiment
from hybridflow.elastic.compatibility import flat
from hybridflow.observability.printable import shown_sample
from hybridflow.observability.redaction import redacted, redacted_leaves, redacted_text
from hybridflow.rewards.interface import Failure

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
    "https://user:s3cr3t/pw@host/x",
    "https://user:pw@s3cr3t@host/",
    "postgres://u:p's3cr3t@h/db",
    "X-API-Key: s3cr3tpw1",
    "x-api-key='s3cr3t pw'",
    "Cookie: session=s3cr3tpw; other=s3cr3t",
    "Proxy-Authorization: Basic s3cr3tpw==",
    "{'api_key': 's3cr3t', 'max_tokens': 5}",
    "settings={api_keys: [s3cr3t-1, s3cr3t-2], clientSecret: s3cr3t3}",
    "--password s3cr3tpw",
    "sent with bearer s3cr3tpw.abc",
    "webhook_url=https://host.example/s3cr3tpw1",
    "posting to https://hooks.slack.com/services/T0/B0/s3cr3tpw1",
    "'https://discord.com/api/webhooks/735577001/s3cr3tpw1'",
    "https://host.example/hook/s3cr3t-pw?x=1",
    "https://api.telegram.org/bot7355770:s3cr3tpw1/sendMessage",
    "https://host/run?code=s3cr3tpw1",
    "proxy user:s3cr3tpw@host.example:3128 refused",
    "reward.settings.own.key=s3cr3tpw",
    "own={key: s3cr3tpw, url: http://host}",
    "{'key': 's3cr3t', 'max_tokens': 5}",
    "password_int=735577001-s3cr3t api_token_str=s3cr3tpw",
    "token: s3cr3tpw1",
    "the password: s3cr3t",
    "Command '['curl', '--api-key=sk-s3cr3t', '--password', 's3cr3t', '-s']' returned non-zero exit status 22.",
    "curl --api-key=sk-s3cr3t --db-password s3cr3t http://host",
    "{'login': {'user': 'me', 'pass': 's3cr3t'}}",
    "basic_auth=[me, s3cr3t]",
    "  private_key: |\n    s3cr3t1\n\n    s3cr3t2",
    "-----BEGIN RSA PRIVATE KEY-----\ns3cr3t\n-----END RSA PRIVATE KEY-----",
    "http://host/login?next=%2Fx%3Fapi_key%3Ds3cr3t",
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
        "https://host:8000/score?mail=a@b http://host:80 http://[::1]:8000/x@y",
        "max_tokens=8192 token_scores=[1.0] tokenizer_path=a/b passk=4 compass=north forward_pass=3",
        "unknown token: <x>; token = tokens[0]; password: must be text",
        "the key: data.files; sorted(rows, key=len); key = name; key=trainer.steps2 key=data.prompt_key",
        "mailto:user@example.com image:tag@sha256:0a1b2c3d4e5f step:1@main 12:30 user@host.example:80",
        "https://host/githooks2/x https://host/path/of/books/one https://host/score?codec=5",
        "max_user_tokens=128 session_tokens=3 id_tokens: 12, reward.settings.f.max_user_tokens=128 token=5 token=3,",
        "tests pass=3 fail=1; if x: pass; pass: the first; second pass: 3",
        "token_text=the key_value=3 password_file=/run/x webhook_attempts=3",
    ],
)
def test_other_texts_stay_as_they_are(text, monkeypatch):
    monkeypatch.setenv("TOKEN", "abc")  # too short to be looked for
    monkeypatch.setenv("PWD", "Basic settings")
    assert redacted_text(text) == text


def test_a_configuration_without_its_secrets():
    headers = {"Authorization": "s3cr3t", "X-Own": "s3cr3t", "Accept": "a/b"}
    config = {"functions": ["http://host/score?token=s3cr3t"], "headers": headers, "password": None}
    hidden = {"Authorization": "***", "X-Own": "***", "Accept": "a/b"}
    assert redacted(config) == {"functions": ["http://host/score?token=***"], "headers": hidden, "password": None}
    assert list(redacted_leaves({"f.headers.X-Own": "s3cr3t", "model.pad_token": "<pad>"}).values()) == ["***", "<pad>"]


@pytest.mark.parametrize("name", ["OPENAI_APIKEY", "DB_PASS", "GITHUB_PAT", "AWS_SESSION_TOKEN", "PRIVATE_KEY"])
def test_the_values_of_secret_variables_are_found_in_every_form(name, monkeypatch):
    value = "s3cr3t-one/with+signs\ns3cr3t-line 'two'\ns3cr3t-line-three"
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("GIT_ASKPASS", "/usr/bin/askpass")
    forms = [value, repr(value), json.dumps(value), quote(value, safe=""), quote(value), "s3cr3t-line-three alone"]
    assert [redacted_text(form) for form in forms if "s3cr3t" in redacted_text(form)] == []
    assert redacted_text("/usr/bin/askpass") == "/usr/bin/askpass"


def test_everything_below_a_secret_name_is_hidden_and_other_names_are_not():
    secret: dict[str, object] = {
        "api_keys": ["s3cr3t", "s3cr3t"], "password": 735577001, "clientSecret": "s3cr3t", "accessToken": "s3cr3t",
        "db": "postgres://u:s3cr3t/pw@h/d", "token": {"value": "s3cr3t"}, "credentials": {"user": {"pin": 735577001}},
        "key": "s3cr3t", "password_int": 735577001, "webhook_url": "https://host/s3cr3t", "slackWebhooks": ["s3cr3t"],
        "basic_auth": ["u", "s3cr3t"], "pass": "s3cr3t", "PGPASSWORD": "s3cr3t", "JWT": "s3cr3t",
        "password2": "s3cr3t", "access_key_id": "s3cr3t", "tokens": ["s3cr3t"], "pwd": "s3cr3t", "db_pass": "s3cr3t",
    }  # fmt: skip
    harmless: dict[str, object] = {
        "max_tokens": 5, "tokenizer_path": "a/b", "token_scores": [1.0], "passk": 4, "compass": "north", "tokens": 9,
        "bypass": "yes", "first_pass": "x", "stop_tokens": ["</s>"], "answer_key": "solution", "use_password": True,
        "max_user_tokens": 128, "session_tokens": 2, "id_tokens": [5, 6], "pass": 3,
        "keys": ["a"], "key_column": "b", "prompt_key": "question", "webhook_attempts": 3, "token_text": "the",
    }  # fmt: skip
    shown = str(redacted({"dataflow_settings": secret}))
    assert "s3cr3t" not in shown and "735577001" not in shown
    leaves = flat({"dataflow_settings": secret})
    assert "s3cr3t" not in str(redacted_leaves(leaves)) and "735577001" not in str(redacted_leaves(leaves))
    assert redacted({"dataflow_settings": harmless}) == {"dataflow_settings": harmless}


def test_the_lines_of_a_block_end_where_the_indentation_does():
    text = "a:\n  private_key: |\n    s3cr3t1\n\n    s3cr3t2\n  other: kept\nb: 1"
    assert redacted_text(text) == "a:\n  private_key: ***\n  other: kept\nb: 1"


SAMPLE = "def f(token=5): return api_key == 'x' and http://u:pw@host"


def test_a_failed_sample_is_shown_as_it_is_but_for_the_values_of_secret_variables(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-of-environment")
    failure = Failure("f.py:f", 3, "api_key=s3cr3t", SAMPLE, f"{SAMPLE}\ns3cr3t-of-environment", "password=s3cr3t")
    found = redacted_text(f"RewardError: the function {failure}")
    assert "s3cr3t" not in found
    assert f"prompt:     {SAMPLE!r}\n" in found and SAMPLE in found.partition("completion:")[2]
    assert unescape(shown_sample(f"{SAMPLE} s3cr3t-of-environment")) == f"{SAMPLE} ***"


@pytest.mark.parametrize("text", ["https://a:b/" * 20000, ("u" * 40 + "://") * 5000, "\n  private_key: |\n   a" * 5000])
def test_long_texts_stay_quick(text):
    start = time.process_time()
    redacted_text(text)
    assert time.process_time() - start < 5.0


def test_no_setting_of_the_schema_has_a_secret_name():
    for value in (1, "s", ["s"]):
        leaves = dict.fromkeys(flat(asdict(Experiment())), value)
        assert redacted_leaves(leaves) == leaves
    assert redacted(asdict(Experiment())) == asdict(Experiment())
