"""Inputs at random for every command: each must end in time, with an error in our words or well.

python -m tests.attacks                                    # all corpora
python -m tests.attacks command_lines data_files:20 --seed 1
"""

import argparse
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

from tests.attacks import command_lines, data_files, model_directories
from tests.attacks.trial import report

CORPORA = {"command_lines": command_lines, "data_files": data_files, "model_directories": model_directories}


def main() -> int:
    """Prints a line of figures for each corpus; the status is 1 if a case ended in a traceback or not at all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("corpora", nargs="*", default=[*CORPORA], help="NAME, or NAME:COUNT for its first COUNT cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", default="", help="the cases whose names contain this")
    parser.add_argument("--show", action="store_true", help="print the output of every case")
    chosen = parser.parse_args()
    verdicts = []
    for name, _, count in (words.partition(":") for words in chosen.corpora):
        corpus = CORPORA[name]
        part = corpus.cases(chosen.seed)[chosen.first : chosen.first + int(count or corpus.COUNT)]
        cases = [case for case in part if chosen.only in case.name]
        verdicts += report(name, cases, limit_seconds=corpus.LIMIT_SECONDS, show=chosen.show)
    return int(any(verdict.kind in ("traceback", "hang") for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
