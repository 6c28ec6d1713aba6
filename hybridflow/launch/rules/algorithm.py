"""Rules on the algorithm's settings: the dataflow's class, named functions, batches and schedules fit them."""

import logging
from collections.abc import Iterator
from dataclasses import replace

from hybridflow.algorithms.catalogue import ADVANTAGES, PREFERENCE_LOSSES
from hybridflow.config.choices import chosen, is_own
from hybridflow.config.derived import optimizer_steps_per_step, total_optimizer_steps, training_of
from hybridflow.config.experiment import Experiment
from hybridflow.config.training import Optimizer, Schedule, Training
from hybridflow.dataflows.interface import Dataflow, learns_from_preferences, learns_from_samples, role_needs
from hybridflow.engines.training.optimizer import learning_rate
from hybridflow.errors import Advice, ConfigError, Problem, Problems
from hybridflow.launch.plan.data import RunData, pair_problems
from hybridflow.launch.plan.dataflow import DATAFLOWS, make_settings
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import CRITIC
from hybridflow.observability.formatting import counted
from hybridflow.workers.named_functions import PROVIDED_COLUMNS, provided_for

logger = logging.getLogger(__name__)


def algorithm_problems(config: Experiment, dataflow: type[Dataflow]) -> Iterator[ConfigError]:
    """Algorithm settings, other than the estimator, and data that the dataflow cannot use."""
    if learns_from_samples(dataflow):
        if config.rollout.sampling.temperature == 0:
            yield ConfigError(
                "rollout.sampling.temperature=0 always gives the same response, so there is nothing to learn from.",
                remedy="Use 1.0 for training; rollout.eval_sampling.temperature=0 is fine.",
            )
    yield from pair_problems(config, dataflow)
    if learns_from_preferences(dataflow) and dataflow.provides is not None:
        yield from _preference(config, dataflow)
    yield from _pretraining(config, dataflow)


def precomputing_problems(plan: RunPlan, data: RunData | None) -> Iterator[ConfigError]:
    """Columns that are computed for all rows before the first step, for rows that are read on demand."""
    stream = None if data is None else data.streams.get("prompts")
    is_asked = vars(plan.settings).get("precompute_reference")
    if is_asked and stream is not None and stream.table is None and "ref_sums" not in stream.columns:
        yield ConfigError(
            "dataflow_settings.precompute_reference=true keeps numbers for every row in memory, but data.streaming=true"
            " reads rows on demand.",
            remedy="Set data.streaming=false, or dataflow_settings.precompute_reference=false; or give the data the"
            " columns ref_chosen_logps and ref_rejected_logps.",
        )


def estimator_problems(config: Experiment, dataflow: type[Dataflow]) -> Iterator[ConfigError]:
    """Estimators whose columns the dataflow does not provide, or that need several samples per prompt."""
    if not learns_from_samples(dataflow):
        return
    name = chosen(config.algorithm.advantage, "algorithm.advantage", ADVANTAGES)
    if dataflow.provides is None or is_own(name):
        return
    provided, wanted = frozenset(dataflow.provides), provided_for(name)
    if unknown := sorted(provided - {*PROVIDED_COLUMNS}):
        yield ConfigError(
            f"{dataflow.__name__}.provides names '{unknown[0]}', which no estimator of the catalogue reads.",
            remedy=f"It may name: {', '.join(PROVIDED_COLUMNS)}.",
        )
        return
    if not _fits(provided, wanted):
        near = next(other for other in ("grpo", *ADVANTAGES) if _fits(provided, provided_for(other)))
        fitting = next(other for other, found in DATAFLOWS.items() if frozenset(found.provides or ()) == wanted)
        both = f"Set both with algorithm={fitting if wanted else name} (dataflow={fitting})"
        bases = [base for kind in dataflow.__mro__ for base, found in DATAFLOWS.items() if found is kind]
        if is_own(config.dataflow):
            both = f"Use algorithm={(*bases, near)[0]} dataflow={config.dataflow}"
        yield ConfigError(
            f"dataflow={config.dataflow} cannot use algorithm.advantage={config.algorithm.advantage}.",
            remedy=f"{both}, or use algorithm.advantage={near}.",
        )
        return
    compares = ADVANTAGES[name].compares_samples or dataflow.compares_samples
    if compares and config.rollout.samples_per_prompt == 1:
        yield ConfigError(
            f"dataflow={config.dataflow} with algorithm.advantage={config.algorithm.advantage} compares samples of one"
            f" prompt, but rollout.samples_per_prompt={config.rollout.samples_per_prompt} leaves nothing to compare.",
            remedy="Use rollout.samples_per_prompt=8.",
        )


