"""The only room that names torch's private parts. Each entry says what for and what happens without it.

May import torch only.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sys
from collections.abc import Callable
from functools import cache, partial, update_wrapper, wraps
from inspect import signature
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import sympy
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _functorch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._functorch import autograd_function as _autograd_function
from torch._functorch._aot_autograd import runtime_wrappers as _runtime_wrappers
from torch._guards import TracingContext
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import mb_unwrap_functional_tensor
from torch._subclasses.meta_utils import MetaTensorDescriber
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree
from torch.utils import checkpoint as _checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_in_torch_dispatch_mode,
    return_and_correct_aliasing,
)
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

try:  # ragged sizes; base class: Dynamo takes a nested tensor only if it is an instance of torch's own class
    from torch.nested._internal import nested_tensor as _torch_nested
    from torch.nested._internal.nested_int import NestedIntNode

    BASE: type = _torch_nested.NestedTensor
except ImportError as missing:
    raise ImportError(
        f"njt needs torch.nested._internal, which torch {torch.__version__} lacks. Expected a torch like 2.13. "
        f"Install one that README.md names."
    ) from missing

try:  # keeps size expressions out of the traced graph until they are used; without it: more nodes
    from torch.fx.experimental.proxy_tensor import make_fx, maybe_enable_thunkify
except ImportError:  # pragma: no cover
    maybe_enable_thunkify = contextlib.nullcontext  # type: ignore[assignment,misc]

try:  # see `trace_attribute`
    from torch._dynamo.source import ConstantSource, TensorProperty, TensorPropertySource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable
except ImportError:  # pragma: no cover
    VariableTracker = TensorVariable = None  # type: ignore[assignment,misc]

try:  # see `unseen`; without these names: structures are read in sight of selective checkpoints
    from torch.utils._python_dispatch import (
        _disable_current_modes,
        _get_current_dispatch_mode_stack,
    )

    _NUMBERING: tuple[type, ...] = (
        _checkpoint._CachingTorchDispatchMode,
        _checkpoint._CachedTorchDispatchMode,
    )
except (ImportError, AttributeError):  # pragma: no cover
    _NUMBERING = ()

try:  # see `_parameters_of_any_length`
    from torch._dynamo.variables import builder as _builder
except ImportError:  # pragma: no cover
    _builder = None  # type: ignore[assignment]

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

NESTED_KEYS = DispatchKeySet(DispatchKey.NestedTensor).add(DispatchKey.AutogradNestedTensor)
COMPOSITE_KEYS = (
    DispatchKey.CompositeImplicitAutogradNestedTensor,
    DispatchKey.CompositeImplicitAutograd,
)

# wraps calls on wrappers that must not come back to `__torch_function__`
no_torch_function = torch._C.DisableTorchFunctionSubclass

# containers of tensors: their leaves, and the way back
tree_flatten, tree_unflatten = _pytree.tree_flatten, _pytree.tree_unflatten

# what F.pad calls: Dynamo looks through F.pad, so a handler for it has to answer here too
pad_function = torch._C._nn.pad

# what torch.jit.trace records, or None; operators below it do not see it
jit_tracing = torch._C._get_tracing_state

# whether a dispatch mode is active, which wants to see operators
in_dispatch_mode = is_in_torch_dispatch_mode

# has the results of a view operator share storage with its input where a tracer looks at that
correct_aliasing = return_and_correct_aliasing

# an overload's schema: names and defaults of its arguments, what it writes, what its results share
schema = attrgetter("_schema")

_get_mode = torch._C._get_dispatch_mode
_PROXY_MODE = torch._C._TorchDispatchModeKey.PROXY
_FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE
_FUNCTIONAL_MODE = torch._C._TorchDispatchModeKey.FUNCTIONAL


def make_wrapper(
    cls: type,
    size: tuple[Any, ...],
    strides: tuple[Any, ...],
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> Any:
    """A wrapper with nested keys whose sizes C++ answers (policy "strides": `.shape` at half the cost).

    `storage_size` is given so that torch does not multiply ragged sizes to find it.
    """
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls,
        size,
        strides,
        0,
        torch.contiguous_format,
        dtype,
        torch.jagged,
        device,
        False,
        requires_grad,
        "strides",
        False,
        True,
        NESTED_KEYS,
        storage_size=0,
    )


def functions_off() -> bool:
    """Whether no `__torch_function__` at all is asked, as where Dynamo builds guards."""
    return torch._C._is_torch_function_all_disabled()


def is_fake(x: Any) -> bool:
    """Whether `x` holds no data: traced by a compiler, a FakeTensor mode, or on the meta device."""
    return isinstance(mb_unwrap_functional_tensor(x), FakeTensor) or x.device.type == "meta"


def fake_tensor(x: Tensor) -> FakeTensor | None:
    """The FakeTensor under `x`, through functionalization, or None."""
    plain = mb_unwrap_functional_tensor(x)
    return plain if isinstance(plain, FakeTensor) else None


def ragged_size_of(source: Tensor) -> torch.SymInt:
    """The symbolic size that stands for "as long as `source` says", one per source tensor.

    Registered where torch's fake-tensor code looks for it, so that compiled graphs see the same symbol.
    """
    plain = mb_unwrap_functional_tensor(source)
    if isinstance(plain, FakeTensor):
        if plain.nested_int_memo is None and plain.fake_mode.shape_env is None:
            plain.nested_int_memo = _new_ragged_size()
        return plain.get_nested_int(coeff=1)  # type: ignore[return-value]
    registry = _torch_nested._tensor_symint_registry
    size = registry.get(plain)
    if size is None:
        size = registry[plain] = _new_ragged_size()
    return size


NO_NUMBER = -1  # a ragged size, and a stride made of it, where torch wants numbers for a text alone


class _RaggedNode(NestedIntNode):
    """A ragged size that says so where a number is wanted."""

    def int_(self) -> int:
        """What `int(size)` comes to."""
        raise _no_number("int", str(self))

    def guard_int(self, file: str, line: int) -> int:
        """What torch 2.14 asks where a gradient is added up, to see how the leaf lies in memory."""
        if adding_up_a_gradient():
            return NO_NUMBER
        raise _no_number("int", str(self))

    def mul(self, other: Any) -> Any:
        """What `size * n` comes to, a stride."""
        if not other.is_constant():  # a symbol of torch.export, which knows no ragged sizes
            raise _no_number("mul", str(self))
        return _RaggedNode(self.t_id, self.coeff * other.constant_int())

    def __getattr__(self, name: str) -> Any:
        """What torch asks of symbols, where it is not prepared for a plain ragged size."""
        raise AttributeError(
            f"{name}: got {self}, the size of a nested tensor's ragged dim. Expected a symbol. Use torch.compile or "
            f"njt.export(module, args); make_fx takes nested tensors with tracing_mode='symbolic'."
        )


def _no_number(op: str, size: str) -> RuntimeError:
    return RuntimeError(
        f"{op}(): got {size}, the size of a nested tensor's ragged dim. Expected a size that is a number. Use "
        f"x.max_seqlen or x.seqlens; for torch.export call njt.export(module, args)."
    )


def _new_ragged_size() -> torch.SymInt:
    size = torch.SymInt(_RaggedNode(_torch_nested._tensor_id_counter, 1))
    _torch_nested._tensor_id_counter += 1
    return size


def _sizes_without_symbols() -> None:
    """Has a FakeTensorMode without ShapeEnv take a ragged size as it is, where torch only has symbols for it."""
    create = getattr(FakeTensorMode, "create_symbolic_nested_int", None)
    if create is None:  # pragma: no cover - such a mode then refuses nested tensors
        return

    @wraps(create)
    def size_in_mode(mode: Any, *, nt_tensor_id: int | None = None) -> Any:
        if mode.shape_env is None and nt_tensor_id is not None:
            return torch.SymInt(_RaggedNode(nt_tensor_id, 1))
        return create(mode, nt_tensor_id=nt_tensor_id)

    FakeTensorMode.create_symbolic_nested_int = size_in_mode  # type: ignore[method-assign, assignment]


_sizes_without_symbols()


def _parameters_of_any_length() -> None:
    """Keeps Dynamo from compiling the sizes of a module's nested parameter or buffer in, as it does for dense ones.

    A ragged size is no number: it fails.
    """
    decide = getattr(_builder, "tensor_always_has_static_shape", None)
    if decide is None:  # pragma: no cover - such parameters are then refused
        return

    @wraps(decide)
    def unless_nested(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, BASE):
            return False, None
        return decide(tensor, *args, **kwargs)

    _builder.tensor_always_has_static_shape = unless_nested


_parameters_of_any_length()


def is_ragged_size(size: Any) -> bool:
    """Whether `size` is the symbolic ragged size of some nested tensor."""
    return isinstance(size, torch.SymInt) and size.node.is_nested_int()


def same_ragged_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same symbol; never a guard, never a look at data."""
    if a is b:
        return True
    if not (isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt)):
        return False
    na, nb = a.node, b.node
    plain_a, plain_b = not na.is_symbolic(), not nb.is_symbolic()
    if plain_a or plain_b:
        return plain_a and plain_b and na.nested_int() == nb.nested_int()
    return bool(na.expr == nb.expr) or _is_replayed(na, nb)


