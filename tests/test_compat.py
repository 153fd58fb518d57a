"""Torch's private parts: what each one is for, so that a torch which lacks one fails here with what breaks."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.masked
from torch import nn

import njt
from njt import _compat
from njt.ops.masked import MASKED

ROOT = Path(__file__).parent.parent
SOURCE = (ROOT / "njt/_compat.py").read_text()

_IMPORT = "njt can't be imported"
_COMPILE = "torch.compile, export and make_fx of nested tensors"
_EXPORT = "njt can't be imported, for the sake of njt.export"
PARTS = {
    "torch.Tensor._make_wrapper_subclass": "nested tensors can't be made",
    "torch.Tensor._version": "writes to offsets are not noticed: bounds and caches go stale",
    "torch.Tensor._is_zerotensor": "gradients of step functions of tensors with gaps",
    "torch._assert_async": "operands of other lengths are not noticed in a graph",
    "torch._grouped_mm": "nothing where F.grouped_mm is public, else grouped products on CUDA",
    "torch._ops.OpOverload": _IMPORT,
    "torch._ops.OpOverload._op_dk": "operators that torch decomposes",
    "torch._ops.OpOverload._schema": _IMPORT,
    "torch._C": _IMPORT,
    "torch._C.DispatchKey": _IMPORT,
    "torch._C.DispatchKeySet": _IMPORT,
    "torch._C.DisableTorchFunctionSubclass": _IMPORT,
    "torch._C._nn": "F.pad in a compiled function",
    "torch._C._nn.pad": "F.pad in a compiled function",
    "torch._C._get_dispatch_mode": _IMPORT,
    "torch._C._TorchDispatchModeKey": _IMPORT,
    "torch._C._TorchDispatchModeKey.FAKE": _IMPORT,
    "torch._C._TorchDispatchModeKey.FUNCTIONAL": _IMPORT,
    "torch._C._TorchDispatchModeKey.PROXY": _IMPORT,
    "torch._C._are_functorch_transforms_active": "torch.func; small calls cost more",
    "torch._C._current_autograd_node": "a second backward into the gradient of a nested leaf",
    "torch._C._functions": _IMPORT,
    "torch._C._functions.AccumulateGrad": _IMPORT,
    "torch._C._current_graph_task_id": "gradients of tensors with gaps in a graph",
    "torch._C._dispatch_get_all_op_names": "`python -m njt.ops`, random operators",
    "torch._C._dispatch_has_kernel": "operators that torch decomposes",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "operators that torch decomposes",
    "torch._C._dispatch_tls_is_dispatch_key_excluded": "nothing but speed of small calls",
    "torch._C._get_tracing_state": _IMPORT,
    "torch._C._is_torch_function_all_disabled": "nested parameters in a compiled function",
    "torch._C._len_torch_dispatch_stack": "nothing but speed of small calls",
    "torch._C._len_torch_function_stack": "nothing but speed of small calls",
    "torch.autograd.forward_ad._current_level": "nothing but speed of small calls",
    "torch.autograd.profiler._is_profiler_enabled": "padding conversions",
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode": _IMPORT,
    "torch.utils._python_dispatch.return_and_correct_aliasing": _IMPORT,
    "torch.utils._python_dispatch._disable_current_modes": "selective checkpoints of code that reads a structure first",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "the same",
    "torch.utils.checkpoint._CachingTorchDispatchMode": "the same",
    "torch.utils.checkpoint._CachedTorchDispatchMode": "the same",
    "torch.nested._internal.nested_tensor": _IMPORT,
    "torch.nested._internal.nested_tensor._tensor_id_counter": "nested tensors can't be made",
    "torch.nested._internal.nested_tensor._tensor_symint_registry": "nested tensors can't be made",
    "torch.nested._internal.nested_int.NestedIntNode": _IMPORT,
    "torch._guards.TracingContext": _IMPORT,
    "torch._inductor.config": _IMPORT,
    "torch._subclasses.fake_tensor.FakeTensor": _IMPORT,
    "torch._subclasses.fake_tensor.FakeTensorMode": _IMPORT,
    "torch._subclasses.functional_tensor.mb_unwrap_functional_tensor": _IMPORT,
    "torch._subclasses.meta_utils.MetaTensorDescriber": _IMPORT,
    "torch._C._dynamo.eval_frame": _IMPORT,
    "torch._C._dynamo.eval_frame._FrameAction": _IMPORT,
    "torch._C._dynamo.eval_frame._FrameExecStrategy": _IMPORT,
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": _IMPORT,
    "torch._dynamo.variables.builder": "nested parameters and buffers of modules in a compiled function",
    "torch._dynamo.variables.builder.tensor_always_has_static_shape": "the same",
    "torch._dynamo.variables.base.VariableTracker": "x.max_seqlen in a compiled function is that of its first batch",
    "torch._dynamo.variables.tensor.TensorVariable": "x.max_seqlen in a compiled function is that of its first batch",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv._set_replacement": _COMPILE,
    "torch.fx.experimental.sym_node.SymNode._expr": _COMPILE,
    f"torch._dynamo.variables.builder.{_compat.DYNAMIC_DIMS}": "every batch is compiled anew",
    "torch._functorch._aot_autograd.runtime_wrappers": _IMPORT,
    "torch._dynamo.guards._dynamo_unbacked_indices": "batches of 0 or 1 components are compiled anew",
    "torch._dynamo.source.ConstantSource": _EXPORT,
    "torch.fx.graph._PyTreeCodeGen": _EXPORT,
    "torch.fx.graph._PyTreeInfo": _EXPORT,
    "torch.utils._pytree": _EXPORT,
    "torch.utils._sympy.interp.sympy_interp": _EXPORT,
    "torch.utils._sympy.reference.PythonReferenceAnalysis": _EXPORT,
    "torch._dynamo.source.TensorProperty": "questions about open sizes in a graph",
    "torch._dynamo.source.TensorPropertySource": "questions about open sizes in a graph",
    "torch._C._AutoDispatchBelowAutograd": "torch.func and forward mode over nested tensors",
    "torch._C._EnableTorchFunction": "torch.func and forward mode over nested tensors",
    "torch._C._ExcludeDispatchKeyGuard": "torch.func and forward mode over nested tensors",
    "torch._C._ForceDispatchKeyGuard": "torch.func and forward mode over nested tensors",
    "torch._C._after_autograd_keyset": "torch.func and forward mode over nested tensors",
    "torch._C._any_requires_grad": "torch.func and forward mode over nested tensors",
    "torch._C._dispatch_tls_local_exclude_set": "torch.func and forward mode over nested tensors",
    "torch._C._dispatch_tls_local_include_set": "torch.func and forward mode over nested tensors",
    "torch._C._functorch": "torch.func and forward mode over nested tensors",
    "torch._C._is_fwd_grad_enabled": "torch.func and forward mode over nested tensors",
    "torch.autograd.forward_ad._set_fwd_grad_enabled": "torch.func and forward mode over nested tensors",
    "torch.Tensor._is_view": "torch.func and forward mode over nested tensors",
    "torch._VF": "torch.func and forward mode over nested tensors",
    "torch._VF._make_dual": "torch.func and forward mode over nested tensors",
    "torch._VF._unpack_dual": "torch.func and forward mode over nested tensors",
    "torch.utils._python_dispatch.TorchDispatchMode": "torch.func and forward mode over nested tensors",
    "torch._functorch.eager_transforms._wrap_for_grad": "one transform of torch.func fails on nested tensors",
    "torch._functorch.eager_transforms._unwrap_for_grad": "one transform of torch.func fails on nested tensors",
    "torch._functorch.eager_transforms._wrap_functional_tensor": "one transform of torch.func fails on nested tensors",
    "torch._functorch.eager_transforms._autograd_grad": "one transform of torch.func fails on nested tensors",
    "torch._functorch.eager_transforms._chunked_standard_basis_for_": "Jacobians by nested tensors are refused by torch's words",
    "torch._functorch.autograd_function": _IMPORT,
    "torch._functorch.autograd_function.custom_function_call": _IMPORT,
    "torch._functorch.vmap._add_batch_dim": "one transform of torch.func fails on nested tensors",
    "torch._functorch.vmap._remove_batch_dim": "one transform of torch.func fails on nested tensors",
    "torch._functorch.vmap.is_batchedtensor": "one transform of torch.func fails on nested tensors",
}  # fmt: skip


def private_names(source: str) -> set[str]:
    """What a file takes from torch under a private name: imports whole, of attributes the last name."""
    found, own = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.startswith("torch")}
        elif isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
            whole = ast.unparse(node)
            found.add(whole if whole.startswith("torch.") else "." + node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add("." + node.name)
    return {n for n in found - own if any(p.startswith("_") for p in n.split(".")[1:])}


def resolve(path: str) -> bool:
    """Whether torch has it: as an attribute, or as a name in the owner's source."""
    parts = path.split(".")
    owner: Any = torch
    for k, part in enumerate(parts[1:], 2):
        if hasattr(owner, part):
            owner = getattr(owner, part)
            continue
        try:
            owner = importlib.import_module(".".join(parts[:k]))
        except ImportError:
            return k == len(parts) and part in _source(owner)
    return True


