"""Sharded training with PyTorch's FSDP2: each rank holds a shard of every parameter and gathers one layer at a time.

Read `engine.py` first, then `sharding.py` (what a rank holds, and where its memory is). `tensor_parallel.py` shards
matrices with DTensor, and `sequence.py` splits the tokens of a microbatch over ranks (Ulysses).
"""
