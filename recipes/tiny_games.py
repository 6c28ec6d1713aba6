"""The model and data of `builtin:games`: a Llama of about 0.3 M parameters that has learned how to reply in four games.

Question:  from how little can reinforcement learning teach a language model to play?
Hardware:  2 CPU cores.
Minutes:   6.
Command:   python recipes/tiny_games.py OUT [key=value ...]    (then OUT/model and OUT/*.jsonl)
Expect:    the files below hybridflow/assets/games; replies in the right form, and bad play.

The model imitates weak players: they walk in any direction, ignore half of the time what they have learned about the
number, bet by their card alone, and ask the calculator for any operation, if they use it.
`hybridflow grpo task=guess_number` and the other tasks continue from there.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.built_in.weak_players import PLAYERS
from hybridflow.environments.episodes import run_episode
from hybridflow.environments.interface import Ask, Message, Model, Reply, Start
from hybridflow.environments.loading import load_environment
from hybridflow.environments.tool_calls import hermes_calls
from hybridflow.trainer import main_sft

SPECIAL = ["<pad>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>"]
WORDS = "guess lower higher right over number lake left down up poker pass bet name calculate arguments"
PIECES = ['{"', '": "', '", "', '": {"', '": ', ', "', "}}", ", ", ": "]
VOCABULARY = [*SPECIAL, *WORDS.split(), "first", "operator", "second", *PIECES, *"0123456789JQK+-*=?,.: "]
TEMPLATE = """\
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
</s>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
NUM_TRACES = 4000  # of the calculator three times as many: to call it, the model must learn to copy numbers


def make_data(directory: Path) -> None:
    """Writes the prompts of each game, and of the calculator also held-out ones."""
    products = [(a, b) for a in range(12, 100) for b in range(12, 100)]
    random.Random(0).shuffle(products)
    questions = [(f"{a}*{b}=", {"answer": str(a * b)}) for a, b in products]
    rows = {
        "guess_number": [("guess", {"number": 1 + index % 15}) for index in range(480)],
        "calculator": questions[512:2560],
        "calculator_eval": questions[:512],
        "frozen_lake": [("lake", {})] * 512,
        "kuhn_poker": [("poker ", {})] * 512,
    }
    for name, part in rows.items():
        lines = [{"prompt": [{"role": "user", "content": text}], **columns} for text, columns in part]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


async def traces(game: str, row: dict, draw: random.Random) -> list[list[Message]]:
    """The conversations of one episode with the game's player: one, or one for each seat of a table."""
    seen: dict[bool, list[Message]] = {}

    async def exchange(ask: Ask) -> Reply:
        text = PLAYERS[game](ask.messages, draw)
        reply: Message = {"role": "assistant", "content": text}
        seen[ask.is_trained] = [*ask.messages, reply]
        return Reply(text, reply, hermes_calls(text))

    settings = EnvironmentSettings(name=game)
    await run_episode(load_environment(settings), settings, Start(row, draw.randrange(1 << 30)), Model(exchange))
    return [*seen.values()]


def make_traces(directory: Path) -> None:
    """Writes the conversations of random players."""
    draw = random.Random(1)
    lines: list[str] = []
    for game in PLAYERS:
        rows = [json.loads(line) for line in (directory / f"{game}.jsonl").read_text().splitlines()]
        for _ in range(NUM_TRACES * (3 if game == "calculator" else 1)):
            lines += [json.dumps({"messages": each}) for each in asyncio.run(traces(game, draw.choice(rows), draw))]
    draw.shuffle(lines)
    (directory / "traces.jsonl").write_text("".join(f"{line}\n" for line in lines))


def make_shape(directory: Path) -> None:
    """Writes a model directory without weights: configuration, generation settings, tokenizer and chat template."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256}
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    kind = {"tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    LlamaConfig(**sizes, **heads, **tokens, **kind).save_pretrained(directory)
    GenerationConfig(do_sample=True, pad_token_id=0, eos_token_id=1).save_pretrained(directory)
    words = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r'[a-z]+|[{}":, ]+|[\s\S]'), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL[:6]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in SPECIAL[6:]])
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", model_max_length=256, **named)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)


def make_weights(out: Path, overrides: list[str]) -> None:
    """Initializes weights, and trains them on the traces."""
    torch.manual_seed(0)
    make_shape(out / "fresh")
    LlamaForCausalLM(LlamaConfig.from_pretrained(out / "fresh")).save_pretrained(out / "fresh")
    settings = [
        f"model.path={out / 'fresh'}",
        f"data.train_files=[{out / 'traces.jsonl'}]",
        f"trainer.run_dir={out / 'run'}",
        "trainer={total_steps: 600, threads: 1, save_every: 600}",
        "data={batch_size: 128, max_prompt_tokens: 16, max_response_tokens: 240}",
        "actor.optimizer={learning_rate: 2e-3, warmup_steps: 20, schedule: linear}",
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
    make_traces(out)
    make_weights(out, overrides)


if __name__ == "__main__":
    main()
