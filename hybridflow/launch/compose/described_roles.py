"""The roles that the class of a user's dataflow describes itself."""

from collections.abc import Mapping
from dataclasses import fields as fields_of

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridflow.config import fields
from hybridflow.config.choices import is_own
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.roles import DescribesRoles, Role
from hybridflow.config.user_code import load_member
from hybridflow.errors import ConfigError


def described_roles(dataflow: str) -> dict[str, Role]:
    """What the class behind `dataflow=<file.py>:<Class>` or a dotted path says of its roles; none for those of ours.

    Raises `ConfigError` that names the class for what is no description.
    """
    if not is_own(dataflow):
        return {}
    found = load_member(dataflow, key="dataflow")
    if not (isinstance(found, type) and issubclass(found, DescribesRoles)):
        return {}
    owner = f"dataflow={dataflow}: {found.__name__}.roles"
    if not isinstance(found.roles, Mapping):
        raise ConfigError(f"{owner} is no table.", remedy='Write roles = {"name": {"kind": "reward_function", ...}}.')
    return {name: _role(name, said, owner) for name, said in found.roles.items()}


def _role(name: str, said: object, owner: str) -> Role:
    names = ", ".join(field.name for field in fields_of(Role))
    if not isinstance(said, Mapping):
        raise ConfigError(f"{owner}['{name}'] is no table.", remedy=f"Give it some of: {names}.")
    try:
        role = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Role), dict(said)))
    except OmegaConfBaseException as error:
        key = str(error.full_key or "").partition("[")[0]
        hint = fields.find(key, Role)
        if hint is not None:
            problem = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"{owner}['{name}'], {key}: {problem}.", remedy=f"It takes {fields.type_name(hint)}."
            ) from error
        known = [found.path for found in fields.keys(Role)]
        raise ConfigError(
            f"{owner}['{name}'] has no setting '{key}'.", remedy=f"{did_you_mean(key, known)}It may have: {names}."
        ) from error
    assert isinstance(role, Role), f"made a {type(role)}"
    return role
