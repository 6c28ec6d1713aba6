"""Environments: conversations of several turns in which the model acts and the environment answers.

Read `interface.py` first, then `transcript.py`, which owns the token ids of a conversation, and `play.py`, which plays
the episodes of a batch with a rollout engine.
"""
