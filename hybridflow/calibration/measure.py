"""Measures the devices of this machine, and fits the constants of the planner to what was measured."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.calibration.engines import Rows, generations, training_calls
from hybridflow.calibration.processes import Place, run_on
from hybridflow.calibration.rates import DeviceRates, LinkRates, device_rates, link_rates
from hybridflow.config.paths import builtin_path
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.traits import ROLLOUT_ENGINES, TRAINING_ENGINES
from hybridflow.mapping.device_files import device_like, find_device
from hybridflow.mapping.devices import Cluster, Efficiency
from hybridflow.mapping.fitting import Observation, fitted
from hybridflow.mapping.operations import OperationKind
from hybridflow.mapping.timing.rates import NODE_REACHED
from hybridflow.models.loading import quiet_transformers

logger = logging.getLogger(__name__)

MOST_PROCESSES = 8
"""Collectives are measured on 2 processes, and on as many as there are devices or cores up to this number."""

_SMALL = "builtin:calculator"
_WIDE = {"cpu": (512, 1536, 4), "cuda": (4096, 12288, 4)}
"""Hidden size, inner size and layers of the wider model, in which matrix products take most of the time."""

_TRAINED_ROWS = {"cpu": (Rows(4, 8, 8), Rows(64, 16, 32)), "cuda": (Rows(4, 8, 8), Rows(64, 64, 64))}
_WIDE_ROWS = {"cpu": (Rows(2, 8, 8), Rows(16, 16, 16)), "cuda": (Rows(1, 8, 8), Rows(32, 128, 128))}
_FIRST_ROWS = (Rows(1, 2, 2),)
"""A call that loads the code of an engine, which is memory that every process takes."""

_GENERATED_ROWS = (Rows(4, 8, 8), Rows(32, 8, 16))
"""Few rows, for the seconds of launches; and many."""


@dataclass(frozen=True)
class Calibration:
    """The devices of this machine, and what was measured."""

    cluster: Cluster
    """One device, with fitted constants."""

    rates: DeviceRates
    links: tuple[LinkRates, ...]
    observations: tuple[Observation, ...]
    seconds: float


def calibrate(kind: str, *, report: Callable[[str], None] = logger.info) -> Calibration:
    """Measures the devices of a kind (`cpu`, `cuda`), in about a minute; `report` receives a line per step.

    Raises `ResourceError` if a process fails. Other programs on this machine make the result worse.
    """
    began = perf_counter()
    count = torch.cuda.device_count() if kind == "cuda" else min(psutil.cpu_count() or 1, MOST_PROCESSES)
    sizes = [] if kind == "cuda" and count == 1 else sorted({2, max(2, min(count, MOST_PROCESSES))})
    with TemporaryDirectory() as folder:
        wide = _write_wide_model(Path(folder) / "wide", kind)
        report("1 process: matrix products, memory, training and generation ...")
        rates, alone = run_on(kind, 1, _alone, wide)[0]
        links, together, crowded = [], [], 0.0
        for size in sizes:
            report(f"{size} processes: collectives and training ...")
            link, crowded, found = run_on(kind, size, _together)[0]
            links.append(link)
            together += found
    name = torch.cuda.get_device_name(0) if kind == "cuda" else ""
    bare = find_device("CPU") if kind == "cpu" else device_like(name, rates.memory_bytes)
    cores = _cores(alone, crowded, sizes) if kind == "cpu" else 0.0
    observations = (*alone, *together)
    cluster = fitted(measured_cluster(bare, rates, links, cores), observations)
    return Calibration(cluster, rates, tuple(links), observations, perf_counter() - began)


def _alone(place: Place, wide: Path) -> tuple[DeviceRates, list[Observation]]:
    """Measurements on one process, with the built-in model and a wider one."""
    kind, found = place.device.type, []
    training_calls(place, TrainingEngine.single, builtin_path(_SMALL), _FIRST_ROWS)
    rates = device_rates(place)
    for directory, rows in ((builtin_path(_SMALL), _TRAINED_ROWS), (wide, _WIDE_ROWS)):
        found += training_calls(place, TrainingEngine.single, directory, rows[kind])
        found += generations(place, RolloutKind.transformers, directory, _GENERATED_ROWS)
    for engine, traits in ROLLOUT_ENGINES.items():
        if engine != RolloutKind.transformers and traits.is_installed:
            found += generations(place, engine, builtin_path(_SMALL), _GENERATED_ROWS)
    return rates, found


def _together(place: Place) -> tuple[LinkRates, float, list[Observation]]:
    """Measurements on several processes: collectives, an update by each on its own, and the sharded engines."""
    links, directory, rows = link_rates(place), builtin_path(_SMALL), _TRAINED_ROWS[place.device.type]
    crowded = 0.0
    if place.device.type == "cpu":
        own = training_calls(place, TrainingEngine.single, directory, rows[1:], shares_model=False)
        crowded = _updates(own)
    found = []
    for engine, traits in TRAINING_ENGINES.items():
        if traits.runs_on_several_devices and traits.is_installed:
            found += training_calls(place, engine, directory, rows)
    return links, crowded, found


def _cores(alone: list[Observation], crowded: float, sizes: list[int]) -> float:
    """Processes that run at full rate at once: those that ran together, over how much longer each of them took."""
    slower = max(1.0, crowded / _updates(alone[: len(_TRAINED_ROWS["cpu"]) * 2]))
    return max(1.0, min(sizes[-1] / slower, psutil.cpu_count() or 1))


def _updates(observations: list[Observation]) -> float:
    """Seconds of the largest update of the single engine."""
    return max(each.seconds for each in observations if each.kind is OperationKind.update)


def measured_cluster(bare: Cluster, rates: DeviceRates, links: Sequence[LinkRates], cores: float) -> Cluster:
    """A known device with the measured rates. Those of collectives are without the crowding under which they ran.

    A process takes at least the memory that the known device reserves: NCCL and fragmentation are not in `rates`.
    """
    device = replace(
        bare.device,
        memory_bytes=rates.memory_bytes,
        matrix_flops=rates.bfloat16_flops,
        float32_flops=rates.float32_flops,
        memory_bandwidth=rates.memory_bandwidth,
        reserved_bytes=max(bare.device.reserved_bytes, rates.process_bytes),
        cores=cores,
        launch_seconds={},
        request_seconds={},
        slowdown={},
    )
    found = replace(bare, device=device, host_link=rates.host_link / NODE_REACHED)
    if not links:
        return found
    last = links[-1]
    crowding = replace(found, num_devices=last.size, devices_per_node=last.size).crowding
    efficiency = Efficiency(1.0, 1.0, last.sync_seconds / crowding)
    node_link = last.bandwidth * crowding / NODE_REACHED
    return replace(found, device=replace(device, efficiency=efficiency), node_link=node_link)


def _write_wide_model(directory: Path, kind: str) -> Path:
    """Writes a Llama with random weights."""
    hidden, inner, layers = _WIDE[kind]
    heads = max(1, hidden // 128)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    with quiet_transformers(), torch.device(kind):
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def table_of(found: Calibration) -> Iterator[tuple[str, str, str]]:
    """Rows of text: each measurement, and for calls the prediction of the fitted device."""
    rates, device = found.rates, found.cluster.device
    yield "", "measured", "predicted"
    yield "matrix products, float32", f"{rates.float32_flops / 1e12:.3g} TFLOPS", ""
    yield "matrix products, bfloat16", f"{rates.bfloat16_flops / 1e12:.3g} TFLOPS", ""
    yield "memory, read and written", f"{rates.memory_bandwidth / 1e9:.3g} GB/s", ""
    for link in found.links:
        yield f"all-reduce on {link.size}, small", f"{link.sync_seconds * 1e6:.0f} us", ""
        yield f"all-reduce on {link.size}, large", f"{link.bandwidth / 1e9:.3g} GB/s", ""
    if device.is_cpu:
        yield "processes at full rate", f"{device.cores:.2g}", ""
    for each in found.observations:
        model, layout = each.use.geometry, each.layout
        size = f"{model.layers} x {model.hidden}, {each.tokens:,.0f} tokens"
        what = f"{each.engine} on {layout.num_devices}: {each.kind.name}, {size}"
        yield what, f"{each.seconds * 1e3:.1f} ms", f"{each.predicted_on(found.cluster) * 1e3:.1f} ms"
