"""Episodes per second with environments that take a random time: each episode on its own, and with a barrier per turn.

    python benchmarks/environments.py --rounds 3

The built-in model plays episodes of 5 turns of 16 tokens, 64 at a time, in environments whose steps take 50 ms on
average (gamma distribution, standard deviation 50 ms). With a barrier, the next replies of all episodes are sampled as
one batch once the slowest environment has answered. Two workloads: a batch of 64 episodes, and one of `--episodes`, in
which a new episode begins whenever one ends.

The table also has the limit: how long the same episodes would take if the model answered as fast as when it decodes
64 rows at once, without waiting for anything else. The last line has the speedup over a barrier with a model that
takes no time, which no engine can exceed. With `make peers`, TRL's `environment_factory` plays the first workload as
well. Variants take turns within each round; the fastest of each counts.
"""

import argparse
import heapq
import json
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from math import inf

import torch
from delayed_environment import ANSWER, TURNS, delays
from record import HERE, run_reporting, write_record
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.transformers.engine import TransformersEngine
from hybridflow.environments.interface import Event, ModelInfo, Request
from hybridflow.environments.play import EpisodePlayer
from hybridflow.environments.running import environment_seed
from hybridflow.environments.stages import Stage
from hybridflow.models.loading import load_causal_lm, resolve_model_path
from hybridflow.models.tokenizers import load_tokenizer
from hybridflow.workers.row_sampler import RowSampler

MODEL = "builtin:calculator"
CONCURRENT = 64
TURN_TOKENS = 16
PROMPT = "12+34="
SEED = 0
SAMPLING = Sampling(ignore_eos=True)
TRL = HERE.parent / ".peers" / "trl" / "bin" / "python"


class BarrierStage:
    """A stage that returns no event until all episodes have one."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._num_acting = 0
        self.places = stage.places
        self.abandon, self.close, self.excuse = stage.abandon, stage.close, stage.excuse

    def send(self, requests: Mapping[int, Request]) -> None:
        """See `Stage.send`."""
        self._num_acting += len(requests)
        self._stage.send(requests)

    def receive(self, *, seconds: float) -> dict[int, Event]:
        """See `Stage.receive`."""
        events: dict[int, Event] = {}
        while len(events) < self._num_acting:
            events |= self._stage.receive(seconds=inf)
        self._num_acting = 0
        return events


class BarrierSampler(RowSampler):
    """Returns no reply until all are sampled."""

    def poll(self, *, max_tokens: int = 1) -> Batch:
        """See `RowSampler.poll`."""
        finished = []
        while self.engine.num_running:
            finished.append(self.engine.poll())
        return Batch.concat(finished)


class Player(EpisodePlayer):
    """Plays with or without a barrier."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, has_barrier: bool) -> None:
        config = EnvironmentSettings(
            name=f"{HERE / 'delayed_environment.py'}:Delayed",
            processes=CONCURRENT,
            max_turns=TURNS,
            max_turn_tokens=TURN_TOKENS,
        )
        super().__init__(config, ModelInfo(tokenizer, 16, 200, TURNS), (1,))
        if has_barrier:
            self._stage = BarrierStage(self._stage)
        self._sampler = BarrierSampler if has_barrier else RowSampler

    def seconds(self, engine: TransformersEngine, prompts: Batch) -> float:
        """How long the episodes of these prompts take."""
        began = time.perf_counter()
        played = self.play(prompts, self._sampler(engine, SAMPLING, SEED, 200), seed=SEED)
        seconds = time.perf_counter() - began
        assert played.row("turns").tolist() == [float(TURNS)] * len(prompts), "an episode ended early"
        return seconds


