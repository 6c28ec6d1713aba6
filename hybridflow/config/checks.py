"""Rules across sections, checked before any process starts. Each yields the errors it finds, with their remedies."""

import math
import unicodedata
from collections.abc import Iterator
from dataclasses import replace

from hybridflow.config.algorithm import Correction, CorrectionLevel, KLPlacement, OldLogprobs
from hybridflow.config.asynchrony import asynchrony_errors
from hybridflow.config.choices import AGGREGATIONS, KL_ESTIMATORS, is_own
from hybridflow.config.derived import CPUS, MAIN, is_evaluated, is_of_cpus, num_devices, placed_roles, pooled_devices
from hybridflow.config.experiment import Experiment
from hybridflow.config.faults import KINDS
from hybridflow.config.guards import GuardAction
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.paths import is_storage_url
from hybridflow.config.ranges import check_ranges, reset
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.templates import template_parts
from hybridflow.errors import STRICT, ConfigError, Problems

_COST_OF_THE_TASK = "hybridflow.rewards.functions.far_off.far_off"
_KL, _CORRECTION = "algorithm.kl", "algorithm.correction"
_LONGEST_NAME = 100
_NOT_PRINTED = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories of control and format characters, surrogates and line separators."""


def check(config: Experiment, problems: Problems = STRICT) -> None:
    """Adds a `ConfigError` for each rule that the configuration breaks."""
    check_ranges(config, problems)
    for rule in (_data_errors, _input_errors):
        for error in rule(config):
            problems.add(error)
            reset(config, error.key)  # later stages assume that these are right
    costs, algorithms = (_cost_errors, _pretraining_errors), (_kl_errors, _correction_errors)
    across = (
        _guard_errors,
        _fault_errors,
        elastic_errors,
        *costs,
        _retention_errors,
        _url_errors,
        *algorithms,
        placement_errors,
    )
    for rule in (_row_errors, _sampling_errors, _name_errors, _choice_errors, *across):
        problems.add(*rule(config))
    problems.add(*asynchrony_errors(config.asynchrony))


def elastic_errors(config: Experiment) -> Iterator[ConfigError]:
    """The devices with which a run begins, if their number is set, must be within the bounds of `trainer.elastic`."""
    bounds, used = config.trainer.elastic, num_devices(config)
    least, most = bounds.min_devices, bounds.max_devices
    if least is None:
        return
    lower, upper = "trainer.elastic.min_devices", "trainer.elastic.max_devices"
    if most is not None and most < least:
        yield ConfigError(
            f"{upper}={most} is below {lower}={least}.",
            remedy=f"Raise {upper} to at least {least}.",
            among=[lower, upper],
        )
    elif used and most is not None and used > most:
        yield ConfigError(
            f"The run begins on {used} devices, more than {upper}={most}.",
            remedy=f"Set {upper} to at least {used}, or use fewer devices.",
            among=[lower, upper],
        )
    elif used and used < least:
        yield ConfigError(
            f"The run begins on {used} devices, fewer than {lower}={least}.",
            remedy=f"Set {lower} to at most {used}, or use more devices.",
            key=lower,
        )


def _choice_errors(config: Experiment) -> Iterator[ConfigError]:
    """Aggregations, KL estimators and rollout engines must be among those that exist."""
    algorithm, engine = config.algorithm, config.rollout.engine
    if engine is not None and engine not in (kinds := [*RolloutKind]) and not is_own(engine):
        yield ConfigError(
            f"rollout.engine={engine} is unknown.",
            remedy=f"{did_you_mean(engine, kinds)}Choose from: {', '.join(kinds)}; or name a class of your own:"
            " file.py:Engine or my_package.Engine.",
            key="rollout.engine",
        )
    for key, value, choices in (
        ("algorithm.aggregation", algorithm.aggregation, AGGREGATIONS),
        ("algorithm.kl.estimator", algorithm.kl.estimator, KL_ESTIMATORS),
    ):
        if value is not None and value not in choices:
            remedy = f"{did_you_mean(value, choices)}Choose from: {', '.join(choices)}."
            yield ConfigError(f"{key}={value} is unknown.", remedy=remedy, key=key)


def _input_errors(config: Experiment) -> Iterator[ConfigError]:
    """There must be a model, data, and one weight per reward function."""
    if not config.model.path:
        remedy = "Give a Hugging Face directory, or builtin:calculator."
        yield ConfigError("model.path is empty.", remedy=remedy, key="model.path")
    if not config.data.train_files and config.trainer.total_steps:
        remedy = "Give a file, or builtin:calculator/train."
        yield ConfigError("data.train_files is empty.", remedy=remedy, key="data.train_files")
    if not (config.trainer.total_steps or is_evaluated(config)):
        has_files = bool(config.data.eval_files)
        yield ConfigError(
            "trainer.total_steps=0 only evaluates the model, but trainer.eval_every=0."
            if has_files
            else "There are no rows to evaluate: data.eval_files is empty.",
            remedy="Leave trainer.eval_every out."
            if has_files
            else "Give files: data.eval_files=[FILE], or data=FILE of hybridflow evaluate.",
            among=["trainer.total_steps", "data.eval_files", "trainer.eval_every"],
        )
    for section, role in {"reward": config.reward, **{f"roles.{n}": r for n, r in config.roles.items()}}.items():
        if role.weights and len(role.weights) != len(role.functions):
            yield ConfigError(
                f"{section}.weights has {len(role.weights)} numbers for {len(role.functions)} {section}.functions.",
                remedy="Give one weight per function, or leave the weights out.",
                key=f"{section}.weights",
                among=[f"{section}.functions"],
            )


def _data_errors(config: Experiment) -> Iterator[ConfigError]:
    """The section `data`: a mixture needs one share per file, a curriculum a column to sort by."""
    data, mixture = config.data, config.data.mixture
    if mixture and len(mixture) != len(data.train_files):
        yield ConfigError(
            f"data.mixture has {len(mixture)} numbers for {len(data.train_files)} data.train_files.",
            remedy="Give one number per file, or leave it empty to concatenate the files.",
            key="data.mixture",
            among=["data.train_files"],
        )
    elif not all(math.isfinite(share) and share > 0 for share in mixture):
        yield ConfigError(
            f"data.mixture={mixture} contains a share that is not above 0.",
            remedy="Give shares such as [0.7,0.3], and leave out files that should not be sampled from.",
            key="data.mixture",
        )
    if data.curriculum_steps and data.difficulty_key is None:
        yield ConfigError(
            f"data.curriculum_steps={data.curriculum_steps} needs a column with the difficulty of each row.",
            remedy="Name a column of numbers: data.difficulty_key=...",
            among=["data.curriculum_steps", "data.difficulty_key"],
        )
    if data.curriculum_steps and mixture:
        yield ConfigError(
            "data.curriculum_steps and data.mixture both determine the order of the rows.",
            remedy="Leave one out: with data.difficulty_key alone, each file of a mixture goes from easy to hard.",
            among=["data.curriculum_steps", "data.mixture"],
        )


def _row_errors(config: Experiment) -> Iterator[ConfigError]:
    """Prompts come from one place."""
    data = config.data
    if data.prompt_template is not None:
        if data.prompt_key is not None:
            yield ConfigError(
                f"data.prompt_template and data.prompt_key={data.prompt_key} both say where prompts come from.",
                remedy="Leave one out.",
                among=["data.prompt_template", "data.prompt_key"],
            )
        try:
            template_parts(data.prompt_template)
        except ConfigError as error:
            error.key = "data.prompt_template"
            yield error


def _sampling_errors(config: Experiment) -> Iterator[ConfigError]:
    """A stop string must have characters, or every response would end at once."""
    for name in ("sampling", "eval_sampling"):
        if "" in vars(config.rollout)[name].stop:
            yield ConfigError(
                f"rollout.{name}.stop contains an empty string, which would end every response at once.",
                remedy='Give texts that end a response, such as ["</answer>"] or ["\\n\\n"], or leave the setting out.',
                key=f"rollout.{name}.stop",
            )


def _name_errors(config: Experiment) -> Iterator[ConfigError]:
    """The name of the run is that of its directory below `runs/`."""
    fault, name = None, config.trainer.experiment
    if not name.strip() or name in (".", ".."):
        fault = "is not a name"
    elif "/" in name or "\\" in name:
        fault = "is a path"
    elif any(unicodedata.category(character) in _NOT_PRINTED for character in name):
        fault = "has control characters"
    elif max(len(name), len(name.encode()) / 2) > _LONGEST_NAME:
        fault = f"has {len(name)} characters"
    if fault is not None:
        shown = ascii(name)[1:-1]
        yield ConfigError(
            f"trainer.experiment={shown[:_LONGEST_NAME]}{'...' * (len(shown) > _LONGEST_NAME)} {fault}.",
            remedy=f"Use a plain name of at most {_LONGEST_NAME} characters, such as gsm8k_ppo; to choose a directory,"
            " use trainer.run_dir.",
            key="trainer.experiment",
        )


def _guard_errors(config: Experiment) -> Iterator[ConfigError]:
    """A step with NaN cannot be taken, and replicas that differ are found after the step."""
    for role, guards in (("actor", config.actor.guards), ("critic", config.critic.guards)):
        for name, refused, left in (
            ("non_finite", GuardAction.warn, "skip or fault"),
            ("replicas", GuardAction.skip, "warn or fault"),
        ):
            if getattr(guards, name) is refused:
                key = f"{role}.guards.{name}"
                yield ConfigError(f"{key}={refused.name} is not possible.", remedy=f"Use {left}.", key=key)


def _fault_errors(config: Experiment) -> Iterator[ConfigError]:
    """A policy must be able to handle its kind of fault."""
    for kind in KINDS:
        policy = getattr(config.trainer.faults, kind.name)
        if policy not in kind.policies:
            key, names = f"trainer.faults.{kind.name}", [each.name for each in kind.policies]
            yield ConfigError(f"{key}={policy.name} is not possible.", remedy=f"Use {' or '.join(names)}.", key=key)
    restarts, resume = config.trainer.restarts, config.trainer.resume
    if restarts and resume != "auto":
        yield ConfigError(
            f"trainer.restarts={restarts} with trainer.resume={resume}: a run that is started again would not continue"
            " from its own checkpoint.",
            remedy="Use trainer.resume=auto, with a new trainer.experiment to start from the beginning.",
            among=["trainer.restarts", "trainer.resume"],
        )


def _cost_errors(config: Experiment) -> Iterator[ConfigError]:
    """The cost function of the built-in task only fits the built-in model."""
    cost = config.roles.get("cost")
    is_example = cost is not None and cost.functions == [_COST_OF_THE_TASK]
    if is_example and config.model.path is not None and not config.model.path.startswith("builtin:"):
        yield ConfigError(
            f"roles.cost.functions=[{_COST_OF_THE_TASK}] scores the sums of the built-in task, but"
            f" model.path={config.model.path} is another model.",
            remedy="Choose a cost: 'roles.cost={kind: reward_model, model: {path: my/cost_model}}', or"
            " 'roles.cost={kind: reward_function, functions: [my_costs.py:f]}'.",
            among=["roles.cost.functions", "model.path"],
        )


def _pretraining_errors(config: Experiment) -> Iterator[ConfigError]:
    """A pretraining loss needs texts, and the built-in texts only fit the built-in model."""
    weight, files = config.algorithm.pretraining_coefficient, config.data.pretraining_files
    if weight and not files:
        yield ConfigError(
            f"algorithm.pretraining_coefficient={weight:g}, but data.pretraining_files is empty.",
            remedy="Name texts or demonstrations: data.pretraining_files=[path,...], or use a coefficient of 0.",
            among=["algorithm.pretraining_coefficient", "data.pretraining_files"],
        )
    path = config.model.path or ""
    if files and all(file.startswith("builtin:") for file in files) and not path.startswith("builtin:"):
        yield ConfigError(
            f"data.pretraining_files=[{','.join(files)}] are texts for the built-in model, but model.path={path}.",
            remedy="Name texts for your model: data.pretraining_files=[path,...].",
            among=["data.pretraining_files", "model.path"],
        )


def _url_errors(config: Experiment) -> Iterator[ConfigError]:
    """A URL has a protocol and a path, and what is written there remains."""
    url = config.trainer.checkpoint_url
    is_in_memory = url is not None and url.startswith("memory:")
    if url is not None and (is_in_memory or not is_storage_url(url)):
        what = "is the memory of this process, and lost with it" if is_in_memory else "is not a URL"
        yield ConfigError(
            f"trainer.checkpoint_url={url!r} {what}.",
            remedy="Give protocol://place, such as s3://bucket/runs/x or file:///mnt/backup/x.",
            key="trainer.checkpoint_url",
        )


def _retention_errors(config: Experiment) -> Iterator[ConfigError]:
    """The best checkpoints are chosen by the evaluations at their own steps."""
    trainer = config.trainer
    if trainer.keep_best and trainer.save_every and not is_evaluated(config):
        yield ConfigError(
            f"trainer.keep_best={trainer.keep_best} compares checkpoints by their evaluations, but this run evaluates"
            " nothing.",
            remedy="Set data.eval_files and trainer.eval_every, or leave trainer.keep_best out.",
            among=["trainer.keep_best", "trainer.eval_every", "data.eval_files"],
        )
    elif trainer.keep_best and trainer.save_every % trainer.eval_every:
        yield ConfigError(
            f"trainer.keep_best={trainer.keep_best} needs an evaluation of every checkpoint, but"
            f" trainer.save_every={trainer.save_every} is not a multiple of trainer.eval_every={trainer.eval_every}.",
            remedy=f"Use trainer.save_every={-(-trainer.save_every // trainer.eval_every) * trainer.eval_every}, or"
            f" trainer.eval_every={math.gcd(trainer.save_every, trainer.eval_every)}.",
            among=["trainer.keep_best", "trainer.save_every", "trainer.eval_every"],
        )


def _kl_errors(config: Experiment) -> Iterator[ConfigError]:
    """`algorithm.kl`: the loss needs a gradient toward the reference, an adaptive coefficient a long horizon."""
    kl = config.algorithm.kl
    if kl.placement is KLPlacement.loss and kl.estimator in ("k1", "kl") and not kl.allow_k1_loss:
        yield ConfigError(
            f"{_KL}.placement=loss with {_KL}.estimator={kl.estimator} does not keep the policy close to the reference:"
            " the gradient of k1 is that of the log-probability alone, whose expectation is 0 whatever the reference.",
            remedy=f"Leave {_KL}.estimator out (k3+), or use k2, k1+ or k3+, whose gradient is that of the divergence."
            f" {_KL}.allow_k1_loss=true permits k1 anyway.",
            among=[f"{_KL}.placement", f"{_KL}.estimator", f"{_KL}.allow_k1_loss"],
        )
    if kl.target is None:
        return
    if kl.placement is not KLPlacement.reward:
        yield ConfigError(
            f"{_KL}.target={kl.target:g} adapts the KL penalty in the reward, but {_KL}.placement={kl.placement.name}.",
            remedy=f"Use {_KL}.placement=reward, or leave the target out.",
            among=[f"{_KL}.target", f"{_KL}.placement"],
        )
    sequences = config.data.batch_size * config.rollout.samples_per_prompt
    if 0.2 * sequences >= kl.horizon:
        yield ConfigError(
            f"{_KL}.horizon={kl.horizon} is too short for {sequences} sequences per step:"
            " a single step could make the coefficient negative.",
            remedy=f"Use {10 * sequences} or more.",
            among=[f"{_KL}.horizon", "data.batch_size", "rollout.samples_per_prompt"],
        )


def _correction_errors(config: Experiment) -> Iterator[ConfigError]:
    """`algorithm.correction`: its bounds must be in order, and every setting must have an effect."""
    correction = config.algorithm.correction
    yield from _bound_errors(correction)
    weights = correction.weights
    if weights is CorrectionLevel.none:
        for name, is_set in (("lower", correction.lower is not None), ("normalize", correction.normalize)):
            if is_set:
                yield ConfigError(
                    f"{_CORRECTION}.{name} has no effect without weights.",
                    remedy=f"Set {_CORRECTION}.weights=token (or sequence).",
                    among=[f"{_CORRECTION}.{name}", f"{_CORRECTION}.weights"],
                )
    elif config.algorithm.old_logprobs is OldLogprobs.rollout:
        yield ConfigError(
            f"algorithm.old_logprobs=rollout with {_CORRECTION}.weights={weights.value}: the ratio in the loss is"
            " already that of the policy to the rollout, so the weights would count it twice.",
            remedy=f"Use {_CORRECTION}.weights=none, or algorithm.old_logprobs=auto. For a policy gradient with"
            " truncated weights: algorithm.old_logprobs=rollout with algorithm.policy_loss=cispo.",
            among=[f"{_CORRECTION}.weights", "algorithm.old_logprobs"],
        )


def _bound_errors(correction: Correction) -> Iterator[ConfigError]:
    """Lower bounds must be below upper ones."""
    if correction.reject is not CorrectionLevel.none:
        correction = replace(correction, reject_lower=correction.reject_lower or 1.0 / correction.reject_upper)
    for low, high in (("lower", "upper"), ("reject_lower", "reject_upper")):
        smallest, largest = vars(correction)[low], vars(correction)[high]
        if smallest is not None and smallest >= largest:
            yield ConfigError(
                f"{_CORRECTION}: nothing lies between {low}={smallest:g} and {high}={largest:g}.",
                remedy=f"Use {_CORRECTION}.{high} above 1 and {_CORRECTION}.{low} below 1: a ratio of 1 means that"
                " rollout and training agree.",
                among=[f"{_CORRECTION}.{low}", f"{_CORRECTION}.{high}"],
            )


def placement_errors(config: Experiment) -> Iterator[ConfigError]:
    """Roles must be in pools that exist, and the pools must use exactly the run's devices."""
    pools = config.placement.pools
    known = [*pools] or [MAIN, CPUS]
    for role, pool in placed_roles(config).items():
        if pool not in known:
            key = f"placement.roles.{role}" if role in config.placement.roles else f"roles.{role}.pool"
            yield ConfigError(
                f"{key}={pool}: there is no such pool.",
                remedy=f"Use {' or '.join(known)}, or add the pool with placement.pools.{pool}.devices=1"
                + ("." if pools else "; then define all pools of the run."),
                key=key,
            )
    total = pooled_devices(config)
    if pools and not config.trainer.devices:
        yield ConfigError(
            f"The pools use {total} devices, but trainer.devices=auto takes all available devices.",
            remedy=f"Set trainer.devices={total}, or leave out placement.pools and placement.roles.",
            among=["trainer.devices", *(f"placement.pools.{name}.devices" for name in pools)],
        )
    elif pools and total != num_devices(config):
        further = " (device: cpu is in addition to them)" if any(is_of_cpus(config, name) for name in pools) else ""
        yield ConfigError(
            f"The pools use {total} devices, but the run has {num_devices(config)}{further}.",
            remedy=f"Set trainer.devices={total}, or change placement.pools.*.devices."
            if total
            else "Leave out device=cpu for the pool of the run's devices; trainer.device=cpu is enough.",
            among=["trainer.devices", "trainer.nodes", *(f"placement.pools.{name}.devices" for name in pools)],
        )