def _is_replayed(a: Any, b: Any) -> bool:
    """Whether one of two traced sizes comes from the replay of a view on fake tensors, the other from its base.

    Such a symbol has no name in a guard; what it stands for is known by the size it was made for.
    """
    env = a.shape_env
    sources = [env.var_to_sources.get(n.expr, ()) for n in (a, b)]
    if not any(of and all(s.is_ephemeral() for s in of) for of in sources):
        return False
    values = [_known_values(env).get(n.expr) for n in (a, b)]
    return values[0] is not None and bool(values[0] == values[1])


# what `tie` needs of a ShapeEnv to take an unknown size out of its books
_UNKNOWN_SIZES = ("size_like", "unbacked_inputs", "pending_fresh_unbacked_symbols")
# Outer sizes that Dynamo is told to take for unknown, since `tie` says at once what they are: a known
# size of 1 would be compiled in. Without these fields: a batch of one component compiles once more.
# torch 2.11 and 2.12 look at such a size before it is tied, and refuse.
_TIES_UNKNOWN = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
UNKNOWN_DIMS: set[int] = (
    {0} if _TIES_UNKNOWN and all(hasattr(ShapeEnv(), f) for f in _UNKNOWN_SIZES) else set()
)


def _known_values(env: ShapeEnv) -> Any:
    """What the symbols of a trace were in the batch it was made for."""
    found = getattr(env, "backed_var_to_val", None)
    return env.var_to_val if found is None else found  # the older name


