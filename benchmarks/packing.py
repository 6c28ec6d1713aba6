"""Tokens per second of an update with and without padding, on responses of long-tailed lengths.

    python benchmarks/packing.py [--rows 64] [--budget-tokens 4096] [--rounds 5] [--threads 2]

Three ways of one update of one model by one engine's passes, under one budget of tokens a forward pass:

    packed           concatenated sequences
    padded           rows in order of arrival, padded to the longest of each microbatch: what a trainer does that
                     neither packs nor sorts
    padded, sorted   rows of like length together, padded to the longest

A round does each once; that all three give the same gradient is checked first. The table goes to the terminal, all
numbers to benchmarks/results/packing-<date>.json.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import cast

import torch
from record import write_record
from torch import Tensor
from transformers import PreTrainedModel
from workload import ModelSize, save_random_llama

from hybridflow.batch import Batch, Ragged
from hybridflow.config.model import Model
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.engines.training.microbatch import MicroBatch, make_microbatches
from hybridflow.engines.training.optimizer import make_optimizer
from hybridflow.engines.training.passes import accumulate_gradients
from hybridflow.engines.training.setup import LANGUAGE, EngineSetup, prepared
from hybridflow.models.packed_attention import IMPLEMENTATION
from hybridflow.parallel.groups import Ranks

RESULTS = Path(__file__).parent / "results"
SIZE = ModelSize(hidden=256, intermediate=768, layers=2, heads=4, kv_heads=2, head_size=64)
PROMPT_TOKENS = 16
MEDIAN_RESPONSE_TOKENS = 64
SPREAD = 1.0
"""Response lengths are log-normal with this deviation of the logarithm: the longest of 64 is about 10 medians."""
CPU = torch.device("cpu")


@dataclass
class Way:
    """One way of doing the update: its microbatches, whether attention pads them, and seconds of each round."""

    name: str
    micros: list[MicroBatch]
    is_packed: bool
    seconds: list[float]

    @property
    def padded_tokens(self) -> int:
        """Tokens that the model reads, padding included."""
        if self.is_packed:
            return sum(len(micro.input_ids) for micro in self.micros)
        return sum(len(micro.packing.lengths) * micro.packing.max_seqlen for micro in self.micros)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows and writes."""
    options = parsed(argv)
    torch.set_num_threads(options.threads)
    batch = long_tailed_batch(options.rows)
    ways = ways_of(batch, options.budget_tokens)
    with tempfile.TemporaryDirectory() as folder:
        save_random_llama(SIZE, Path(folder))
        update = Update(Path(folder), batch)
    norms = {way.name: update.gradient_norm(way) for way in ways}
    assert max(norms.values()) < 1.001 * min(norms.values()), f"the ways disagree: {norms}"
    for _ in range(options.rounds):
        for way in ways:
            started = time.perf_counter()
            update.step(way)
            way.seconds.append(time.perf_counter() - started)
    real = sum(len(micro.input_ids) for micro in ways[0].micros)
    sys.stdout.write(table_of(ways, real, options))
    path = options.results / f"packing-{datetime.now():%Y-%m-%d-%H%M}.json"
    write_results(path, ways, real, options)
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--budget-tokens", type=int, default=4096, help="tokens a forward pass, padding included")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def long_tailed_batch(num_rows: int) -> Batch:
    """Random tokens; the prompts are of one length, the responses of log-normal ones."""
    generator = torch.Generator().manual_seed(0)
    logarithms = SPREAD * torch.randn(num_rows, generator=generator)
    lengths = (MEDIAN_RESPONSE_TOKENS * logarithms.exp()).long().clamp(min=1, max=2048)

    def tokens(counts: Tensor) -> Ragged:
        return Ragged.from_lengths(torch.randint(2, 64, (int(counts.sum()),), generator=generator), counts)

    responses = tokens(lengths)
    columns = {
        "response_mask": responses.like(torch.ones(len(responses.values))),
        "advantages": responses.like(torch.randn(len(responses.values), generator=generator)),
    }
    prompts = tokens(torch.full_like(lengths, PROMPT_TOKENS))
    return Batch.of(tokens={"prompt_ids": prompts, "response_ids": responses, **columns})


