"""What torch.distributed offers, as one simulated rank: it runs, or stops with the script's line and what to do."""

import json
import subprocess
from pathlib import Path

import pytest
from support.ready_python import ready_python

pytestmark = pytest.mark.slow

RUNNER = Path(__file__).with_name("simulated_scripts.py")

DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
RUNS = {
    "join": DDP + "m = DDP(model, device_ids=[0])\nwith m.join(): train(m)",
    "synchronized buffers": DDP + "train(DDP(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda()))",
    "hook in C++": DDP
    + "m = DDP(model, device_ids=[0])\n"
    + "m._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)\ntrain(m)",
    "PowerSGD": DDP
    + "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power\nm = DDP(model)\n"
    + "m.register_comm_hook(power.PowerSGDState(None, start_powerSGD_iter=2), power.powerSGD_hook)\ntrain(m, steps=4)",
    "mixed precision": DDP
    + "from torch.nn.parallel.distributed import _MixedPrecision\n"
    + "train(DDP(model, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16)))",
    "unused parameters": DDP
    + "model.extra = nn.Linear(64, 64).cuda()\nmodel.forward = lambda x: model[2](model[1](model[0](x)))\n"
    + "train(DDP(model, find_unused_parameters=True))",
    "ZeRO in the hook": DDP
    + "from torch.distributed.optim import ZeroRedundancyOptimizer as Zero\n"
    + "from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step\n"
    + "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook\nm = DDP(model)\n"
    + "zero = Zero(m.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)\n"
    + "m.register_comm_hook(None, hook_with_zero_step(allreduce_hook, m, zero))\ntrain(m, zero, steps=5)",
    "averaged models": "from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager\n"
    + "model(torch.randn(8, 64, device='cuda')).sum().backward()\n"
    + "PeriodicModelAverager(period=1).average_parameters(model.parameters())",
    "functional collectives": "import torch.distributed._functional_collectives as functional\n"
    + "functional.all_gather_tensor(torch.ones(4, 4, device='cuda'), 0, dist.group.WORLD) * 2",
    "spawned": "dist.destroy_process_group()\ndef main(rank, size):\n"
    + "    dist.init_process_group('nccl', rank=rank, world_size=size)\n    train(model)\n"
    + "torch.multiprocessing.spawn(main, args=(2,), nprocs=torch.cuda.device_count())",
    "a store": "store = dist.TCPStore('127.0.0.1', 29511, 2, True)\nstore.set('a', '1')\n"
    + "assert store.get('a') == b'1'\ntrain(model)",
    "barriers": "dist.monitored_barrier(group=dist.new_group(backend='gloo'))\ndist.barrier()\ntrain(model)",
}
SHARD = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard\n"
ON_CPU = "m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8192), nn.Linear(8192, 8))\n"
RUNS |= {
    "moved by FSDP2": SHARD + ON_CPU + "train(fully_shard(m))",
    "moved by FSDP1": SHARD + ON_CPU + "train(FSDP(m, device_id=torch.cuda.current_device()))",
    "bfloat16 hook": DDP
    + "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook\nm = DDP(model)\n"
    + "m.register_comm_hook(None, bf16_compress_hook)\ntrain(m)",
    "checkpoint": "import torch.distributed.checkpoint as checkpoint\n"
    + "checkpoint.save(model.state_dict(), checkpoint_id='nowhere')\n"
    + "checkpoint.async_save(model.state_dict(), checkpoint_id='nowhere').result()\ntrain(model)",
    "compiled": DDP
    + "m = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).cuda())\nc = torch.compile(m)\ntrain(c)",
    "launched": "assert dist.is_torchelastic_launched()\ntrain(model)",
}
STOPS = {
    "another GPU": (DDP + "DDP(model, device_ids=[1])", "train.py:2: only rank 0 is simulated, whose GPU is cuda:0"),
    "remote calls": (
        "import torch.distributed.rpc as rpc\nrpc.init_rpc('a', rank=0, world_size=2)",
        "train.py:2: remote procedure calls need the other processes",
    ),
    "symmetric memory": (
        "import torch.distributed._symmetric_memory as symmetric\nsymmetric.empty(8, device='cuda')",
        "train.py:2: symmetric memory",
    ),
    "ZeRO's whole state": (
        "from torch.distributed.optim import ZeroRedundancyOptimizer as Zero\n"
        "zero = Zero(model.parameters(), torch.optim.SGD, lr=0.1)\nzero.consolidate_state_dict()",
        "train.py:3: the other ranks are not simulated, so their optimizer state",
    ),
    "a traced pipeline": (
        "from torch.distributed.pipelining import pipeline\npipeline(model, (torch.ones(4, 64),))",
        "train.py:2: a pipeline that is traced",
    ),
    "what another rank stores": (
        "store = dist.TCPStore('127.0.0.1', 29511, 2, True)\nstore.get('address')",
        "train.py:2: 'address' is not in the store",
    ),
    "too many processes": (
        "torch.multiprocessing.spawn(print, nprocs=4)",
        "train.py:1: the script starts 4 processes, but the machine of rank 0 has 2 of the 2 simulated ranks",
    ),
    "CUDA graphs": (
        DDP + "torch.compile(DDP(model), mode='reduce-overhead')",
        "train.py:2: the memory of compiled code depends on CUDA graphs",
    ),
    "a checkpoint": (
        "import torch.distributed.checkpoint as checkpoint\ncheckpoint.load({}, checkpoint_id='nowhere')",
        "train.py:2: a distributed checkpoint of another run cannot be loaded",
    ),
    "batch norm over ranks": (
        "norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(64)).cuda()\nnorm(torch.ones(4, 64).cuda())",
        "train.py:2: aten.batch_norm_stats.default has no meta kernel",
    ),
    "sparse gradients": (
        DDP + "DDP(nn.Embedding(8, 8, sparse=True).cuda())(torch.zeros(2, dtype=torch.long, device='cuda'))",
        "train.py:2: sparse gradients cannot be simulated",
    ),
}
STAGE = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
stage = PipelineStage(model, dist.get_rank(), 2, torch.device("cuda", dist.get_rank()){inputs})
run = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
batch = torch.randn(16, 64, device="cuda")
run.step(batch) if dist.get_rank() == 0 else run.step(target=batch)
"""
RECEIVED = """
count = torch.zeros(1, dtype=torch.long, device="cuda")
dist.recv(count, src=1)
torch.empty(int(count) * 1000, device="cuda")
"""
GATHERED = """
count = torch.full((), 17, device="cuda")
counts = [torch.zeros((), dtype=count.dtype, device="cuda") for _ in range(2)]
dist.all_gather(counts, count)
torch.empty(int(counts[1]), dtype=torch.uint8, device="cuda")
dist.all_gather(counts, count * 2)
torch.empty(int(counts[1]), dtype=torch.uint8, device="cuda")
dist.all_gather(counts, count)
counts[1].add_(1)
torch.empty(int(counts[1]), dtype=torch.uint8, device="cuda")
"""
BROADCAST = """
count = torch.full((), 17, device="cuda")
dist.broadcast(count, src=0)
torch.empty(int(count) * 1000, dtype=torch.uint8, device="cuda")
"""
REDUCED = """
def take(count):
    torch.empty(int(count), dtype=torch.uint8, device="cuda")

