"""Functions in processes of their own: the same results, and what a slow, crashing or greedy sample costs."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hybridflow.config.reward import Reward
from hybridflow.errors import RewardError
from hybridflow.observability.metrics import plain
from hybridflow.rewards.interface import Samples
from hybridflow.rewards.resolve import resolve_functions
from hybridflow.rewards.runners.chunks import chunks_of
from hybridflow.rewards.runners.pooled import PooledRunner
from hybridflow.rewards.runners.serial import SerialRunner
from hybridflow.rewards.scorer import RewardScorer

JUDGES = """
import asyncio, ctypes, mmap, os, signal, subprocess, sys, time

def lengths(completions, answer, log_metric, log_extra, **columns):
    log_metric("letters", sum(map(len, completions)) / len(completions))
    log_extra("shout", [text.upper() for text in completions])
    return [None if wanted is None else float(len(text)) for text, wanted in zip(completions, answer)]

def raises(completions, **columns):
    if any(text.endswith("7") for text in completions):
        raise ValueError("not a seven, please")
    return [1.0] * len(completions)

def leaves(completions, **columns):
    if any(text.endswith("7") for text in completions):
        sys.exit(3)
    return [1.0] * len(completions)

def nan(completions, **columns):
    return [float("nan") if text.endswith("7") else 1.0 for text in completions]

def only_alone(completions, **columns):
    assert len(completions) == 1, "one, please"
    return [1.0]

def of_its_group(prompts, completions, **columns):
    return [float(len(text) - min(len(o) for p, o in zip(prompts, completions) if p == prompt))
            for prompt, text in zip(prompts, completions)]

def of_one(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str)), "is_long": len(solution_str) > 3, "text": solution_str}

async def waits(completions, **columns):
    await asyncio.sleep(0.6)
    return [2.0] * len(completions)

def bad(what, text):
    acts = {
        "hang": lambda: time.sleep(60),
        "hang in C": lambda: ctypes.PyDLL(None).sleep(60),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "segfault": lambda: ctypes.string_at(0),
        "exit": lambda: os._exit(5),
        "memory": lambda: [b'x' * 2**24 for _ in iter(int, 1)],
        "memory of a child": lambda: subprocess.run([sys.executable, "-c", "[b'x' * 2**24 for _ in iter(int, 1)]"]),
    }
    if what in acts and text.endswith("7"):
        acts[what]()
    return 1.0

def misbehaves(completions, what, **columns):
    return [bad(kind, text) for kind, text in zip(what, completions)]

def killed_once(completions, marker, **columns):
    if not os.path.exists(marker[0]):
        open(marker[0], "w").close()
        os.kill(os.getpid(), 9)
    return [float(len(text)) for text in completions]

def reserves(completions, **columns):
    reserved = mmap.mmap(-1, 2**33)
    return [float(len(reserved))] * len(completions)

def loads_torch(completions, **columns):
    import torch
    return [float(torch.ones(len(text), 1000, 1000).sum() / 1e6) for text in completions]

def prints(completions, **columns):
    print("of", len(completions))
    return [float(len(text)) for text in completions]

def prints_and_crashes(completions, **columns):
    print("looking at", completions)
    os._exit(3)