def ways_of(batch: Batch, budget_tokens: int) -> list[Way]:
    """The three ways, the packed one first."""
    lengths = batch.tokens("prompt_ids").lengths + batch.tokens("response_ids").lengths - 1
    arrival = torch.arange(len(lengths))
    return [
        Way("packed", make_microbatches(batch, budget_tokens=budget_tokens, device=CPU), True, []),
        Way("padded", rectangles(batch, arrival, lengths, budget_tokens), False, []),
        Way("padded, sorted", rectangles(batch, lengths.argsort(), lengths, budget_tokens), False, []),
    ]


def rectangles(batch: Batch, order: Tensor, lengths: Tensor, budget_tokens: int) -> list[MicroBatch]:
    """Microbatches of consecutive rows of an order, as many as fit when each is as long as their longest."""
    parts: list[list[int]] = [[]]
    for row in order.tolist():
        longest = max(int(lengths[other]) for other in [*parts[-1], row])
        if parts[-1] and (len(parts[-1]) + 1) * longest > budget_tokens:
            parts.append([])
        parts[-1].append(row)
    micros = []
    for rows in map(torch.tensor, parts):
        (micro,) = make_microbatches(batch.select(rows), budget_tokens=1 << 40, device=CPU)
        micros.append(replace(micro, rows=rows[micro.rows]))
    return micros


class Update:
    """One model and its optimizer, and the update that each way does."""

    def __init__(self, directory: Path, batch: Batch) -> None:
        training = Training(engine=TrainingEngine.single)
        setup = EngineSetup(LANGUAGE, Model(path=str(directory)), training, 1, CPU, Ranks.alone())
        self._batch = batch
        self._model = cast(PreTrainedModel, setup.load(directory))
        self._outputs = prepared(setup, self._model)
        self._optimizer = make_optimizer([*self._model.parameters()], training.optimizer)
        self._total = float(len(batch.tokens("response_ids").values))

    def gradient_norm(self, way: Way) -> float:
        """The norm of the gradient that a way gives."""
        # A model that is not switched to packed attention is padded to the longest sequence of each microbatch.
        self._model.set_attn_implementation(IMPLEMENTATION if way.is_packed else "sdpa")
        self._model.zero_grad()
        accumulate_gradients(
            self._outputs, self._batch, way.micros, LossFn(("logprobs", "entropy"), self._loss), temperature=1.0
        )
        return float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0, foreach=True))

    def step(self, way: Way) -> None:
        """A whole update."""
        self.gradient_norm(way)
        self._optimizer.step()

    def _loss(self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        weighted = outputs["logprobs"] * columns["advantages"] + 0.01 * outputs["entropy"]
        return Loss(-(weighted * columns["response_mask"]).sum() / self._total, {})


def table_of(ways: list[Way], real: int, options: argparse.Namespace) -> str:
    """The ways as text: what they read, how fast, and how many times faster the packed one is."""
    lines = [
        f"An update of {options.rows} rows, {real:,} tokens; budget {options.budget_tokens:,}, "
        f"{options.threads} threads, load {os.getloadavg()[0]:.1f}",
        f"{'':16}{'passes':>8}{'tokens read':>13}{'median s':>10}{'tokens/s':>10}{'packed is':>11}",
    ]
    packed = statistics.median(ways[0].seconds)
    for way in ways:
        median = statistics.median(way.seconds)
        numbers = f"{len(way.micros):>8}{way.padded_tokens:>13,}{median:>10.3f}{real / median:>10,.0f}"
        lines.append(f"{way.name:16}{numbers}{median / packed:>10.2f}x")
    return "\n".join(lines) + "\n"


def write_results(path: Path, ways: list[Way], real: int, options: argparse.Namespace) -> None:
    """Everything measured, with the machine and the versions it was measured with."""
    content = {
        "options": {name: value for name, value in vars(options).items() if name != "results"},
        "model": asdict(SIZE),
        "real_tokens": real,
        "ways": [
            {
                "name": way.name,
                "passes": len(way.micros),
                "tokens_read": way.padded_tokens,
                "seconds": way.seconds,
                "tokens_per_second": real / statistics.median(way.seconds),
            }
            for way in ways
        ],
    }
    write_record(path, ["transformers"], content)


if __name__ == "__main__":
    raise SystemExit(main())
