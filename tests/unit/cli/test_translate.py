"""`hybridflow translate`: commands of verl, TRL and OpenRLHF as commands of hybridflow."""

import io
import re
import shlex
import sys

import pytest
import yaml

from hybridflow.cli.main import main
from tests.architecture.source import ROOT

VERL = r"""# a comment
train="['a.parquet', 'b.parquet']"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$train" \
    data.train_batch_size=64 \
    data.max_prompt_length=128 data.max_response_length=256 \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.rollout.n=4 \
    trainer.n_gpus_per_node=8 trainer.logger=['console','wandb'] trainer.total_epochs=2 $@ 2>&1 | tee log
"""


def printed(words: list[str], capsys, status: int = 0) -> tuple[list[str], str]:
    """The words of the printed command, and what follows it."""
    assert main(["translate", *words]) == status
    command, _, rest = capsys.readouterr().out.partition("\n\n")
    return shlex.split(command.replace("\\\n", " ")), rest


def test_a_script_of_verl_becomes_a_command(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(VERL)
    words, rest = printed([str(tmp_path / "run.sh")], capsys)
    assert words[:3] == ["hybridflow", "grpo", "model.path=Qwen/Qwen3-8B"]
    expected = {"data.train_files=[a.parquet,b.parquet]", "data.batch_size=64", "actor.minibatch_size=32"}
    expected |= {"actor.microbatch_tokens=768", "rollout.samples_per_prompt=4", "trainer.epochs=2"}
    assert expected | {"trainer.trackers=[console,wandb,jsonl]"} <= set(words)
    assert "algorithm.dual_clip=3.0: default actor_rollout_ref.actor.clip_ratio_c=3.0" in rest


def test_standard_input_words_and_a_quoted_command_give_the_same(tmp_path, capsys, monkeypatch):
    command = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=a data.train_files=b.jsonl"
    monkeypatch.setattr(sys, "stdin", io.StringIO(command + " \\\n  trainer.nnodes=1"))
    typed = [["-"], [command + " trainer.nnodes=1"], [*shlex.split(command), "trainer.nnodes=1"]]
    first, second, third = [printed(words, capsys) for words in typed]
    assert first == second == third


def test_a_run_file_is_saved_and_composes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(VERL.replace("'console','wandb'", "console"))
    assert main(["translate", "--save", "run.yaml", "run.sh"]) == 0
    saved = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert saved["command"] == "grpo" and saved["data.train_files"] == ["a.parquet", "b.parquet"]
    assert "hybridflow run run.yaml" in capsys.readouterr().out
    assert main(["run", "run.yaml", "--cfg", "job"]) == 0


def test_no_file_is_overwritten_and_no_part_of_a_command_is_saved(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = VERL.replace("'console','wandb'", "console")
    (tmp_path / "run.sh").write_text(script)
    (tmp_path / "run.yaml").write_text(script)
    for name, said in (("run.sh", "does not end with .yaml or .yml"), ("run.yaml", "exists already")):
        assert main(["translate", "--save", name, name]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
        assert (tmp_path / name).read_text() == script
    (tmp_path / "part.sh").write_text(script.replace("$@", "trainer.critic_warmup=20"))
    assert main(["translate", "--save", "part.yaml", "part.sh"]) == 2
    shown = capsys.readouterr().out
    assert shown.startswith("hybridflow grpo") and "part.yaml is not written" in shown
    assert not (tmp_path / "part.yaml").exists()


def test_settings_that_change_the_results_are_named_and_the_status_is_2(capsys):
    words = ["verl.trainer.main_ppo", "actor_rollout_ref.model.path=a", "data.train_files=b.jsonl"]
    more = ["trainer.critic_warmup=20", "actor_rollout_ref.actor.nonsense=1", "trainer.experiment_name=$(date)"]
    _, rest = printed([*words, *more, "trainer.balance_batch=True"], capsys, status=2)
    missing, _, others = rest.partition("no counterpart")
    assert "trainer.critic_warmup=20: the actor learns from the first step" in missing
    assert "actor_rollout_ref.actor.nonsense=1: hybridflow does not know this setting of verl." in missing
    assert "trainer.experiment_name: its value $(date) is not known" in missing
    assert "trainer.balance_batch: microbatches are limited by tokens" in others


def test_a_long_value_is_not_printed_whole(capsys):
    words = ["verl.trainer.main_ppo", "actor_rollout_ref.model.path=a", "data.train_files=b.jsonl"]
    for value in ("$(date)" + 15_000 * "a", 15_000 * "a"):
        _, rest = printed([*words, f"trainer.experiment_name={value}", f"a.b={value}"], capsys, status=2)
        assert "aaa" in rest and 201 * "a" not in rest


def test_what_hybridflow_rejects_is_printed_and_the_status_is_2(capsys):
    words = ["verl.trainer.main_ppo", "actor_rollout_ref.model.path=a", "data.train_files=b.jsonl"]
    _, rest = printed([*words, "trainer.n_gpus_per_node=-2"], capsys, status=2)
    assert "trainer.devices=-2" in rest


def test_a_command_of_trl_counts_completions_on_all_devices(capsys):
    command = """accelerate launch --num_processes 4 examples/scripts/gspo.py --model_name_or_path Qwen/Qwen3-0.6B
        --dataset_name AI-MO/NuminaMath-TIR --reward_funcs accuracy_reward --learning_rate 1e-5 --dtype bfloat16
        --max_prompt_length 2048 --max_completion_length 1024 --use_peft --lora_target_modules "q_proj", "v_proj"
        --per_device_train_batch_size 8 --num_generations 8 --gradient_accumulation_steps 2 --steps_per_generation 8
        --max_steps 100 --epsilon 3e-4 --epsilon_high 4e-4 --beta 0.04 --no_remove_unused_columns"""
    words, _ = printed(shlex.split(command), capsys)
    assert words[:2] == ["hybridflow", "gspo"]
    expected = {"data.batch_size=32", "actor.minibatch_size=8", "trainer.total_steps=25", "trainer.devices=4"}
    expected |= {"algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.04", "algorithm.clip_high=4e-4"}
    expected |= {"actor.lora.targets=[q_proj,v_proj]", "reward.functions=[math]", "rollout.samples_per_prompt=8"}
    assert expected <= set(words)


def test_a_module_of_trl_is_its_command(capsys):
    command = "python -m trl.scripts.sft --model_name_or_path a --dataset_name b/c"
    words, _ = printed(shlex.split(command), capsys, status=2)
    assert words[:2] == ["hybridflow", "sft"]


def test_a_command_of_trl_without_its_devices_data_or_rewards_says_so(capsys):
    _, rest = printed(["python", "grpo_vlm.py", "--model_name_or_path", "a", "--beta", "0"], capsys, status=2)
    assert "num_processes: 1 device is assumed" in rest
    assert "dataset_name: the script reads its own data" in rest and "reward_funcs: the script has its own" in rest


def test_a_file_of_trl_gives_arguments(tmp_path, capsys):
    (tmp_path / "dpo.yaml").write_text(
        "model_name_or_path: a\ndataset_name: o/d\nbeta: 0.5\nper_device_train_batch_size: 2\n"
    )
    words, _ = printed(["trl", "dpo", "--config", f"{tmp_path}/dpo.yaml", "--num_processes", "2"], capsys)
    assert {"algorithm.preference.beta=0.5", "data.batch_size=4", "data.train_files=[o/d]"} <= set(words)


def test_a_command_of_openrlhf_places_its_roles(capsys):
    command = """ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/openrlhf"}'
        -- python3 -m openrlhf.cli.train_ppo_ray --ref_num_gpus_per_node 2 --critic_num_gpus_per_node 2
        --actor_num_gpus_per_node 2 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 --colocate_actor_ref
        --pretrain OpenRLHF/Llama-3-8b-sft-mixture --remote_rm_url http://localhost:5000/get_reward
        --prompt_data OpenRLHF/prompt-collection-v0.1 --input_key context_messages --rollout_batch_size 1024
        --train_batch_size 128 --n_samples_per_prompt 4 --lr_scheduler constant --lr_warmup_ratio 0"""
    words, _ = printed(shlex.split(command), capsys)
    assert words[:2] == ["hybridflow", "ppo"]
    expected = {"data.batch_size=1024", "actor.minibatch_size=32", "critic.minibatch_size=32", "trainer.devices=8"}
    expected |= {"placement.pools={actor: {devices: 2}, critic: {devices: 2}, rollout: {devices: 4}}"}
    expected |= {"reward.functions=[http://localhost:5000/get_reward]", "algorithm.kl.placement=reward"}
    assert expected <= set(words)


def test_defaults_that_differ_are_named(capsys):
    command = "deepspeed --module openrlhf.cli.train_ppo --pretrain a --prompt_data b --reward_pretrain c"
    words, rest = printed([command], capsys, status=2)
    assert {"actor.optimizer.beta2=0.95", "critic.optimizer.beta2=0.95"} <= set(words)
    assert "lr_scheduler=cosine_with_min_lr" in rest and "algorithm.value_clip=0.5: default value_clip=0.5" in rest


def test_the_page_shows_what_is_printed(capsys):
    page = (ROOT / "docs" / "how_to" / "translate.md").read_text()
    command = re.findall(r"```bash\nhybridflow (translate.*?)\nhybridflow", page, re.DOTALL)[0]
    shown = re.findall(r"```text\n(hybridflow .*?)  \.\.\.\n```", page, re.DOTALL)[0]
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    assert capsys.readouterr().out.startswith(shown)


PPO = "python3 -m openrlhf.cli.train_ppo_ray --pretrain a --prompt_data b --reward_pretrain c --lr_scheduler constant"


def test_the_critic_of_openrlhf_begins_as_the_reward_model_and_vllm_engines_are_those_of_vllm(capsys):
    options = [*shlex.split(PPO), "--lr_warmup_ratio", "0", "--vllm_num_engines", "2", "--colocate_all_models"]
    words, _ = printed(options, capsys)
    assert {"critic.model.path=c", "reward.model.path=c", "rollout.engine=vllm"} <= set(words)
    words, _ = printed([*options, "--critic_pretrain", "d"], capsys)
    assert "critic.model.path=d" in words and "critic.model.path=c" not in words
    words, _ = printed([*options, "--remote_rm_url", "http://x:1/y"], capsys)
    assert not [word for word in words if word.startswith("critic.model")]


def test_a_limit_of_prompt_and_response_together_is_named(capsys):
    sft = ["trl", "sft", "--model_name_or_path", "a", "--dataset_name", "b", "--num_processes", "1"]
    sft.append("--assistant_only_loss")
    words, rest = printed([*sft, "--max_length", "2048"], capsys, status=2)
    assert {"data.max_prompt_tokens=1024", "data.max_response_tokens=1024"} <= set(words)
    assert "max_length=2048: it limits prompt and response together" in rest
    _, rest = printed(sft, capsys)
    assert "default max_length=1024" in rest.partition("implied")[2]
    command = "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --pretrain a --dataset b --max_len 4096"
    words, rest = printed([*shlex.split(command), "--output_key", "reply"], capsys, status=2)
    assert "max_len=4096: it limits prompt and response together" in rest.partition("implied")[0]
    assert {"trainer.devices=4", "data.answer_key=reply"} <= set(words)


def test_the_messages_from_which_trl_learns_are_named(capsys):
    sft = ["trl", "sft", "--model_name_or_path", "a", "--dataset_name", "b", "--num_processes", "1"]
    _, rest = printed(sft, capsys, status=2)
    assert (
        "default assistant_only_loss=False: of a conversation, TRL learns all messages; here, only the replies" in rest
    )
    _, rest = printed([*sft, "--assistant_only_loss", "true"], capsys)
    assert "assistant_only_loss: of a conversation, only the replies are learned" in rest


def test_deepspeed_takes_all_gpus(capsys):
    command = "deepspeed --module openrlhf.cli.train_rm --pretrain a --dataset b --lr_scheduler constant"
    words, rest = printed([*shlex.split(command), "--lr_warmup_ratio", "0"], capsys)
    assert "trainer.devices=auto" in words and "trainer.devices=auto: deepspeed takes all GPUs" in rest


def test_the_batches_and_the_metric_of_filtered_groups_of_verl(capsys):
    dapo = """python3 -m recipe.dapo.main_dapo actor_rollout_ref.model.path=a data.train_files=b.parquet
        algorithm.adv_estimator=grpo data.train_batch_size=512 data.gen_batch_size=1536 actor_rollout_ref.rollout.n=2
        algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10
        algorithm.filter_groups.metric=acc reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True
        reward_model.overlong_buffer.len=64"""
    words, rest = printed(shlex.split(dapo), capsys)
    assert "dataflow_settings.max_refills=29" in words  # 10 batches of 1536 prompts are 30 of 512
    unneeded, _, implied = rest.partition("implied:")
    assert "algorithm.filter_groups.metric: groups are compared by their scores" in unneeded
    assert "gen_batch_size" not in unneeded and "reward.functions=[gsm8k]: no reward function" in implied
    _, rest = printed([*shlex.split(dapo), "algorithm.filter_groups.metric=seq_reward"], capsys, status=2)
    assert "algorithm.filter_groups.metric=seq_reward: groups are compared by their scores, without penalties" in rest
    plain = dapo.replace("filter_groups.enable=True", "filter_groups.enable=False")
    _, rest = printed(shlex.split(plain), capsys, status=2)
    assert "data.gen_batch_size=1536: without filter_groups, verl's batches have this size" in rest


@pytest.mark.parametrize(
    ("words", "message", "remedy"),
    [
        (["torchrun", "-m", "verl.trainer.fsdp_sft_trainer", "a=b"], "fsdp_sft_trainer is not supported", "main_ppo"),
        (["trl", "ppo", "--beta", "1"], "trl ppo is not supported.", "trl grpo, gspo, rloo, sft, dpo, kto, reward;"),
        (["deepspeed", "--module", "openrlhf.cli.train_kd"], "train_kd is not supported", "train_ppo, train_sft"),
        (["ls", "-l"], "'ls -l' has no command of verl", "Give a script, or a command of verl"),
        (["none.sh"], "'none.sh' cannot be read: No such file", "Give a script"),
        (["verl.trainer.main_ppo data.x='a"], "is not closed", "Give the whole command"),
        (["python -m verl.trainer.main_ppo a=1", "--save"], "has no command", "Give a script"),
        (["--save", "none/x.yaml", "verl.trainer.main_ppo actor_rollout_ref.model.path=a"], "could not be", "existing"),
        (["trl", "sft", "--config", "none.yaml"], "none.yaml cannot be read", "Give the path"),
        (["trl", "grpo", "--num_generations", "many"], "num_generations=many is not a number", "Write"),
        (["trl", "grpo", "--num_generations", "0"], "num_generations=0 is not above 0", "Write"),
        (
            ["main_ppo.py", "trainer.nnodes=inf", "actor_rollout_ref.actor.ppo_micro_batch_size=1"],
            "not a number",
            "Write",
        ),
    ],
)
def test_bad_input_is_a_sentence_with_a_remedy(words, message, remedy, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["translate", *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said and remedy in said


def test_a_script_without_a_command_or_with_several_to_save_is_rejected(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["translate"]) == 2
    assert "The input has no command" in capsys.readouterr().err
    (tmp_path / "two.sh").write_text(
        "trl kto --dataset_name a --num_processes 1\ntrl kto --dataset_name b --num_processes 1\n"
    )
    assert main(["translate", "--save", "x.yaml", f"{tmp_path}/two.sh"]) == 2
    assert "The script has 2 commands" in capsys.readouterr().err
    assert main(["translate", f"{tmp_path}/two.sh"]) == 0
    assert capsys.readouterr().out.count("hybridflow kto") == 2


def test_asynchronous_training_of_openrlhf_runs_a_batch_ahead(capsys):
    options = [*shlex.split(PPO), "--lr_warmup_ratio", "0", "--async_train"]
    words, _ = printed(options, capsys)
    assert "asynchrony.max_staleness=1" in words


def test_a_run_of_verl_that_only_evaluates_has_no_settings_of_training(capsys):
    command = "python3 -m verl.trainer.main_ppo +trainer.val_only=True actor_rollout_ref.model.path=x"
    given = ["data.train_files=a", "data.val_files=b", "trainer.total_epochs=3"]
    words, unused = printed([*shlex.split(command), *given], capsys)
    assert "trainer.total_steps=0" in words
    assert "trainer.total_epochs: trainer.val_only=True only evaluates" in unused
    assert not [word for word in words if word.startswith(("trainer.eval_every", "trainer.epochs"))]
