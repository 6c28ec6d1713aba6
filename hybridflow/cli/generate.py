"""`hybridflow generate MODEL_OR_RUN --prompts FILE --out FILE`: responses to the prompts of a file."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hybridflow.cli.evaluate import add_subject
from hybridflow.errors import ConfigError
from hybridflow.launch.command import ended_by_signals

_DESCRIPTION = """Generates responses of a model to the prompts of files, on one device or several, with either rollout
engine. Writes one row per response: the columns of the prompt's file, the response, its number of tokens, and whether
it was cut off at data.max_response_tokens. With --by-prompt, a row has all responses to a prompt (responses, as verl's
main_generation writes them). Rows are written to OUT.partial while responses are generated; after an interruption, the
same command continues. MODEL_OR_RUN is as in `hybridflow evaluate`; n=SAMPLES is short for
rollout.eval_samples_per_prompt. data.streaming=true reads prompts when they are answered."""
_EXAMPLES = """examples:
  hybridflow generate runs/calculator --prompts prompts.jsonl --out responses.jsonl
  hybridflow generate models/qwen --prompts questions.parquet --out responses.parquet --by-prompt n=4 data.as_chat=true
  hybridflow generate models/qwen --prompts a.jsonl --prompts b.jsonl --out out.jsonl --token-ids rollout.engine=vllm
"""
_FORMATS = (".jsonl", ".parquet")


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
    parser.add_argument("--by-prompt", action="store_true", help="write one row per prompt, with a list of responses")
    parser.add_argument("--token-ids", action="store_true", help="also write the token ids of responses (response_ids)")


def _run(arguments: argparse.Namespace, console: Console) -> int:
    out: Path = arguments.out.absolute()
    if out.suffix not in _FORMATS:
        raise ConfigError(
            f"--out={arguments.out} must end in {' or '.join(_FORMATS)}.",
            remedy=f"Write --out {arguments.out.with_suffix(_FORMATS[0])}.",
        )
    if not out.parent.is_dir():
        raise ConfigError(
            f"--out={arguments.out}: there is no directory {arguments.out.parent}.",
            remedy="Create it, or use another one.",
        )
    with ended_by_signals():
        from hybridflow.launch.evaluation import evaluate, subject_of
        from hybridflow.launch.responses_file import ResponsesFile, settings_of_responses

    step = "" if arguments.step is None else f" step {arguments.step}"
    own = {
        "data.eval_files": arguments.prompts,
        "reward.functions": [],
        "reward.weights": [],
        "reward.model.path": None,
        "trainer.trackers": ["console", "jsonl"],
        "dataflow_settings.out": str(out),
        "dataflow_settings.model": f"{arguments.subject}{step}",
        "dataflow_settings.by_prompt": arguments.by_prompt,
        "dataflow_settings.token_ids": arguments.token_ids,
    }
    file = ResponsesFile(out)
    with subject_of(arguments.subject, step=arguments.step) as subject:
        done = evaluate(
            subject,
            arguments.overrides,
            own,
            command="generate",
            dry_run=arguments.dry_run,
            check=lambda composed: file.check(settings_of_responses(composed)),
        )
    if arguments.dry_run or done.run_dir is None:
        return done.status
    what = "prompts" if arguments.by_prompt else "responses"
    if done.status == 0:
        console.print(f"{arguments.out}  {file.finish()} {what}", soft_wrap=True)
    elif rows := file.rows():
        kept = f"{arguments.out}.partial  {rows} {what}; the same command continues after them"
        console.print(kept, soft_wrap=True)
    return done.status
