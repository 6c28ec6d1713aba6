"""The options that the scripts of peers in step.py have in common."""

import argparse
from pathlib import Path

PROMPTS = "JSON lines with a field `prompt`"
"""The rows of workloads that generate."""


def step_parser(description: str | None, *, workloads: tuple[str, ...], rows: str = PROMPTS) -> argparse.ArgumentParser:
    """Model, rows, workload (the first by default), steps and threads; `rows` says what the file has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--rows", type=Path, required=True, help=rows)
    parser.add_argument("--workload", choices=workloads, default=workloads[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    return parser
