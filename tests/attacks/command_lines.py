"""Command lines at random: keys, types, numbers, layouts, Unicode and YAML, for the five trainers.

python -m tests.attacks command_lines --seed 0
"""

import random
from collections.abc import Callable
from functools import partial

from rich.console import Console

from hybridflow.config import fields
from hybridflow.config.placement import Pool
from hybridflow.config.roles import Role
from hybridflow.errors import STRICT, HybridflowError
from hybridflow.launch.compose.command_line import parse_command_line
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.compose.presets import SYNONYMS, presets
from hybridflow.launch.compose.trainers import known_command
from hybridflow.launch.messages import say_failure
from hybridflow.launch.prepare import prepare
from hybridflow.launch.rules.parallelism import parallelism_problems
from tests.attacks.trial import Case

COUNT = 540
LIMIT_SECONDS = 60.0
TRAINERS = ("ppo", "ppo", "sft", "dpo", "kto", "reward_model")
KEYS = [
    *fields.keys(),
    *fields.keys(Role, "roles.judge."),
    *fields.keys(Role, "roles.reference."),
    *fields.keys(Pool, "placement.pools.a."),
]
TABLE_KEYS = (
    "dataflow_settings.x", "reward.settings.x", "placement.roles.critic", "algorithm.loss_settings.x", "roles.a",
)  # fmt: skip
# fmt: off
NUMBERS = [
    "0", "1", "-1", "2", "3", "7", "8", "64", "10000000000", "1000000000000000000000000000000",
    "9223372036854775807", "-9223372036854775808", "0.5", "-0.0", "1e308", "-1e308", "1e400", "5e-324", "1e-30",
    "nan", "inf", "-inf", ".5", "1.", "0x1F", "0b11", "0o17", "1_000", "1e5", "+5", "00012", "1:30", "3.0",
]
TEXTS = [
    "", " ", "x", "null", "~", "true", "yes", "on", "no", "None", "???", "auto", "2020-01-01", "a b", "a=b", "=",
    "==", "a,b", "a;b", "a#b", "#", "@", "%", "`ls`", "$(ls)", "$HOME", "\\", "\\ ", "\\\\", "'", '"', "'a",
    '"a\'', "a:b", "-", "--", "*", "*x", "&x", "!!python/object/apply:os.system [ls]", "!x", "<<", "|", ">",
    "%s%n", "a\tb", "a\nb", "..", "../..", "/", "/dev/null/x", "/proc/self/mem", "/dev/zero", "~nobodyx/a",
    "a/b.py:f", "b.py", "os.system", "a.b", "http://", "http://[", "builtin:", "builtin:x", "reasoning_gym:x?y",
    "owner/name?split=", "?",
]
UNICODE = [
    "\u202e", "\u200b", "\ufeff", "\u2400", "\uff11", "\u0661", "\xe9", "e\u0301", "\U0001f600", "\udcff",
    "\x1b[31m", "\x7f", "\u2028", "\u0130", "\U0010ffff", "\ufffe",
]
YAML = [
    "[]", "[1]", "[a,b]", "[[1],[2]]", "[,]", "[", "]", "{}", "{a: 1}", "{a: {b: 1}}", "{a}", "{", "}", "{1: 2}",
    "{null: 1}", "{a: 1, a: 2}", "[1,2", "{a: [}", "${trainer.seed}", "${", "${}", "${oc.env:HOME}",
    "${oc.env:NOT_THERE}", "${x}", "${trainer}", "${.seed}", "${oc.create:{}}", "range(1,3)", "choice(1,2)",
    "glob(*)", "interval(0,1)", "int(3)", "str(3)", "float(x)", "json_str({})", "sort(3,2)", "shuffle(1,2)",
    "tag(a,choice(1))", "extend_list(1)",
]
LAYOUTS = ("tensor", "pipeline", "sequence", "expert", "virtual_pipeline", "replicas")
FLAGS = [
    "--help", "--cfg", "--cfg=job", "--cfg=x", "-c", "--config-name=x", "--config-name", "--config-dir=/gone",
    "-cd", "-x", "--", "---", "--config-dir=.", "-cn=ppo", "--multirun", "-m", "--cfg job", "@file",
]
# fmt: on


def cases(seed: int) -> list[Case]:
    """The corpus of a seed; the cases before one do not change with how many follow."""
    chance = random.Random(seed)
    makers = (_number, _text, _yaml, _unicode, _typo, _layout, _sensible, _table, _group, _mixed)
    found = []
    for index in range(COUNT):
        trainer, maker = chance.choice(TRAINERS), makers[index % len(makers)]
        words = (
            [maker(chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))] if maker is not _mixed else _mixed(chance)
        )
        words = [word.replace("\0", "") for word in words]
        found.append(Case(f"main_{trainer} {words}"[:300], partial(attempt, trainer, words)))
    return found


