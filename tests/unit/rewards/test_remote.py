"""Scores from real HTTP servers, good ones and others."""

import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybridflow.config.reward import Reward
from hybridflow.errors import ConfigError, RewardError
from hybridflow.observability.metrics import plain
from hybridflow.rewards.scorer import RewardScorer

PROMPTS, COMPLETIONS = ["1+1=", "2+2=", "3+3="], ["2", "5", "6"]
COLUMNS = {"answer": ["2", "4", "6"]}


BODY = b"HTTP/1.0 200 OK\r\n\r\n"
RAW = {
    "/trickle": BODY,
    "/headers": b"HTTP/1.0 200 OK\r\nX-Slow: ",
    "/moved": b"HTTP/1.0 302 Found\r\nLocation: /good\r\n\r\n",
    "/huge": BODY + b" " * (50 << 20),
    "/deep": BODY + b"[" * 100_000,
}
"""Answers sent as they are, two of them followed by a space every 0.1 s."""


class Handler(BaseHTTPRequestHandler):
    """Answers as its path says, and notes what it was asked."""

    def do_POST(self):
        assert isinstance(self.server, Server)
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
            "/lists": {"rewards": rewards, "extra_logs": [1, 2, 3]},
            "/null": {"rewards": [None, *rewards[1:]]},
            "/short": {"rewards": rewards[:1]},
            "/other": {"reward": 1},
        }
        if self.path == "/slow":
            time.sleep(0.6)
        if self.path == "/waking" and len(self.server.asked) < 3:
            self.send_error(503)
            return
        if self.path in RAW:
            with suppress(OSError):
                self.wfile.write(RAW[self.path])
                for _ in range(50 if self.path in ("/trickle", "/headers") else 0):
                    self.wfile.write(b" ")
                    time.sleep(0.1)
            return
        status = 500 if self.path == "/broken" else 200
        text = json.dumps(answers.get(self.path, answers["/good"])) if status == 200 else "the model is still loading"
        self.send_response(status)
        self.end_headers()
        self.wfile.write((text if self.path != "/words" else "hello").encode())

    def log_message(self, format, *args):
        """Says nothing."""


class Server(ThreadingHTTPServer):
    """Keeps what it was asked: path, body and headers."""

    asked: list


@pytest.fixture(scope="module")
def server():
    found = Server(("127.0.0.1", 0), Handler)
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


def test_null_is_not_scored(address):
    assert scored(f"{address}/null", error_budget=1).columns["null"].isnan().tolist() == [True, False, False]


@pytest.mark.parametrize("path", ["good", "nested", "rich", "lists"])
def test_a_server_is_asked_and_answers_as_openrlhfs_do(address, asked, path, caplog):
    found = scored(f"{address}/{path}")
    assert found.scores.tolist() == [1.0, 0.0, 1.0]
    assert plain(found.metrics)[f"rewards/{path}/mean"] == pytest.approx(2 / 3)
    body = asked[0][1]
    assert ("extra_logs left out" in caplog.text) is (path == "lists")
    assert body == {"query": ["1+1=2", "2+2=5", "3+3=6"], "prompts": PROMPTS, "labels": ["2", "4", "6"]}
    if path == "rich":
        assert plain(found.metrics)["rewards/rich/half"] == pytest.approx(1 / 3)
        assert found.extras["half"] == [0.5, 0.0, 0.5]
        assert found.filter_scores is not None and found.filter_scores.tolist() == [0.0, 0.0, 1.0]


def test_samples_go_in_requests_of_the_size_asked_for_to_the_addresses_in_turn(address, asked):
    settings = {"good": {"batch_size": 1, "headers": {"Authorization": "Bearer x"}}}
    found = scored(f"{address}/good {address}/rich", settings=settings)
    assert found.scores.tolist() == [1.0, 0.0, 1.0]
    assert sorted(path for path, _, _ in asked) == ["/good", "/good", "/rich"]
    assert all(headers["Authorization"] == "Bearer x" for _, _, headers in asked)


