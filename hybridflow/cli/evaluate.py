"""`hybridflow evaluate MODEL_OR_RUN`: samples responses, scores them, and prints a table."""

import argparse
import sys
from collections.abc import Callable

from rich.console import Console

from hybridflow.launch.command import ended_by_signals

_DESCRIPTION = """Samples responses of a model to held-out prompts and scores them with reward functions, as an
evaluation during training does. MODEL_OR_RUN is a directory with a model, a name on the Hub, a run's directory (its
newest checkpoint, evaluated with the data and rewards of the run), or one of its checkpoints. data=FILE,
reward=FUNCTION and n=SAMPLES are short for data.eval_files, reward.functions and rollout.eval_samples_per_prompt.
Prints a table by data source, and writes samples.jsonl, evaluation.jsonl (the table) and report.html."""
_EXAMPLES = """examples:
  hybridflow evaluate runs/calculator
  hybridflow evaluate runs/calculator n=8 rollout.eval_sampling.temperature=0.7     also pass@2, pass@4 and pass@8
  hybridflow evaluate models/qwen data=test.jsonl reward=gsm8k data.max_response_tokens=1024
  hybridflow evaluate models/qwen data=a.jsonl,b.parquet reward=my.py:score trainer.devices=4 rollout.engine=vllm
"""


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `evaluate` to the commands."""
    summary = "sample responses of a model or a run, score them, and print a table"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    add_subject(parser)


def add_subject(parser: argparse.ArgumentParser) -> None:
    """The arguments of a command that generates with a model or a run."""
    parser.add_argument(
        "subject", metavar="MODEL_OR_RUN", help="a model (directory or Hub name), a run, or one of its checkpoints"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="settings of the evaluation")
    parser.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of this step (default: the newest)")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print all problems, start nothing")


def _run(arguments: argparse.Namespace, console: Console) -> int:
    with ended_by_signals():
        from hybridflow.launch.evaluation import evaluate, subject_of, write_table
        from hybridflow.observability.evaluation_table import summaries, table_text
        from hybridflow.observability.jsonlines import read_rows
        from hybridflow.observability.trackers.jsonl import SAMPLES_FILE

    with subject_of(arguments.subject, step=arguments.step) as subject:
        done = evaluate(subject, arguments.overrides, {}, command="evaluate", dry_run=arguments.dry_run)
    if done.status == 0 and done.run_dir is not None and not arguments.dry_run:
        found = summaries(row for _, row in read_rows(done.run_dir / SAMPLES_FILE))
        write_table(done.run_dir / "evaluation.jsonl", found)
        sys.stdout.write(f"{table_text(found)}\n")
    return done.status
