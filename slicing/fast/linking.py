"""Compiled functions that others call by symbol, so that each is compiled once.

numba takes the body of what a function calls into that function, and compiles it again there, at every level of calls.
A linked function is compiled by itself, to C's conventions, and its callers hold only its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import cfunc, njit, types
from numba.core import cgutils

from slicing.fast.compiling import emitted, keeping_code
from slicing.fast.lanes import I64


class _Linked:
    """One linked function, compiled when it is first needed."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.symbol = f"diffuse_{function.__module__}_{function.__qualname__}".replace(".", "_")
        self.num_args = function.__code__.co_argcount
        self.compiled: Any = None  # what the symbol points to, for the life of the process

    def load(self) -> bool:
        """Compile it, or load what was kept, and tell LLVM of the symbol; return whether it was compiled."""
        signature = types.void(*[types.int64] * self.num_args)
        with keeping_code() as can_keep:
            self.compiled = cfunc(signature, error_model="numpy", cache=can_keep)(self.function)
        binding.add_symbol(self.symbol, self.compiled.address)
        return not self.compiled.cache_hits


# In the order of their definition: what a function calls stands before it, and LLVM ends the process where it loads
# machine code with a symbol that it does not know.
_functions: list[_Linked] = []


def linked(function: Callable[..., None]) -> Any:
    """Link a function whose arguments are all int64 and that returns nothing; return what compiled code calls."""
    entry = _Linked(function)
    _functions.append(entry)
    source = ", ".join(function.__code__.co_varnames[: entry.num_args])
    namespace: dict[str, Any] = {"call": _call(entry)}
    exec(f"def linked({source}):\n    call(({source},))\n", namespace)  # noqa: S102 - numba wants named arguments
    return njit(nogil=True, error_model="numpy", inline="always")(namespace["linked"])


def load_linked(until: _Linked | None = None) -> int:
    """Compile or load every linked function defined so far, or up to one; return how many had to be compiled."""
    num_compiled = 0
    for entry in _functions:
        if entry.compiled is None:
            num_compiled += entry.load()
        if entry is until:
            break
    return num_compiled


def _call(entry: _Linked) -> Any:
    @emitted
    def call(typing_context: Any, args: Any) -> Any:
        load_linked(entry)  # a caller that is kept on disk is not typed again: load_linked goes before it

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [I64] * entry.num_args)
            target = cgutils.get_or_insert_function(builder.module, kind, entry.symbol)
            builder.call(target, cgutils.unpack_tuple(builder, values[0], entry.num_args))
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, entry.num_args)), generate

    return call