def _fits(provided: frozenset[str], wanted: frozenset[str]) -> bool:
    """Whether the dataflow provides all columns that the estimator reads, and the estimator reads some if it can."""
    return wanted <= provided and bool(wanted) is bool(provided)


def _preference(config: Experiment, dataflow: type[Dataflow]) -> Iterator[ConfigError]:
    """Preference losses for other data, with all weights 0, or with a precomputed reference that they do not read."""
    preference = config.algorithm.preference
    loss = chosen(preference.loss, "algorithm.preference.loss", PREFERENCE_LOSSES)
    if is_own(loss):
        return
    is_alone = preference.reference_free or not PREFERENCE_LOSSES[loss].compares_with_reference
    settings = make_settings(dataflow, config.dataflow_settings, Problems(collects=True))
    if is_alone and vars(settings).get("precompute_reference"):
        why = "reference_free=true" if preference.reference_free else f"loss={loss}"
        yield ConfigError(
            "dataflow_settings.precompute_reference=true precomputes the reference's log-probabilities, but"
            f" algorithm.preference.{why} reads none.",
            remedy="Use dataflow_settings.precompute_reference=false.",
        )
    if loss == "kto" and not (preference.desirable_weight or preference.undesirable_weight):
        yield ConfigError(
            "algorithm.preference.desirable_weight=0 and undesirable_weight=0 leave nothing to learn from.",
            remedy="Set at least one of them to 1.",
        )
    if PREFERENCE_LOSSES[loss].data != dataflow.data and not [*pair_problems(config, dataflow)]:
        fitting = ", ".join(name for name, method in PREFERENCE_LOSSES.items() if method.data == dataflow.data)
        trainer, other = ("dpo", "kto") if dataflow.data == "preferences" else ("kto", "dpo")
        own = f" dataflow={config.dataflow}" if is_own(config.dataflow) else ""
        yield ConfigError(
            f"dataflow={config.dataflow} cannot use algorithm.preference.loss={loss}.",
            remedy=f"Use {fitting} (hybridflow {trainer}{own} does)"
            + ("." if own else f"; or hybridflow {other}, which can."),
        )


def _pretraining(config: Experiment, dataflow: type[Dataflow]) -> Iterator[ConfigError]:
    """Pretraining texts without a weight, or with a dataflow that does not read them."""
    weight, files = config.algorithm.pretraining_coefficient, config.data.pretraining_files
    if dataflow.provides is None:
        return
    if files and not weight:
        yield ConfigError(
            "data.pretraining_files are set, but algorithm.pretraining_coefficient=0 gives them no weight.",
            remedy="Use algorithm.pretraining_coefficient=0.1 with algorithm=ppo_ptx, or leave the files out.",
        )
    elif weight and not dataflow.reads_pretraining:
        yield ConfigError(
            f"algorithm.pretraining_coefficient={weight:g}, but dataflow={config.dataflow} does not read"
            " data.pretraining_files.",
            remedy="Use algorithm=ppo_ptx. If your own dataflow reads them, declare reads_pretraining = True.",
        )
    elif dataflow.reads_pretraining and not weight:
        yield ConfigError(
            f"dataflow={config.dataflow} needs algorithm.pretraining_coefficient above 0.",
            remedy="Set it, or use algorithm=ppo.",
        )


def gradient_problems(plan: RunPlan) -> Iterator[Problem]:
    """Several optimizer steps per batch with a loss that is correct only for the first, because it has no ratios."""
    loss, steps = plan.functions.policy_loss, optimizer_steps_per_step(plan.config, plan.config.actor)
    if loss is not None and steps > 1 and "old_logprobs" not in loss.parameters:
        yield Advice(
            f"algorithm.policy_loss={loss.name} ignores the policy that drew the samples, but a batch has {steps}"
            " optimizer steps: nothing bounds how far the later ones move the policy.",
            remedy="Use actor.minibatch_size=null and actor.epochs=1.",
        )


