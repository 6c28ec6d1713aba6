"""Writes the reference pages while the documentation is built: from the code, so that they cannot disagree with it."""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, get_args, get_type_hints

import hybridflow
from hybridflow.api import callbacks
from hybridflow.api.drawing import Drawing
from hybridflow.api.objects import Objects
from hybridflow.api.planning import Plan, Prediction
from hybridflow.api.result import Report
from hybridflow.api.system import System
from hybridflow.api.table import Table
from hybridflow.batch.columns import COLUMNS
from hybridflow.config.experiment import Experiment
from hybridflow.config.fields import field_docs, type_name
from hybridflow.config.other_names import other_names
from hybridflow.errors import Advice
from hybridflow.graph.svg import svg_drawing
from hybridflow.launch.algorithm_table import algorithm_table
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.step_trace import plan_to_show, trace_step
from hybridflow.observability.ending import Ending
from hybridflow.rewards.dialects import DIALECTS
from hybridflow.rewards.factory import BUILT_IN

_POOLS = [
    "trainer.devices=6",
    "placement.pools.train.devices=4",
    "placement.pools.judge.devices=2",
    "placement.roles.reward=judge",
    "placement.roles.reference=judge",
]
DRAWN = {
    "show_ppo": ["algorithm=ppo", "algorithm.kl.placement=reward", *_POOLS],
    "show_grpo": ["algorithm=grpo", "algorithm.kl.placement=loss", *_POOLS],
    "show_safe_rlhf": [
        "algorithm=safe_rlhf",
        "placement.roles.cost=judge",
        "placement.roles.cost_critic=judge",
        *_POOLS,
    ],
}
"""The settings of the drawings shown in the documentation."""

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "algorithms.jsonl"

_NAMES_TABLE = re.compile(r"<!-- table: names of (?P<system>\w+) -->")
_FIRST = re.compile(r"\((self|cls)(, )?")
"""The parameter that a call of a method does not name."""

_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """MkDocs calls this with the files it found; the generated pages are added to them."""
    from mkdocs.structure.files import File  # the pages themselves need no MkDocs

    files.append(File.generated(config, "reference/settings.md", content=settings_page()))
    files.append(File.generated(config, "reference/python.md", content=python_page()))
    files.append(File.generated(config, "reference/columns.md", content=columns_page()))
    files.append(File.generated(config, "reference/rewards.md", content=rewards_page()))
    files.append(File.generated(config, "reference/algorithms.md", content=algorithms_page()))
    files.append(File.generated(config, "reference/names.md", content=names_page()))
    for name, drawing in drawings().items():
        files.append(File.generated(config, f"assets/{name}.svg", content=drawing))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """MkDocs calls this with the text of each page; tables of names replace the comments that ask for them."""
    return _NAMES_TABLE.sub(lambda found: "\n".join(_names_table(found["system"])), markdown)


def settings_page() -> str:
    """Every key of the configuration with its type, range, default and meaning, one table per section."""
    lines = ["# Settings", "", "Every configuration key, generated from the dataclasses in `hybridflow/config/`."]
    lines += ["Set one on the command line: `hybridflow ppo trainer.seed=1`.", ""]
    for path, section in sections(Experiment(), ""):
        lines += [f"## {path or 'The run'}", "", inspect.getdoc(type(section)) or "", ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        meanings = field_docs(type(section))
        for name, annotation in get_type_hints(type(section), include_extras=True).items():
            if name in vars(section) and nested(annotation) is None:
                meaning = " ".join(meanings.get(name, "").split())
                cells = (f"`{name}`", type_name(annotation), shown(vars(section)[name]), meaning)
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def python_page() -> str:
    """Every public name of the package with its signature and its docstring, and the members of its classes."""
    lines = [
        "# Python",
        "",
        "Generated from the docstrings. See [From Python](../how_to/from_python.md) for a guide.",
        "",
    ]
    for name in hybridflow.__places__:
        lines += _described(f"hybridflow.{name}", hybridflow.__getattr__(name))
    for kind in (Objects, Table, Report, Ending, Plan, Prediction, Advice, System, Drawing):
        lines += _described(kind.__name__, kind)
    return "\n".join(lines)


def _described(name: str, found: object) -> Iterator[str]:
    """A heading with the docstring; for a class, its documented fields and its public members as well."""
    yield from (f"## {name}", "")
    if not callable(found):
        yield from (_constant_docs(callbacks)["STOP"], "")
        return
    if not isinstance(found, type):
        yield from ("```python", f"{name}{_signature(found)}", "```", "")
    yield from (inspect.getdoc(found) or "", "")
    if not isinstance(found, type):
        return
    for field, text in field_docs(found).items():
        yield from (f"- `{field}`: {' '.join(text.split())}",)
    for member, value in vars(found).items():
        function = value.__func__ if isinstance(value, classmethod) else value
        text = "" if member.startswith("_") else inspect.getdoc(function) or ""
        called = _FIRST.sub("(", _signature(function)) if inspect.isfunction(function) else ""
        if text and (called or isinstance(value, property)):
            yield f"- `{member}{called}`: {' '.join(text.split())}"
    yield ""


def _signature(function: Callable) -> str:
    """The parameters without annotations, which are in the text."""
    parameters = inspect.signature(function).parameters.values()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))


