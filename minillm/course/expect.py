"""What a check says about an answer: the first wrong index, what was got and what was expected."""

from __future__ import annotations

import collections
import contextlib
import copy
import numbers
import types
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

CUT = 90  # characters of a value shown in a message


class Mismatch(AssertionError):
    """An answer differs from what a check expects; the message names the first difference."""


def show(value: Any) -> str:
    """A value on one line, cut where it gets long."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dim() == 0:
            return show(value.item())
        text = f"{describe(value)} {value.tolist()}" if value.numel() <= 8 else describe(value)
    elif isinstance(value, bool) or not isinstance(value, numbers.Real):
        text = repr(value)
    else:
        text = f"{value:.6g}" if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= CUT else text[: CUT - 1] + "…"


def describe(value: Any) -> str:
    """The kind of a value in words: "a float32 tensor of shape [2, 3]", "a list of 4", "None"."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        kind = "tensor" if isinstance(value, torch.Tensor) else "numpy array"
        return f"a {str(value.dtype).removeprefix('torch.')} {kind} of shape {list(value.shape)}"
    if value is None:
        return "None (does your function return its result?)"
    if isinstance(value, (list, tuple, dict, set, str)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}, {show(value)}"


def _fail(what: str, message: str) -> None:
    raise Mismatch(f"{what}: {message}" if what else message)


def expect_shape(got: Any, shape: Sequence[int], dtype: torch.dtype | None = None, what: str = "") -> None:
    """``got`` must be a tensor of this shape (-1 matches any size) and, where given, this dtype."""
    if not isinstance(got, torch.Tensor):
        _fail(what, f"got {describe(got)}, expected a tensor of shape {list(shape)}")
    if len(got.shape) != len(shape) or any(e not in (-1, g) for g, e in zip(got.shape, shape)):
        _fail(what, f"got shape {list(got.shape)}, expected {list(shape)}")
    if dtype is not None and got.dtype != dtype:
        _fail(what, f"got dtype {str(got.dtype).removeprefix('torch.')}, expected {str(dtype).removeprefix('torch.')}")


def expect_equal(got: Any, expected: Any, atol: float = 0.0, rtol: float = 0.0, what: str = "") -> None:
    """Raise Mismatch at the first place where ``got`` differs from ``expected`` by more than atol + rtol * |expected|.

    Tensors and arrays must agree in type, shape and dtype; NaN and infinities must sit in the same places. Lists, tuples
    and dicts are compared element by element and must agree in type, except that any two real numbers may be compared.
    """
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        _equal_arrays(got, expected, atol, rtol, what)
    elif isinstance(expected, Mapping):
        _equal_mappings(got, expected, atol, rtol, what)
    elif isinstance(expected, (list, tuple)):
        _equal_sequences(got, expected, atol, rtol, what)
    elif isinstance(expected, numbers.Real) and not isinstance(expected, bool):
        if isinstance(got, bool) or not isinstance(got, numbers.Real):
            extra = "; .item() makes a number of a tensor" if isinstance(got, torch.Tensor) and got.dim() == 0 else ""
            _fail(what, f"got {describe(got)}, expected the number {show(expected)}{extra}")
        _equal_arrays(np.asarray(got), np.asarray(expected), atol, rtol, what, same_dtype=False)
    elif type(got) is not type(expected) or got != expected:
        _fail(what, f"got {show(got)}, expected {show(expected)}")


def _equal_arrays(got: Any, expected: Any, atol: float, rtol: float, what: str, same_dtype: bool = True) -> None:
    if isinstance(got, torch.Tensor) is not isinstance(expected, torch.Tensor) or not isinstance(got, (torch.Tensor, np.ndarray)):
        _fail(what, f"got {describe(got)}, expected {describe(expected)}")
    if tuple(got.shape) != tuple(expected.shape):
        _fail(what, f"got shape {list(got.shape)}, expected {list(expected.shape)}")
    if same_dtype and got.dtype != expected.dtype:
        _fail(what, f"got {describe(got)}, expected {describe(expected)}")
    if isinstance(got, torch.Tensor) and got.device != expected.device:
        _fail(what, f"got a tensor on {got.device}, expected one on {expected.device}")
    g, e = _exact(got), _exact(expected)
    if g.dtype.kind in "fc" or e.dtype.kind in "fc":
        with np.errstate(invalid="ignore"):  # inf - inf: such places are equal already
            ok = (g == e) | (np.abs(g - e) <= atol + rtol * np.abs(e)) & np.isfinite(g) & np.isfinite(e)
        ok |= np.isnan(g) & np.isnan(e)
    elif atol or rtol:
        ok = np.abs(g.astype(float) - e.astype(float)) <= atol + rtol * np.abs(e.astype(float))
    else:
        ok = g == e
    if ok.all():
        return
    first = tuple(int(i) for i in np.argwhere(~ok)[0]) if ok.ndim else ()
    tolerance = f", tolerance {atol + rtol * abs(float(e[first])):.3g}" if atol or rtol else ""
    numbers_differ = f"got {_scalar(g[first])}, expected {_scalar(e[first])}{tolerance}"
    if not first:
        _fail(what, numbers_differ)
    _fail(what, f"first wrong element {list(first)}: {numbers_differ} ({int((~ok).sum())} of {ok.size} differ)")


