"""Model directories that are wrong, odd or hostile: configurations, tokenizers, templates, weights, indices.

python -m tests.attacks model_directories --seed 0
"""

import json
import math
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from recipes.tiny_calculator import make_tokenizer
from tests.attacks.small_run import run, write_rows
from tests.attacks.trial import Case
from tests.toys import toy_model

COUNT = 150
LIMIT_SECONDS = 90.0
MODEL = Path("model")
CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG = (
    MODEL / name for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
)
WEIGHTS, INDEX = MODEL / "model.safetensors", MODEL / "model.safetensors.index.json"
Change = Callable[[], object]
ADDED_TOKEN = {"id": 10**6, "content": "<x>", "special": True, "single_word": False} | dict.fromkeys(
    ("lstrip", "rstrip", "normalized"), False
)
VALUES: list[object] = [
    None, True, False, 0, -1, 1, 3, 10**6, 10**18, 10**30, 0.5, -1e308, math.nan, math.inf, "", "x", "\x00", "\ud800",
    "../../x", "os.system", [], [None], [[1]], ["x"] * 3, {}, {"x": 1}, {"": None}, {"__class__": "os.system"},
]  # fmt: skip


def cases(seed: int) -> list[Case]:
    """The corpus of a seed."""
    chance = random.Random(seed)
    found = {**_configs(), **_files(chance), **_generation(), **_tokenizers(), **_templates(), **_weights(chance)}
    while len(found) < COUNT:
        name, change = _odd_value(chance)
        found[name] = change
    names = [*found]
    chance.shuffle(names)
    return [Case(name, partial(_attempt, found[name], is_chat=name.startswith("template"))) for name in names]


def _attempt(change: Change, *, is_chat: bool) -> int:
    toy_model("llama").save_pretrained(MODEL)
    GenerationConfig(do_sample=True, pad_token_id=0, eos_token_id=1).save_pretrained(MODEL)
    make_tokenizer(MODEL)
    change()
    turns = [{"role": "user", "content": "1+1="}]
    write_rows(Path("data.jsonl"), [{"messages": turns, "answer": "2"}] * 4 if is_chat else None)
    return run("ppo", model=str(MODEL))


def _set(path: Path, **changes: object) -> Change:
    return lambda: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _without(path: Path, name: str) -> Change:
    def change() -> None:
        content = json.loads(path.read_text())
        content.pop(name)
        path.write_text(json.dumps(content))

    return change


def _configs() -> dict[str, Change]:
    changes: list[dict[str, object]] = [
        *({"num_attention_heads": value} for value in (0, 3, "2", None)),
        *({"hidden_size": value} for value in (0, -64, "64", None, 64.5, True, 10**12)),
        *({"num_hidden_layers": value} for value in (0, 1, 3, 10**9, 1.5)),
        *({"vocab_size": value} for value in (0, 32, 65, 10**15)),
        *({"num_key_value_heads": value} for value in (0, 3, [1])),
        *({"head_dim": value} for value in (0, 33, "x")),
        *({"rms_norm_eps": value} for value in (math.nan, -1, "x")),
        *(
            {"rope_parameters": value}
            for value in ({"rope_type": "default", "rope_theta": 0}, {"rope_type": "x"}, [], 1)
        ),
        *({"model_type": value} for value in ("evil", "gpt2", None, ["llama"])),
        *({"dtype": value} for value in ("evil", 16, "int8")),
        {"architectures": "x"},
        {"hidden_act": "evil"},
        {"max_position_embeddings": 4},
        {"text_config": [1]},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {"quantization_config": "x"},
        {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}, "model_type": "evil"},
    ]
    return {f"config {json.dumps(change)[:70]}": _set(CONFIG, **change) for change in changes}


def _files(chance: random.Random) -> dict[str, Change]:
    contents = {
        "a list": b"[1]",
        "deep": b"[" * 100_000,
        "noise": chance.randbytes(300),
        "empty": b"",
        "a number": b"3",
        "digits": b'{"a": ' + b"9" * 5000 + b"}",
    }
    paths = (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG)
    found: dict[str, Change] = {
        f"{path.name} {name}": partial(path.write_bytes, content)
        for path in paths
        for name, content in contents.items()
        if path is CONFIG or name in ("a list", "noise")
    }
    return found | {f"without {path.name}": path.unlink for path in paths if path is not GENERATION}


