"""Numbers that follow from the configuration."""

from pathlib import Path

from hybridflow.config.data import Data
from hybridflow.config.derived import (
    max_sequence_tokens,
    minibatch_prompts,
    model_of,
    num_devices,
    optimizer_steps_per_step,
    run_dir,
    total_optimizer_steps,
)
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import Trainer
from hybridflow.config.model import Model
from hybridflow.config.training import Training


def test_optimizer_steps_count_minibatches_and_epochs():
    config = Experiment(data=Data(batch_size=64), trainer=Trainer(total_steps=10))
    training = Training(minibatch_size=16, epochs=3)
    assert optimizer_steps_per_step(config, training) == 12
    assert total_optimizer_steps(config, training) == 120


def test_without_a_minibatch_size_the_whole_batch_is_one_step():
    config = Experiment(data=Data(batch_size=64))
    assert minibatch_prompts(config, Training()) == 64
    assert optimizer_steps_per_step(config, Training()) == 1


def test_devices_are_those_of_all_nodes():
    assert num_devices(Experiment(trainer=Trainer(devices=4, nodes=3))) == 12


def test_the_run_directory_follows_from_the_experiment_unless_it_is_given():
    assert run_dir(Experiment(trainer=Trainer(experiment="sums"))) == Path("runs/sums").absolute()
    assert run_dir(Experiment(trainer=Trainer(run_dir="/elsewhere"))) == Path("/elsewhere")
    assert run_dir(Experiment(trainer=Trainer(run_dir="~/mine"))) == Path.home() / "mine"


def test_a_role_without_a_model_has_the_runs():
    config = Experiment(model=Model(path="run"))
    assert model_of(config, Model()).path == "run"
    assert model_of(config, Model(path="own")).path == "own"


def test_a_sequence_is_prompt_and_response():
    assert max_sequence_tokens(Experiment(data=Data(max_prompt_tokens=64, max_response_tokens=16))) == 80
