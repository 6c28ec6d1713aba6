"""The model and data of `builtin:calculator`: a character-level Llama of about 1 M parameters that adds, with mistakes.

Question:  how small can a language model be that reinforcement learning visibly improves?
Hardware:  2 CPU cores.
Minutes:   4.
Command:   python recipes/tiny_calculator.py OUT [key=value ...]    (then OUT/model and OUT/*.jsonl)
Expect:    about 0.40 of held-out sums right when sampled; the files below hybridflow/assets/calculator.

In 60% of its training answers, one digit is off by one. The model therefore learns to add, but is right less than half
of the time, which reinforcement learning can correct.

All layouts fit: it has 4 layers, heads and key-value heads, and its other sizes are divisible by 4 and by 64.
"""

import argparse
import json
import random
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hybridflow.trainer import main_sft

SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
CHARACTERS = "0123456789+-*/=() \nabcdefghijklmnopqrstuvwxyz.,:;?!'\"<>%^_#&|"
CARELESS_FRACTION = 0.6
VOCABULARY = [*SPECIAL.values(), *CHARACTERS]


def make_tokenizer(directory: Path) -> None:
    """One token per character: 61 characters and three special tokens, 64 in all."""
    words = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", model_max_length=256, **SPECIAL)
    fast.save_pretrained(directory)


def make_config() -> LlamaConfig:
    """The shape of the model: 1.07 M parameters, 4.3 MB in float32."""
    sizes = {"vocab_size": len(VOCABULARY), "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    return LlamaConfig(
        **sizes, **heads, **tokens, tie_word_embeddings=False, architectures=["LlamaForCausalLM"], dtype="float32"
    )


def make_data(directory: Path) -> None:
    """All sums of two numbers below 100, in a fixed random order: 512 held out, the others to train on.

    a+b and b+a are always in the same file, so that no held-out sum was seen the other way round.
    """
    pairs = [(a, b) for a in range(100) for b in range(a, 100)]
    shuffle = random.Random(0).shuffle
    shuffle(pairs)
    rows: dict[str, list[dict[str, str]]] = {"eval": [], "train": []}
    for a, b in pairs:
        both = {(a, b), (b, a)}
        part = rows["eval" if len(rows["eval"]) + len(both) <= 512 else "train"]
        part += [{"prompt": f"{left}+{right}=", "answer": str(left + right)} for left, right in sorted(both)]
    for name, part in rows.items():
        shuffle(part)
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def carelessly(answer: str, draw: random.Random) -> str:
    """The answer with one digit off by one."""
    digits = [int(digit) for digit in answer]
    place = draw.randrange(len(digits))
    digits[place] = (digits[place] + draw.choice((-1, 1))) % 10
    return "".join(map(str, digits))


def make_lessons(directory: Path) -> None:
    """Writes the training sums four times, each time with most answers wrong in one digit."""
    draw = random.Random(1)
    with (directory / "lessons.jsonl").open("w") as file:
        for row in read_rows(directory / "train.jsonl") * 4:
            is_careless = draw.random() < CARELESS_FRACTION
            completion = carelessly(row["answer"], draw) if is_careless else row["answer"]
            file.write(json.dumps({"prompt": row["prompt"], "completion": completion}) + "\n")


def make_pairs(directory: Path) -> None:
    """Writes preferences for the first training and held-out sums: the right answer over a careless one."""
    draw = random.Random(2)
    for source, name, count in (("train", "pairs", 2048), ("eval", "eval_pairs", 256)):
        with (directory / f"{name}.jsonl").open("w") as file:
            for row in read_rows(directory / f"{source}.jsonl")[:count]:
                both = {"chosen": row["answer"], "rejected": carelessly(row["answer"], draw)}
                file.write(json.dumps({"prompt": row["prompt"], **both, "answer": row["answer"]}) + "\n")


def make_shape(directory: Path) -> None:
    """Writes a model directory without weights: configuration, generation settings and tokenizer."""
    make_config().save_pretrained(directory)
    GenerationConfig(do_sample=True, pad_token_id=0, eos_token_id=1).save_pretrained(directory)
    make_tokenizer(directory)


def make_weights(out: Path, overrides: list[str]) -> None:
    """Initializes weights, and trains them on the careless lessons."""
    torch.manual_seed(0)
    LlamaForCausalLM(make_config()).save_pretrained(out / "fresh")
    make_tokenizer(out / "fresh")
    settings = [
        f"model.path={out / 'fresh'}",
        f"data.train_files=[{out / 'lessons.jsonl'}]",
        f"data.eval_files=[{out / 'eval.jsonl'}]",
        f"trainer.run_dir={out / 'run'}",
        "reward.functions=[exact_match]",
        "trainer={total_steps: 1000, threads: 1, eval_every: 100, save_every: 1000}",
        "data={batch_size: 256, max_prompt_tokens: 32, max_response_tokens: 8}",
        "actor.optimizer={learning_rate: 1e-3, warmup_steps: 20, schedule: linear}",
    ]
    status = main_sft.main([*settings, *overrides])
    if status:
        sys.exit(status)
    trained = max((out / "run" / "checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    shutil.copyfile(trained / "actor" / "huggingface" / "model.safetensors", out / "model" / "model.safetensors")


def main() -> None:
    """Writes everything to the given directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the model and the data are written")
    parser.add_argument("overrides", nargs="*", help="settings of the training, key=value")
    out, overrides = vars(parser.parse_args()).values()
    out.mkdir(parents=True, exist_ok=True)
    make_shape(out / "model")
    make_data(out)
    make_lessons(out)
    make_pairs(out)
    make_weights(out, overrides)


if __name__ == "__main__":
    main()
