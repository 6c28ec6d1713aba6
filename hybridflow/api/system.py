"""A run whose steps are taken by the caller: its roles, its data, and what the training loop otherwise does."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from hybridflow.api.inputs import Inputs, removed_if_refused
from hybridflow.api.running import interrupt, opened
from hybridflow.api.table import Row
from hybridflow.batch import Batch
from hybridflow.dataflows.interface import Dataflow, role_needs
from hybridflow.dataflows.loop import Loop
from hybridflow.dataflows.run import AfterStep, Run
from hybridflow.elastic.stopping import Stop
from hybridflow.errors import STRICT, Advice, ConfigError
from hybridflow.launch.compose.compose import Composed
from hybridflow.observability.metrics import Metrics, measured


class System:
    """A run that has started, for a training loop of your own; `hybridflow.assemble` makes it.

        with hybridflow.assemble("grpo", {"trainer.total_steps": 100}, data=rows, reward=reward) as system:
            for batch in system.prompts:
                system.log(system.dataflow.step(batch))
                if system.step % 10 == 0:
                    system.evaluate()
                    system.save()

    A step begins when `prompts` yields its batch, and ends with the next call of `log`, `evaluate`, `save` or
    `prompts`. Its row is logged when the next step begins, so that it holds the metrics of `log` and `evaluate`.
    Between steps, nothing is evaluated or saved automatically. Callbacks are called when the row of a step is complete;
    if one returns `STOP`, `prompts` ends.
    """

    def __init__(self, run: Run, loop: Loop, stop: Stop) -> None:
        self._run = run
        self._loop = loop
        self._stop = stop
        self._completed_step = loop.step
        self._is_ended = False
        self._stepping: ExitStack | None = None

    @property
    def dataflow(self) -> Dataflow:
        """The algorithm; `step(batch)` trains on one batch."""
        return self._run.dataflow

    @property
    def roles(self) -> Mapping[str, object]:
        """The roles by name (`actor`, `rollout`, ...); `hybridflow.dataflows.roles` documents their methods."""
        held = vars(self.dataflow)
        return {name: held[name] for name in role_needs(type(self.dataflow)) if held[name] is not None}

    @property
    def run_dir(self) -> Path:
        """The directory of the run; `hybridflow.Result` reads it."""
        return self._run.checkpoints.run_dir

    @property
    def step(self) -> int:
        """The number of the current step, from 1; before the first, the number of steps that are done."""
        return self._loop.step + (self._stepping is not None)

    @property
    def prompts(self) -> Iterator[Batch]:
        """The batches of the remaining steps, up to `trainer.total_steps`, in the same order as in `run`.

        After Ctrl-C there are no more: the last step is saved, and leaving the `with` block raises
        `KeyboardInterrupt`.
        """
        while True:
            self._complete_row()
            if self._loop.is_over or self._is_ended:
                break
            self._loop.log_step()
            self._run.report()
            self._stepping = ExitStack()
            yield self._stepping.enter_context(self._loop.stepping())
        if self._stop.signal is not None:
            self.save()

    def log(self, metrics: Mapping[str, float] | Metrics) -> dict[str, float]:
        """Adds metrics to the row of the step, and returns the row."""
        self._end_step()
        self._loop.record(measured(metrics, owner="system.log"))
        return Row(self._loop.row or {})

    def evaluate(self) -> dict[str, float]:
        """Evaluates the model on the held-out data, adds the metrics to the row of the step, and returns them."""
        if not self._run.evaluations:
            is_off = self._run.trainer.eval_every == 0
            raise ConfigError(
                f"system.evaluate() needs held-out data, but {'trainer.eval_every=0' if is_off else 'there is none'}.",
                remedy="Set trainer.eval_every to 1 or more; in your own loop, it only enables evaluation."
                if is_off
                else "Give eval_data=..., or set data.eval_files.",
            )
        self._end_step()
        return Row(self._loop.evaluate())

    def save(self) -> Path | None:
        """Saves a checkpoint of the roles, the position in the data and the dataflow, from which `run` and `assemble`
        resume; returns its path, or None before the first step."""
        self._complete_row()
        self._loop.log_step()
        self._loop.save()
        self._loop.saved.finish()
        return self._loop.outcome.checkpoint

    def close(self) -> None:
        """Ends the current step and logs its row."""
        self._complete_row()
        self._loop.log_step()

    def __repr__(self) -> str:
        return f"System(run_dir={str(self.run_dir)!r}, step={self.step}, roles={list(self.roles)})"

    def _complete_row(self) -> None:
        """Ends the current step, and calls the callbacks with its row, once."""
        self._end_step()
        row = self._loop.row
        if row is not None and self._completed_step < self._loop.step:
            self._completed_step = self._loop.step
            self._is_ended |= self._run.after_step(self._loop.step, dict(row))

    def _end_step(self) -> None:
        if self._stepping is not None:
            stepping, self._stepping = self._stepping, None
            stepping.close()


class SystemContext(AbstractContextManager[System]):
    """Checks and starts a run for a loop when its `with` block is entered, and ends it with the block.

    Used without `with`, as if it were the system, it raises `ConfigError`.
    """

    def __init__(self, compose: Callable[[Inputs], tuple[Composed, AfterStep]]) -> None:
        self._opened = _opened_system(compose)

    def __enter__(self) -> System:
        return self._opened.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._opened.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or name not in vars(System):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        raise ConfigError(
            f"assemble(...).{name}: the run has not been started, because assemble returns a context manager.",
            remedy=f"Write: with hybridflow.assemble(...) as system: system.{name} ...",
        )


@contextmanager
def _opened_system(compose: Callable[[Inputs], tuple[Composed, AfterStep]]) -> Iterator[System]:
    """Composes and starts a run; closing it stops all processes and writes the report."""
    with removed_if_refused() as inputs:
        composed, after_step = compose(inputs)
        if staleness := composed.config.asynchrony.max_staleness:
            raise ConfigError(
                f"asynchrony.max_staleness={staleness} is for the training loop of hybridflow; in a loop of your own,"
                " you decide when roles are called.",
                remedy="Leave it out, or use hybridflow.run.",
            )
        with opened(composed, after_step) as (run, stop), run.loop.may_be_abandoned():
            system = System(run.run, run.loop, stop)
            run.loop.begin()
            yield system
            system.close()
            unsaved = run.loop.step - run.loop.saved.step
            if unsaved and run.run.trainer.save_every:
                STRICT.add(_not_saved(unsaved, run.loop.step))
        interrupt(stop)


def _not_saved(unsaved: int, step: int) -> Advice:
    saved = step - unsaved
    what = (
        f"The steps after the checkpoint of step {saved}" if saved else "No checkpoint was saved: the trained weights"
    )
    return Advice(f"{what} are not kept.", remedy="Call system.save() in the loop to keep them.")
