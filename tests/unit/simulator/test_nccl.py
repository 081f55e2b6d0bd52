"""What NCCL keeps for itself, from the sizes in its sources; and which communicators a script would have."""

from collections.abc import Mapping

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from ampmem.allocator.settings import KIB, MIB  # noqa: E402
from ampmem.simulator.communication.nccl import Communicator, Connections, least, most  # noqa: E402

HOPPER, AMPERE = (9, 0), (8, 0)
LOCAL = 10 * MIB + 2 * MIB
"""To receive: 4 MiB + 4.7 MiB + 512 KiB and a page, in pieces of 2 MiB; to send: a page."""
NETWORK = 2 * 10 * MIB
NVLS = 2 * 16 * 8 * 8 * 128 * KIB


def tables(channels: int) -> int:
    return (3 * channels + 4) * 2 * MIB


def group(ranks: int, local: int, *uses: Connections) -> Communicator:
    return Communicator(ranks=ranks, local=local, nodes=-(-ranks // local), uses=frozenset(uses))


MACHINE, SIXTY_FOUR, COLUMN = (
    group(8, 8, Connections.RING),
    group(64, 8, Connections.RING),
    group(8, 1, Connections.RING),
)


@pytest.mark.parametrize(
    ("communicator", "size"),
    [
        (group(1, 1, Connections.RING), tables(32)),
        (MACHINE, tables(32) + 32 * LOCAL + NVLS),
        (group(2, 2, Connections.RING, Connections.TREE), tables(32) + 32 * LOCAL + NVLS // 4),
        (group(8, 8, Connections.TREE), tables(32) + 32 * 3 * LOCAL + NVLS),
        (SIXTY_FOUR, tables(16) + 16 * LOCAL + 2 * NETWORK + NVLS),
        (group(64, 8, Connections.TREE), tables(16) + 16 * 3 * LOCAL + 2 * 4 * NETWORK + NVLS),
        (COLUMN, tables(8) + 8 * 7 * NETWORK),
        (group(2, 1, Connections.TREE), tables(8) + 8 * NETWORK),
        (group(8, 8, Connections.ALL_TO_ALL), tables(32) + 32 * 8 * LOCAL),
        (group(2, 2, Connections.SEND), tables(32) + 32 * LOCAL),
        (group(2, 1, Connections.SEND), tables(8) + 2 * 8 * 16 * 128 * KIB),
    ],
)
def test_the_most_of_a_communicator(communicator: Communicator, size: int) -> None:
    assert most(communicator, HOPPER, {}) == size
    assert 0 < least() < size


def test_an_all_to_all_takes_what_was_measured_on_a_machine_of_eight_h100() -> None:
    """3.28 GB more than before it, which counts the tables of more channels too."""
    measured = 3.28e9
    buffers = most(group(8, 8, Connections.ALL_TO_ALL), HOPPER, {}) - tables(32)
    assert measured * 0.97 < buffers < measured


@pytest.mark.parametrize(
    ("communicator", "environment", "size"),
    [
        (MACHINE, {"NCCL_MAX_NCHANNELS": "4"}, tables(4) + 4 * LOCAL + NVLS),
        (MACHINE, {"NCCL_MAX_CTAS": "4", "NCCL_MIN_NCHANNELS": "8"}, tables(8) + 8 * LOCAL + NVLS),
        (MACHINE, {"NCCL_MIN_CTAS": "1000"}, tables(64) + 64 * LOCAL + NVLS),
        (MACHINE, {"NCCL_NVLS_ENABLE": "0"}, tables(32) + 32 * LOCAL),
        (MACHINE, {"NCCL_BUFFSIZE": str(8 * MIB)}, tables(32) + 32 * (14 + 2) * MIB + NVLS),
        (MACHINE, {"NCCL_BUFFSIZE": "-2", "NCCL_LL128_BUFFSIZE": "4M"}, tables(32) + 32 * LOCAL + NVLS),
        (MACHINE, {"NCCL_P2P_DISABLE": "1"}, tables(32) + NVLS),
        (group(8, 8, Connections.SEND), {"NCCL_MAX_P2P_NCHANNELS": "3"}, tables(32) + 4 * 7 * LOCAL),
    ],
)
def test_the_variables_of_nccl_count(communicator: Communicator, environment: Mapping[str, str], size: int) -> None:
    assert most(communicator, HOPPER, environment) == size


def test_only_gpus_that_can_add_up_in_the_switch_have_buffers_for_it() -> None:
    assert most(MACHINE, AMPERE, {}) == most(MACHINE, HOPPER, {}) - NVLS
    assert most(MACHINE, None, {}) == most(MACHINE, HOPPER, {})
    assert most(MACHINE, (10, 0), {}) == most(MACHINE, HOPPER, {}) + NVLS