def tie(outer: Any, inner: Any) -> None:
    """Makes a traced outer size an alias of the inner size it is derived from.

    Dynamo tracks sources of inner tensors only; without this, guards on outer sizes are lost.
    """
    if isinstance(outer, torch.SymInt) and inner is not None:
        env, symbol = outer.node.shape_env, outer.node._expr
        if not isinstance(inner, torch.SymInt) and symbol in _known_values(env):
            return  # torch compares the two itself, and keeps a guard
        expr = inner.node.expr if isinstance(inner, torch.SymInt) else sympy.Integer(inner)
        if symbol.is_Symbol and symbol not in env.replacements and symbol not in expr.free_symbols:
            for field in _UNKNOWN_SIZES:
                unknown: Any = getattr(env, field, ())
                if symbol in unknown:
                    unknown.remove(symbol)
            env._set_replacement(symbol, expr, "njt: outer size derived from inner size")


# Dynamo compiles sizes of 0 and 1 in. Inner tensors that have one are marked for as long as it describes
# them; a mark that stayed would be guarded on.
_MARKED: list[Tensor] = []


def describing(x: Tensor) -> bool:
    """Whether a compiler that can leave sizes open is about to describe `x`."""
    context = TracingContext.try_get() if UNKNOWN_DIMS else None
    return context is not None and x not in context.tensor_to_context


def leave_open(*dims: tuple[Tensor, set[int]]) -> None:
    """Has the compiler take these sizes for unknown, so that one graph does for all of them."""
    _unmark()
    for x, open_dims in dims:
        if not hasattr(x, "_dynamo_unbacked_indices"):
            x._dynamo_unbacked_indices = open_dims  # type: ignore[attr-defined]
            _MARKED.append(x)


def _unmark() -> None:
    for x in _MARKED:
        del x._dynamo_unbacked_indices  # type: ignore[attr-defined]
    _MARKED.clear()


def answer_for_open_sizes(sizes: tuple[Any, ...], least: int = 0) -> None:
    """Ends the description of a tensor whose sizes are at least `least`, if they are open.

    A program that asks about an open size gets an answer and a guard.
    """
    _unmark()
    for size in sizes:
        if isinstance(size, torch.SymInt):
            env, symbol = size.node.shape_env, size.node._expr
            if symbol in getattr(env, "unbacked_inputs", ()):
                if not isinstance(getattr(env.evaluate_expr, "__self__", None), _Answering):
                    answering = _Answering(env)
                    env.evaluate_expr = answering.evaluate
                    env.guard_or_defer_runtime_assert = answering.check
                env.evaluate_expr.__self__.open.add(symbol)
                # a view has the sizes of its base instead, and nobody misses its own
                env.ignorable_fresh_unbacked_symbols.append(symbol)
                torch._check(size >= least)


