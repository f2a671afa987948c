"""The engine that does all work in this process, one client after the other: the reference for all others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from fedtailor.local.client import State
from fedtailor.site.work import Bench, Result, Task, copied


class InProcess:
    """Clients run here. They get copies and hand out copies, as if they were elsewhere."""

    workers = 1

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """The results of the tasks, as they come."""
        for task in tasks:
            state: Callable[[], State] = partial(dict, copied(task.state()))
            result = self.bench.do(replace(task, message=copied(task.message), state=state))
            result.reply, result.state = copied(result.reply), copied(result.state)
            yield result

    def close(self) -> None:
        """Nothing to end."""