def attempt(trainer: str, words: list[str]) -> int:
    """All that a command does before the first process starts."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        flags = parse_command_line(words, program=f"hybridflow {trainer}", command=known_command(trainer))
        if not flags.help:
            composed = compose_run(flags.typed(), config_name=flags.config_name, config_dir=flags.config_dir)
            STRICT.check([parallelism_problems], composed.config)
            if not flags.cfg:
                prepare(composed)
    except HybridflowError as error:
        say_failure(console, error)
        return 2
    return 0


def _key(chance: random.Random) -> str:
    return chance.choice(KEYS).path if chance.random() < 0.9 else chance.choice(TABLE_KEYS)


def _number(chance: random.Random) -> str:
    numeric = [key.path for key in KEYS if any(kind in str(key.type) for kind in ("int", "float"))]
    return f"{chance.choice(numeric)}={chance.choice(NUMBERS)}"


def _text(chance: random.Random) -> str:
    value = chance.choice(TEXTS) if chance.random() < 0.9 else chance.choice("a/.\u00e9") * chance.choice((300, 5000))
    return f"{_key(chance)}={value}"


def _yaml(chance: random.Random) -> str:
    return f"{_key(chance)}={chance.choice(YAML)}"


def _unicode(chance: random.Random) -> str:
    key, extra = _key(chance), chance.choice(UNICODE)
    place = chance.randrange(len(key))
    return chance.choice(
        (f"{key}={extra}", f"{key}=a{extra}b", f"{key[:place]}{extra}{key[place:]}=1", f"{key}{extra}=1")
    )


def _typo(chance: random.Random) -> str:
    key = _key(chance)
    place = chance.randrange(len(key))
    changes: list[Callable[[], str]] = [
        lambda: key[:place] + key[place + 1 :],
        lambda: key[:place] + chance.choice("abz._-") + key[place:],
        key.upper,
        lambda: key.replace(".", "/"),
        lambda: f"{key}.{chance.choice(('x', '0', ''))}",
        lambda: f".{key}",
        lambda: chance.choice(("+", "++", "~", "-", "@")) + key,
        lambda: f"{key}@x",
        lambda: f"{key}[0]",
    ]
    return f"{chance.choice(changes)()}{chance.choice(('=1', '=', '', ':1', ' = 1', '==1'))}"


def _layout(chance: random.Random) -> str:
    size = chance.choice((0, 1, 2, 3, 4, 8, -1, 1000000))
    role = chance.choice(("actor", "critic", "rollout", "reward"))
    return chance.choice(
        (
            f"trainer.devices={size}",
            f"trainer.nodes={size}",
            f"{role}.parallelism.{chance.choice(LAYOUTS)}={size}",
            f"{role}.parallelism={{tensor: {size}, pipeline: {chance.choice((1, 2, 3))}}}",
            f"placement.pools={{a: {{devices: {size}}}, b: {{devices: 1}}}}",
            f"placement.roles={{critic: {chance.choice('abc')}}}",
            f"{role}.engine={chance.choice(('auto', 'single', 'fsdp', 'megatron', 'vllm'))}",
            f"rollout.engine={chance.choice(('transformers', 'vllm', 'none'))}",
            f"trainer.backend={chance.choice(('local', 'auto'))}",
        )
    )


def _sensible(chance: random.Random) -> str:
    """A value of the key's own type."""
    key = chance.choice(KEYS)
    if key.type is bool:
        return f"{key.path}={chance.choice(('true', 'false', 'yes', '2', '-5', '0', '1', 'True', 'FALSE'))}"
    if "float" in str(key.type):
        return f"{key.path}={chance.choice((0, 1e-5, 0.5, 1, 2.5, 'null'))}"
    if "int" in str(key.type):
        return f"{key.path}={chance.choice((0, 1, 2, 4, 16, 'null'))}"
    default = key.default if isinstance(key.default, str) else chance.choice(("null", "a", "[]", "auto"))
    return f"{key.path}={default}"


def _table(chance: random.Random) -> str:
    name = chance.choice(("roles", "placement.pools", "placement.roles", "reward.settings", "dataflow_settings"))
    row = chance.choice(("a", "actor", "critic", "reference", "0", "a.b", "a b", "\u00e9", "", "cost"))
    rows = ("{kind: reference}", "{kind: reward_function, functions: [exact_match]}", "{devices: 1}", "{pool: a}")
    value = chance.choice((*YAML, *NUMBERS[:8], *rows, "{model: {path: x}}"))
    return chance.choice((f"{name}.{row}={value}", f"{name}={{{row}: {value}}}", f"{name}={value}"))


def _group(chance: random.Random) -> str:
    names = (
        *presets(), *SYNONYMS, "none", "", "x", "ppo,grpo", "[ppo]", "null", "../ppo", "ppo.yaml", "ppo ", "PPO",
        "1",
    )  # fmt: skip
    return f"{chance.choice(('algorithm', 'algorithm', 'task', '+algorithm', 'task@a'))}={chance.choice(names)}"


def _mixed(chance: random.Random) -> list[str]:
    """Several kinds at once, with flags among them, and words that are no setting at all."""
    makers = (_number, _text, _yaml, _sensible, _sensible, _group, _layout, lambda chance: chance.choice(FLAGS))
    return [chance.choice(makers)(chance) for _ in range(chance.choice((1, 2, 4, 8)))]
