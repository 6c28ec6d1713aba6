"""Seconds of steps, transitions and generation that others have published, and their predictions."""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from benchmarks.planning_published import cluster_of, geometry_of, paper_figures, paper_workload, read
from benchmarks.planning_report import Criterion, Section, rank_correlation
from benchmarks.planning_steps import nemo_step, phase_seconds, step_seconds, verl_step
from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.devices import Efficiency
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.timing.generation import generation_seconds
from hybridflow.mapping.timing.training import forward_seconds, update_seconds
from hybridflow.mapping.timing.transfers import Transition, publish_seconds
from hybridflow.models.geometry import parameter_count

CLOSE, FAR, PAPER = 0.2, 0.4, 0.3
"""Median error on the rows that nothing is fitted on, largest without an explanation, and largest for the paper's."""

ORDER = 0.9
"""Smallest rank correlation of a block."""


class Case(NamedTuple):
    """A published time and its prediction."""

    name: str
    label: str
    device: str
    published: float
    predict: Callable[[Efficiency | None], float]
    """The prediction with these constants; None takes those of the device's file."""

    why: str = ""
    """The reason for an error beyond `FAR`."""

    is_comparable: bool = True
    """Whether it counts in the order of its block, and constants can be fitted on it."""

    @property
    def is_fitted(self) -> bool:
        """Whether the constants of the device are fitted on it."""
        number = re.match(r"\d+", self.name)
        return bool(number and int(number[0]) % 2) and self.is_comparable


@cache
def step_blocks() -> Mapping[str, Sequence[Case]]:
    """Published steps by the block within which they can be compared."""
    published = read("step_times.yaml")
    nemo, verl, rlinf = (published[system] for system in ("nemo_rl", "verl", "rlinf"))
    blocks = {
        name: [_nemo_case(row, block["device"], nemo) for row in block["rows"]]
        for name, block in nemo["blocks"].items()
    }
    blocks |= {"verl, H20": [_verl_case(row, verl) for row in verl["rows"]]}
    return blocks | {"verl, measured by RLinf, H100": [_verl_case(row, rlinf) for row in rlinf["rows"]]}


@cache
def sync_cases() -> Sequence[Case]:
    """Published seconds to publish weights to separate devices."""
    verl = read("step_times.yaml")["verl"]
    found = []
    for name, model, training, generating, seconds in verl["syncs"]:
        layouts = (
            TrainingLayout(engine=TrainingEngine.fsdp, data=training),
            RolloutLayout(engine="vllm", replicas=generating, is_colocated=False),
        )
        use, total = ModelUse(geometry_of(model), 2, is_trained=True), training + generating
        predict = partial(_transition_seconds, use, *layouts, "per_tensor", verl["device"], total, None)
        why, is_comparable = verl["explained"].get(name, ""), name not in verl["not_comparable"]
        found.append(Case(name, f"weights of {model}", verl["device"], seconds, predict, why, is_comparable))
    return found