def _exact(value: Any) -> np.ndarray:
    """As numpy, without losing a bit: 16-bit floats widen, integers stay."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.double() if value.is_floating_point() else value).numpy()


def _scalar(value: Any) -> str:
    return f"{value:.6g}" if np.asarray(value).dtype.kind == "f" else str(value)


def _equal_sequences(got: Any, expected: Any, atol: float, rtol: float, what: str) -> None:
    if type(got) is not type(expected):
        _fail(what, f"got {describe(got)}, expected {describe(expected)}")
    whole = ""
    if max(len(got), len(expected)) <= 8 and all(isinstance(x, numbers.Real) for x in (*got, *expected)):
        whole = f"; in all: got {show(got)}, expected {show(expected)}"
    for i, (g, e) in enumerate(zip(got, expected)):
        try:
            expect_equal(g, e, atol, rtol, f"{what}[{i}]" if what else f"element [{i}]")
        except Mismatch as wrong:
            raise Mismatch(f"{wrong}{whole}") from None
    if len(got) != len(expected):
        longer, extra = (got, "too many") if len(got) > len(expected) else (expected, "missing")
        first = min(len(got), len(expected))
        counts = f"got {len(got)} element{'' if len(got) == 1 else 's'}, expected {len(expected)}"
        _fail(what, f"{counts}; first {extra}: [{first}], {show(longer[first])}{whole}")


def _equal_mappings(got: Any, expected: Mapping[Any, Any], atol: float, rtol: float, what: str) -> None:
    if not isinstance(got, Mapping):
        _fail(what, f"got {describe(got)}, expected {describe(dict(expected))}")
    for key, e in expected.items():
        if key not in got:
            _fail(what, f"key {key!r} is missing, expected {show(e)}")
        expect_equal(got[key], e, atol, rtol, f"{what}[{key!r}]")
    extra = [key for key in got if key not in expected]
    if extra:
        _fail(what, f"key {extra[0]!r} should not be there")


@contextlib.contextmanager
def unchanged(*inputs: Any, **named: Any) -> Iterator[None]:
    """``with unchanged(q=q, k=k): candidate(q, k)`` raises Mismatch when the block altered one of them."""
    watched = {**{f"input {i}": x for i, x in enumerate(inputs)}, **{f"input {name}": x for name, x in named.items()}}
    before = {name: _snapshot(x) for name, x in watched.items()}
    yield
    for name, x in watched.items():
        expect_equal(x, before[name], what=f"your code changed its {name}")


def _snapshot(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def is_whole(value: Any) -> bool:
    """True for a whole number of Python or numpy; False for a bool, a float such as 3.0, a tensor."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def expect_raises(kind: type[BaseException], call: Callable[[], Any], what: str = "") -> None:
    """``call()`` must raise ``kind``; another exception or none is a Mismatch."""
    try:
        got = call()
    except kind:
        return
    except NotImplementedError:
        raise  # an unfinished answer is reported as unfinished
    except Exception as error:
        raise Mismatch(f"{what or 'this call'}: raised {type(error).__name__} ({error}), expected {kind.__name__}") from error
    _fail(what or "this call", f"returned {show(got)}, expected it to raise {kind.__name__}")


def expect_at_most(got: int | float, budget: int | float, what: str) -> None:
    """A counted cost must stay within its budget: bytes, passes, blocks."""
    if got > budget:
        _fail("", f"{what}: {got:,} used, the budget is {budget:,}")


def bytes_held(owner: Any) -> int:
    """Bytes of all tensors and arrays in an object: in its attributes and slots, in lists and dicts, in objects further in."""
    memory: dict[int, int] = {}
    seen: dict[int, Any] = {}  # keeps what it saw, so that no id is used twice
    stack = [owner]
    while stack:
        x = stack.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        if isinstance(x, torch.Tensor):
            memory[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, np.ndarray):
            memory.setdefault(x.__array_interface__["data"][0], x.nbytes)
        elif isinstance(x, dict):
            stack.extend(x.values())
        elif isinstance(x, (list, tuple, set, frozenset, collections.deque)):
            stack.extend(x)
        elif not isinstance(x, (type, types.ModuleType, types.FunctionType, types.MethodType)):
            stack.extend(getattr(x, "__dict__", {}).values())
            stack.extend(_kept_in_slots(x))
    return sum(memory.values())


def _kept_in_slots(owner: Any) -> Iterator[Any]:
    """What an object keeps in ``__slots__``."""
    for base in type(owner).__mro__:
        for member in vars(base).values() if "__slots__" in vars(base) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    yield member.__get__(owner)
