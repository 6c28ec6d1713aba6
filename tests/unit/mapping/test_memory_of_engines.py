"""The arithmetic of memory against the tensors that an engine holds."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.config.model import Dtype
from hybridflow.config.training import Lora, TrainingEngine
from hybridflow.engines.training.single import SingleEngine
from hybridflow.mapping.layouts import ModelUse, TrainingLayout
from hybridflow.mapping.memory.phases import RoleMemory, colocated_phases
from hybridflow.mapping.memory.training import training_memory
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.geometry import read_geometry, value_bytes
from tests.toys import sequences, stepped
from tests.unit.engines.training.engines import language_engine, likelihood_loss, value_engine

PROMPT, RESPONSE = 300, 200
TOKENS = PROMPT + RESPONSE
SIZES = {"hidden_size": 96, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 32}


@pytest.fixture
def stepped_engine(toy_dir):
    """A function: an engine after an optimizer step, the bytes of its gradients, and those that a layer kept."""

    def make(architecture: str, dtype: Dtype, *, layers: int = 2, rank: int = 0) -> tuple[SingleEngine, int, int]:
        path = toy_dir(architecture, max_position_embeddings=1024, num_hidden_layers=layers, **SIZES)
        settings = {"gradient_checkpointing": False, "lora": Lora(rank=rank)}
        engine = language_engine(path, dtype=dtype, **settings)
        gradients, kept = count_gradients(engine.model), KeptTensors(engine.model)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            stepped(engine, sequences((PROMPT,), (RESPONSE,)), likelihood_loss)
        return engine, sum(gradients.values()), sum(tensor.untyped_storage().nbytes() for tensor in kept.found.values())

    return make


class KeptTensors:
    """Tensors that autograd keeps, without parameters, one per storage."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.found: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in self._parameters:
            self.found[place] = tensor
        return tensor


def count_gradients(model: nn.Module) -> dict[str, int]:
    """Filled with the bytes of each parameter's gradient when it is complete."""
    found: dict[str, int] = {}

    def count(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        found[name] = parameter.grad.nbytes

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: count(name, p))
    return found


def predicted(engine: SingleEngine, dtype: Dtype, *, rank: int = 0) -> RoleMemory:
    use = ModelUse(read_geometry(engine._setup.directory), value_bytes(dtype), is_trained=True, lora_rank=rank)
    layout = TrainingLayout(engine=TrainingEngine.single, gradient_checkpointing=False)
    return training_memory("actor", use, layout, Workload(1, Lengths((PROMPT,)), Lengths((RESPONSE,)), 1))


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_gradients_and_optimizer_are_the_tensors_of_the_engine(stepped_engine, architecture, dtype):
    engine, gradients, _ = stepped_engine(architecture, dtype)
    role = predicted(engine, dtype)
    assert role.resident["weights of actor"] == sum(parameter.nbytes for parameter in engine.model.parameters())
    assert role.phases["updating actor"]["gradients"] == gradients
    assert role.resident["optimizer of actor"] == state_bytes(engine)


def test_a_value_model_has_no_language_head(toy_dir):
    path = toy_dir("llama", **SIZES)
    engine = value_engine(path)
    use = ModelUse(read_geometry(path), 4, is_trained=True, has_language_head=False)
    layout, workload = TrainingLayout(engine=TrainingEngine.single), Workload(1, Lengths((8,)), Lengths((8,)), 1)
    role = training_memory("critic", use, layout, workload)
    held = {name: parameter.nbytes for name, parameter in engine.model.named_parameters()}
    score = sum(size for name, size in held.items() if "score" in name)
    assert 0 < score <= 4 * (SIZES["hidden_size"] + 1)
    assert role.resident["weights of critic"] == sum(held.values()) - score


