"""What becomes of a torch that lacks the private parts that the simulated device stands on."""

import ctypes
import json
import subprocess
from pathlib import Path

import pytest
from support.ready_python import ready_python

torch = pytest.importorskip("torch")

from ampmem.simulator.private import general  # noqa: E402

CPU_BUILD = {
    "registry": "general._REGISTRY = 'no_such_symbol'",
    "register": "general._REGISTER = 'no_such_symbol'",
}
"""Needed in CPU builds of torch alone: a CUDA build registers a device of its own."""
MISSING = {
    "ensure": "del torch._C._ensureCUDADeviceGuardSet",
    "hooks": "general._CUDA_HOOKS = 'no_such_symbol'",
    "yes": "general._YES = 'no_such_symbol'",
    "slots": "general._SLOTS = 0",
    "elsewhere": "general._lies_in = lambda *_, **__: False",
    "selftest": "from ampmem.simulator import start; start._train = lambda: 1 / 0",
    "accelerator": "del torch._C._accelerator_getAccelerator",
    "foreach": "del general.torch_optimizer._foreach_supported_types",
    "fallback": "del general.fake_tensor.run_fallback_kernel",
    "swap": "del torch.__future__.set_swap_module_params_on_conversion",
    "holders": "del torch._C._storage_Use_Count",
    "tasks": "del torch._C._current_graph_task_id",
    "node": "del torch._C._current_autograd_node",
    "streams": "del torch._C._autograd._get_sequence_nr",
    "context": "del general.fake_tensor.init_gpu_context",
    "threads": "del torch._C._is_multithreading_enabled",
    "below": "del torch._C._DisableTorchDispatch",
    "composite": "del torch._C._dispatch_has_kernel_for_dispatch_key",
    "stance": "import torch._dynamo; del torch._dynamo.eval_frame._callback_from_stance",
    "layers": "del torch.nn.RNNBase.flatten_parameters",
    "swapping": "del torch.utils.swap_tensors",
    "lists": "del torch.library.Library.impl",
    "TorchScript": "import torch.jit._builtins; del torch.jit._builtins._get_builtin_table",
    "constructors": "import torch.utils._device; del torch.utils._device._device_constructors",
    "collective": "import torch.distributed; del torch._C._distributed_c10d._create_work_from_future",
    "verify": "import torch.distributed; del torch.distributed._verify_params_across_processes",
    "hook": "import torch.distributed; del torch.distributed._register_comm_hook",
    "built-in hook": "import torch.distributed; del torch.distributed._register_builtin_comm_hook",
    "timer": "import torch.distributed; del torch.distributed.Reducer.prepare_for_forward",
    "times": "import torch.distributed; del torch.distributed.Logger.set_runtime_stats_and_log",
    "stages": "from torch.distributed import pipelining; del pipelining.PipelineStage._send_meta",
    "meshes": "del torch._C._get_accelerator",
    "index": "del torch._C._accelerator_setDeviceIndex",
    "shapes": "from torch.distributed.tensor import _sharding_prop as p; "
    "del p.ShardingPropagator._propagate_tensor_meta_non_cached",
    "nobody": "sys.modules['torch.testing._internal.distributed.fake_pg'] = None; "
    "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('ampmem.simulator.private.comm')]",
    "import": "del sys.modules['torch._subclasses.fake_tensor'].UnsupportedOperatorException",
}
OUR_FAULT = {"patches": "from ampmem.simulator.torch_cuda import unsupported; del unsupported.replace_all"}
"""What no torch can be at fault for."""
REFUSED = """
import ctypes, gc, json, os, sys
from pathlib import Path
import torch
import torch._dynamo  # which takes seconds, and not in each child
import torch.distributed.fsdp, torch.distributed.optim, torch.distributed.pipelining  # likewise
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from ampmem.cli.main import main
from ampmem.simulator import start
from ampmem.simulator.private import general

hooks = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))[general._CUDA_HOOKS]
hooks.restype = ctypes.c_void_p

def now():
    owners = (torch, torch.cuda, torch.cuda.memory, torch.cuda.random, torch.accelerator, torch.distributed)
    kept = [{name: value for name, value in vars(owner).items() if callable(value)} for owner in owners]
    del kept[0]["manual_seed"]  # torch._dynamo replaces it when it is imported
    table = ctypes.c_void_p.from_address(hooks()).value
    return kept, table, torch.Tensor.pin_memory, general.FakeTensor.__format__, len(_get_current_dispatch_mode_stack())

gc.collect()
gc.freeze()  # or each child would copy all of torch to look for garbage in it
for name, damage in json.loads(sys.argv[1]).items():
    child = os.fork()  # the guard cannot be taken away, so each tries in a process of its own
    if not child:
        exec(damage)
        if name == "import":
            ours = ("ampmem.cli", "ampmem.recorder", "ampmem.simulator")
            for module in [each for each in sys.modules if each.startswith(ours)]:
                del sys.modules[module]
        before = now()
        sys.argv[1:] = ["profile", "--device", "sim", "--world-size", "2", "train.py"]
        print(name, end="\\t", file=sys.stderr, flush=True)
        code = None
        try:
            main()
        except SystemExit as error:
            code = error.code
        print(f"{code} {now() == before}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_a_torch_without_them_is_refused_in_one_line_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')\n")
    missing = MISSING if torch.backends.cuda.is_built() else MISSING | CPU_BUILD
    command = [ready_python(), "-c", REFUSED, json.dumps(missing | OUR_FAULT)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    messages = dict(line.split("\t", 1) for line in done.stderr.splitlines())
    assert list(messages) == [*missing, *OUR_FAULT], done.stderr
    assert messages.pop("patches") == (
        f"ampmem: the simulation could not be started with torch {torch.__version__}: NameError: name 'replace_all' "
        "is not defined. This is an error inside ampmem, not in the script; please report it. --device cpu measures "
        "on the CPU instead"
    )
    for name, message in messages.items():
        assert message.startswith("ampmem: this build of torch ("), (name, message)
        assert "--device cpu measures on the CPU instead" in message
    assert done.stdout.splitlines() == ["2 True"] * len(missing) + ["1 True"] * len(OUR_FAULT)
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


def test_where_an_address_lies() -> None:
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    function = ctypes.cast(library[general._YES], ctypes.c_void_p).value or 0
    assert general._lies_in((function,), "x", of_torch=True)
    assert not general._lies_in((function, 8), "x", of_torch=True)
    assert not general._lies_in((function,), "rw")
    foreign = ctypes.cast(ctypes.pythonapi.Py_IncRef, ctypes.c_void_p).value or 0
    assert general._lies_in((foreign,), "x")
    assert not general._lies_in((foreign,), "x", of_torch=True)
    assert general._lies_in((ctypes.addressof(ctypes.c_long(1)),), "rw")
