"""Scores from real HTTP servers, good ones and others."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybridflow.config.reward import Reward
from hybridflow.errors import ConfigError, RewardError
from hybridflow.observability.metrics import plain
from hybridflow.rewards.scorer import RewardScorer

PROMPTS, COMPLETIONS = ["1+1=", "2+2=", "3+3="], ["2", "5", "6"]
COLUMNS = {"answer": ["2", "4", "6"]}


class Handler(BaseHTTPRequestHandler):
    """Answers as its path says, and notes what it was asked."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, dict(self.headers)))
        rewards = [
            float(q[len(p) :] == a) for q, p, a in zip(body["query"], body["prompts"], body["labels"], strict=True)
        ]
        answers = {
            "/good": {"rewards": rewards},
            "/nested": {"rewards": [[reward] for reward in rewards]},
            "/rich": {
                "rewards": rewards,
                "scores": [0.0, *rewards[1:]],
                "extra_logs": {"half": [r / 2 for r in rewards]},
            },
            "/null": {"rewards": [None, *rewards[1:]]},
            "/short": {"rewards": rewards[:1]},
            "/other": {"reward": 1},
        }
        if self.path == "/slow":
            time.sleep(1.0)
        status = 503 if self.path == "/broken" else 200
        text = json.dumps(answers.get(self.path, answers["/good"])) if status == 200 else "the model is still loading"
        self.send_response(status)
        self.end_headers()
        self.wfile.write((text if self.path != "/words" else "hello").encode())

    def log_message(self, format, *args):
        """Says nothing."""


@pytest.fixture(scope="module")
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def asked(server):
    server.asked = []
    return server.asked


@pytest.fixture
def address(server, asked):
    return f"http://127.0.0.1:{server.server_port}"


def scored(functions, **settings):
    scorer = RewardScorer(Reward(functions=[functions], **settings))
    return scorer.score(PROMPTS, COMPLETIONS, COLUMNS)


@pytest.mark.parametrize("path", ["good", "nested", "rich"])
def test_a_server_is_asked_and_answers_as_openrlhfs_do(address, asked, path):
    found = scored(f"{address}/{path}")
    assert found.scores.tolist() == [1.0, 0.0, 1.0]
    assert plain(found.metrics)[f"rewards/{path}/mean"] == pytest.approx(2 / 3)
    body = asked[0][1]
    assert body == {"query": ["1+1=2", "2+2=5", "3+3=6"], "prompts": PROMPTS, "labels": ["2", "4", "6"]}
    if path == "rich":
        assert plain(found.metrics)["rewards/rich/half"] == pytest.approx(1 / 3)
        assert found.extras["half"] == [0.5, 0.0, 0.5]
        assert found.filter_scores is not None and found.filter_scores.tolist() == [0.0, 0.0, 1.0]


def test_null_is_not_scored(address):
    found = scored(f"{address}/null", error_budget=1)
    assert found.columns["null"].isnan().tolist() == [True, False, False]


def test_samples_go_in_requests_of_the_size_asked_for_to_the_addresses_in_turn(address, asked):
    settings = {"good": {"batch_size": 1, "headers": {"Authorization": "Bearer x"}}}
    found = scored(f"{address}/good {address}/rich", settings=settings)
    assert found.scores.tolist() == [1.0, 0.0, 1.0]
    assert sorted(path for path, _, _ in asked) == ["/good", "/good", "/rich"]
    assert all(headers["Authorization"] == "Bearer x" for _, _, headers in asked)


@pytest.mark.parametrize("bad", ["broken", "short", "other", "words", "slow"])
def test_the_next_address_is_asked_where_one_fails(address, asked, bad, caplog):
    found = scored(f"{address}/{bad} {address}/good", settings={bad: {"request_seconds": 0.3}})
    assert found.scores.tolist() == [1.0, 0.0, 1.0]
    assert [path for path, _, _ in asked] == [f"/{bad}", "/good"]
    assert f"/{bad} attempt=1 of 3 failed" in caplog.text


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("broken", "status 503 Service Unavailable, and it said: the model is still loading"),
        ("short", "without 'rewards' for 3 samples"),
        ("words", "b'hello', which is not JSON"),
        ("slow", "timed out"),
    ],
)
def test_when_none_answers_the_error_says_what_they_said(address, bad, said):
    with pytest.raises(RewardError, match="failed on sample 0: No server answered") as caught:
        scored(f"{address}/{bad}", settings={bad: {"attempts": 1, "request_seconds": 0.3}})
    assert f"/{bad}" in caught.value.message and "A server answers" in caught.value.message
    assert "line" not in caught.value.message  # where in the package it was noticed helps nobody
    assert (said in caught.value.message) or (said.replace("3", "1") in caught.value.message)


def test_a_server_that_is_not_there_is_an_error():
    with pytest.raises(RewardError, match="refused"):
        scored("http://127.0.0.1:9/reward")


def test_addresses_and_their_settings_are_checked():
    with pytest.raises(ConfigError, match="'localhost:3' is no address") as caught:
        scored("http://a:1/x localhost:3")
    assert "spaces between" in caught.value.remedy
    with pytest.raises(ConfigError, match="no setting 'reward.settings.x.batchsize'") as caught:
        scored("http://a:1/x", settings={"x": {"batchsize": 3}})
    assert "Did you mean 'batch_size'?" in caught.value.remedy
    with pytest.raises(ConfigError, match="out of range"):
        scored("http://a:1/x", settings={"x": {"attempts": 0}})
