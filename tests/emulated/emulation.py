"""Builds the emulated CUDA runtime for the torch of an environment: PyTorch's own CUDA build, without a GPU.

    python tests/emulated/emulation.py [--torch 2.14.1 | ENVIRONMENT] [--install [--minutes 6]] [--list]

ENVIRONMENT is the folder of a virtual environment with a CUDA build of torch, which need not be the one that runs this.
Left out, it is torch-VERSION in the cache folder: $AMPMEM_EMULATED, or ~/.cache/ampmem/emulated. --install makes it
there where it is not there yet: 4.9 to 5.6 GB for torch 2.11 to 2.15. The library comes into a folder of ENVIRONMENT's
for these sources, since other checkouts may use the same environment; `run.py` starts programs on it. gcc, nm and the
headers that come with torch's own dependencies are all that it takes. Where a tool, the network or room on the disk is
missing, or pip takes longer than --minutes, one line says so and the exit code is 77.

Every function of CUDA's libraries that this torch asks for is one of these, and --list names them:

- written by hand, in runtime.c and libraries.c;
- harmless: it does nothing and says that all went well (HARMLESS below says which, and why that is right);
- missing: it ends the process with its name.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH = "2.14.1"
LIBRARY = "libemulatedcuda.so"
BESIDES = ("click", "tabulate", "jinja2", "plotly", "numpy", "pytest", "hypothesis", "nvidia-ml-py", "expecttest")
"""What ampmem and its tests need beside torch."""
NEEDS_GB = 12
"""Free room on the disk without which an environment is not begun: 5.6 for the largest, and pip's copies meanwhile."""
CANNOT = 77
"""The exit code where an environment cannot be made here: what needs it is to be skipped."""

_ASKING = ("c10_cuda", "torch_cuda", "torch_cuda_linalg", "torch_python", "torch_nvshmem", "torch_cpu", "caffe2_nvrtc")
"""torch's libraries that ask CUDA's for something."""
_OF_CUDA = re.compile(
    r"(__)?(cuda|cublas|cudnn|cusparse|cusolver|cufft|curand|cupti|nccl|nvml)[A-Z_]|cuFile|cu[A-Z]|nvshmem"
)
"""NVRTC is not among them: it compiles without a GPU."""

HARMLESS: dict[str, str] = {
    "computes on the device, where nothing is computed": r"""
        cublas[SDCZHI][a-z0-9]+(_v2|Batched|StridedBatched|Ex)? cublas\w*Gemm\w* cublasDotEx cublasLtMatmul
        cublas[SG]et(Matrix|Vector)Async cudaMemcpyToSymbol cuTensorMapEncodeTiled
        cudnn(Convolution|BatchNormalization|Pooling|SpatialTf)\w*(Forward|Backward)\w*
        cudnnRNN(Forward|Backward)\w* cudnnCTCLoss(_v8)? cufftXtExec""",
    "sets what only its own library reads": r"""
        cublasSet\w+ cublasLt\w+SetAttribute cublasLtMatmulAlgoInit cudnnSet\w+
        cudnnBackend(SetAttribute|Finalize) cusparseSet\w+ cusparseDnMatSet\w+ cusolverDnSet\w+ cufftSet\w+""",
    "ends what costs nothing": r"""
        (cublas|cublasLt|cudnn|cusparse|cusolverDn|cufft)\w*Destroy\w* nccl\w*(Destroy|Abort|Finalize|Deregister|Revoke)
        cuFile\w*Deregister""",
    "gives a handle, which the stub makes": r"(cublas|cublasLt|cudnn|cusparse|cusolverDn|cufft)\w*Create\w*",
    "speaks of groups, windows and memory of communicators, which have none": r"""
        ncclGroup(Start|End|SimulateEnd) ncclCommRegister ncclCommWindowRegister ncclCommMemStats ncclCommSuspend
        ncclCommResume""",
    "is told what to trace, or whom to tell; there is nothing": r"cupti\w+ cuLogs(Register|Unregister)Callback",
    "is a property that the emulation does not have": r"""
        cudaFuncSetAttribute cudaFuncSetCacheConfig cudaKernelSetAttributeForDevice cudaDeviceSetLimit
        cudaSetDeviceFlags cudaMemPoolSet\w+ cudaMemPoolTrimTo cudaDeviceSetGraphMemAttribute
        cudaProfiler(Start|Stop) cudaLibraryUnload cudaStreamUpdateCaptureDependencies cuMemAdvise""",
}
"""Why doing nothing is right, and the functions, as regular expressions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The functions that a torch asks for, by what becomes of them."""

    written: frozenset[str]
    harmless: frozenset[str]
    missing: frozenset[str]


