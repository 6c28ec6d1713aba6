"""Configurations for tests of their rules."""

from hybridflow.config.experiment import Experiment


def experiment(settings: dict[str, object]) -> Experiment:
    """A model, its data, the defaults, and some settings changed."""
    config = Experiment()
    config.model.path, config.data.train_files = "builtin:calculator", ["builtin:calculator/train"]
    for key, value in settings.items():
        section, *path = config, *key.split(".")
        for name in path[:-1]:
            section = section[name] if isinstance(section, dict) else vars(section)[name]
        setattr(section, path[-1], value)
    return config