def _source(owner: Any) -> str:
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):  # of C
        return ""


@pytest.mark.parametrize("path", PARTS)
def test_torch_has(path: str) -> None:
    assert resolve(path), f"torch {torch.__version__} has no {path}. Without it: {PARTS[path]}"


def test_what_torch_lacks_is_noticed() -> None:
    assert not resolve("torch.nested._internal.nowhere")
    assert not resolve("torch._C._no_such_question")
    assert not resolve("torch.Tensor._no_such_attribute")


def test_every_private_part_is_listed() -> None:
    """Whoever uses another one says here what breaks without it."""
    listed = set(PARTS) | {"." + path.rpartition(".")[2] for path in PARTS}
    public = {"._getframe", "torch._check", "torch._check_is_size"}  # Python's own, and documented
    assert private_names(SOURCE) - listed - public == set()
    assert private_names("import torch\ntorch._foo(x._bar)") == {"torch._foo", "._bar"}
    assert private_names("from torch._foo import bar") == {"torch._foo.bar"}


def plain(x: Any, y: int = 1, *, z: int = 2) -> Any:
    return x, y, z


def test_a_door_keeps_the_function() -> None:
    """Calls without a nested argument, the signature, and names imported before stay what they were."""
    before = inspect.signature(plain)
    assert _compat.door_in_function(plain, njt.NestedTensor, lambda *a, **o: ("ours", a, o))
    assert _compat.door_in_function(plain, njt.NestedTensor, lambda *a, **o: "a second door")
    assert plain(0) == (0, 1, 2)
    assert plain(0, 3, z=4) == (0, 3, 4)
    assert plain(x=5) == (5, 1, 2)
    assert inspect.signature(plain) == before
    x = njt.nested_tensor([torch.ones(2)])
    assert plain(x, z=3) == ("ours", (x,), {"z": 3})
    assert plain(x=x) == ("ours", (), {"x": x})
    with pytest.raises(TypeError):
        plain()