def _constant_docs(module: ModuleType) -> dict[str, str]:
    """The docstring under each constant of a module."""
    body = ast.parse(inspect.getsource(module)).body
    pairs = [pair for pair in pairwise(body) if isinstance(pair[0], ast.Assign) and isinstance(pair[1], ast.Expr)]
    return {ast.unparse(a.targets[0]): " ".join(ast.literal_eval(b.value).split()) for a, b in pairs}


def names_page() -> str:
    """Settings of other systems and their counterparts here."""
    lines = [
        "# Names in other systems",
        "",
        "Generated from `hybridflow/assets/other_names.yaml`, which error messages also use. Batch sizes are",
    ]
    lines += [
        "global: they count over all devices. verl's prefix `actor_rollout_ref.` is omitted, and so are settings of",
        "its critic that the actor also has: `critic.optim.lr` is `critic.optimizer.learning_rate`.",
        "",
    ]
    for system in other_names():
        lines += [f"## {system}", "", *_names_table(system), ""]
    return "\n".join(lines)


def _names_table(system: str) -> list[str]:
    names = other_names()[system].items()
    rows = [f"| `{theirs}` | {_as_code(row.here.replace('none: ', 'no counterpart: '))} |" for theirs, row in names]
    return [f"| {system} | hybridflow |", "|---|---|", *rows]


def _as_code(here: str) -> str:
    return re.sub(r"(?<![\w`])((?:\w+\.)+[\w*]+(?:=(?:\[[^\]]*\]|[^ ,;]+))?|algorithm=\w+)", r"`\1`", here)


def columns_page() -> str:
    """The vocabulary of batches: every column's name, kind, meaning and producer."""
    lines = ["# Columns of a batch", "", "Generated from `hybridflow/batch/columns.py`.", ""]
    lines += ["| column | kind | type | meaning | made by |", "|---|---|---|---|---|"]
    for name, column in COLUMNS.items():
        dtype = str(column.dtype).removeprefix("torch.") if column.dtype else "Python"
        lines.append(f"| `{name}` | {column.kind} | {dtype} | {column.meaning} | `{column.producer}` |")
    return "\n".join(lines) + "\n"


def algorithms_page() -> str:
    """Every method by name: source, function, command, requirements and settings."""
    lines = ["# Algorithms", "", "Generated from `algorithms/catalogue.py`, the presets and the dataflows.", ""]
    lines += [
        "An entry such as `algorithm=grpo` in the column *run it with* is appended to `hybridflow ppo`. The column"
    ]
    lines += ["*settings* shows the values in that run.", ""]
    for heading, entries in algorithm_table().items():
        lines += [f"## {heading}", "", "| name | from | function | run it with | needs | settings |"]
        lines += ["|---|---|---|---|---|---|"]
        for entry in entries:
            settings = "<br>".join(f"`{key}={_typed(value)}`" for key, value in entry.settings.items())
            synonyms = "".join(f"<br>also `{name}`" for name in entry.synonyms)
            cells = (
                f"`{entry.name}`{synonyms}",
                _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", entry.source),
                f"`{entry.place}`",
                f"`{entry.command}`",
                ", ".join(entry.needs),
                settings,
            )
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join([*lines, *_learning()])