class _Answering:
    """What a ShapeEnv with open sizes is asked, answered by the batch at hand, as for known sizes.

    Without it a program that asks is refused, and one that checks fails in its guards.
    """

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        self.ask = env.evaluate_expr
        self.defer = env.guard_or_defer_runtime_assert
        self.open: set[sympy.Basic] = set()

    def evaluate(self, expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        """An answer and a guard where there would be an error."""
        try:
            return self.ask(expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            sizes = {} if self.env.frozen else self._sizes(expr)
            if not sizes:
                raise
        # only now: with known values, questions that take "unknown" for an answer would be guarded on, too
        known = _known_values(self.env)
        known.update(sizes)
        try:
            return self.ask(expr, *args, **kwargs)
        finally:
            for symbol in sizes:
                del known[symbol]

    def check(self, expr: sympy.Basic, *args: Any, **kwargs: Any) -> bool:
        """False at once if the batch at hand does not pass."""
        sizes = self._sizes(expr)
        passes = self.env.simplify(expr).xreplace(sizes).xreplace(_known_values(self.env))
        if sizes and passes is sympy.false:
            return False
        return self.defer(expr, *args, **kwargs)

    def _sizes(self, expr: sympy.Basic) -> dict[sympy.Basic, sympy.Integer]:
        found: dict[sympy.Basic, sympy.Integer] = {}
        asked = self.env.simplify(expr).free_symbols & self.open
        if not asked:
            return found
        context = TracingContext.try_get()
        for x, described in {} if context is None else context.tensor_to_context.items():
            symbols = getattr(described, "shape_env_to_source_to_symbol_cache", {})
            named = symbols.get(id(self.env), {})
            for d in range(x.dim() if type(x) is Tensor else 0):
                source = TensorPropertySource(described.tensor_source, TensorProperty.SIZE, d)
                symbol = named.get(source.name)
                if symbol in asked:
                    found[symbol] = sympy.Integer(x.shape[d])
        return found


def remember_fake_size(source: Tensor, size: Any) -> None:
    """Gives fake offsets the ragged size that the tracer chose for them."""
    if isinstance(source, FakeTensor) and source.nested_int_memo is None:
        source.nested_int_memo = size


@cache
def code_digest() -> str:
    """What identifies this package's code in the key of a compiler cache on disk."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def unseen(make: Callable[[], _T]) -> _T:
    """`make()`, which is called once and its result kept, out of sight of transforms and selective checkpoints.

    A transform's tensors end with it. Checkpoints number the operators of the forward pass and expect the same ones in
    the same order when it runs again.
    """
    if transforming():
        with outside_transforms():
            return make()
    if _NUMBERING and in_dispatch_mode() and not (fake_mode_active() or proxy_tracing()):
        modes = _get_current_dispatch_mode_stack()
        if any(isinstance(mode, _NUMBERING) for mode in modes):
            with _disable_current_modes():
                return make()
    return make()


def proxy_tracing() -> bool:
    """Whether a graph is being recorded below us (AOTAutograd, make_fx, non-strict export)."""
    return _get_mode(_PROXY_MODE) is not None


def unrecorded(size: Any) -> bool:
    """Whether `size` is made of symbols that the graph being recorded can't name."""
    mode = _get_mode(_PROXY_MODE)
    if mode is None or not isinstance(size, torch.SymInt) or not size.node.is_symbolic():
        return False
    tracer = mode.tracer  # type: ignore[attr-defined]
    return not size.node.expr.free_symbols <= tracer.sympy_expr_tracker.keys()


def written_back(x: Tensor) -> bool:
    """Whether `x` is an input of a graph to which its new values are copied at the end, below functionalization."""
    return _get_mode(_FUNCTIONAL_MODE) is not None and mb_unwrap_functional_tensor(x) is x


def fake_mode_active() -> bool:
    """Whether operators run on fake tensors: inside a compiler, or under a FakeTensorMode."""
    return _get_mode(_FAKE_MODE) is not None


def traced(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `f` on fake tensors; it may read numbers from the device that its results don't show.

    Dynamo, which records a call of `f` as one node, would miss them. Recorders below it see each operator.
    """
    with maybe_enable_thunkify():
        out = f(*args, **kwargs)
    mode = _get_mode(_FAKE_MODE)
    env = None if mode is None or proxy_tracing() else mode.shape_env
    if env is not None and env.pending_fresh_unbacked_symbols:
        env.ignorable_fresh_unbacked_symbols.extend(env.pending_fresh_unbacked_symbols)
    return out


def one_node(f: _F) -> _F:
    """`f` as one node of Dynamo's graph: its insides run when the graph is traced further, on real objects.

    So nothing inside is guarded on, and what Dynamo can't follow doesn't stop it.
    """

    @wraps(f)
    def node(*args: Any, **kwargs: Any) -> Any:
        if fake_mode_active():
            return traced(f, args, kwargs)
        return f(*args, **kwargs)

    _mark_cacheable(f"{f.__module__}.{f.__name__}")
    return torch.compiler.allow_in_graph(node)  # type: ignore[return-value]


def never_traced(*functions: Callable[..., Any]) -> None:
    """Has Dynamo leave these functions, and what they call, alone where they run outside of a graph.

    Without it: in eager code between two graphs Dynamo compiles our own insides, piece by piece.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for f in functions:
        set_code_exec_strategy(f.__code__, skip)


def trace_attribute(cls: type, name: str, f: Callable[[Any], Any]) -> None:
    """Has Dynamo trace `f(x)` where a program reads the attribute `name` of a tensor of class `cls`.

    Without it Dynamo reads the attribute of the present batch and compiles its value in.
    """

    def read(variable: Any, tx: Any) -> Any:
        if not isinstance(variable.proxy.node.meta.get("example_value"), cls):
            return None
        return tx.inline_user_function_return(VariableTracker.build(tx, f), [variable], {})

    if VariableTracker is not None:
        setattr(TensorVariable, f"method_attr_{name}", read)


def _mark_cacheable(name: str) -> None:
    """Lets graphs that name one of our functions be kept on disk, as long as our code stays the same.

    Without it such graphs are compiled anew in every process.
    """
    if hasattr(inductor_config, "unsafe_marked_cacheable_functions"):
        known = inductor_config.unsafe_marked_cacheable_functions
        inductor_config.unsafe_marked_cacheable_functions = {**known, name: code_digest()}


class _Noting(FakeTensorMode):
    """Notes which questions about sizes a program asked itself, and which its operators did."""

    def __init__(self) -> None:
        env = ShapeEnv(duck_shape=False)
        super().__init__(shape_env=env, allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.env = env
        self.by_operators: list[Any] = []

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        before = len(self.env.guards)
        try:
            return super().__torch_dispatch__(*args, **kwargs)
        finally:
            self.by_operators += self.env.guards[before:]


def flat_graph(
    f: Callable[..., Any], leaves: list[Any], open_dims: list[set[int]]
) -> torch.fx.Graph:
    """The operators on plain tensors that `f(*leaves)` comes down to, and checks of what `f` found out about sizes.

    Args:
        open_dims: of each leaf, the dims whose sizes become symbols, every one its own.
    """
    mode = _Noting()
    kept = []  # make_fx finds this mode, and the mode what it made of a tensor before, as long as that lives
    for i, (x, dims) in enumerate(zip(leaves, open_dims, strict=True)):
        if isinstance(x, Tensor):
            kinds = [DimDynamic.DYNAMIC if d in dims else DimDynamic.STATIC for d in range(x.dim())]
            context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
            source = ConstantSource(f"input{i}")
            kept.append(mode.from_tensor(x, source=source, symbolic_context=context))

    def inside(*inputs: Any) -> Any:
        return traced(f, inputs, {})

    with mode:
        graph = make_fx(inside, tracing_mode="symbolic")(*leaves).graph
    # who traces the graph again has its operators ask once more
    _check_sizes(graph, [g.expr for g in mode.env.guards if g not in mode.by_operators])
    return graph


def _check_sizes(graph: torch.fx.Graph, conditions: list[sympy.Basic]) -> None:
    """Puts checks of `conditions` before the first operator."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    with graph.inserting_before(inputs[-1].next if inputs else None):
        sizes: dict[Any, Any] = {}
        for node in inputs:
            x = node.meta.get("val")
            for d, n in enumerate(x.shape if isinstance(x, Tensor) else ()):
                if isinstance(n, torch.SymInt):
                    size = graph.call_function(torch.ops.aten.sym_size.int, (node, d))
                    sizes[n.node._expr] = torch.fx.Proxy(size, tracer)
        for condition in conditions:
            if condition.free_symbols <= sizes.keys():
                holds = sympy_interp(PythonReferenceAnalysis, sizes, condition)
                graph.call_function(torch._check, (holds.node,))


def module_of_graph(
    graph: torch.fx.Graph,
    module: torch.nn.Module,
    names: list[str],
    arguments: list[str],
    specs: tuple[Any, Any],
) -> torch.fx.GraphModule:
    """A module that runs `graph` on arguments and parameters as `module` has them.

    Args:
        names: parameters and buffers that the first inputs of the graph are.
        arguments: names of the arguments.
        specs: of the arguments, whose leaves are the other inputs, and of the result.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    for node, name in zip(inputs, names):
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.create_node("get_attr", name))
        graph.erase_node(node)
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(arguments, *specs)))
    return torch.fx.GraphModule(module, graph)


def compiler_at_work() -> bool:
    """Whether a compiler is tracing or describing tensors, in any of its stages."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


_DESCRIBER = getattr(MetaTensorDescriber.describe_tensor, "__code__", None)


def asked_by_describer() -> bool:
    """Whether the question comes from torch's description of a tensor of which it is about to make a fake one."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _DESCRIBER:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def operators_run_as_they_are() -> bool:
    """Whether a call may go past the dispatcher: no mode, transform or tangent is active, autograd is in force.

    Should a torch lack one of these questions, the answer is no, and calls take the operators.
    """
    try:
        return (
            torch._C._len_torch_dispatch_stack() == 0
            and torch._C._len_torch_function_stack() == 0
            and not torch._C._are_functorch_transforms_active()
            and not torch._C._dispatch_tls_is_dispatch_key_excluded(
                DispatchKey.AutogradFunctionality
            )
            and torch.autograd.forward_ad._current_level < 0
        )
    except AttributeError:  # pragma: no cover
        return False


# the attribute by which Dynamo knows dims that vary, without a guard on it; torch 2.11 has the other name
DYNAMIC_DIMS = (
    "_dynamo_propagated_dynamic_indices"
    if hasattr(_runtime_wrappers, "mark_dynamo_propagated_dynamic_indices")
    else "_dynamo_weak_dynamic_indices"
)


def mark_dynamic(x: Tensor, dims: set[int]) -> None:
    """Tells Dynamo that these dims vary from batch to batch, as a hint and not as a demand.

    Marks that are there, as on the outputs of compiled graphs, stay.
    """
    marks = getattr(x, DYNAMIC_DIMS, None)
    if marks is None or not dims <= marks:
        setattr(x, DYNAMIC_DIMS, set(dims) if marks is None else dims | marks)


def in_backward() -> bool:
    """Whether the autograd engine is running the present code."""
    return torch._C._current_graph_task_id() != -1


def adding_up_a_gradient() -> bool:
    """Whether the autograd engine is at a leaf that has a gradient, to which it adds another."""
    adds_up = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
    return isinstance(torch._C._current_autograd_node(), adds_up)


def redispatch_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a composite operator's own decomposition with autograd on; NotImplemented if it has none."""
    for key in COMPOSITE_KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            with torch.overrides.enable_reentrant_dispatch():
                return func._op_dk(key, *args, **kwargs)
    return NotImplemented


def has_composite(func: Any) -> bool:
    """Whether `redispatch_composite` would find a decomposition."""
    if not torch._C._dispatch_has_kernel(func.name()):  # known to the JIT alone, as aten::size
        return False
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in COMPOSITE_KEYS
    )


