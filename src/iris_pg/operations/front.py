"""What comes before every operation of a process group: the forms of its call, tensors without memory, the profiler.

torch's own ProcessGroup takes an operation in two forms. In one, lists of tensors are followed by an object with
options: so call torch.distributed and C++. In the other, which people use, tensors come alone, and the options are
arguments. Without an object of options a call returns when the operation is done, with its work.

As with NCCL, a synchronous call that has such an object returns None where tensors are on a GPU: its stream is the
current one, and making a work costs the host more than a microsecond. torch.distributed expects that.

A tensor of a class of its own may have no memory. A FakeTensor stands for its shape: nothing is moved, and the work is
done. An AsyncCollectiveTensor is waited for. Any other that wraps tensors (DTensor) is an error that says so.

While a profiler records, an operation is a range named ``iris:all_reduce`` and the like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C import _disabled_torch_dispatch_impl, _distributed_c10d
from torch.autograd import profiler

from iris_pg.errors import ArgumentError, UnsupportedError
from iris_pg.work import IrisWork

Tensor = torch.Tensor
Arguments = tuple[Any, ...]
Class = TypeVar("Class", bound=type)

_PLAIN = frozenset({Tensor, torch.nn.Parameter})


@dataclass(frozen=True)
class Form:
    """How methods of a process group are called.

    Args:
        name: of the operation, as in messages and profiles.
        methods: under which it is called, in every release of torch.
        options: class of the object that is the last argument of a usual call; None where there is none.
        count: number of arguments of a usual call.
        tensors: number of arguments that are tensors, or lists of them; they come first.
        usual: called with the arguments of any other call; returns those of a usual one.
    """

    name: str
    methods: tuple[str, ...]
    options: type | None
    count: int
    tensors: int
    usual: Callable[..., Arguments]


def install(cls: Class) -> Class:
    """Put this in front of the operations of a class; a class decorator."""
    for form in FORMS:
        for method in form.methods:
            if hasattr(cls, method):
                setattr(cls, method, _fronted(getattr(cls, method), form))
    return cls


def _fronted(method: Callable[..., IrisWork | None], form: Form) -> Callable[..., IrisWork | None]:
    label, count, options, two = f"iris:{form.name}", form.count, form.options, form.tensors == 2
    last = count - 1

    @functools.wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> IrisWork | None:
        is_usual = not named and len(args) == count and (not options or type(args[last]) is options)
        if not is_usual:
            args = form.usual(*args, **named)
        if form.tensors and not (_is_plain(args[0]) and (not two or _is_plain(args[1]))):
            args, is_fake = _with_memory(form, args)
            if is_fake:
                return IrisWork(args[0] if isinstance(args[0], list) else [args[0]])
        if profiler._is_profiler_enabled:
            with torch.profiler.record_function(label):
                work = method(self, *args)
        else:
            work = method(self, *args)
        return self._work_on_gpu(*args[:2]) if work is None and not is_usual else work

    return call


# Tensors without memory -----------------------------------------------------------------------------------------------


def _is_plain(argument: Any) -> bool:
    """Return whether every tensor in ``argument``, a tensor or a list, is of a class that has memory for sure."""
    kind = type(argument)
    if kind is Tensor:
        return True
    if kind is not list:
        return kind in _PLAIN
    for item in argument:
        if type(item) is not Tensor and not _is_plain(item):
            return False
    return True


def _with_memory(form: Form, args: Arguments) -> tuple[Arguments, bool]:
    """Return ``args`` with tensors that have memory, and whether that cannot be: one of them is fake."""
    is_fake = False

    def resolve(argument: Any) -> Any:
        nonlocal is_fake
        if isinstance(argument, list | tuple):
            return [resolve(item) for item in argument]
        if isinstance(argument, Tensor) and _wraps(type(argument)):
            if getattr(argument, "fake_mode", None) is not None:
                is_fake = True
            elif hasattr(argument, "trigger_wait"):  # AsyncCollectiveTensor
                return argument.trigger_wait()
            else:
                hint = "tensor.to_local()" if hasattr(argument, "to_local") else "the tensors that it holds"
                raise ArgumentError(
                    f"{form.name}: a tensor is a {type(argument).__name__}, which has no memory of its own; it takes "
                    f"plain tensors; pass {hint}"
                )
        return argument

    return (*map(resolve, args[: form.tensors]), *args[form.tensors :]), is_fake


def _wraps(kind: type) -> bool:
    """Return whether tensors of a class handle operations themselves; others are memory under another name."""
    return getattr(kind, "__torch_dispatch__", None) is not _disabled_torch_dispatch_impl and kind not in _PLAIN


# Forms of calls -------------------------------------------------------------------------------------------------------


def _options(kind: str, name: str, timeout: Any, **values: Any) -> Any:
    if timeout is not None:
        raise UnsupportedError(
            f"{name}: timeout={timeout}; one call has no deadline of its own; use group.set_timeout, or wait(timeout) "
            "on the work of an asynchronous call"
        )
    opts = getattr(_distributed_c10d, kind)()
    opts.asyncOp = False
    for field, value in values.items():
        setattr(opts, field, value)
    return opts


def _is_options(value: Any) -> bool:
    return hasattr(value, "asyncOp")


def _listed(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _nested(value: Sequence[Any]) -> list[Any]:
    return [list(value)] if value and isinstance(value[0], Tensor) else [list(row) for row in value]


def _all_reduce(tensors: Any, op: Any = dist.ReduceOp.SUM, timeout: Any = None, opts: Any = None) -> Arguments:
    if _is_options(op):
        op, opts = None, op
    return _listed(tensors), opts or _options("AllreduceOptions", "all_reduce", timeout, reduceOp=op)


def _all_reduce_coalesced(tensors: Any, opts: Any = None) -> Arguments:
    return _listed(tensors), opts or _options("AllreduceCoalescedOptions", "all_reduce_coalesced", None)


def _broadcast(tensors: Any, root: Any = 0, timeout: Any = None, opts: Any = None) -> Arguments:
    if _is_options(root):
        root, opts = 0, root
    return _listed(tensors), opts or _options("BroadcastOptions", "broadcast", timeout, rootRank=root)


def _reduce(
    tensors: Any, root: Any = 0, op: Any = dist.ReduceOp.SUM, timeout: Any = None, opts: Any = None
) -> Arguments:
    if _is_options(root):
        root, opts = 0, root
    return _listed(tensors), opts or _options("ReduceOptions", "reduce", timeout, rootRank=root, reduceOp=op)


def _all_gather(outputs: Any, inputs: Any, timeout: Any = None, opts: Any = None) -> Arguments:
    if _is_options(timeout):
        timeout, opts = None, timeout
    opts = opts or _options("AllgatherOptions", "all_gather", timeout)
    return _nested(outputs), _listed(inputs), opts


def _gather(outputs: Any, inputs: Any, root: Any = 0, timeout: Any = None, opts: Any = None) -> Arguments:
    if _is_options(root):
        root, opts = 0, root
    opts = opts or _options("GatherOptions", "gather", timeout, rootRank=root)
    return _nested(outputs), _listed(inputs), opts


def _scatter(outputs: Any, inputs: Any, root: Any = 0, timeout: Any = None, opts: Any = None) -> Arguments:
    if _is_options(root):
        root, opts = 0, root
    opts = opts or _options("ScatterOptions", "scatter", timeout, rootRank=root)
    return _listed(outputs), _nested(inputs), opts


def _reduce_scatter(
    outputs: Any, inputs: Any, op: Any = dist.ReduceOp.SUM, timeout: Any = None, opts: Any = None
) -> Arguments:
    if _is_options(op):
        op, opts = None, op
    opts = opts or _options("ReduceScatterOptions", "reduce_scatter", timeout, reduceOp=op)
    return _listed(outputs), _nested(inputs), opts


def _all_to_all(outputs: Any, inputs: Any, timeout: Any = None, opts: Any = None) -> Arguments:
    if _is_options(timeout):
        timeout, opts = None, timeout
    return list(outputs), list(inputs), opts or _options("AllToAllOptions", "all_to_all", timeout)


def _all_to_all_single(
    output: Any, input: Any, output_splits: Any = (), input_splits: Any = (), timeout: Any = None, opts: Any = None
) -> Arguments:
    if _is_options(timeout):
        timeout, opts = None, timeout
    opts = opts or _options("AllToAllOptions", "all_to_all_single", timeout)
    return output, input, output_splits, input_splits, opts


def _barrier(timeout: Any = None, opts: Any = None) -> Arguments:
    if _is_options(timeout):
        timeout, opts = None, timeout
    return (opts or _options("BarrierOptions", "barrier", timeout),)


def _two(output: Any, input: Any, opts: Any = None) -> Arguments:
    return output, input, opts


def _message(tensors: Any, rank: Any, tag: int = 0) -> Arguments:
    return _listed(tensors), rank, tag


def _anyones(tensors: Any, tag: int = 0) -> Arguments:
    return _listed(tensors), tag


def _form(name: str, methods: str, options: str | None, count: int, tensors: int, usual: Any) -> Form:
    kind = getattr(_distributed_c10d, options, None) if options else None
    return Form(name, tuple(methods.split()), kind, count, tensors, usual)


FORMS = (
    _form("all_reduce", "allreduce all_reduce", "AllreduceOptions", 2, 1, _all_reduce),
    _form("all_reduce", "allreduce_coalesced", "AllreduceCoalescedOptions", 2, 1, _all_reduce_coalesced),
    _form("broadcast", "broadcast", "BroadcastOptions", 2, 1, _broadcast),
    _form("reduce", "reduce", "ReduceOptions", 2, 1, _reduce),
    _form("all_gather", "allgather all_gather", "AllgatherOptions", 3, 2, _all_gather),
    _form("all_gather", "allgather_coalesced", "AllgatherOptions", 3, 2, _two),
    _form(
        "all_gather_into_tensor",
        "all_gather_single _allgather_base all_gather_into_tensor all_gather_single_coalesced "
        "allgather_into_tensor_coalesced",
        *("AllgatherOptions", 3, 2, _two),
    ),
    _form("gather", "gather", "GatherOptions", 3, 2, _gather),
    _form("scatter", "scatter", "ScatterOptions", 3, 2, _scatter),
    _form("reduce_scatter", "reduce_scatter", "ReduceScatterOptions", 3, 2, _reduce_scatter),
    _form(
        "reduce_scatter_tensor",
        "reduce_scatter_single _reduce_scatter_base reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced",
        *("ReduceScatterOptions", 3, 2, _two),
    ),
    _form("all_to_all_single", "alltoall_base all_to_all_single", "AllToAllOptions", 5, 2, _all_to_all_single),
    _form("all_to_all", "alltoall all_to_all", "AllToAllOptions", 3, 2, _all_to_all),
    _form("barrier", "barrier", "BarrierOptions", 1, 0, _barrier),
    _form("send", "send", None, 3, 1, _message),
    _form("recv", "recv", None, 3, 1, _message),
    _form("recv", "recv_anysource recvAnysource", None, 2, 1, _anyones),
)