def main() -> None:
    """Measures, prints a table, and writes a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=512, help="episodes of the second workload")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    directory = resolve_model_path(MODEL)
    tokenizer = load_tokenizer(directory)
    engine = TransformersEngine(
        load_causal_lm(directory, dtype=torch.float32, device=torch.device("cpu")),
        max_sequences=CONCURRENT,
        eos_token_ids=(1,),
    )
    players = {name: Player(tokenizer, has_barrier=name == "barrier") for name in ("concurrent", "barrier")}
    workloads = {count: prompts_of(tokenizer, count) for count in (CONCURRENT, options.episodes)}
    seconds: dict[str, list[float]] = {}
    for player in players.values():
        player.seconds(engine, workloads[CONCURRENT])  # processes start
    for _ in range(options.rounds):
        reply = reply_seconds(engine, workloads[CONCURRENT])
        seconds.setdefault("reply", []).append(reply)
        for count, prompts in workloads.items():
            for name, player in players.items():
                seconds.setdefault(f"{name} {count}", []).append(player.seconds(engine, prompts))
        if TRL.exists():
            found = run_reporting([str(TRL), "benchmarks/peers/trl_environment.py", "--model", str(directory)], 600)
            if found is not None:
                seconds.setdefault(f"trl {CONCURRENT}", []).extend(found["seconds"])
    for player in players.values():
        player.close()
    report(seconds, list(workloads))


def prompts_of(tokenizer: PreTrainedTokenizerBase, count: int) -> Batch:
    """So many prompts with their own seeds."""
    ids = Ragged.from_rows([tokenizer.encode(PROMPT)] * count, torch.int64)
    batch = Batch.of(
        rows={"uid": torch.arange(count)}, tokens={"prompt_ids": ids}, objects={"prompt": [PROMPT] * count}
    )
    return batch.repeat(1)


def reply_seconds(engine: TransformersEngine, prompts: Batch) -> float:
    """How long a reply takes if 64 are sampled at once, to prompts of the mean length of a turn's."""
    length = len(PROMPT) + (TURN_TOKENS + len(ANSWER)) * (TURNS - 1) // 2
    ids = Ragged.from_rows([[3] * length] * len(prompts), torch.int64)
    batch = prompts.with_columns(tokens={"prompt_ids": ids})
    began = time.perf_counter()
    engine.generate(batch, SAMPLING, max_response_tokens=TURN_TOKENS, seed=SEED)
    return time.perf_counter() - began


def limit_seconds(count: int, reply: float) -> float:
    """Seconds of so many episodes, 64 at a time, of which each reply takes `reply` seconds and each step its delay."""
    ends = [0.0] * min(count, CONCURRENT)
    for uid in range(count):
        start = heapq.heappop(ends)
        heapq.heappush(ends, start + sum(delays(environment_seed(SEED, uid))) + TURNS * reply)
    return max(ends)


def instant_speedup(count: int) -> float:
    """The speedup of so many episodes, 64 at a time, over a barrier, with a model that takes no time."""
    found = [delays(environment_seed(SEED, uid)) for uid in range(count)]
    batches = [found[start : start + CONCURRENT] for start in range(0, count, CONCURRENT)]
    barrier = sum(max(episode[turn] for episode in batch) for batch in batches for turn in range(TURNS))
    return barrier / limit_seconds(count, 0.0)


def report(seconds: Mapping[str, list[float]], counts: list[int]) -> None:
    """Prints a table of episodes per second, and writes everything measured."""
    best = {name: min(values) for name, values in seconds.items()}
    rows = []
    for count in counts:
        limit = limit_seconds(count, best["reply"])
        barrier = best[f"barrier {count}"]
        for name, value in {
            "limit": limit,
            **{name: best[f"{name} {count}"] for name in ("concurrent", "barrier", "trl") if f"{name} {count}" in best},
        }.items():
            rows.append(
                {
                    "episodes": count,
                    "variant": name,
                    "seconds": value,
                    "per_second": count / value,
                    "x_barrier": barrier / value,
                }
            )
    lines = [f"{'episodes':>8} {'variant':<11} {'seconds':>8} {'episodes/s':>10} {'x barrier':>9}"]
    lines += [
        f"{row['episodes']:>8} {row['variant']:<11} {row['seconds']:>8.3f} {row['per_second']:>10.1f}"
        f" {row['x_barrier']:>9.2f}"
        for row in rows
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    path = HERE / "results" / f"environments-{datetime.now():%Y-%m-%d-%H%M}.json"
    write_record(path, ["transformers"], {"seconds": dict(seconds), "rows": rows})
    found = {f"instant_x_barrier_{count}": round(instant_speedup(count), 2) for count in counts}
    sys.stdout.write(json.dumps({"reply_seconds": best["reply"], **found}) + "\n")


if __name__ == "__main__":
    main()
