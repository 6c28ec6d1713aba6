"""What a node says of its GPUs before a run starts, and what this process finds when it computes there."""

import pytest
import torch

from hybridflow.controller.resource_pool import visible_gpu_bytes
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan.plan import plan_run
from hybridflow.launch.rules.memory import available_gpus, least_unavoidable


def test_the_memory_of_this_machines_gpus_is_what_pytorch_finds_there(device):
    plan = plan_run(compose_run(["trainer.backend=local", "trainer.devices=1"], config_name="ppo"), device=device.type)
    gpus = least_unavoidable(available_gpus(plan), 1)
    if device.type == "cpu" and not torch.cuda.is_available():
        assert gpus is None and visible_gpu_bytes() == []
        return
    totals = [torch.cuda.mem_get_info(index)[1] for index in range(torch.cuda.device_count())]
    assert visible_gpu_bytes() == pytest.approx(totals, rel=0.02)  # the driver keeps some of each
    assert gpus is not None and (gpus.node, gpus.smallest) == ("this machine", visible_gpu_bytes()[0])