@cache
def paper_cases() -> Mapping[str, Sequence[Case]]:
    """The paper's iterations, transitions and generation."""
    paper = paper_figures()
    device, link = paper["device"], paper["network_gb_per_second"] * 1e9

    def case(name: str, label: str, seconds: float, predict: Callable[[Efficiency | None], float]) -> Case:
        return Case(name, label, device, seconds, predict, paper["explained"].get(name, ""))

    iterations = [
        case(name, f"{model}, 128 devices", seconds, partial(_iteration_seconds, model, sizes, tensor, device, link))
        for name, model, sizes, tensor, seconds in paper["iterations"]
    ]
    transitions = []
    for name, method, model, (tensor, pipeline), generation, seconds in paper["transitions"]:
        use, training = _megatron(model, tensor, pipeline, 128)
        rollout = RolloutLayout(engine="vllm", replicas=128 // generation, tensor=generation)
        predict = partial(_transition_seconds, use, training, rollout, method, device, 128, link)
        transitions.append(case(name, f"{model}, {method}", seconds, predict))
    generation = [
        case(
            name, f"{model}, t_g={tensor}", seconds, partial(_colocated_generation, model, 8, tensor, 16, device, link)
        )
        for name, model, tensor, seconds in paper["generation"]
    ]
    return {"iterations": iterations, "transitions": transitions, "generation": generation}


def all_cases() -> Sequence[Case]:
    """Every published time that has a prediction."""
    groups = [*step_blocks().values(), sync_cases(), *paper_cases().values()]
    return [case for group in groups for case in group]


def sections() -> list[Section]:
    """The tables."""
    published = read("step_times.yaml")
    blocks = step_blocks()
    found = [_block_section(name, cases) for name, cases in blocks.items()]
    found.append(_pairs_section("asynchronous against on-policy", published["nemo_rl"]["pairs"], blocks))
    found.append(_pairs_section("asynchronous against colocated, verl", published["verl"]["pairs"], blocks))
    found.append(_errors_section([case for cases in blocks.values() for case in cases]))
    found.append(_phases_section(published))
    found.append(_tail_section(blocks["verl, H20"], published["verl"]["explained_tail"]))
    found.append(
        Section("Publishing weights to separate devices (verl, H20)", _lines(sync_cases()), [_far(sync_cases(), FAR)])
    )
    for name, cases in paper_cases().items():
        found.append(Section(f"HybridFlow: {name}", _lines(cases), [_far(cases, PAPER)]))
    return [*found, _sweep_section()]


def _error(case: Case) -> float:
    return case.predict(None) / case.published - 1


def _lines(cases: Iterable[Case]) -> list[str]:
    return [
        f"  {case.name:>4} {case.label:<44} {case.published:8.2f} {case.predict(None):8.2f} {_error(case):+5.0%}"
        f"{' fitted' if case.is_fitted else ''}{'  ' + case.why if abs(_error(case)) > PAPER and case.why else ''}"
        for case in cases
    ]


def _block_section(name: str, cases: Sequence[Case]) -> Section:
    title, like = (
        f"Seconds per step, {name}: published, predicted, error",
        [case for case in cases if case.is_comparable],
    )
    if len(like) < 3:
        return Section(title, _lines(cases), [])
    found = rank_correlation([case.published for case in like], [case.predict(None) for case in like])
    return Section(
        title,
        _lines(cases),
        [Criterion(f"Spearman's rank correlation of {name} is at least {ORDER}", f"{found:.3f}", found >= ORDER)],
    )


def _pairs_section(title: str, pairs: Iterable[Sequence[str]], blocks: Mapping[str, Sequence[Case]]) -> Section:
    cases = {case.name: case for block in blocks.values() for case in block}
    lines, right, total = [], 0, 0
    for first, second in pairs:
        published = cases[second].published / cases[first].published
        predicted = cases[second].predict(None) / cases[first].predict(None)
        agrees = (published < 1) == (predicted < 1)
        right, total = right + agrees, total + 1
        shown = f"published {published:5.2f} predicted {predicted:5.2f}"
        lines.append(f"  {first:>4} {second:>4} {shown}{'' if agrees else '  wrong'}")
    return Section(
        f"Ratio of seconds, {title}", lines, [Criterion(f"sign, {title}", f"{right} of {total}", right == total)]
    )


def _errors_section(cases: Sequence[Case]) -> Section:
    held_out = [case for case in cases if not case.is_fitted]
    lines = []
    for device in dict.fromkeys(case.device for case in held_out):
        errors = [abs(_error(case)) for case in held_out if case.device == device]
        lines.append(f"  {device}: median {statistics.median(errors):.0%} of {len(errors)} rows")
    median = statistics.median([abs(_error(case)) for case in held_out])
    close = Criterion(f"median error of even rows is at most {100 * CLOSE:.0f} %", f"{median:.0%}", median <= CLOSE)
    return Section("Errors of the rows that nothing is fitted on", lines, [close, _far(held_out, FAR)])


def _far(cases: Iterable[Case], limit: float) -> Criterion:
    far = [case for case in cases if abs(_error(case)) > limit]
    unexplained = [case.name for case in far if not case.why]
    found = f"{len(far)} beyond, {', '.join(unexplained) or 'none'} without an explanation"
    return Criterion(f"errors beyond {100 * limit:.0f} % are explained", found, not unexplained)


def _phases_section(published: Mapping[str, Any]) -> Section:
    """verl's phases; `published` is the file of step times."""
    names = ("generation", "log-probabilities", "update")
    lines = [f"{'':40}" + "".join(f"{name:>20}" for name in names)]
    for system in (published["verl"], published["rlinf"]):
        for row in system["rows"]:
            measured = system["phases"].get(row[0])
            if measured is None:
                continue
            predicted = phase_seconds(verl_step(row, system), system["device"], None)
            pairs = zip(measured, predicted, strict=False)
            shown = "".join(f"{own:13.0f} {seconds:6.0f}" for own, seconds in pairs)
            lines.append(f"  {row[0]:>4} {f'{row[1]}, {row[3]} devices':<33}{shown}")
    return Section("Phases of colocated steps, verl: published, predicted seconds", lines, [])


def _tail_section(cases: Sequence[Case], why: str) -> Section:
    """Twice as many devices save little if the longest responses take most of the time."""
    smaller, larger = (next(case for case in cases if case.name == name) for name in ("41", "42"))
    gain = 1 - larger.predict(None) / smaller.predict(None)
    shown = f"  published {1 - larger.published / smaller.published:.1%}, predicted {gain:.1%}"
    found = Criterion("64 to 128 devices of rows 41 and 42 save less than 10 %", f"{gain:.1%}", gain < 0.1)
    title = "Time saved by twice as many devices, 99th percentile ten times the median"
    return Section(title, [shown] if found.is_met else [shown, f"  {why}"], [found])


def _sweep_section() -> Section:
    paper = paper_figures()
    link, lines, criteria = paper["network_gb_per_second"] * 1e9, [], []
    for model, published in paper["best_generation_tensor"].items():
        seconds = {
            tensor: _colocated_generation(model, 8, tensor, 16, paper["device"], link, None) for tensor in (1, 2, 4, 8)
        }
        best = min((2, 4, 8), key=seconds.__getitem__)
        lines.append(f"  {model}: " + ", ".join(f"t_g={tensor} {each:.0f} s" for tensor, each in seconds.items()))
        worst = max((2, 4, 8), key=seconds.__getitem__)
        is_met = best == published and worst == 8
        why = "" if is_met else paper["explained_sweep"].get(model, "")
        found = f"best {best}, worst {worst}" + (f" ({why})" if why else "")
        criteria.append(
            Criterion(f"{model}: t_g={published} is best and 8 worst, or explained", found, is_met or bool(why))
        )
    return Section("HybridFlow: seconds of generation against t_g", lines, criteria)


def _nemo_case(row: Sequence[Any], device: str, published: Mapping[str, Any]) -> Case:
    name, model, devices, generating, *_, seconds = row
    predict = partial(step_seconds, nemo_step(row, published), device)
    return Case(
        name, _label(model, devices, generating), device, seconds, predict, published["explained"].get(name, "")
    )


def _verl_case(row: Sequence[Any], published: Mapping[str, Any]) -> Case:
    name, model, _, devices, generating, *_, seconds = row
    predict = partial(step_seconds, verl_step(row, published), published["device"])
    why, is_comparable = published["explained"].get(name, ""), name not in published["not_comparable"]
    return Case(name, _label(model, devices, generating), published["device"], seconds, predict, why, is_comparable)


def _label(model: str, devices: int, generating: int) -> str:
    return f"{model}, {devices} devices" + (f", {generating} generate" if generating else "")


def _megatron(model: str, tensor: int, pipeline: int, devices: int) -> tuple[ModelUse, TrainingLayout]:
    layout = TrainingLayout(
        engine=TrainingEngine.megatron,
        data=devices // (tensor * pipeline),
        pipeline=pipeline,
        tensor=tensor,
        sequence_parallel=True,
        microbatch_tokens=4096,
        gradient_checkpointing=False,
    )
    return ModelUse(geometry_of(model), 2, is_trained=True), layout


def _iteration_seconds(
    model: str, sizes: Sequence[int], tensor: int, device: str, link: float, efficiency: Efficiency | None
) -> float:
    """PPO with all models on all devices: generation, five calls of models of equal size, and a transition."""
    use, layout = _megatron(model, sizes[0], sizes[1], 128)
    critic, workload = replace(use, has_language_head=False), paper_workload()
    cluster = cluster_of(device, 128, efficiency, link)
    rollout = RolloutLayout(engine="vllm", replicas=128 // tensor, tensor=tensor)
    seconds = _colocated_generation(model, layout.model_parallel, tensor, 128, device, link, efficiency)
    seconds += publish_seconds(use, layout, rollout, cluster, Transition.micro_data).total
    seconds += forward_seconds(use, layout, workload, cluster).total
    seconds += 2 * forward_seconds(critic, layout, workload, cluster).total
    return seconds + sum(update_seconds(each, layout, workload, cluster).total for each in (use, critic))


def _colocated_generation(
    model: str, model_parallel: int, tensor: int, devices: int, device: str, link: float, efficiency: Efficiency | None
) -> float:
    """Generation next to an actor, a critic, a reference and a reward model."""
    use, cluster = ModelUse(geometry_of(model), 2, is_trained=True), cluster_of(device, devices, efficiency, link)
    parameters = parameter_count(use.geometry)
    states = 2 * parameters * 12 / devices + 4 * 2 * parameters / model_parallel
    gathered = 2 * parameters * (1 / tensor - 1 / model_parallel)
    cache_bytes = max(0.9 * cluster.device.memory_bytes - states - gathered, 1e9)
    rollout = RolloutLayout(
        engine="vllm",
        replicas=devices // tensor,
        tensor=tensor,
        max_sequences=256,
        cache_bytes=cache_bytes,
        captures_graphs=False,
    )
    return generation_seconds(use, rollout, paper_workload(), cluster).total


def _transition_seconds(
    use: ModelUse,
    training: TrainingLayout,
    rollout: RolloutLayout,
    method: str,
    device: str,
    devices: int,
    link: float | None,
    efficiency: Efficiency | None,
) -> float:
    cluster = cluster_of(device, devices, efficiency, link)
    return publish_seconds(use, training, rollout, cluster, Transition[method]).total
