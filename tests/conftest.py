"""Turns the shapes and types in the signatures of `hybridflow.algorithms` into checks."""

import hypothesis
import jaxtyping

# pep484_tower: an int is accepted where a float is asked for.
jaxtyping.install_import_hook(
    "hybridflow.algorithms", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
)

# The same examples on every run, and no time limit for one: the machine may be busy.
hypothesis.settings.register_profile("house", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("house")