def _generation() -> dict[str, Change]:
    ids = (10**6, -1, "</s>", [1, 64], [[1]], None)
    return {f"generation eos_token_id={value}": _set(GENERATION, eos_token_id=value) for value in ids} | {
        "config eos_token_id='</s>'": _set(CONFIG, eos_token_id="</s>"),
        "generation temperature=x": _set(GENERATION, temperature="x"),
    }


def _tokenizers() -> dict[str, Change]:
    return {
        "pad_token a list": _set(TOKENIZER_CONFIG, pad_token=["<pad>"]),
        "pad_token unknown": _set(TOKENIZER_CONFIG, pad_token="<nothing>"),
        "tokenizer_class evil": _set(TOKENIZER_CONFIG, tokenizer_class="Evil"),
        "tokenizer model null": _set(TOKENIZER, model=None),
        "tokenizer vocabulary empty": _set(TOKENIZER, model={"type": "WordLevel", "vocab": {}, "unk_token": "x"}),
        "tokenizer added token of id 10**6": _set(TOKENIZER, added_tokens=[ADDED_TOKEN]),
    }


def _odd_value(chance: random.Random) -> tuple[str, Change]:
    """One setting that stands in one of the JSON files, or inside one of its settings, with a value at random."""
    path = chance.choice((CONFIG, CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG))
    place, is_inside = chance.random(), chance.random() < 0.3
    value = chance.choice(VALUES)

    def change() -> None:
        content = json.loads(path.read_text())
        inner = [found for found in content.values() if isinstance(found, dict) and found]
        table = inner[int(place * len(inner))] if inner and is_inside else content
        table[[*table][int(place * len(table))]] = value
        path.write_text(json.dumps(content))

    return f"odd {path.name} {place:.3f}{' inside' * is_inside} {json.dumps(value)[:40]}", change


def _templates() -> dict[str, Change]:
    loop = "{% for i in range(90000) %}{% for j in range(90000) %}{% set x = j %}{% endfor %}{% endfor %}"
    texts = [
        "{{ range(10**8) | list }}", "{{ 1/0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", loop,
        "{{ 'x' * 10**9 }}", "{{ 10 ** (10 ** 8) }}", "{% for %}", "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}", "{% include '/etc/passwd' %}", "{{ raise_exception('no') }}",
        "{{ cycler.__init__.__globals__.os.system('id') }}", "", "{{ messages[9].content }}", "plain",
    ]  # fmt: skip
    write = (MODEL / "chat_template.jinja").write_text
    return {f"template {text[:60]!r}": partial(write, text) for text in texts}


def _weights(chance: random.Random) -> dict[str, Change]:
    name = "model.layers.1.mlp.down_proj.weight"

    def changed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
        return lambda: save_file(change(load_file(WEIGHTS)), WEIGHTS, metadata={"format": "pt"})

    def flipped() -> None:
        content = bytearray(WEIGHTS.read_bytes())
        content[chance.randrange(8, 200)] ^= 1 << chance.randrange(8)
        WEIGHTS.write_bytes(content)

    changes: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
        "NaN": lambda found: found | {name: found[name] * math.nan},
        "inf": lambda found: found | {name: found[name] + math.inf},
        "3e38": lambda found: found | {name: torch.full_like(found[name], 3e38)},
        "of another shape": lambda found: found | {name: found[name].T.contiguous()},
        "of int64": lambda found: found | {name: found[name].long()},
        "missing": lambda found: {key: value for key, value in found.items() if key != name},
        "more": lambda found: found | {"model.layers.7.mlp.down_proj.weight": found[name].clone()},
        "none": lambda found: {},
    }
    indices: dict[str, object] = {
        "a list": [1],
        "empty": {},
        "a map of numbers": {"weight_map": {name: 1}},
        "outside": {"weight_map": {name: "../../../etc/passwd"}},
        "gone": {"weight_map": {name: "gone.safetensors"}},
    }
    return {
        **{f"weights {key}": changed(change) for key, change in changes.items()},
        **{f"index {key}": partial(INDEX.write_text, json.dumps(value)) for key, value in indices.items()},
        "weights, header's bit flipped": flipped,
        "weights cut": lambda: os.truncate(WEIGHTS, 5000),
        "weights empty": partial(WEIGHTS.write_bytes, b""),
        "weights a long header": lambda: WEIGHTS.write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
        "weights gone": WEIGHTS.unlink,
        "weights a pickle": lambda: (
            WEIGHTS.unlink(),
            (MODEL / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'id'\ntR."),
        ),
    }
