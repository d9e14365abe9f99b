"""Where the time of a step goes: the parts that telemetry keeps, and how they are measured.

    Engine.step    plan | apply | execute                                   | resume | account
    Backend                       layout | the model's parts, or | sampling
                                           one `device_s`

Each part is the time between two readings of a clock, so the parts of a step add up to it: nothing
is estimated, and nothing waits in order to be measured. Names are the columns of the telemetry
table `steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class ModelTimes(NamedTuple):
    """Seconds of a model by kind of work.

    Attributes:
        products_s: projections of the layers.
        attention_s: scores and sums over the history.
        rows_s: what is done row by row: embedding, norms, rotation, activations, writing keys and
            values.
        head_s: norm and projection to the vocabulary.
    """

    products_s: float = 0.0
    attention_s: float = 0.0
    rows_s: float = 0.0
    head_s: float = 0.0

    def since(self, earlier: ModelTimes) -> ModelTimes:
        """What has come on top."""
        return ModelTimes(*(now - then for now, then in zip(self, earlier, strict=True)))


class ExecuteTimes(NamedTuple):
    """Seconds of one `Backend.execute` by kind of work.

    Attributes:
        layout_s: the batch as integers and tensors, and the calls into the model.
        products_s: see `ModelTimes`; so are the next three.
        sampling_s: drawing tokens from the logits.
        device_s: all of the model and the draw where the device works by itself, and when one ends
            and the next begins could only be learnt by waiting.
    """

    layout_s: float = 0.0
    products_s: float = 0.0
    attention_s: float = 0.0
    rows_s: float = 0.0
    head_s: float = 0.0
    sampling_s: float = 0.0
    device_s: float = 0.0

    def plus(self, other: ExecuteTimes) -> ExecuteTimes:
        """Of two calls together."""
        return ExecuteTimes(*(one + two for one, two in zip(self, other, strict=True)))


class EngineTimes(NamedTuple):
    """Seconds of one step of the engine outside of the backend.

    Attributes:
        intake_s: taking requests in before the step, waiting for them included.
        plan_s: the policy's plan.
        apply_s: block tables and states.
        resume_s: coroutines, and rows that ended.
        account_s: telling the policy and those who listen to its decisions.
    """

    intake_s: float = 0.0
    plan_s: float = 0.0
    apply_s: float = 0.0
    resume_s: float = 0.0
    account_s: float = 0.0


class Stopwatch:
    """Reads a clock again and again.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last_s = clock()

    def lap(self) -> float:
        """Seconds since the last reading, which this one replaces."""
        before_s, self.last_s = self.last_s, self._clock()
        return self.last_s - before_s