def floods(completions, **columns):
    print("x" * 3000, flush=True)
    return [float(len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    path = tmp_path_factory.mktemp("judges") / "judges.py"
    path.write_text(JUDGES)
    return path


def samples_of(num, columns=None):
    return Samples(
        [f"p{index // 3}" for index in range(num)],
        ["x" * (index % 5) + str(index) for index in range(num)],
        {"answer": [None if index % 4 == 1 else "a" for index in range(num)], **(columns or {})},
        [[index] for index in range(num)],
    )


@pytest.mark.parametrize(("processes", "memory_mb"), [(1, 4096), (3, None)])
def test_outcomes_are_those_of_the_serial_runner(judges, processes, memory_mb):
    names = ["lengths", "raises", "leaves", "nan", "only_alone", "of_its_group", "of_one", "waits"]
    config = Reward(functions=[f"{judges}:{name}" for name in names], memory_mb=memory_mb)
    functions, samples = resolve_functions(config), samples_of(30)
    expected = SerialRunner().run(functions, samples, allowed_failures=100)
    found = PooledRunner(config, processes=processes).run(functions, samples, allowed_failures=100)
    for name, one, other in zip(names, found, expected, strict=True):
        assert one.scores == other.scores, name
        assert [f.index for f in one.failures] == [f.index for f in other.failures], name
        assert [f.reason for f in one.failures] == [f.reason for f in other.failures], name
        assert one.extras == other.extras, name
        assert plain(one.metrics) == pytest.approx(plain(other.metrics)), name
    assert [f.index for f in found[1].failures] == [7, 17, 27]
    assert "sys.exit" not in found[2].failures[0].reason and "SystemExit: 3" in found[2].failures[0].reason


@pytest.mark.parametrize(
    ("what", "settings", "reason"),
    [
        ("hang", {"timeout_seconds": 0.3}, "it took longer than reward.timeout_seconds=0.3."),
        ("hang in C", {"timeout_seconds": 0.3}, "it took longer than reward.timeout_seconds=0.3."),
        ("kill", {}, "its process was killed by signal 9."),
        ("segfault", {}, "its process was killed by signal 11."),
        ("exit", {}, "its process exited with status 5."),
        ("memory", {"memory_mb": 200}, "its process exceeded reward.memory_mb=200 (above its baseline)."),
        ("memory of a child", {"memory_mb": 200}, "its process exceeded reward.memory_mb=200"),
    ],
)
def test_only_the_guilty_sample_fails_and_says_why(judges, what, settings, reason):
    if "memory" in what and sys.platform != "linux":
        pytest.skip("reads /proc")
    scorer = RewardScorer(Reward(functions=[f"{judges}:misbehaves"], processes=2, error_budget=9, **settings))
    scored = scorer.score(["p"] * 3, ["1", "27", "3"], {"what": [what] * 3})
    assert [f.index for f in scored.failures] == [1]
    assert reason in scored.failures[0].reason
    assert scored.scores.tolist() == [1.0, 0.0, 1.0]
    assert scorer.score(["p"] * 3, ["1", "27", "3"], {"what": ["fine"] * 3}).scores.tolist() == [1.0] * 3


@pytest.mark.parametrize("texts", [["one"], ["one", "two"]])
def test_a_process_that_is_killed_once_fails_no_sample(judges, tmp_path, texts):
    scorer = RewardScorer(Reward(functions=[f"{judges}:killed_once"]))
    scored = scorer.score(["p"] * len(texts), texts, {"marker": [str(tmp_path / "marker")] * len(texts)})
    assert scored.scores.tolist() == [3.0] * len(texts) and not scored.failures


def test_models_fit_below_the_limit_and_reserved_memory_does_not_count(judges):
    assert Reward().memory_mb is not None
    config = Reward(functions=[f"{judges}:loads_torch", f"{judges}:reserves"], memory_mb=600)
    scored = RewardScorer(config).score(["p"], ["four"], {})
    assert [column.tolist() for column in scored.columns.values()] == [[4.0], [2.0**33]]


def test_past_the_budget_the_run_stops_without_waiting_for_the_rest(judges):
    config = Reward(functions=[f"{judges}:misbehaves"], processes=1, timeout_seconds=0.1)
    with pytest.raises(RewardError, match="failed on sample 1: it took longer") as caught:
        RewardScorer(config).score(
            [f"p{i}" for i in range(30)], ["x", *["xx7"] * 29], {"what": ["fine", *["hang"] * 29]}
        )
    assert "xx7" in caught.value.message and "reward.error_budget" in caught.value.remedy


@pytest.mark.parametrize("processes", [0, 2])
def test_asynchronous_functions_wait_concurrently(judges, tmp_path, processes):
    (tmp_path / "copy.py").write_text(JUDGES)
    functions = [f"{judges}:waits", f"{tmp_path}/copy.py:waits", f"{judges}:lengths"]
    scorer, samples = RewardScorer(Reward(functions=functions, processes=processes)), samples_of(9)
    if processes:
        scorer.score(samples.prompts, samples.completions, samples.columns)
    begun = time.monotonic()
    scorer.score(samples.prompts, samples.completions, samples.columns)
    assert time.monotonic() - begun < 1.15


def test_a_function_that_only_the_driver_can_import_is_an_error(judges, tmp_path):
    path = tmp_path / "late.py"
    path.write_text("def f(completions, **columns):\n    return [1.0] * len(completions)\n")
    scorer = RewardScorer(Reward(functions=[f"{path}:f"]))
    path.unlink()
    with pytest.raises(RewardError, match=r"cannot load the reward functions: .*there is no file.*reward\.processes=0"):
        scorer.score(["p"], ["c"], {})


def test_code_that_is_edited_during_a_run_is_an_error_when_a_process_is_replaced(tmp_path, monkeypatch):
    reward, rule = tmp_path / "reward.py", tmp_path / "rule_of_edited_reward.py"
    reward.write_text(
        "import os\nfrom rule_of_edited_reward import score\n"
        "def f(completions, **columns):\n"
        "    return [os._exit(3) if text == 'die' else score(text) for text in completions]\n"
    )
    rule.write_text("def score(text):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    scorer = RewardScorer(Reward(functions=[f"{reward}:f"], error_budget=1))
    prompts = [f"p{index}" for index in range(4)]
    assert scorer.score(prompts, list("abcd"), {}).scores.tolist() == [1.0] * 4
    for changed in (reward, rule):
        changed.write_text(changed.read_text() + "# another version\n")
    assert scorer.score(prompts, list("abcd"), {}).scores.tolist() == [1.0] * 4
    with pytest.raises(RewardError, match="code that has changed since the run began") as caught:
        scorer.score(prompts, ["a", "die", "c", "d"], {})
    assert f"{reward}, {rule}" in caught.value.message and "trainer.resume_changed=accept" in caught.value.remedy


def test_chunks_are_cut_between_prompts_only(judges):
    config = Reward(functions=[f"{judges}:{name}" for name in ("lengths", "of_one", "waits")])
    whole, each, waits = resolve_functions(config)
    samples = samples_of(20)
    assert [(c.start, c.stop) for c in chunks_of(0, whole, samples)] == [(0, 9), (9, 18), (18, 20)]
    assert len(chunks_of(0, each, samples)) == 20
    assert len(chunks_of(0, each, samples_of(1000))) == 250
    assert [(c.start, c.stop) for c in chunks_of(0, waits, samples)] == [(0, 20)]
    assert chunks_of(0, whole, samples_of(0)) == []


OWNER = """
import sys
from hybridflow.config.reward import Reward
from hybridflow.rewards.interface import Samples
from hybridflow.rewards.resolve import resolve_functions
from hybridflow.rewards.runners.pooled import PooledRunner

file, *names = sys.argv[1:]
config = Reward(functions=[f"{file}:{name}" for name in names], timeout_seconds=60)
pool = PooledRunner(config, processes=2)
samples = Samples(["a", "b"], ["7", "777"], {"what": ["hang in C"] * 2})
print([outcome.scores for outcome in pool.run(resolve_functions(config), samples, allowed_failures=9)], file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_their_owner_however_it_ends(judges, how):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(judges), "misbehaves"])
    until, family = time.monotonic() + 10, []
    while time.monotonic() < until and len(family) < 3:  # the fork server and two of its processes
        time.sleep(0.5)
        family = psutil.Process(owner.pid).children(recursive=True)
    os.kill(owner.pid, how)
    owner.wait()
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert (len(gone), alive) == (3, [])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_end_with_their_scorer(judges):
    us, before = psutil.Process(), set(psutil.Process().children(recursive=True))
    scorer = RewardScorer(Reward(functions=[f"{judges}:nan"]))
    scorer.score(["p"], ["c"], {})
    family = set(us.children(recursive=True)) - before
    del scorer
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert (len(gone), alive) == (2, [])


def test_functions_that_print_to_a_closed_pipe_score_as_before(judges):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", OWNER, str(judges), "floods"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == "[[1.0, 3.0]]\n"


def test_what_a_function_prints_is_shown_though_its_process_crashes_or_is_killed_in_the_end(judges):
    command = [sys.executable, "-c", OWNER, str(judges), "prints", "prints_and_crashes"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "of 2\n" in done.stdout and "looking at ['777']\n" in done.stdout


FORKING = """
import gc, os
from multiprocessing.connection import Connection

def returns(completions, **columns):
    child = os.fork()
    if child == 0:
        return [-1.0] * len(completions)
    os.waitpid(child, 0)
    return [float(len(text)) for text in completions]

def raises(completions, **columns):
    if os.fork() == 0:
        raise OSError("the log is full")
    return [float(len(text)) for text in completions]

async def waits(completions, **columns):
    if os.fork() == 0:
        return [-1.0] * len(completions)
    return [float(len(text)) for text in completions]

def of_one(data_source, solution_str, ground_truth):
    if os.fork() == 0:
        raise SystemExit
    return float(len(solution_str))

class Judge:
    def __init__(self):
        child = os.fork()
        if child:
            os.waitpid(child, 0)

    def __call__(self, completions, **columns):
        return [float(len(text)) for text in completions]

def writes(completions, **columns):
    for found in gc.get_objects():
        if isinstance(found, Connection) and not found.closed:
            found.send((7, None))
    return [1.0] * len(completions)
"""


@pytest.fixture
def forking(tmp_path):
    (tmp_path / "forking.py").write_text(FORKING)
    return tmp_path / "forking.py"


@pytest.mark.parametrize(
    ("names", "processes"), [(["returns", "Judge"], 0), (["returns", "raises", "waits", "of_one", "Judge"], 1)]
)
def test_a_forked_process_never_answers_for_the_function(forking, tmp_path, names, processes):
    us, returned = os.getpid(), tmp_path / "returned"
    scorer = RewardScorer(Reward(functions=[f"{forking}:{name}" for name in names], processes=processes))
    prompts = [f"p{index // 2}" for index in range(40)]
    for step in range(3):
        completions = ["x" * (index + 50 * step) for index in range(40)]
        scored = scorer.score(prompts, completions, {})
        if os.getpid() != us:
            returned.touch()
            os._exit(9)  # it must not go on as a second pytest
        expected = [float(len(text)) for text in completions]
        assert {name: column.tolist() for name, column in scored.columns.items()} == dict.fromkeys(names, expected)
        assert scored.failures == []
    assert not returned.exists()  # `returns` and `Judge` wait for their children


def test_a_reply_to_another_request_is_an_error_that_names_the_function(forking):
    scorer = RewardScorer(Reward(functions=[f"{forking}:writes"], processes=1))
    with pytest.raises(RewardError, match=r"function 'writes' sent reply 7 instead of reply 1.*os\._exit\(\)"):
        scorer.score(["p"], ["c"], {})


STARTS_A_PROGRAM = """
import pathlib, subprocess, time

def score(prompts, completions, **columns):
    started = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path(__file__).with_suffix(".pid").write_text(str(started.pid))
    time.sleep(600)
"""


def test_a_program_with_a_session_of_its_own_ends_with_the_process_that_started_it(tmp_path):
    (tmp_path / "starts.py").write_text(STARTS_A_PROGRAM)
    config = Reward(functions=[f"{tmp_path}/starts.py:score"], timeout_seconds=2)
    PooledRunner(config, processes=1).run(resolve_functions(config), samples_of(1), allowed_failures=1)
    started = int((tmp_path / "starts.pid").read_text())
    left = [psutil.Process(started)] if psutil.pid_exists(started) else []
    alive = psutil.wait_procs(left, timeout=5)[1]
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