def operator_names() -> list[str]:
    """Every operator that the dispatcher knows, as "namespace::name.overload"."""
    return torch._C._dispatch_get_all_op_names()


def register_inductor_decomposition(overload: Any, decomposition: Any) -> bool:
    """Gives inductor, and no other backend, a decomposition; without its table the operator stays a call.

    Where the decomposition returns NotImplemented the operator stays a call as well, which inductor is told apart.
    Imports inductor, which takes seconds: to be called when something is compiled, not before.
    """
    try:
        inductor = importlib.import_module("torch._inductor.decomposition")
    except ImportError:  # pragma: no cover
        return False
    inductor.decompositions[overload] = decomposition
    make_fallback = getattr(
        importlib.import_module("torch._inductor.lowering"), "make_fallback", None
    )
    if make_fallback is not None:
        make_fallback(overload, warn=False, override_decomp=True)
    # a copy of the table may have been made by a compilation before
    cached = getattr(inductor, "fast_random_decomps", None)
    getattr(cached, "cache_clear", lambda: None)()
    return True


def version(x: Tensor) -> int:
    """How often `x` was written to, as autograd counts; tensors that it does not watch are never written."""
    return 0 if x.is_inference() else x._version


def is_zero_tensor(x: Tensor) -> bool:
    """Whether `x` is a gradient of zeros without memory, which some operators can't take."""
    return x._is_zerotensor()


