"""Shared by the sections of the GPU benchmark: the device, generated models, batches, clocks and peaks."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from workload import ModelSize, save_random_llama

from hybridflow.batch import Batch, Ragged
from hybridflow.config.model import Dtype, Model
from hybridflow.config.training import Optimizer, Training, TrainingEngine
from hybridflow.controller.rendezvous import Rendezvous
from hybridflow.engines.training.factory import make_language_engine
from hybridflow.engines.training.interface import Loss, LossFn, TrainEngine
from hybridflow.parallel.groups import Ranks

SMALL = ModelSize(hidden=256, intermediate=768, layers=4, heads=4, kv_heads=2, head_size=64)
LARGE = ModelSize(hidden=1536, intermediate=6144, layers=16, heads=12, kv_heads=4, head_size=128)
"""About 0.6 billion parameters."""

PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Dense bfloat16, from the makers' data sheets, by a part of the device's name."""


@dataclass(frozen=True)
class Row:
    """One number."""

    name: str
    value: float
    unit: str = ""


@dataclass
class Case:
    """Where the sections run. `is_tiny` keeps models and counts small enough for a rehearsal on a CPU."""

    device: torch.device
    scratch: Path
    is_tiny: bool
    model: Path | None = None
    gsm8k: Path | None = None
    _models: dict[str, Path] = field(default_factory=dict)

    @property
    def device_name(self) -> str:
        """As the driver calls it; `cpu`."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    @property
    def peak_flops(self) -> float | None:
        """Operations per second of the data sheet; None for devices that are not listed."""
        known = [tflops for name, tflops in PEAK_TFLOPS.items() if name in self.device_name]
        return known[0] * 1e12 if known else None

    def model_directory(self, name: str, size: ModelSize) -> Path:
        """A random Llama of a size, made once."""
        if name not in self._models:
            self._models[name] = self.scratch / name
            save_random_llama(size, self._models[name])
        return self._models[name]

    def engine(self, directory: Path, kind: str, dtype: Dtype, device: torch.device, **settings: object) -> TrainEngine:
        """A training engine alone on a device."""
        Rendezvous().process_group("benchmark")
        optimizer = Optimizer(learning_rate=1e-3, epsilon=1e-3)
        training = Training(engine=TrainingEngine[kind], optimizer=optimizer, **settings)  # pyright: ignore
        model = Model(path=str(directory), dtype=dtype)
        return make_language_engine(model, training, total_optimizer_steps=100, device=device, ranks=Ranks.alone())

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], *, rounds: int = 3) -> float:
        """The least seconds of a call, after one that warms up."""
        call()
        found = []
        for _ in range(rounds):
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            found.append(time.perf_counter() - started)
        return min(found)

    def peak_mib(self, call: Callable[[], object]) -> float:
        """The most device memory that a call had allocated, in MiB; 0 on a CPU."""
        if self.device.type != "cuda":
            call()
            return 0.0
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) / 2**20


def batch_of(rows: int, prompt_tokens: int, response_tokens: int, *, seed: int = 0) -> Batch:
    """Random tokens of the workload's vocabulary; response lengths from half of `response_tokens` to all."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(response_tokens // 2, response_tokens + 1, (rows,), generator=generator)

    def tokens(counts: Tensor) -> Ragged:
        return Ragged.from_lengths(torch.randint(2, 64, (int(counts.sum()),), generator=generator), counts)

    responses = tokens(lengths)
    return Batch.of(
        tokens={
            "prompt_ids": tokens(torch.full_like(lengths, prompt_tokens)),
            "response_ids": responses,
            "response_mask": responses.like(torch.ones(len(responses.values))),
            "advantages": responses.like(torch.randn(len(responses.values), generator=generator)),
        },
    )


def _policy_gradient(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
    weighted = outputs["logprobs"] * columns["advantages"] + 0.01 * outputs["entropy"]
    return Loss(-(weighted * columns["response_mask"]).sum() / 1000.0, {})


POLICY_GRADIENT = LossFn(("logprobs", "entropy"), _policy_gradient)
"""A loss that moves every weight: minus the log-probabilities, weighed by advantages, and a little entropy."""
