"""vLLM imported once, in the server that rank processes are forked from: 7 s of a core for each rank otherwise."""

import importlib
from importlib.util import find_spec

import torch

from hybridflow.engines.rollout.vllm.environment import import_vllm

if find_spec("vllm") is not None:
    import_vllm(torch.device("cpu"))
    importlib.import_module("hybridflow.engines.rollout.vllm.engine")
    for _module in (
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.engine.core",
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
        "vllm.model_executor.layers.quantization.online.base",
    ):
        importlib.import_module(_module)