def cache() -> Path:
    """The folder that has the environments."""
    return Path(os.environ.get("AMPMEM_EMULATED") or Path.home() / ".cache/ampmem/emulated").expanduser()


def environment(version: str) -> Path:
    """The environment with that torch."""
    return cache() / f"torch-{version}"


def packages(where: Path) -> Path:
    """The environment's site-packages; raises ``SystemExit`` where there is no CUDA build of torch in it."""
    found = next(where.glob("lib/python3*/site-packages"), None)
    if found is None or not (found / "torch/lib/libtorch_cuda.so").exists():
        sys.exit(f"{where} has no CUDA build of torch; --install makes it, or: {where}/bin/pip install torch=={TORCH}")
    return found


class CannotInstall(Exception):
    """An environment cannot be made on this machine; the message says why."""


def is_installed(where: Path, version: str) -> bool:
    """Whether that torch and everything else is there; pip writes what is installed last."""
    found = {path.name.lower().replace("_", "-") for path in where.glob("lib/python3*/site-packages/*.dist-info")}
    wanted = [f"torch-{version}", *(f"{name}-" for name in BESIDES)]
    return all(any(name.startswith(each) for name in found) for each in wanted)


def install(where: Path, version: str, minutes: float | None = None) -> None:
    """Make the environment: torch's CUDA build as pip has it, and what ampmem needs.

    Raises :class:`CannotInstall` where a tool, the network or room on the disk is missing, and where pip takes more
    than ``minutes``; another try goes on with what pip has downloaded.
    """
    missing = [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]
    if missing:
        raise CannotInstall(f"not installed: {', '.join(missing)}")
    if is_installed(where, version):
        return
    where.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(where).free / 1e9
    if free < NEEDS_GB:
        raise CannotInstall(f"{where} has {free:.1f} GB of free room, {NEEDS_GB} are needed")
    # Three equals signs: "==2.13.0" takes 2.13.0+cpu, too, where a machine has both.
    command = [where / "bin/python", "-m", "pip", "install", "--progress-bar", "off", f"torch==={version}", *BESIDES]
    try:
        if not (where / "bin/python").exists():
            venv.create(where, with_pip=True)
        limit = None if minutes is None else 60 * minutes
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"pip took more than {minutes:g} minutes to install torch {version}") from None
    if done.returncode:
        sys.stderr.write(done.stderr)
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [f"exit {done.returncode}"]
        raise CannotInstall(f"pip cannot install torch {version}: {said[-1].removeprefix('ERROR: ')}")
    if not any(where.glob("lib/python3*/site-packages/torch/lib/libtorch_cuda.so")):
        raise CannotInstall(f"pip has only a CPU build of torch {version}")


def folder_of(where: Path) -> Path:
    """Where the library made of these sources comes for the torch in ``where``."""
    sources = sorted([*HERE.glob("*.[ch]"), HERE / "emulation.py"])
    key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return where / "emulated" / key[:12]


def plan(site: Path) -> Plan:
    """What becomes of each function that the torch in ``site`` asks for."""
    asked: set[str] = set()
    for name in _ASKING:
        library = site / f"torch/lib/lib{name}.so"
        if library.exists():
            asked |= {symbol for symbol in _symbols(library, "--undefined-only") if _OF_CUDA.match(symbol)}
    # libcuda and libnvidia-ml are opened by name and asked for any of their functions.
    header = (_include(site) / "cuda.h").read_text(encoding="utf-8", errors="replace")
    asked |= set(re.findall(r"\bCUDAAPI\s+(cu\w+)\(", header))
    written = set(re.findall(r"^(?:\w[\w \*]*?)\b((?:__)?(?:cu|nccl|nvml)\w+)\(", _sources(), re.M))
    rest = asked - written
    pattern = re.compile("|".join(f"(?:{each})" for text in HARMLESS.values() for each in text.split()))
    harmless = {name for name in rest if pattern.fullmatch(name)}
    return Plan(written=frozenset(written), harmless=frozenset(harmless), missing=frozenset(rest - harmless))