def check_later(condition: Tensor, text: str) -> None:
    """Raises with `text` if `condition` is False, when its device comes to it, also from inside a graph.

    Without it: operands of other lengths are not noticed in a graph.
    """
    torch._assert_async(condition, text)


def profiling() -> bool:
    """Whether a profiler runs, which wants to see operators."""
    return torch.autograd.profiler._is_profiler_enabled


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """One product a group of rows; public in newer versions."""
    public = getattr(F, "grouped_mm", None)
    return torch._grouped_mm(a, b, offs=offs) if public is None else public(a, b, offs=offs)


# ---- transforms of functions ----------------------------------------------------------------------------------------
# torch.func and forward mode see dense operators only. So it is the values of a nested tensor that they wrap and
# follow; operators on wrappers are brought past them, and what is then done to the values is in their sight again.

functorch_active = torch._C._are_functorch_transforms_active
_forward_ad = torch.autograd.forward_ad


def transforming() -> bool:
    """Whether torch.func (grad, vmap, jvp) or a level of forward mode is at work."""
    return functorch_active() or _forward_ad._current_level >= 0


def _keys(*names: str) -> DispatchKeySet:
    found = DispatchKeySet(DispatchKey.Undefined)
    for name in names:
        found = found.add(getattr(DispatchKey, name))
    return found


