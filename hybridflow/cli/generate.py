"""`hybridflow generate MODEL_OR_RUN --prompts FILE --out FILE`: responses to the prompts of a file."""

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from hybridflow.cli.evaluate import add_subject
from hybridflow.errors import ConfigError
from hybridflow.launch.command import ended_by_signals

if TYPE_CHECKING:
    from hybridflow.launch.compose.compose import Composed

_DESCRIPTION = """Generates responses of a model to the prompts of files, on one device or several, with either rollout
engine. Writes one row per response: the columns of the prompt's file, the response, its number of tokens, and whether
it was cut off at data.max_response_tokens. With --by-prompt, a row has all responses to a prompt (responses, as verl's
main_generation writes them). Rows are written to OUT.partial while responses are generated; after an interruption, the
same command continues. OUT.origin has the settings, prompts and model that they were made with: a file that was made
with others is not overwritten. MODEL_OR_RUN is as in `hybridflow evaluate`; n=SAMPLES is short for
rollout.eval_samples_per_prompt. data.streaming=true reads prompts when they are answered."""
_EXAMPLES = """examples:
  hybridflow generate runs/calculator --prompts prompts.jsonl --out responses.jsonl
  hybridflow generate models/qwen --prompts questions.parquet --out responses.parquet --by-prompt n=4 data.as_chat=true
  hybridflow generate models/qwen --prompts a.jsonl --prompts b.jsonl --out out.jsonl --token-ids rollout.engine=vllm
"""
_STOP_SECONDS = 1.0
"""After Ctrl-C, there is no step to finish and no checkpoint to save: the same command continues the file."""
_FORMATS = (".jsonl", ".parquet")
_NAMES = frozenset({"trainer.run_dir", "trainer.experiment"})
"""Settings that name the directory of the run, which is kept if the user sets one."""


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
        from hybridflow.config.derived import run_dir
        from hybridflow.launch.evaluation import evaluate, subject_of
        from hybridflow.launch.responses_file import ResponsesFile, origin_of_responses
        from hybridflow.launch.resume import fingerprints_to_generate

    file, unnamed = ResponsesFile(out), list[Path]()

    def is_needed(composed: "Composed") -> bool:
        if file.exists and file.is_whole(origin_of_responses(composed, fingerprints_to_generate(composed))):
            return False
        if not (arguments.dry_run or composed.user_keys & _NAMES):
            unnamed.append(run_dir(composed.config))
            _remove_directory(unnamed[0], out)
        return True

    with subject_of(arguments.subject, step=arguments.step) as subject:
        done = evaluate(
            subject,
            arguments.overrides,
            _own_settings(arguments, out),
            command="generate",
            dry_run=arguments.dry_run,
            check=is_needed,
        )
    if done.status == 0 and not done.is_needed:
        console.print(f"{arguments.out}  has all responses already", soft_wrap=True)
    if arguments.dry_run or done.run_dir is None or not done.is_needed:
        return done.status
    what = "prompts" if arguments.by_prompt else "responses"
    if done.status == 0:
        console.print(f"{arguments.out}  {file.finish()} {what}", soft_wrap=True)
        if unnamed:
            _remove_directory(unnamed[0], out)
    elif rows := file.rows():
        kept = f"{arguments.out}.partial  {rows} {what}; the same command continues after them"
        console.print(kept, soft_wrap=True)
    return done.status


def _remove_directory(run_dir: Path, out: Path) -> None:
    """Removes the directory of a command that wrote this file, or began to: nothing but its log is of use, until the
    file is whole."""
    with ended_by_signals():
        import yaml

        from hybridflow.config.section import leaves
        from hybridflow.elastic.claim import is_claimed
        from hybridflow.launch.run_directory import CONFIG_FILE

    config = run_dir / CONFIG_FILE
    written = dict(leaves(yaml.safe_load(config.read_text(encoding="utf-8")))) if config.is_file() else {}
    if written.get("dataflow_settings.out") == str(out) and not is_claimed(run_dir):
        shutil.rmtree(run_dir)


def _own_settings(arguments: argparse.Namespace, out: Path) -> dict[str, object]:
    return {
        "data.eval_files": arguments.prompts,
        "reward.functions": [],
        "reward.weights": [],
        "reward.model.path": None,
        "trainer.trackers": ["console"],
        "trainer.stop_seconds": _STOP_SECONDS,
        "dataflow_settings.out": str(out),
        "dataflow_settings.by_prompt": arguments.by_prompt,
        "dataflow_settings.token_ids": arguments.token_ids,
    }
