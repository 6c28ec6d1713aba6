"""What Megatron-Core warns of in itself, and a user can do nothing about."""

import warnings

for _message in (
    ".*Apex (is|are) not installed",
    r".*(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    ".*attribute of a Tensor that is not a leaf Tensor is being accessed",
    "TypedStorage is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)
