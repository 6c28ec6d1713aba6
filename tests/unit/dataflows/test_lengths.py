"""Algorithms are short: the lines of their steps, and what each adds to PPO."""

import ast
import inspect
import textwrap

import pytest

from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.pf_ppo import PFPPO
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.ppo_ptx import PPOPtx
from hybridflow.dataflows.safe_rlhf import SafeRLHF


def statements(dataflow: type[Dataflow]) -> list[ast.stmt]:
    """The statements of both halves of a step, their docstrings left out."""
    found: list[ast.stmt] = []
    for half in (dataflow.collect, dataflow.learn):
        function = ast.parse(textwrap.dedent(inspect.getsource(half))).body[0]
        assert isinstance(function, ast.FunctionDef)
        has_docstring = ast.get_docstring(function) is not None
        found += function.body[has_docstring:]
    return found


def lines(dataflow: type[Dataflow]) -> int:
    """Lines of the body, but blank ones and the docstring."""
    return sum(1 for statement in statements(dataflow) for line in ast.unparse(statement).splitlines() if line)


def test_the_step_of_ppo_is_at_most_fifteen_lines():
    halves = [inspect.getsource(half).strip().splitlines() for half in (PPO.collect, PPO.learn)]
    assert sum(len(half) - 1 for half in halves) <= 15  # without the signatures, blank lines counted
    assert len(statements(PPO)) == lines(PPO) == 11


@pytest.mark.parametrize(("dataflow", "more"), [(SafeRLHF, 6), (PFPPO, 1), (PPOPtx, 1)])
def test_what_an_algorithm_adds_to_ppo(dataflow, more):
    assert lines(dataflow) <= lines(PPO) + more
    assert len(statements(dataflow)) <= len(statements(PPO)) + more