def build(where: Path) -> tuple[Path, Plan]:
    """Compile the library for the torch in the environment ``where``; the library, and what is in it."""
    site = packages(where)
    folder = folder_of(where)
    folder.mkdir(parents=True, exist_ok=True)
    planned = plan(site)
    stubs = folder / f"stubs.{os.getpid()}.c"
    stubs.write_text("\n".join(_stubs(planned)), encoding="utf-8")
    # crt/ is not among the headers of every version; triton has a copy of all of them.
    headers = [_include(site), site / "nvidia/cudnn/include", site / "nvidia/nccl/include"]
    headers += [*site.glob("nvidia/cuda_crt/include"), site / "triton/backends/nvidia/include", HERE]
    library = folder / LIBRARY
    fresh = folder / f"{LIBRARY}.{os.getpid()}"  # programs may run on the one that is there
    command = ["gcc", "-std=gnu11", "-O1", "-g1", "-shared", "-fPIC", "-Wno-deprecated-declarations", "-o", str(fresh)]
    command += [f"-I{header}" for header in headers]
    command += _launches(site)
    command += [str(HERE / "runtime.c"), str(HERE / "libraries.c"), str(stubs), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    stubs.unlink()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):  # one library under all names: it is one state
        link = folder / f"{name}.{os.getpid()}"
        link.symlink_to(LIBRARY)
        link.replace(folder / name)
    fresh.replace(library)  # last: who finds it finds all of it
    return library, planned


def _launches(site: Path) -> Iterable[str]:
    """How many tensors and blocks a launch of a foreach op has, for runtime.c; nothing from torch 2.14 on."""
    header = site / "torch/include/ATen/native/cuda/MultiTensorApply.cuh"
    text = header.read_text(encoding="utf-8")
    if "int64_t numel_for_tensor[depth_to_max_tensors[n - 1]]" not in text:
        return ()
    many = "{770," in text and "CUDART_VERSION >= 13000" in text and _include(site).parent.name == "cu13"
    sizes = ("770", "2240", "uint16_t") if many else ("110", "320", "unsigned char")
    names = ("TENSORS_OF_A_LAUNCH", "BLOCKS_OF_A_LAUNCH", "TENSOR_OF_A_BLOCK")
    return [f"-D{name}={size}" for name, size in zip(names, sizes, strict=True)]


def _include(site: Path) -> Path:
    found = [*site.glob("nvidia/cu1*/include/cuda.h"), *site.glob("nvidia/cuda_runtime/include/cuda.h")]
    if not found:
        sys.exit(f"{site} has no headers of CUDA (nvidia-cuda-runtime)")
    return found[0].parent


def _symbols(library: Path, which: str) -> Iterable[str]:
    done = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        yield line.split()[-1].split("@")[0]


def _sources() -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("runtime.c", "libraries.c"))


def _stubs(planned: Plan) -> Iterable[str]:
    """One C function for each that is not written; without CUDA's headers, which would rename some of them."""
    yield "void *emulated_handle(void);\nlong emulated_harmless(const char *);"
    yield "void emulated_missing(const char *) __attribute__((noreturn));"
    for name in sorted(planned.harmless):
        if "Create" in name and not name.startswith("cupti"):
            yield f'long {name}(void **out) {{ *out = emulated_handle(); return emulated_harmless("{name}"); }}'
        else:
            yield f'long {name}(void) {{ return emulated_harmless("{name}"); }}'
    for name in sorted(planned.missing):
        yield f'long {name}(void) {{ emulated_missing("{name}"); }}'


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, and say what is not emulated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", nargs="?", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("--torch", default=TORCH, metavar="VERSION", help=f"which environment of the cache ({TORCH})")
    parser.add_argument("--install", action="store_true", help="make the environment where it is not there")
    parser.add_argument("--minutes", type=float, metavar="N", help="give up when pip takes longer")
    parser.add_argument(
        "--list", action="store_true", help="name the functions that are harmless, and those that are missing"
    )
    options = parser.parse_args(arguments)
    where = (options.environment or environment(options.torch)).expanduser().resolve()
    if options.install:
        try:
            install(where, options.torch, options.minutes)
        except CannotInstall as reason:
            print(f"skipped: PyTorch's CUDA build without a GPU: {reason}")
            sys.exit(CANNOT)
    library, planned = build(where)
    print(library)
    counts = f"{len(planned.written)} functions are written, {len(planned.harmless)} do nothing"
    print(f"{counts}, {len(planned.missing)} are not emulated and end the process if they are called")
    families = (
        "cusolver",
        "cusparseLt",
        "cusparse",
        "cufft",
        "cuFile",
        "nvshmem",
        "nccl",
        "cudnn",
        "cublas",
        "cuda",
        "cu",
    )
    left = set(planned.missing)
    for family in families:
        names = sorted(name for name in left if name.startswith(family))
        left -= set(names)
        if names:
            shown = names if options.list else names[:3]
            print(f"  not emulated: {len(names)} of {family}: {', '.join(shown)}{'' if options.list else ', …'}")
    if options.list:
        print("  harmless:", ", ".join(sorted(planned.harmless)))
    print("not emulated at all: values that kernels compute, their times, the workspaces that cuBLAS and cuDNN choose,")
    print("other ranks' data, and other processes on the device; the head of runtime.c has the settings")


if __name__ == "__main__":
    main()
