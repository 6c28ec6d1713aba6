"""The adapters, in the order in which they are asked."""

from hybridflow.environments.adapters.gymnasium import GYMNASIUM
from hybridflow.environments.adapters.interface import Adapter, methods_of
from hybridflow.environments.adapters.skyrl_gym import SKYRL_GYM
from hybridflow.environments.adapters.textarena import TEXTARENA
from hybridflow.environments.adapters.trl import TRL
from hybridflow.environments.adapters.verifiers import VERIFIERS
from hybridflow.environments.adapters.verl import VERL_TOOL
from hybridflow.environments.adapters.verl_agent_loop import VERL_AGENT_LOOP

ADAPTERS = (VERIFIERS, VERL_TOOL, VERL_AGENT_LOOP, TEXTARENA, SKYRL_GYM, TRL, GYMNASIUM)
"""TextArena has methods of Gymnasium's names, and comes before it."""


OWN_SETTINGS = frozenset(name for adapter in ADAPTERS for name in adapter.own_settings)
"""Settings that adapters read themselves; a function that returns an environment need not accept them."""


def adapter_of(kind: type) -> Adapter | None:
    """The adapter that recognizes a class; None for hybridflow's own interface, and for anything else."""
    methods = methods_of(kind)
    return next((adapter for adapter in ADAPTERS if adapter.recognizes(methods)), None)
