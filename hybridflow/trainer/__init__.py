"""`python -m hybridflow.trainer.main_ppo` and its like, which are also `hybridflow ppo` and so on."""