def reduced(reduce, *how):
    count = torch.full((), 700, device="cuda")
    reduce(count, *how)
    take(count)

reduced(dist.all_reduce)
reduced(dist.all_reduce, dist.ReduceOp.MAX)
reduced(lambda count: dist.all_reduce_coalesced([count]))
reduced(dist.reduce, 0)
reduced(dist.reduce, 1)
reduced(lambda count: dist.group.WORLD.allreduce([count]))
number = torch.tensor([700.0], device="cuda")
dist.all_reduce(number, dist._make_nccl_premul_sum(2.0))
take(number)
"""
FUNCTIONAL = """
import torch.distributed._functional_collectives as functional
x = torch.empty(1 << 20, device="cuda", requires_grad=True)
gathered = functional.all_gather_tensor(x.detach(), 0, dist.group.WORLD)
functional.wait_tensor(gathered)
reduced = functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD)
reduced.add_(1)
"""

Outcome = list[int] | str


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """What became of each."""
    pieces: dict[str, tuple[int, int, str]] = {name: (0, 2, code) for name, code in RUNS.items()}
    pieces |= {name: (0, 2, code) for name, (code, _) in STOPS.items()}
    pieces |= {f"{size} ranks": (0, size, DDP + "train(DDP(model))") for size in (8, 4096)}
    pieces["first stage"] = (0, 2, STAGE.format(inputs=""))
    pieces["last stage"] = (1, 2, STAGE.format(inputs=""))
    pieces["last stage, told"] = (1, 2, STAGE.format(inputs=", input_args=torch.empty(4, 64)"))
    pieces["gathered"] = (0, 2, GATHERED)
    pieces["functional"] = (0, 2, FUNCTIONAL)
    pieces["received"] = (0, 2, RECEIVED)
    pieces |= {f"broadcast, rank {rank}": (rank, 2, BROADCAST) for rank in (0, 1)}
    pieces["reduced"] = (0, 2, REDUCED)
    done = subprocess.run(
        [ready_python(), str(RUNNER)], input=json.dumps(pieces), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Outcome] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_it_runs(outcomes: dict[str, Outcome], name: str) -> None:
    assert isinstance(outcomes[name], list), outcomes[name]
    assert outcomes[name]


@pytest.mark.parametrize("name", STOPS)
def test_it_stops_with_the_line_and_what_to_do(outcomes: dict[str, Outcome], name: str) -> None:
    message = outcomes[name]
    assert isinstance(message, str)
    assert message.startswith(STOPS[name][1]), message
    assert name != "batch norm over ranks" or message.endswith("leave convert_sync_batchnorm out")
    assert "; " in message  # what to do comes after it
    assert "\n" not in message


def test_ddp_takes_the_same_beside_four_thousand_others(outcomes: dict[str, Outcome]) -> None:
    """But for the numbers that it compares when it is made: one from each rank."""
    few, many = outcomes["8 ranks"], outcomes["4096 ranks"]
    assert isinstance(few, list) and isinstance(many, list)
    assert few.count(8) - 8 == many.count(8) - 4096
    assert [size for size in few if size not in (8, 8 * 8)] == [size for size in many if size not in (8, 4096 * 8)]


def test_a_stage_needs_to_be_told_what_comes_from_another_rank(outcomes: dict[str, Outcome]) -> None:
    assert isinstance(outcomes["first stage"], list), outcomes["first stage"]
    assert isinstance(outcomes["last stage, told"], list), outcomes["last stage, told"]
    message = outcomes["last stage"]
    assert isinstance(message, str)
    assert message.startswith("train.py:6: stage 1 of the pipeline gets its inputs from stage 0, which runs on another")
    assert "give PipelineStage its input_args=" in message


def test_a_number_that_another_rank_sends_is_not_what_was_there_before(outcomes: dict[str, Outcome]) -> None:
    """It is taken as 1, with a warning, like any other that the device would have."""
    assert outcomes["received"] == [8, 4000]
    assert outcomes["broadcast, rank 0"] == [8, 17_000]
    assert outcomes["broadcast, rank 1"] == [8, 1000]


def test_what_a_reduction_leaves_is_what_it_makes_of_the_same_from_each_rank_or_not_known(
    outcomes: dict[str, Outcome],
) -> None:
    """What is not known is taken as 1: on a rank to which nothing is reduced, and of a method that does not say how."""
    found = outcomes["reduced"]
    assert isinstance(found, list), found
    assert [size for size in found if size not in (8, 4)] == [1400, 700, 1400, 1400, 1, 1, 1]


def test_waiting_for_a_collective_makes_no_second_result(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["functional"] == [4 << 20, 8 << 20, 4 << 20]


def test_what_is_gathered_is_what_this_rank_has(outcomes: dict[str, Outcome]) -> None:
    """Where that is known; else it is taken as 1, and never as what was there before."""
    sizes = outcomes["gathered"]
    assert isinstance(sizes, list), sizes
    assert [size for size in sizes if size in (1, 17, 34)] == [17, 34, 1]
