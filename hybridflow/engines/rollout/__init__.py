"""Rollout engines: prompts in, sampled responses out. Read `interface.py`, then `transformers/`, the simplest."""
