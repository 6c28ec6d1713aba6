"""The keys of the schema: documented, found by path, and the nearest to what was typed."""

import pytest

from hybridflow.config.fields import find, keys, nearest, type_name
from hybridflow.config.loop import BackendKind
from hybridflow.config.roles import Role


def test_every_setting_and_section_has_documentation():
    settings = [*keys(), *keys(Role, "roles.judge.")]
    assert [key.path for key in settings if not key.doc.strip()] == []
    assert all(find(path).__doc__ for path in {key.path.rpartition(".")[0] for key in keys()} - {""})


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("trainer.seed", int),
        ("trainer.backend", BackendKind),
        ("data.train_files", list[str]),
        ("algorithm.kl.target", float | None),
        ("roles.judge", Role),
        ("roles.judge.model.path", str | None),
        ("placement.roles.critic", str),
    ],
)
def test_a_key_is_found_by_its_path(path, kind):
    assert find(path) == kind


@pytest.mark.parametrize("path", ["", "sed", "trainer.sed", "trainer.seed.x", "roles.judge.kin", "data.train_files.0"])
def test_what_is_no_key_is_not_found(path):
    assert find(path) is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("trainer.sed", "trainer.seed"),
        ("trainr.seed", "trainer.seed"),
        ("trainr", "trainer"),
        ("actor.lr", "actor.optimizer.learning_rate"),
        ("critic.lr", "critic.optimizer.learning_rate"),
        ("lr", "actor.optimizer.learning_rate"),
        ("temperature", "rollout.sampling.temperature"),
        ("rollout.temperature", "rollout.sampling.temperature"),
        ("actor.grad_checkpointing", "actor.gradient_checkpointing"),
        ("roles.judge.model.pth", "roles.judge.model.path"),
        ("placement.pools.main.devcies", "placement.pools.main.devices"),
        ("critic.optimizer.learning_rat", "critic.optimizer.learning_rate"),
        ("actor.max_tokens_per_microbatch", "actor.microbatch_tokens"),
        ("algorithm.kl_coef", "algorithm.kl.coefficient"),
        ("reward.headers", "reward.settings"),
        ("trainer.output_dir", "trainer.run_dir"),
        ("algorithm.loss", "algorithm.policy_loss or algorithm.preference.loss"),
        ("rollout.mode", None),
        ("xyzzy", None),
    ],
)
def test_the_nearest_key_is_the_one_meant(typed, meant):
    assert nearest(typed) == meant


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("trainer.seed", "a whole number"),
        ("algorithm.kl.target", "a number or null"),
        ("data.shuffle", "true or false"),
        ("reward.functions", "a list, each text"),
        ("placement.pools.main", "settings of its own: devices, device, resource"),
        ("placement.roles", "a table"),
        ("dataflow_settings.anything", "any value"),
    ],
)
def test_types_are_put_in_words(path, words):
    assert type_name(find(path)) == words


def test_a_numbers_range_is_part_of_its_type_in_words():
    words = {key.path: key.type_words for key in [*keys(), *keys(Role, "roles.judge.")]}
    assert words["algorithm.gamma"] == "a number from 0 to 1"
    assert words["trainer.threads"] == "a whole number of 1 or more, or null"
    assert words["roles.judge.weights"].startswith("a list, each a number from -1e15 to")
    assert words["trainer.device"] == "one of: auto, cpu, cuda"
