"""What a rank tells NCCL, in order, and what other ranks tell it.

Where all ranks of a job are traced, one after the other, each gets the integers and Python objects that the
others gave: they decide what is called next. Until these are known, a rank gets what it gives.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedOperatorException
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_fspo.lab.trace.match import match
from megatron_fspo.lab.trace.memory import Memory
from megatron_fspo.lab.trace.record import OBJECTS, Call, Event, Made, Request, Trace, Wait, here

_SUMS: Any = {("allreduce_", "SUM"): torch.add, ("allreduce_", "MAX"): torch.maximum}
_FLOAT = re.compile(r"\d*\.\d+(e[+-]?\d+)?|\bnan\b|\binf\b|\d+e-\d+")


@dataclass
class Job:
    """The ranks of a job that were traced."""

    events: dict[int, list[Event]] = field(default_factory=dict)
    gave: defaultdict[Any, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))
    """Group, way of a message, and number → what ranks of the group gave."""
    misled: dict[int, list[Callable[[], bool]]] = field(default_factory=dict)
    """Rank → whether it would get something else now."""


class Calls:
    """Sees the groups, collectives and messages of a rank, and answers them."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._jobs: dict[str, Job] = {}
        self.incoming: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}
        """Type and shape → what another rank sends of that kind, such as the shape of what it will send."""
        self.totals: dict[str, tuple[float, float]] = {}
        self.headers: Iterator[Any] = iter(())
        """The metrics that the last stage tells the others; what stages announce of their weights."""

    def begin(self, trace: Trace, asked: Request) -> None:
        """Begin with a rank, which is alone or one of a job."""
        self._trace, self._asked = trace, asked
        self._job = Job() if asked.job is None else self._jobs.setdefault(asked.job, Job())
        self._job.events[asked.rank], self._job.misled[asked.rank] = trace.events, []
        self._numbers: Counter[Any] = Counter()
        self._sent: defaultdict[Any, deque[Tensor]] = defaultdict(deque)
        self._works: dict[int, tuple[Work, int]] = {}  # with the work, as its id would be used again
        self._batch: int | None = None
        trace.events.append(Made("0", tuple(range(asked.world)), "world"))

    def compare(self) -> dict[str, Any]:
        """Return where ranks of the job differ, and which are to be traced again, once all have been."""
        job = self._job
        whole = self._asked.job is not None and len(job.events) == self._asked.world
        misled = [rank for rank, checks in job.misled.items() if whole and any(check() for check in checks)]
        calls = [event for history in job.events.values() for event in history if isinstance(event, Call)]
        return {"misled": misled, "differ": match(job.events) if whole else [], "calls": len(calls)}

    def install(self) -> None:
        """Replace functions of torch that make groups, wait, or join messages."""
        make, join, wait = dist.new_group, dist.batch_isend_irecv, Work.wait

        def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            name, members = str(c10d._world.group_count), tuple(ranks or range(dist.get_world_size()))
            self._trace.events.append(Made(name, members, kwargs.get("group_desc") or ""))
            return make(ranks, *args, **kwargs)

        def join_messages(messages: Any) -> Any:
            self._batch = len(self._trace.events)
            out = join(messages)
            self._batch = None
            return out

        def note_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if id(work) in self._works:
                self._trace.events.append(Wait(self._works[id(work)][1]))
            return wait(work, *args, **kwargs)

        dist.new_group, dist.batch_isend_irecv = new_group, join_messages  # type: ignore[assignment]
        for kind in (Work, FakeWork):
            kind.wait = note_wait  # type: ignore[assignment]

    def answer_collective(self, func: Any, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        """Note an operation of ``torch.ops.c10d``, and run it."""
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        group, boxed = dist.ProcessGroup.unbox(given["process_group"]), given.get("reduce_op")
        parts = (
            len(args[0][0]) if isinstance(args[0], list) and args[0] and isinstance(args[0][0], list) else 1
        )
        call = Call(
            group=group.group_name,
            name=func._schema.name.removeprefix("c10d::"),
            dtypes=tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})),
            counts=tuple(tensor.numel() for tensor in tensors),
            size=parts * max((tensor.numel() * tensor.itemsize for tensor in tensors), default=0),
            reduction="" if boxed is None else dist.ReduceOp.RedOpType(boxed.op()).name,
            root=next((given[name] for name in ("root_rank", "dst", "src") if name in given), None),
            gives=tuple(given.get("input_split_sizes", ())),
            takes=tuple(given.get("output_split_sizes", ())),
            # Defaults do not come here. Who sends or receives is given the work, and waits for that.
            blocks=not given.get("async_op", True),
            batch=self._batch,
            phase=self._trace.phase,
            site=here(),
        )
        place = len(self._trace.events)
        self._trace.events.append(call)
        with _disable_current_modes():
            self._answer(call, args, group)
        try:
            out = func(*args, **kwargs)
        except UnsupportedOperatorException:
            work = FakeWork().boxed()
            out = work if len(func._schema.returns) == 1 else (args[0], work)
        done = Work.unbox(out[-1] if isinstance(out, tuple) else out)
        self._works[id(done)] = done, place
        return out

    def _answer(self, call: Call, args: Any, group: Any) -> None:
        """Write into the outputs what the other ranks gave."""
        values, gave, me = self._memory.values, self._find_given(call, group), group.rank()
        outs = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, FakeTensor)]
        source = args[1][0] if isinstance(args[1], list) and args[1] else args[1]
        source = source if isinstance(source, Tensor) else next(iter(outs), None)
        given = None if source is None else values(source)
        held = [known for out in outs if (known := values(out)) is not None]
        _repeat(given, held)
        if given is None or given.is_floating_point() or len(held) < len(outs):
            return
        alike, sent = torch.cat([part.flatten() for part in held]), self._sent[self._trace.phase, call.root]
        if call.name == "recv_":  # a gradient has the shape of what was sent
            alike = sent.popleft() if sent else self.incoming.get((given.dtype, tuple(given.shape)), alike)
        elif call.name == "alltoall_base_":
            rows = list(call.gives) or [len(given) // group.size()] * group.size()
            gave[me] = torch.split(given.clone(), rows)
        else:
            gave[me] = given.flatten().clone()
        if call.name == "send":
            sent.append(gave[me])
        got = self._get(gave, alike, partial(_combine, call, me, group.size()))
        sizes = [part.numel() for part in held]
        if len(got) == sum(sizes):
            for part, new in zip(held, torch.split(got, sizes), strict=True):
                part.copy_(new.view_as(part))

    def gather_objects(self, out: list[Any], item: Any, group: Any = None) -> None:
        """Stand in for ``dist.all_gather_object``."""
        alike, members = [item] * len(out), range(len(out))
        gave = self._note_object("all_gather_object", group, None, item)
        out[:] = self._get(gave, alike, lambda gave: [gave[member] for member in members])

    def broadcast_objects(self, box: list[Any], src: int, group: Any = None, **_: Any) -> None:
        """Stand in for ``dist.broadcast_object_list``."""
        root = dist.get_group_rank(group or c10d._get_default_group(), src)
        alike = [dict(self.totals) if item == {} else item for item in box]
        if box == [None] and src != dist.get_rank():
            alike = [next(self.headers, None)]
        gave = self._note_object("broadcast_object_list", group, root, list(box))
        box[:] = self._get(gave, alike, lambda gave: gave[root])

    def _note_object(self, name: str, group: Any, root: int | None, item: Any) -> dict[int, Any]:
        group, phase = group or c10d._get_default_group(), self._trace.phase
        call = Call(group.group_name, name, OBJECTS, root=root, blocks=True, phase=phase, site=here())
        self._trace.events.append(call)
        gave = self._find_given(call, group)
        gave[group.rank()] = item
        return gave

    def _find_given(self, call: Call, group: Any) -> dict[int, Any]:
        """Return what ranks gave so far in the exchange of the job that a call is."""
        ends = {"send": (group.rank(), call.root), "recv_": (call.root, group.rank())}
        key = call.group, ends.get(call.name)
        self._numbers[key] += 1
        return self._job.gave[*key, self._numbers[key]]

    def _get(self, gave: dict[int, Any], alike: Any, result: Callable[[dict[int, Any]], Any]) -> Any:
        """Return what this rank gets; ``alike`` until all is known that goes into it."""

        def known() -> Any:
            try:
                return result(gave)
            except (KeyError, RuntimeError):  # unknown, or of other sizes, which are told apart later
                return alike

        got = known()
        self._job.misled[self._asked.rank].append(lambda: _format_decisive(known()) != _format_decisive(got))
        return got


def _format_decisive(value: Any) -> str:
    """Return what decides other calls; of floats in objects, such as times, that they are there."""
    return _FLOAT.sub("0", repr(value.tolist() if isinstance(value, Tensor) else value))


def _combine(call: Call, me: int, size: int, gave: Any) -> Any:
    """Return what an operation gives a rank, end to end; ``KeyError`` if that is not known."""
    if call.name in ("recv_", "broadcast_"):
        return gave[call.root]
    every = [gave[member] for member in range(size)]
    if call.name in ("_allgather_base_", "allgather_"):
        return torch.cat(every)
    if call.name == "alltoall_base_":
        return torch.cat([pieces[me].flatten() for pieces in every])
    return reduce(_SUMS[call.name, call.reduction], every)


def _repeat(given: Tensor | None, held: list[Tensor]) -> None:
    """Copy the input into the outputs, end to end, as if every rank gave what this one does."""
    for values in held:
        if given is None or not given.numel():
            return
        if values.shape == given.shape:
            values.copy_(given)
        elif values.numel() % given.numel() == 0:
            values.view(-1).view(-1, given.numel()).copy_(given.reshape(1, -1))
        elif given.numel() % values.numel() == 0:
            values.copy_(given.reshape(-1)[: values.numel()].view_as(values))
