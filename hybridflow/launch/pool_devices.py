"""The devices of pools that differ from those of the run, for the planner."""

from collections.abc import Mapping
from dataclasses import replace

from hybridflow.config.derived import is_of_cpus
from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.mapping.device_files import find_device
from hybridflow.mapping.devices import Cluster

_KIND_OF_GPU = "accelerator_type:"


def divided(plan: RunPlan, cluster: Cluster, named: Mapping[str, Cluster]) -> tuple[Cluster, dict[str, Cluster]]:
    """The run's devices without those of pools that differ, and the devices of each such pool.

    Pools differ if `named` has their devices, if they have CPUs, or a kind of GPU as their resource. `cluster` has the
    devices of all pools, except named ones and those of CPUs.
    """
    pools, found = plan.config.placement.pools, dict[str, Cluster]()
    if unknown := sorted(named.keys() - pools.keys()):
        raise ConfigError(
            f"--on names the pool '{unknown[0]}', which the run does not have.",
            remedy=f"{did_you_mean(unknown[0], pools)}Its pools: {', '.join(pools) or 'none (see placement.pools)'}.",
        )
    for name, pool in pools.items():
        if name in named:
            found[name] = named[name]
            if found[name].num_devices != pool.devices:
                raise ConfigError(
                    f"--on gives pool '{name}' {found[name].num_devices} devices, but placement.pools.{name}.devices="
                    f"{pool.devices}.",
                    remedy="Give the same number in both.",
                )
        elif is_of_cpus(plan.config, name):
            found[name] = _some(find_device("cpu"), pool.devices)
        elif pool.resource is not None and pool.resource.startswith(_KIND_OF_GPU):
            kind = _kind(name, pool.resource, cluster)
            if kind.device.name != cluster.device.name:
                found[name] = _some(kind, pool.devices)
                cluster = replace(cluster, num_devices=cluster.num_devices - pool.devices)
    if found and cluster.num_devices < cluster.devices_per_node:
        cluster = replace(cluster, devices_per_node=max(1, cluster.num_devices))
    return cluster, found


def _kind(pool: str, resource: str, cluster: Cluster) -> Cluster:
    """The device that Ray calls so."""
    name = resource.removeprefix(_KIND_OF_GPU)
    if cluster.device.name.partition("-")[0] == name:
        return cluster
    try:
        return find_device(name)
    except ConfigError as error:
        raise ConfigError(
            f"placement.pools.{pool}.resource={resource}: the planner does not know which device this is.",
            remedy=f"Name it: hybridflow plan --on DEVICES,{pool}=COUNTxDEVICE. Known devices are those of --on.",
        ) from error


def _some(kind: Cluster, devices: int) -> Cluster:
    """A number of devices of a kind, on as few nodes as possible."""
    return replace(kind, num_devices=devices, devices_per_node=min(devices, kind.devices_per_node))