@pytest.mark.parametrize("bad", ["broken", "other", "slow"])
def test_the_next_address_is_asked_where_one_fails(address, asked, bad, caplog):
    found = scored(f"{address}/{bad} {address}/good", settings={bad: {"request_seconds": 0.3}})
    assert found.scores.tolist() == [1.0, 0.0, 1.0]
    assert [path for path, _, _ in asked] == [f"/{bad}", "/good"]
    assert f"/{bad}: " in caplog.text and "attempt=1 of 5 failed" in caplog.text


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("broken", "status 500 Internal Server Error: the model is still loading"),
        ("short", "without 'rewards' for 3 samples"),
        ("words", "b'hello', which is not JSON"),
        ("slow", "timed out"),
        ("huge", "its response has more than 1 MiB"),
        ("deep", "which is nested too deeply"),
        ("moved", "status 302 Found: go to /good; use that address if it is right"),
    ],
)
def test_when_none_answers_the_error_says_what_they_said(address, asked, bad, said):
    settings = {"attempts": 1, "request_seconds": 0.3 if bad == "slow" else 60.0, "answer_mb": 1}
    with pytest.raises(RewardError, match="failed on sample 0: No server (gave|answered)") as caught:
        scored(f"{address}/{bad}", settings={bad: settings})
    assert {path for path, _, _ in asked} == {f"/{bad}"}  # a redirect is not followed
    advice = "Start the server again" if bad == "slow" else "A server answers"
    assert f"/{bad}" in caught.value.message and advice in caught.value.message
    assert "line" not in caught.value.message  # of our own code
    assert (said in caught.value.message) or (said.replace("3", "1") in caught.value.message)


def test_a_server_that_restarts_is_waited_for(address, asked):
    begun = time.monotonic()
    found = scored(f"{address}/waking", settings={"waking": {"retry_seconds": 0.1}})
    assert found.scores.tolist() == [1.0, 0.0, 1.0]
    assert len(asked) == 3
    assert time.monotonic() - begun > 0.1 + 0.4  # each wait is 4 times the one before


@pytest.mark.parametrize("processes", [0, 1])
def test_a_server_that_is_down_is_not_asked_for_each_sample_alone(processes, caplog):
    settings = {"reward": {"retry_seconds": 0.01, "attempts": 3}}
    with pytest.raises(RewardError, match="No server answered in 3 attempts") as caught:
        scored("http://127.0.0.1:9/reward", settings=settings, processes=processes)
    assert "one by one" not in caplog.text
    assert processes or caplog.text.count("attempt=") == 3
    assert "reward.settings.NAME.attempts or retry_seconds" in caught.value.message


def test_a_server_is_looked_for_before_anything_is_loaded(address, caplog):
    RewardScorer(Reward(functions=[f"{address}/good"])).check_servers()
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9/r\?token=\*\*\*: .*refused.*Start it first"):
        RewardScorer(Reward(functions=["http://127.0.0.1:9/r?token=s3cr3t"])).check_servers()
    RewardScorer(Reward(functions=[f"http://127.0.0.1:9/r {address}/good"])).check_servers()
    assert "some servers cannot be reached yet: http://127.0.0.1:9/r" in caplog.text


@pytest.mark.parametrize("path", ["trickle", "headers"])
def test_a_request_has_a_total_time(address, path):
    begun = time.monotonic()
    with pytest.raises(RewardError, match="no complete response after request_seconds=0.5"):
        scored(f"{address}/{path}", settings={path: {"request_seconds": 0.5, "attempts": 1}})
    assert time.monotonic() - begun < 3


def test_errors_do_not_tell_the_secrets_of_an_address(caplog):
    with pytest.raises(RewardError) as caught:
        scored("http://127.0.0.1:9/r?token=s3cr3t", settings={"r": {"attempts": 1}})
    assert "s3cr3t" not in caught.value.message + caplog.text
    with pytest.raises(ConfigError, match="contains a name and password") as refused:
        scored("http://me:s3cr3t@127.0.0.1:9/reward")
    assert "s3cr3t" not in str(refused.value) and "headers" in refused.value.remedy


def test_addresses_and_their_settings_are_checked():
    with pytest.raises(ConfigError, match="'localhost:3' is not an address.*separate several with spaces"):
        scored("http://a:1/x localhost:3")
    with pytest.raises(ConfigError, match=r"no setting 'reward.settings.x.batchsize'.*Did you mean 'batch_size'\?"):
        scored("http://a:1/x", settings={"x": {"batchsize": 3}})
    with pytest.raises(ConfigError, match="out of range"):
        scored("http://a:1/x", settings={"x": {"attempts": 0}})
