"""`hybridflow export`: what is in OUT, and what is said where nothing can be."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.cli.main import main
from hybridflow.config.model import Dtype
from hybridflow.config.training import Lora, Optimizer
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.models.heads import load_value_model
from tests.toys import sequences, stepped
from tests.unit.elastic.victim import written_by
from tests.unit.engines.training.engines import language_engine, likelihood_loss, value_engine, weights

LARGE_STEPS = Optimizer(learning_rate=0.05)


@pytest.fixture
def run_of(tmp_path):
    """A function: engines by role and step -> a run's directory with their checkpoints."""

    def save(steps: dict[int, dict], **model: str):
        store = CheckpointStore(tmp_path / "run")
        for step, engines in steps.items():

            def write(directory, engines=engines):
                for role, engine in engines.items():
                    (directory / role).mkdir()
                    engine.save(directory / role)
                return written_by(directory, *engines)

            config = {"model": {"trust_remote_code": False, **model}}
            store.save(step, write, driver_state={"step": step, "config": config})
        return tmp_path / "run"

    return save


def trained(engine):
    stepped(engine, sequences(), likelihood_loss)
    return engine


def loaded(directory) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


def assert_equal(found, expected) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_the_actor_of_the_newest_checkpoint_is_a_hugging_face_directory(
    toy_dir, run_of, tmp_path, capsys, architecture
):
    engine = trained(language_engine(toy_dir(architecture)))
    run_dir = run_of({2: {"actor": language_engine(toy_dir(architecture))}, 4: {"actor": engine}})
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    assert_equal(loaded(tmp_path / "out"), weights(engine))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("1+2").input_ids
    assert f"actor of {run_dir}/checkpoints/step_4" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


@pytest.fixture
def two_steps(toy_dir, run_of):
    """A run with checkpoints of steps 2 and 4, and the weights of the first."""
    engine = language_engine(toy_dir())
    return run_of({2: {"actor": engine}, 4: {"actor": trained(language_engine(toy_dir()))}}), weights(engine)


def test_a_step_may_be_chosen_and_so_may_a_checkpoint_itself(two_steps, tmp_path):
    run_dir, before = two_steps
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--step", "2"]) == 0
    assert_equal(loaded(tmp_path / "out"), before)
    assert main(["export", str(run_dir / "checkpoints" / "step_2"), str(tmp_path / "other")]) == 0
    assert_equal(loaded(tmp_path / "other"), before)


def test_a_damaged_checkpoint_is_passed_over_unless_it_is_asked_for(two_steps, tmp_path, capsys):
    run_dir, before = two_steps
    (run_dir / "checkpoints" / "step_4" / "actor" / "huggingface" / "model.safetensors").write_bytes(b"torn")
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    assert_equal(loaded(tmp_path / "out"), before)
    assert "step_4 is skipped" in capsys.readouterr().err
    assert main(["export", str(run_dir), str(tmp_path / "other"), "--step", "4"]) == 2
    assert "is damaged" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "other").exists()


def test_a_critic_is_exported_with_its_head_in_float32(toy_dir, run_of, tmp_path):
    engine = value_engine(toy_dir())
    run_dir = run_of({1: {"critic": engine}})
    out = tmp_path / "out"
    assert main(["export", str(run_dir), str(out), "--role", "critic", "--dtype", "bfloat16"]) == 0
    saved = load_file(out / "model.safetensors")
    assert saved["score.weight"].dtype is torch.float32
    assert saved["model.norm.weight"].dtype is torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    model = load_value_model(out, dtype=torch.float32, device="cpu")
    assert torch.equal(model.score.weight, engine.model.score.weight)


def test_float32_of_a_bfloat16_run_is_what_the_optimizer_moves(toy_dir, run_of, tmp_path):
    engine = trained(language_engine(toy_dir(), dtype=Dtype.bfloat16, optimizer=LARGE_STEPS))
    run_dir = run_of({1: {"actor": engine}})
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    copies = {weight: copy for copy, weight in engine.optimizer.weight_of.items()}
    expected = {name: copies[parameter].detach() for name, parameter in engine.model.named_parameters()}
    assert_equal(loaded(tmp_path / "out"), expected)
    assert any(not torch.equal(copy, weight.float()) for weight, copy in copies.items())


@pytest.mark.parametrize("dtype", [None, Dtype.bfloat16])
def test_an_adapter_is_added_to_the_model_it_was_trained_on(toy_dir, run_of, tmp_path, dtype):
    engine = trained(language_engine(toy_dir(), lora=Lora(rank=4), optimizer=LARGE_STEPS))
    run_dir = run_of({1: {"actor": engine}})
    options = [] if dtype is None else ["--dtype", dtype.name]
    assert main(["export", str(run_dir), str(tmp_path / "out"), *options]) == 0
    found = loaded(tmp_path / "out")
    for shard in engine.weight_shards():
        expected = shard.tensor if dtype is None else shard.tensor.bfloat16()
        assert torch.equal(found[shard.name], expected), shard.name
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("1+2").input_ids
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/nowhere", "{tmp}/out"], "There is no directory '{tmp}/nowhere'"),
        (["{tmp}", "{tmp}/out"], "Runs below it: {tmp}/run"),
        (
            ["{run}", "{tmp}/out", "--role", "critic"],
            "no model of the role 'critic'. What to do: Use --role with one of: ['actor']",
        ),
        (["{run}", "{tmp}/out", "--step", "3"], "no checkpoint of step 3. What to do: Use --step with one of: 1."),
        (["{run}", "{run}"], "exists and is not an empty directory. What to do: Use a new directory"),
        (["{run}", "{run}/checkpoints/step_1/driver.json/out"], "could not be written"),
    ],
)
def test_what_cannot_be_exported_is_said_with_what_to_do(toy_dir, run_of, tmp_path, capsys, arguments, words):
    places = {"tmp": tmp_path, "run": run_of({1: {"actor": language_engine(toy_dir())}})}
    assert main(["export", *(argument.format(**places) for argument in arguments)]) == 2
    assert words.format(**places) in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_named_by_a_relative_path_is_found_from_anywhere(toy_dir, run_of, tmp_path, monkeypatch):
    engine = language_engine(toy_dir(), lora=Lora(rank=4))
    run_dir = run_of({1: {"actor": engine}}, tokenizer_path="its_tokenizer")
    (run_dir / "config.yaml").write_text(f"model:\n  tokenizer_path: {toy_dir()}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("1+2").input_ids


def test_a_base_model_that_has_gone_is_named_with_the_option_that_gives_it(toy_dir, run_of, tmp_path, capsys):
    engine = language_engine(toy_dir(), lora=Lora(rank=4))
    run_dir = run_of({1: {"actor": engine}})
    gone = str(tmp_path / "gone")
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--base-model", gone]) == 2
    assert f"--base-model={gone} does not exist" in " ".join(capsys.readouterr().err.split())


def test_help_tells_the_commands_and_their_options(capsys):
    for arguments, words in ([["--help"], "export"], [["export", "--help"], "--dtype"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert words in capsys.readouterr().out