_TRANSFORMS = _keys(
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchGradWrapper",
    "FuncTorchBatched",
    "FuncTorchBatchedDecomposition",
    "FuncTorchVmapMode",
)
_AUTOGRAD = _keys(
    "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"
)


_LAZY_BITS = _keys("Conjugate", "Negative")


def lazy_bits_resolved() -> Any:
    """A context below `__torch_dispatch__` in which operators see that a tensor is a conjugate or negative view."""
    return torch._C._ForceDispatchKeyGuard(
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set() - _LAZY_BITS,
    )


def outside_transforms() -> Any:
    """A context in which operators on plain tensors are run as if no transform were at work."""
    return torch._C._ExcludeDispatchKeyGuard(_TRANSFORMS)


class _OnWrappers(TorchDispatchMode):
    """Brings every operator of a C++ function past transforms and autograd to `run`, which is in their sight again."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run
        self.seen = (
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set(),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._ForceDispatchKeyGuard(*self.seen), torch._C._EnableTorchFunction():
            return self.run(func, args, kwargs or {})


def call_on_wrappers(
    func: Callable[..., Any], args: Any, kwargs: Any, run: Callable[..., Any]
) -> Any:
    """`func`, of whose operators each is given to `run(operator, args, kwargs)`, past transforms and autograd."""
    mode = _OnWrappers(run)
    with (
        no_torch_function(),
        torch._C._ExcludeDispatchKeyGuard(_TRANSFORMS | _AUTOGRAD),
        mode,
    ):
        return func(*args, **kwargs)


def decompose_on_wrappers(func: Any, args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
    """`call_on_wrappers` for the decomposition of a composite operator; NotImplemented if it has none."""
    for key in COMPOSITE_KEYS:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return call_on_wrappers(partial(func._op_dk, key), args, kwargs, run)
    return NotImplemented


# where a kernel meets torch.func before its transforms do
UNDER_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"


def wants_gradient(args: tuple[Any, ...]) -> bool:
    """Whether autograd records an operator with these arguments."""
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


def below_autograd(op: OpOverload, keyset: DispatchKeySet, args: Any) -> Any:
    """Goes on from a kernel of key Autograd to the operator's kernel for its device."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def with_defaults(op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args` with the defaults that the dispatcher has left out."""
    return (*args, *(a.default_value for a in op._schema.arguments[len(args) :]))


def is_view(x: Tensor) -> bool:
    """Whether autograd knows `x` as a view of another tensor."""
    return x._is_view()


def is_transformed(x: Tensor) -> bool:
    """Whether `x` belongs to a transform of torch.func."""
    return _functorch.is_functorch_wrapped_tensor(x)


