"""The workloads W, P, H and G: random Llamas, a tokenizer of 64 characters, and prompts and pairs, as files.

Every system measured reads the same directories; this file needs only torch, transformers and tokenizers, so that
a peer's environment can import it too. `build_workload` is idempotent: what exists is kept.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = ("<pad>", "<eos>", *"0123456789+-*/= ", *"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRST")
STORED_ROWS = 4096


@dataclass(frozen=True)
class Shape:
    """A step of a workload: its prompts, responses per prompt (a pair of preferences has two), and their tokens."""

    algorithms: tuple[str, ...]
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    is_long_tailed: bool = False
    """Whether these are the most tokens; otherwise all have as many. Responses that are sampled always do."""

    sizes: tuple[str, ...] = ("tiny", "ten")
    """The models that it is measured with."""

    @property
    def sequences(self) -> int:
        """Sequences of a step; PPO takes as many prompts, with one sample each."""
        return self.prompts * self.samples


SHAPES = {
    "W": Shape(("grpo", "ppo"), prompts=64, samples=4, prompt_tokens=16, response_tokens=32),
    "P": Shape(("grpo",), prompts=16, samples=8, prompt_tokens=256, response_tokens=64),
    "H": Shape(
        ("dpo", "sft", "reward_model"),
        prompts=64,
        samples=2,
        prompt_tokens=256,
        response_tokens=128,
        is_long_tailed=True,
    ),
    "G": Shape(
        ("grpo",), prompts=8, samples=4, prompt_tokens=128, response_tokens=96, is_long_tailed=True, sizes=("smol",)
    ),
}
"""W: many short prompts. P: long prompts in large groups. H: pairs whose lengths are spread as those of HH's harmless
test split (median 80 and 32 tokens, 95% below 330 and 130), cut at 256 and 128; supervised fine-tuning takes the
prompt and the chosen response. G: prompts as long as GSM8K's questions (median 53 tokens, 95% below 103), for a model
of SmolLM2-135M's dimensions."""


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of one random Llama of the workload; `heads` of `head_size`, key-value heads grouped or not."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int = len(VOCABULARY)


SIZES = {
    "tiny": ModelSize(hidden=128, intermediate=256, layers=2, heads=4, kv_heads=2, head_size=32),
    "ten": ModelSize(hidden=320, intermediate=1024, layers=8, heads=5, kv_heads=5, head_size=64),
    "smol": ModelSize(hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, head_size=64, vocabulary=49_152),
}


@dataclass(frozen=True)
class Workload:
    """Where the files are: a Hugging Face directory per size, and a file of JSON lines per workload.

    Lines of W, P and G have `prompt`, lines of H also `chosen` and `rejected`; those of `demonstrations` have `prompt`
    and `completion`.
    """

    models: dict[str, Path]
    rows: dict[str, Path]
    demonstrations: Path

    def rows_for(self, shape: str, algorithm: str) -> Path:
        """The file that an algorithm reads."""
        return self.demonstrations if algorithm == "sft" else self.rows[shape]


def build_workload(directory: Path) -> Workload:
    """The workload's files below `directory`, made when absent."""
    models = {name: directory / name for name in SIZES}
    rows = {name: directory / f"{name}.jsonl" for name in SHAPES}
    demonstrations = directory / "demonstrations.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    pairs = random_pairs(SHAPES["H"])
    made = {
        rows["W"]: [{"prompt": prompt} for prompt in arithmetic_prompts(SHAPES["W"].prompt_tokens)],
        rows["P"]: [{"prompt": prompt} for prompt in random_texts([SHAPES["P"].prompt_tokens] * STORED_ROWS, seed=1)],
        rows["G"]: [
            {"prompt": text}
            for text in random_texts(random_lengths(53, 0.39, SHAPES["G"].prompt_tokens, random.Random(6)), seed=7)
        ],
        rows["H"]: pairs,
        demonstrations: [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs],
    }
    for path, lines in made.items():
        if not path.exists():
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, path in models.items():
        if not (path / "model.safetensors").exists():
            save_random_llama(SIZES[name], path)
    return Workload(models, rows, demonstrations)


def arithmetic_prompts(length: int, num: int = STORED_ROWS) -> list[str]:
    """`num` sums of two numbers below 100, padded on the left to `length` characters."""
    source = random.Random(0)
    return [f"{source.randrange(100)}+{source.randrange(100)}=".rjust(length) for _ in range(num)]


def random_texts(lengths: Sequence[int], *, seed: int) -> list[str]:
    """Texts of random characters, one token each, which share no beginning."""
    source = random.Random(seed)
    letters = [token for token in VOCABULARY if len(token) == 1 and token != " "]
    return ["".join(source.choices(letters, k=length)) for length in lengths]


def random_lengths(median: float, spread: float, most: int, source: random.Random) -> list[int]:
    """Log-normal lengths of 4 to `most` tokens; `spread` is the standard deviation of their logarithms."""
    return [max(4, min(most, round(source.lognormvariate(math.log(median), spread)))) for _ in range(STORED_ROWS)]


def random_pairs(shape: Shape) -> list[dict[str, str]]:
    """Prompts with two responses each, of log-normal lengths."""
    spread, source = 0.86, random.Random(2)
    prompts = random_texts(random_lengths(80, spread, shape.prompt_tokens, source), seed=3)
    chosen, rejected = (
        random_texts(random_lengths(32, spread, shape.response_tokens, source), seed=seed) for seed in (4, 5)
    )
    return [
        {"prompt": prompt, "chosen": one, "rejected": other}
        for prompt, one, other in zip(prompts, chosen, rejected, strict=True)
    ]


def save_random_llama(size: ModelSize, path: Path) -> None:
    """A Llama with random weights (standard deviation 0.02, seed 0, fp32) and the tokenizer, written to `path`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_size,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(path)
    save_character_tokenizer(path, size.vocabulary)


def save_character_tokenizer(path: Path, size: int) -> None:
    """One token per character, with pad and end-of-sequence, in the fast tokenizer's format.

    Texts are encoded in 64 characters; further tokens, up to `size`, are only sampled.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*VOCABULARY, *(f"{number} " for number in range(len(VOCABULARY), size))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    wrapped.save_pretrained(path)


def digit_fraction(prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float]:
    """The workload's reward (TRL's signature): the share of a completion's characters that are digits."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]
