"""The name of each weight in each engine, and its place in the engine's tensors. Read `rules.py` first.

A weight's canonical name is its name in a Hugging Face checkpoint. `rules` lists a model's weights and says how tensor
parallelism shards each; `huggingface`, `megatron` and `vllm` say which of them an engine's parameter holds, as `Part`s
(`parts.views` turns those into shards); `layouts` says why a model cannot be sharded. Nothing here imports torch.
"""