def is_batched(x: Tensor) -> bool:
    """Whether torch.func.vmap has a dim of `x` in hand, at any level."""
    while is_transformed(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def untransformed(x: Tensor) -> Tensor:
    """The plain tensor under all wrappers of torch.func."""
    while is_transformed(x):
        x = _functorch.get_unwrapped(x)
    return x


def tangents_are_dropped(x: Tensor) -> bool:
    """Whether `x` has a tangent that no operator follows at present, as inside of an autograd.Function."""
    return (
        _forward_ad._current_level >= 0
        and not torch._C._is_fwd_grad_enabled()
        and torch._VF._unpack_dual(x, level=0)[1] is not None  # type: ignore[attr-defined]
    )


def following_tangents() -> Any:
    """A context in which operators follow tangents, which torch turns off around an autograd.Function's jvp."""
    return _forward_ad._set_fwd_grad_enabled(True)


# what an autograd.Function becomes under torch.func
custom_function_call = _autograd_function.custom_function_call

make_dual, unpack_dual = torch._VF._make_dual, torch._VF._unpack_dual  # type: ignore[attr-defined]

# what `teach_transforms` replaces, by the module that looks the name up
_TRANSFORM_DOORS = {
    "torch._functorch.eager_transforms": (
        "_wrap_for_grad",
        "_unwrap_for_grad",
        "_wrap_functional_tensor",
        "_autograd_grad",
        "_chunked_standard_basis_for_",
    ),
    "torch._functorch.vmap": ("_add_batch_dim", "_remove_batch_dim", "is_batchedtensor"),
    "torch._functorch.autograd_function": ("_unwrap_for_grad", "_add_batch_dim"),
}


def teach_transforms(kind: type, ours: dict[str, Callable[..., Any]]) -> None:
    """Has torch.func take tensors of class `kind`: `ours` holds, by "module.name", what a function does to one.

    Each is called as `ours(torch's function, x, ...)` where `x` or what follows it is such a tensor, or holds one.
    Without a name in torch: that transform fails on nested tensors.
    """
    for module, names in _TRANSFORM_DOORS.items():
        home = importlib.import_module(module)
        for name in names:
            dense = getattr(home, name, None)
            if dense is not None and not hasattr(dense, "njt_door"):
                setattr(home, name, _taught(dense, kind, ours[f"{home.__name__[17:]}.{name}"]))


def _taught(dense: Any, kind: type, ours: Callable[..., Any]) -> Any:
    def concerns(x: Any) -> bool:
        return type(x) is kind or (type(x) in (tuple, list) and any(type(e) is kind for e in x))

    def door(x: Any, *args: Any, **options: Any) -> Any:
        if concerns(x) or (args and concerns(args[0])):
            return ours(dense, x, *args, **options)
        return dense(x, *args, **options)

    door.njt_door = True  # type: ignore[attr-defined]
    return door


# ---- doors ----------------------------------------------------------------------------------------------------------
# Some functions of torch refuse a nested tensor before they call anything that it could answer. A door in front of such
# a function gives calls with a nested argument to us; all others go on as before. Where torch leaves no place for a
# door (False is returned) that refusal stays, and nothing else changes.


def _any_of(kind: type, args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    return any(isinstance(a, kind) for a in (*args, *options.values()))


def _through_door(*args: Any, _door: Callable[..., Any], **options: Any) -> Any:
    return _door(*args, **options)


def door_in_function(function: Any, kind: type, ours: Callable[..., Any]) -> bool:
    """Puts a door into a plain Python function, for programs that imported it before us as well.

    The function object stays, its code moves to a copy: needs a function with code and no free variables.
    """
    if not isinstance(function, FunctionType) or function.__code__.co_freevars:
        return False
    if function.__code__ is _through_door.__code__:
        return True  # it is there already
    dense = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    dense.__kwdefaults__ = function.__kwdefaults__

    def door(*args: Any, **options: Any) -> Any:
        return (ours if _any_of(kind, args, options) else dense)(*args, **options)

    function.__signature__ = signature(function)  # type: ignore[attr-defined]
    function.__code__, function.__defaults__ = _through_door.__code__, None
    function.__kwdefaults__ = {"_door": door}
    return True


def door_in_forward(module: type, kind: type, ours: Callable[..., Any]) -> bool:
    """Puts a door before the `forward(query, key, value, ...)` of a class of modules.

    TorchScript, which reads source and names through `__wrapped__`, does not see it.
    """
    original = getattr(module, "forward", None)
    if not isinstance(original, FunctionType):
        return False
    if hasattr(original, "njt_door"):
        return True  # it is there already

    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(query, kind) or isinstance(key, kind) or isinstance(value, kind):
            return ours(self, query, key, value, *args, **kwargs)
        return original(self, query, key, value, *args, **kwargs)

    # in the globals of torch's module, where the source that TorchScript finds through __wrapped__ looks for names
    moved = FunctionType(
        forward.__code__, original.__globals__, "forward", forward.__defaults__, forward.__closure__
    )
    update_wrapper(moved, original)
    moved.njt_door = True  # type: ignore[attr-defined]
    module.forward = moved  # type: ignore[attr-defined]
    return True
