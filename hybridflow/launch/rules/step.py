"""Errors of a dataflow that a traced step reveals before the run starts."""

from collections.abc import Sequence

from hybridflow.config.algorithm import KLPlacement, OldLogprobs
from hybridflow.config.choices import is_own
from hybridflow.config.derived import optimizer_steps_per_step
from hybridflow.config.experiment import Experiment
from hybridflow.dataflows.interface import Dataflow
from hybridflow.errors import Advice, ConfigError, Problems
from hybridflow.graph.stand_in import PROMPTS
from hybridflow.graph.trace import Call
from hybridflow.launch.plan.defaults import kl_reads_rollout
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR, ROLLOUT
from hybridflow.workers.named_functions import ESTIMATOR_COLUMNS, PROVIDED_COLUMNS
from hybridflow.workers.policy_update import check_one_step, check_unlearned
from hybridflow.workers.rollout_correction import check_corrected

_LEARNS = ("update", "supervised_step", "preference_step")
_PUBLISH = "self.actor.publish_weights(version=self.iteration + 1)"


def check_followed(plan: RunPlan, program: Dataflow, calls: Sequence[Call], problems: Problems) -> None:
    """Raises `ConfigError` for a step that cannot work; adds a warning for one that reports nothing or omits a role.

    `program` has run its first step, which made `calls`.
    """
    config = plan.config
    name = f"dataflow={config.dataflow}"
    _check_published(name, program, calls)
    if is_own(config.dataflow):
        _check_estimator(plan, name, calls)
        _check_old_logprobs(config, program, calls)
        called = {call.role for call in calls} | ({ROLLOUT, "reward"} if plan.is_evaluated else set())
        for role in (role.name for role in plan.roles if role.name not in called):
            found = f"{name}: the first step does not call '{role}', although its workers start."
            problems.add(Advice(found, "Remove it from the class, unless a later step or another method calls it."))
    if program.data == "prompts" and program.last_batch is None:
        found = f"{name}: the step never calls self.observe(batch), which reports scores and lengths."
        problems.add(Advice(found, "End the step with: return metrics | self.observe(batch)."))


def _check_published(name: str, program: Dataflow, calls: Sequence[Call]) -> None:
    """A policy that generates must publish its weights after each update, under a new version."""
    own = [call for call in calls if call.role == ACTOR]
    learned = [index for index, call in enumerate(own) if call.method in _LEARNS]
    if not learned or not any(call.method == "generate" for call in calls):
        return
    published = _published(own[learned[-1] :])
    if not published:
        raise ConfigError(
            f"{name}: the step calls actor.{own[learned[-1]].method} but does not publish the new weights, so the next"
            " step would sample from the old ones.",
            remedy=f"End the step with {_PUBLISH}.",
        )
    _check_newer(name, program, published[-1], current=0)


def check_versions(config: Experiment, program: Dataflow, first: Sequence[Call], second: Sequence[Call]) -> None:
    """Raises `ConfigError` if the second step publishes weights under a version that the first step has used.

    A constant version does so: samples of older weights then look as if they came from the current ones.
    """
    before, after = _published(first), _published(second)
    if before and after:
        _check_newer(f"dataflow={config.dataflow}", program, after[-1], current=before[-1].plain[0])


def _check_newer(name: str, program: Dataflow, published: Call, *, current: object) -> None:
    (version,) = published.plain
    if not isinstance(version, int) or not isinstance(current, int) or version <= current:
        raise ConfigError(
            f"{name}: with self.iteration={program.iteration} the step publishes its new weights as version={version},"
            f" but the current version is already {current}.",
            remedy=f"Write {_PUBLISH}.",
        )


def _published(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.role == ACTOR and call.method == "publish_weights"]


def _check_old_logprobs(config: Experiment, program: Dataflow, calls: Sequence[Call]) -> None:
    """Every update must have the log-probabilities of the old policy, or not need them."""
    takes_rollouts = config.algorithm.old_logprobs is OldLogprobs.rollout
    needs_for_kl = config.algorithm.kl.placement is KLPlacement.reward and not kl_reads_rollout(config)
    has_learned = False
    for call in calls:
        if call.method == "advantages" and needs_for_kl and "old_logprobs" not in _taken(call):
            raise ConfigError(
                "algorithm.kl.placement=reward needs the column 'old_logprobs', but no call before"
                f" {call.role}.advantages adds it.",
                remedy="Add it in the dataflow's step: batch = batch.join(self.actor.logprobs(batch)).",
            )
        if call.role != ACTOR:
            continue
        if call.method == "update" and "old_logprobs" not in _taken(call):
            check_corrected(config.algorithm.correction.is_active)
            if not takes_rollouts:
                check_unlearned(has_learned)
                check_one_step(_optimizer_steps(config, program, call))
        has_learned = call.method in _LEARNS or (has_learned and call.method != "publish_weights")


def _optimizer_steps(config: Experiment, program: Dataflow, update: Call) -> int:
    """The fewest optimizer steps of the run's update; minibatches of a subset of the rows are known only in the run."""
    all_rows = PROMPTS * (program.rows_per_prompt or program.samples_per_prompt)
    return optimizer_steps_per_step(config, config.actor) if update.rows >= all_rows else config.actor.epochs


def _taken(call: Call) -> set[str]:
    return {column for columns in call.takes.values() for column in columns}


def _check_estimator(plan: RunPlan, name: str, calls: Sequence[Call]) -> None:
    """The batch has the columns that the advantage estimator needs."""
    bound = plan.functions.estimator
    if bound is None:
        return
    needed = [column for column in ESTIMATOR_COLUMNS if column in bound.needs]
    if plan.dataflow.provides is not None and not is_own(bound.name):  # otherwise a rule on the class reports it
        needed = [column for column in needed if column in plan.dataflow.provides or column not in PROVIDED_COLUMNS]
    for call in calls:
        missing = [column for column in needed if column not in _taken(call)]
        if call.method == "advantages" and missing:
            raise ConfigError(
                f"{name}: algorithm.advantage={bound.name} needs the column '{missing[0]}', but no call before"
                f" {call.role}.advantages adds it.",
                remedy="Choose an estimator without a critic, such as algorithm.advantage=rloo, or join the call that"
                f" adds '{missing[0]}'.",
            )
