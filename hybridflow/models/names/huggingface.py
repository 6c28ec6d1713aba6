"""The canonical weights in the parameters of transformers models: usually one each; experts are stacked."""

from collections.abc import Sequence

from hybridflow.models.names.parts import Part, whole_part
from hybridflow.parallel.boxes import Box
from hybridflow.parallel.layout import TensorLayout

_STACKED = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
"""transformers 5 stacks a layer's experts in two tensors, [experts, rows, columns], and saves them one by one."""


def canonical_name(parameter_name: str) -> str:
    """The name in a checkpoint of a parameter that holds one weight.

    `ValueModel` calls its decoder `backbone`. peft calls an adapted layer `base_layer`, and its matrices
    `lora_A.default` and `lora_B.default`, without `default` in its files.
    """
    parameter_name = parameter_name.replace(".base_layer.", ".")
    parameter_name = parameter_name.replace(".lora_A.default.", ".lora_A.").replace(".lora_B.default.", ".lora_B.")
    prefix = "backbone."
    return f"model.{parameter_name.removeprefix(prefix)}" if parameter_name.startswith(prefix) else parameter_name


def parts_of(parameter_name: str, shape: Sequence[int], box: Box | None = None) -> list[Part]:
    """The weights in a parameter of the given global shape, or in the `box` of it that a rank holds.

    Regions index the rank's part. A tied head is not a separate parameter in transformers, and does not appear.
    """
    layout = TensorLayout.full(shape) if box is None else TensorLayout(tuple(shape), box)
    name = canonical_name(parameter_name)
    parent, _, last = name.rpartition(".experts.")
    projections = _STACKED.get(f"experts.{last}") if parent else None
    if projections is None:
        return [whole_part(name, layout)]
    (first, end), (low, high), columns = layout.box
    rows = shape[1] // len(projections)
    parts = []
    for expert in range(first, end):
        for index, projection in enumerate(projections):
            start, stop = max(low, index * rows), min(high, (index + 1) * rows)
            if start >= stop:
                continue
            own = TensorLayout((rows, shape[2]), ((start - index * rows, stop - index * rows), columns))
            region = (expert - first, slice(start - low, stop - low))
            parts.append(Part(f"{parent}.experts.{expert}.{projection}.weight", region, own))
    return parts