def _learning() -> Iterator[str]:
    """Results of `benchmarks/algorithms.py`: one line per method, with all seeds in one cell."""
    found: dict[str, list[dict]] = {}
    for line in RESULTS.read_text().splitlines():
        row = json.loads(line)
        if not row["error"]:
            found.setdefault(row["method"], []).append(row)
    yield from ("## Results on the built-in task", "")
    yield "Exact match on the held-out problems, before training and after the given number of steps, with"
    yield "`hybridflow ppo` and the settings in the column *added*, on one CPU core, for seeds"
    yield "0, 1, and so on. `grpo_passk` is measured by `pass@2`, `gdpo` by one of its two rewards."
    yield "`python benchmarks/algorithms.py` reproduces this table."
    yield from ("", "| name | added | steps | before | after | reached 0.75 at step |", "|---|---|---|---|---|---|")
    for name, unordered in found.items():
        rows = sorted(unordered, key=lambda row: row["seed"])
        cells = [f"`{name}`", " ".join(f"`{word}`" for word in rows[0]["settings"]), str(rows[0]["steps"])]
        cells += [f"{rows[0]['first']:.3f}", ", ".join(f"{row['last']:.3f}" for row in rows)]
        cells += [", ".join(str(row["reached"]) for row in rows)]
        yield f"| {' | '.join(cells)} |"
    yield ""


def drawings() -> dict[str, str]:
    """Drawings of dataflows by the names of their files, as `hybridflow show --svg` makes them."""
    return {
        name: svg_drawing(trace_step(plan_to_show(compose_run(overrides, config_name="ppo"))))
        for name, overrides in DRAWN.items()
    }


def rewards_page() -> str:
    """The built-in reward functions with their settings, and the signatures that are recognized."""
    lines = [
        "# Rewards",
        "",
        "Generated from `hybridflow/rewards/`. A setting is `reward.settings.<function>.<name>`.",
        "",
    ]
    lines += ["| function | score | settings |", "|---|---|---|"]
    for name, entry in BUILT_IN.items():
        parameters = inspect.signature(entry.make).parameters.values()
        settings = ", ".join(f"`{p.name}={json.dumps(p.default)}`" for p in parameters)
        score = (inspect.getdoc(entry.make) or "").partition("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{name}` | {score} | {settings} |")
    lines += ["", "Custom functions are recognized by the names of their parameters:", ""]
    lines += ["| library | signature | recognized by | available parameters |", "|---|---|---|---|"]
    for dialect in DIALECTS:
        known, offered = (", ".join(f"`{name}`" for name in names) for names in (dialect.known_by, dialect.offers))
        columns = ", columns of the data" if dialect.columns else ""
        lines.append(f"| `{dialect.name.lower()}` | `{dialect.signature}` | {known} | {offered}{columns} |")
    return "\n".join(lines) + "\n"


def sections(section: object, path: str) -> Iterator[tuple[str, object]]:
    """The section and those below it, with their dotted paths; NAME stands for a name the user gives."""
    yield path, section
    for name, annotation in get_type_hints(type(section)).items():
        below = nested(annotation)
        if below is not None and isinstance(annotation, type):
            yield from sections(vars(section)[name], f"{path}.{name}".lstrip("."))
        elif below is not None:
            yield from sections(below(), f"{path}.{name}.NAME".lstrip("."))


def nested(annotation: object) -> type | None:
    """The section inside a field's type: of `Optimizer` itself, of the values of `dict[str, Role]`; or None."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    return None


def shown(value: object) -> str:
    """A default value, formatted as on the command line."""
    if isinstance(value, Enum):
        return f"`{value.name}`"
    if value is None or isinstance(value, bool):
        return f"`{json.dumps(value)}`"
    return f"`{value}`"


def _typed(value: object) -> str:
    """A value as a command line takes it."""
    return shown(list(value) if isinstance(value, tuple) else value).strip("`")