def reward_weight_problems(plan: RunPlan) -> Iterator[Problem]:
    """GDPO weights that do not match the rewards: one per function, then one for the reward model."""
    config, estimator = plan.config, plan.functions.estimator
    if estimator is None or estimator.name != "gdpo" or "reward" in config.roles:
        return
    weights = estimator.settings.get("weights")
    rewards = [*config.reward.functions, *([] if config.reward.model.path is None else ["the reward model"])]
    if config.reward.weights and not weights:
        yield Advice(
            f"reward.weights={config.reward.weights} has no effect on advantages: algorithm.advantage=gdpo weighs"
            " each reward by algorithm.advantage_settings.weights, by default 1.",
            remedy="Set algorithm.advantage_settings.weights.",
        )
    if isinstance(weights, list) and weights and len(weights) != len(rewards):
        yield ConfigError(
            f"algorithm.advantage_settings.weights={weights} has {counted(len(weights), 'number')}, but"
            f" there {'is 1 reward' if len(rewards) == 1 else f'are {len(rewards)} rewards'}: {', '.join(rewards)}.",
            remedy="Give one weight per reward, in this order, or none for 1 each.",
        )


def minibatch_advice(plan: RunPlan) -> Iterator[Advice]:
    """Minibatch sizes that were fitted to the user's batch size, which leaves learning rates unchanged."""
    flat = plan.composed.flat()
    for key, origin in plan.composed.origins.items():
        role = key.partition(".")[0]
        if origin == "data.batch_size" and (role != CRITIC or CRITIC in role_needs(plan.dataflow)):
            rate = f"{role}.optimizer.learning_rate"
            yield Advice(
                f"{key}={flat[key]} was set to fit data.batch_size={flat[origin]}; {rate}={flat[rate]} was chosen for"
                " larger minibatches, and may be too high.",
                remedy=f"Watch the first steps, or set {rate}.",
            )


def schedule_problems(plan: RunPlan) -> Iterator[ConfigError]:
    """Learning-rate schedules that end before the run. Logs the last rate of longer schedules.

    All trained roles except critics use the section `actor`.
    """
    config, total = plan.config, plan.config.trainer.total_steps
    for name in sorted({"critic" if role.endswith("critic") else "actor" for role in plan.trained}):
        training = training_of(config, name)
        optimizer, key = training.optimizer, f"{name}.optimizer.schedule_steps"
        horizon = optimizer.schedule_steps or total
        if optimizer.schedule is Schedule.constant or horizon == total:
            continue
        if horizon < total:
            other = replace(optimizer, schedule_steps=total)
            epochs = "" if config.trainer.epochs is None else f" (trainer.epochs={config.trainer.epochs:g})"
            yield ConfigError(
                f"trainer.total_steps={total}{epochs} goes beyond {key}={horizon}: with {name}.optimizer.schedule="
                f"{optimizer.schedule.name} the learning rate is 0 from step {horizon + 1}.",
                remedy=f"Set {key}={total}: the rate is then {_rate(config, training, other, horizon):.3g} at step"
                f" {horizon + 1} and falls to 0 after step {total}. Or set {name}.optimizer.schedule=constant:"
                f" {optimizer.learning_rate:.3g} throughout.",
            )
            continue
        logger.info(
            "%s=%d: the learning rate of the last step, %d, is %.3g; with %s=%d it would fall to 0 after that",
            key, horizon, total, _rate(config, training, optimizer, total - 1), key, total,
        )  # fmt: skip


def _rate(config: Experiment, training: Training, optimizer: Optimizer, step: int) -> float:
    """The learning rate of the first optimizer step after `step` training steps."""
    training = replace(training, optimizer=optimizer)
    return learning_rate(
        step * optimizer_steps_per_step(config, training),
        optimizer=optimizer,
        total_steps=total_optimizer_steps(config, training),
    )