@pytest.mark.lora
@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16], ids=lambda dtype: dtype.name)
def test_an_adapter_is_what_peft_adds(stepped_engine, dtype):
    engine, gradients, _ = stepped_engine("qwen3", dtype, rank=4)
    role = predicted(engine, dtype, rank=4)
    assert role.resident["weights of actor"] == sum(parameter.nbytes for parameter in engine.model.parameters())
    assert role.phases["updating actor"]["gradients"] == gradients
    assert role.resident["optimizer of actor"] == state_bytes(engine)


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_layer_keeps_the_tensors_that_are_counted(stepped_engine, architecture, dtype):
    (three, _, most), (two, _, fewer) = (stepped_engine(architecture, dtype, layers=layers) for layers in (3, 2))
    activations = [predicted(engine, dtype).phases["updating actor"]["activations"] for engine in (three, two)]
    # Not counted: attention's log-sum-exp, one or two float32 numbers per head and token, 1% of this layer.
    assert activations[0] - activations[1] == pytest.approx(most - fewer, rel=0.02)


@pytest.mark.parametrize(
    ("architecture", "dtype", "recomputes"),
    [
        pytest.param(
            architecture,
            dtype,
            recomputes,
            marks=pytest.mark.slow if dtype is Dtype.bfloat16 and (architecture != "qwen3" or recomputes) else [],
            id=f"{architecture}-{dtype.name}-{'recomputed' if recomputes else 'kept'}",
        )
        for architecture in ("llama", "qwen3")
        for dtype in (Dtype.float32, Dtype.bfloat16)  # a CPU is slow in bfloat16
        for recomputes in (False, True)
    ],
)
def test_the_peak_of_an_update_is_predicted(toy_dir, architecture, dtype, recomputes):
    """Every tensor that PyTorch allocates during the second update counts until it is freed."""
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_hidden_layers": 4}
    path = toy_dir(architecture, max_position_embeddings=1024, **sizes)
    engine = language_engine(path, dtype=dtype, gradient_checkpointing=recomputes, microbatch_tokens=TOKENS)
    batch = sequences((1,) * 3, (TOKENS - 1,) * 3)
    stepped(engine, batch, likelihood_loss)
    held = sum(parameter.nbytes for parameter in engine.model.parameters()) + state_bytes(engine)
    kept = [*engine.model.parameters(), *state_tensors(engine)]
    with LiveTensors(kept) as live:
        stepped(engine, batch, likelihood_loss)
    use = ModelUse(read_geometry(path), value_bytes(dtype), is_trained=True)
    layout = TrainingLayout(engine=TrainingEngine.single, gradient_checkpointing=recomputes, microbatch_tokens=TOKENS)
    workload = Workload(3, Lengths((0.0,)), Lengths((TOKENS,)), 1)
    (phase,) = colocated_phases([training_memory("actor", use, layout, workload)])
    # The arithmetic gives each tensor of a layer memory of its own; here it is reused as soon as it is freed.
    assert phase.total == pytest.approx(held + live.peak, rel=0.15)


class LiveTensors(TorchDispatchMode):
    """Bytes of the tensors that operations make, except `known` ones, until they are freed; `peak` is the most."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, int] = {}
        self._total = self.peak = 0

    def __torch_dispatch__(
        self, function: Callable, types: object, arguments: tuple = (), settings: Mapping[str, Any] | None = None
    ) -> object:
        result = function(*arguments, **(settings or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known or storage._cdata in self._live:
            return
        self._live[storage._cdata] = storage.nbytes()
        self._total += storage.nbytes()
        self.peak = max(self.peak, self._total)
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, storage: int) -> None:
        self._total -= self._live.pop(storage, 0)


def state_bytes(engine: SingleEngine) -> int:
    """Bytes of moments and float32 copies."""
    return sum(tensor.nbytes for tensor in state_tensors(engine))


def state_tensors(engine: SingleEngine) -> list[Tensor]:
    """Moments and float32 copies, without torch's step counts."""
    states = engine.optimizer.state.values()
    moments = [tensor for state in states for name, tensor in state.items() if name != "step"]
    return [*moments, *engine.optimizer.weight_of]
