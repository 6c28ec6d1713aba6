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
    """The statements of a step, its docstring left out."""
    function = ast.parse(textwrap.dedent(inspect.getsource(dataflow.step))).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function.body[1:]


def lines(dataflow: type[Dataflow]) -> int:
    """Lines of the body, but blank ones and the docstring."""
    return sum(1 for statement in statements(dataflow) for line in ast.unparse(statement).splitlines() if line)


def test_the_step_of_ppo_is_at_most_fifteen_lines():
    source = inspect.getsource(PPO.step).strip().splitlines()
    assert len(source) - 2 <= 15  # without the signature and the docstring, blank lines counted
    assert len(statements(PPO)) == lines(PPO) == 10


@pytest.mark.parametrize(("dataflow", "more"), [(SafeRLHF, 6), (PFPPO, 1), (PPOPtx, 1)])
def test_what_an_algorithm_adds_to_ppo(dataflow, more):
    assert lines(dataflow) <= lines(PPO) + more
    assert len(statements(dataflow)) <= len(statements(PPO)) + more