def test_no_place_for_a_door() -> None:
    """What a later torch may turn the functions into is left as it is."""
    free = 1
    for function in (None, torch.sin, lambda x: x + free):
        assert not _compat.door_in_function(function, njt.NestedTensor, plain)
    assert not _compat.door_in_forward(object, njt.NestedTensor, plain)


def test_doors_stand() -> None:
    """Should this torch have no place for one: torch.masked, or nn.MultiheadAttention, refuses nested tensors."""
    for name in MASKED:
        function = getattr(torch.masked, name)
        assert _compat.door_in_function(function, njt.NestedTensor, plain), name
        assert "_door" in function.__kwdefaults__
    assert nn.MultiheadAttention.forward.njt_door


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_rest_works_without_doors() -> None:
    """On a torch that leaves no place for a door, and has no public grouped product."""
    done = run("""
import torch, torch.masked
torch.masked.sum = torch.sum
del torch.masked.mean
del torch.nn.MultiheadAttention.forward
torch.nn.functional.__dict__.pop("grouped_mm", None)
import njt
x = njt.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
assert (x * 2).sum(1).tolist() == [[4.0] * 3, [2.0] * 3]
assert torch.masked.amax(x, -1).values().tolist() == [1.0] * 3
""")
    assert done.returncode == 0, done.stderr


def test_without_ragged_sizes() -> None:
    """A torch without its jagged internals is refused at once, by name."""
    blocked = """
import sys, torch
for name in [m for m in sys.modules if m.startswith("torch.nested._internal")]:
    sys.modules[name] = None
import njt
"""
    done = run(blocked)
    assert done.returncode == 1
    assert "ImportError: njt needs torch.nested._internal" in done.stderr
