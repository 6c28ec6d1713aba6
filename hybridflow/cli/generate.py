"""`hybridflow generate MODEL_OR_RUN --prompts FILE --out FILE`: responses to the prompts of a file."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hybridflow.cli.evaluate import add_subject
from hybridflow.errors import ConfigError
from hybridflow.launch.command import ended_by_signals

_DESCRIPTION = """Generates responses of a model to the prompts of files, on one device or several, with either rollout
engine. Writes one row per response: prompt, response, number of tokens, whether the response was cut off at
data.max_response_tokens, and the prompt's answer and source if they are known. MODEL_OR_RUN is as in
`hybridflow evaluate`; n=SAMPLES is short for rollout.eval_samples_per_prompt."""
_EXAMPLES = """examples:
  hybridflow generate runs/calculator --prompts prompts.jsonl --out responses.jsonl
  hybridflow generate models/qwen --prompts questions.parquet --out responses.parquet n=4 data.as_chat=true
  hybridflow generate models/qwen --prompts a.jsonl --prompts b.jsonl --out out.jsonl --token-ids rollout.engine=vllm
"""
_FORMATS = (".jsonl", ".parquet")
_LEFT_OUT = ("step", "split", "score")


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `generate` to the commands."""
    summary = "write a model's responses to the prompts of a file"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    add_subject(parser)
    parser.add_argument(
        "--prompts", metavar="FILE", action="append", required=True, help="a file of prompts; may be repeated"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="the file to write: .jsonl or .parquet")
    parser.add_argument("--token-ids", action="store_true", help="also write the token ids of responses (response_ids)")


def _run(arguments: argparse.Namespace, console: Console) -> int:
    out: Path = arguments.out
    if out.suffix not in _FORMATS:
        raise ConfigError(f"--out={out} has another ending than {' or '.join(_FORMATS)}.", remedy="Use one of them.")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out={out}: there is no directory {out.parent}.", remedy="Create it, or use another one.")
    with ended_by_signals():
        from hybridflow.launch.evaluation import evaluate, evaluated_rows, subject_of, write_rows

    own = {
        "data.eval_files": arguments.prompts,
        "reward.functions": [],
        "reward.weights": [],
        "reward.model.path": None,
        "trainer.trackers": ["console", "jsonl"],
        "trainer.sample_token_ids": arguments.token_ids,
    }
    with subject_of(arguments.subject, step=arguments.step) as subject:
        done = evaluate(subject, arguments.overrides, own, command="generate", dry_run=arguments.dry_run)
    if done.status == 0 and done.run_dir is not None and not arguments.dry_run:
        rows = evaluated_rows(done.run_dir)
        names = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in _LEFT_OUT]
        known = [name for name in names if any(row.get(name) is not None for row in rows)]
        rows = [{name: row.get(name) for name in known} for row in rows]
        write_rows(out, rows)
        console.print(f"{out}  {len(rows)} responses", soft_wrap=True)
    return done.status
