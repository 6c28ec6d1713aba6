"""What most rank programs import: done once, in the server that their processes are forked from."""

import importlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

for _module in (
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "hybridflow.engines.training.factory",
    "hybridflow.dataflows",
    "tests.toys",
):
    importlib.import_module(_module)
