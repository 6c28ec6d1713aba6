"""Megatron-Core read for a machine without CUDA: its own modules change, and nothing else in the process."""

import ast
import subprocess
import sys

import pytest
import torch

from hybridflow.engines.training.megatron.cpu_adapter import _ToCpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is adapted where there is CUDA")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("torch.cuda.current_device()", "_hybridflow_cpu_for_cuda.current_device()"),
        ("torch.empty(2, device='cuda')", "torch.empty(2, device='cpu')"),
        ("x.type() == 'torch.cuda.BFloat16Tensor'", "x.type() == 'torch.BFloat16Tensor'"),
        ("weight.data.cuda(device, non_blocking=True)", "weight.data.cpu()"),
        ("tensor.record_stream(torch.cuda.current_stream())", "None"),
        ("x = 1 if tensor.is_cuda else 2", "x = 1 if True else 2"),
        ("from torch.cuda import _lazy_call as call", "call = _hybridflow_cpu_for_cuda._lazy_call"),
        ("from torch import cuda_things", "from torch import cuda_things"),
        ("x = 'a cuda device'", "x = 'a cuda device'"),
    ],
)
def test_what_asks_for_cuda_asks_for_the_cpu(written, read):
    tree = ast.fix_missing_locations(_ToCpu().visit(ast.parse(written)))
    assert ast.unparse(tree) == read


def test_the_rest_of_the_process_sees_torch_as_it_is():
    program = """
import torch
before = dict(vars(torch.cuda))
import hybridflow.engines.training.megatron
from megatron.core import parallel_state
assert all(vars(torch.cuda)[name] is value for name, value in before.items())
assert not torch.cuda.is_available()
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError):
    print("torch is as it was")
"""
    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "torch is as it was"


def test_an_import_that_came_too_early_is_named():
    program = """
import sys, types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
from hybridflow.errors import EngineError
try:
    import hybridflow.engines.training.megatron
except EngineError as error:
    print(error.message, error.remedy, sep="|")
"""
    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "megatron.core was imported before" in answer.stdout
    assert "Import hybridflow.engines.training.megatron first" in answer.stdout
