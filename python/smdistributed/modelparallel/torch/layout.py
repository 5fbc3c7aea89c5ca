"""From the tasks of a microbatch to stages: what one rank computes without waiting for another.

- LAY-1: a stage holds the tasks of one partition that have the same number of changes of the partition before them. So
  an edge leads to a later stage, and stages can be ordered.
- LAY-2: a stage that only one other stage of its rank takes values from becomes a part of that: it need not run earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smdistributed.modelparallel.torch.recording import Task, Value


class Stage:
    """Tasks by their numbers, values by theirs.

    Attributes:
        rank: The partition.
        tasks: In the order in which they were recorded.
        takes: Values of other stages, by the stage that makes them.
        gives: Values for other stages, by the stage that takes them.
        exports: Values that are needed after its forward: by other stages, by the caller, or to begin a backward.
        seeds: Those at which a backward begins.
        early: It runs while the step is still being recorded, since the body asks for numbers.
        trains: It has a part in the backward.
    """

    def __init__(self, rank: int, level: int) -> None:
        self.rank, self.level = rank, level
        self.tasks: list[int] = []
        self.takes: dict[int, list[int]] = {}
        self.gives: dict[int, list[int]] = {}
        self.exports: list[int] = []
        self.seeds: list[int] = []
        self.early = False
        self.trains = False


class Layout:
    """The stages of a microbatch, in a topological order.

    Attributes:
        stages: They.
        values: Every value by its number.
        returned: Values that the body returns, by their ranks.
    """

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self.values: list[Value] = []
        self.returned: list[int] = []
        self._stage_of_value: dict[int, int] = {}

    def extend(self, tasks: Sequence[Task], start: int, early: bool) -> range:
        """Adds the tasks from ``start`` on; returns the new stages."""
        found: dict[tuple[int, int], Stage] = {}
        home: dict[int, Stage] = {}
        for number in range(start, len(tasks)):
            task = tasks[number]
            stage = found.setdefault((task.level, task.rank), Stage(task.rank, task.level))
            stage.tasks.append(number)
            stage.early = early
            for value in task.outputs:
                home[value.index] = stage
                assert value.index == len(self.values), "values are made in order"
                self.values.append(value)
        order = [found[key] for key in sorted(found)]
        order = _merged(order, tasks, home)
        first = len(self.stages)
        numbers = {id(stage): first + place for place, stage in enumerate(order)}
        self.stages += order
        for stage in order:
            for number in stage.tasks:
                for value in tasks[number].outputs:
                    self._stage_of_value[value.index] = numbers[id(stage)]
        for stage in order:
            self._connect(stage, numbers[id(stage)], tasks)
        return range(first, len(self.stages))

    def adopt(self, task: int, outputs: Sequence[Value]) -> int:
        """The values of a task that was added before anybody knew them; returns its stage."""
        number = next(number for number, stage in enumerate(self.stages) if task in stage.tasks)
        for value in outputs:
            assert value.index == len(self.values), "values are made in order"
            self.values.append(value)
            self._stage_of_value[value.index] = number
        return number

    def stage_of(self, value: int) -> int:
        """The stage that makes a value."""
        return self._stage_of_value[value]

    def _connect(self, stage: Stage, number: int, tasks: Sequence[Task]) -> None:
        for value in _inputs(stage, tasks):
            maker = self._stage_of_value[value]
            if maker != number and value not in stage.takes.get(maker, ()):
                stage.takes.setdefault(maker, []).append(value)
        stage.takes = {maker: sorted(values) for maker, values in sorted(stage.takes.items())}
        for maker, values in stage.takes.items():
            self.stages[maker].gives[number] = values

    def finish(self, seeds: Iterable[int], returned: Iterable[int]) -> None:
        """Says what is needed after the forwards."""
        self.returned = sorted(set(returned))
        for value in seeds:
            self.stages[self._stage_of_value[value]].seeds.append(value)
        for stage in self.stages:
            exports = {value for values in stage.gives.values() for value in values} | set(stage.seeds)
            stage.exports = sorted(exports)
        for value in self.returned:
            stage = self.stages[self._stage_of_value[value]]
            if value not in stage.exports:
                stage.exports.append(value)
        for stage in reversed(self.stages):
            reached = any(
                self.stages[taker].trains and any(self.values[value].meta.requires_grad for value in values)
                for taker, values in stage.gives.items()
            )
            stage.trains = reached or bool(stage.seeds)

    def edges(self, stages: Iterable[int]) -> list[tuple[int, int]]:
        """Ranks between which the inputs of these stages go: the maker's and the taker's."""
        pairs = (
            (self.stages[maker].rank, self.stages[taker].rank) for taker in stages for maker in self.stages[taker].takes
        )
        return sorted(set(pairs))

    def gradients(self, maker: int, taker: int) -> list[int]:
        """Values of an edge whose gradients come back."""
        if not self.stages[taker].trains:
            return []
        return [value for value in self.stages[maker].gives[taker] if self.values[value].meta.requires_grad]

    def rows(self, tasks: Sequence[Task]) -> list[tuple]:
        """The stages as the core takes them."""
        rows = []
        backward: list[bool] = []
        for stage in self.stages:
            inputs = [
                (maker, sum(self.values[value].meta.bytes for value in values)) for maker, values in stage.takes.items()
            ]
            # To the core, a stage behind one with a backward has one as well; it may be empty.
            backward.append(stage.trains or any(backward[maker] for maker in stage.takes))
            cost = sum(1 if tasks[number].module is None else _MODULE for number in stage.tasks)
            kept = sum(self.values[value].meta.bytes for value in stage.exports) + sum(size for _, size in inputs)
            rows.append((stage.rank, (cost, cost, cost), kept, inputs, backward[-1]))
        return rows


#: The price of a module, where that of an operation outside of modules is 1: prices say what is worth waiting for.
_MODULE = 16


def _inputs(stage: Stage, tasks: Sequence[Task]) -> list[int]:
    return sorted({v.index for number in stage.tasks for v in tasks[number].inputs if v.parameter is None})


def _merged(order: list[Stage], tasks: Sequence[Task], home: dict[int, Stage]) -> list[Stage]:
    """LAY-2."""
    takers: dict[int, list[Stage]] = {id(stage): [] for stage in order}
    for stage in order:
        for value in _inputs(stage, tasks):
            maker = home.get(value)
            if maker is not None and maker is not stage and stage not in takers[id(maker)]:
                takers[id(maker)].append(stage)
    # From the last on, so that a whole chain becomes one. Takers that were merged away are where they went.
    into: dict[int, Stage] = {}

    def target(stage: Stage) -> Stage:
        while id(stage) in into:
            stage = into[id(stage)]
        return stage

    for stage in reversed(order):
        goals = {id(target(taker)): target(taker) for taker in takers[id(stage)]}
        if len(goals) == 1:
            (goal,) = goals.values()
            if goal.rank == stage.rank:
                into[id(stage)] = goal
                goal.tasks = sorted(goal.tasks + stage.tasks)
    return [stage for stage in order if id(stage) not in into]
