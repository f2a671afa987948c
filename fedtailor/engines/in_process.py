"""The engine that does all work in this process, one client after the other: the reference for all others."""

from collections.abc import Iterator, Sequence

from fedtailor.engines.work import Bench, Result, Task, copied


class InProcess:
    """Clients run here. They get copies and hand out copies, as if they were elsewhere."""

    workers = 1

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def run(self, tasks: Sequence[Task]) -> Iterator[Result]:
        """The results of the tasks, as they come."""
        for task in tasks:
            task.message, task.state = copied(task.message), copied(task.state)
            result = self.bench.do(task)
            result.reply, result.state = copied(result.reply), copied(result.state)
            yield result

    def close(self) -> None:
        """Nothing to end."""
