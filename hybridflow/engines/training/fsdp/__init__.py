"""Training in shards with PyTorch's FSDP2: a rank holds a piece of every parameter and gathers a layer while it runs.

Read `engine.py` first, then `sharding.py` (what a rank holds, and where its memory is). `tensor_plan.py` divides
matrices over ranks as well (DTensor), `sequence.py` divides the tokens of a micro-batch (Ulysses).
"""
