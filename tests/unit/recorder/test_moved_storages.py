"""One storage may be emptied and filled again elsewhere, and an event to come tells who is alive until then."""

import pytest

torch = pytest.importorskip("torch")

from ampmem.recorder.sources.ledger import fates  # noqa: E402
from ampmem.recorder.sources.storages import Storages  # noqa: E402


def test_what_is_freed_later_is_alive_and_what_is_handed_out_again_was_dead() -> None:
    blocks = {0x10: 8, 0x20: 8, 0x30: 8, 0x40: 8}
    later = [(0x10, -8), (0x20, 16), (0x10, 8), (0x20, -16), (0x50, 8), (0x30, -8)]
    assert fates(later, blocks) == ([0x20], {0x10, 0x30})


def test_a_storage_that_was_emptied_says_nothing_of_where_it_was() -> None:
    storages = Storages()
    tensor = torch.zeros(1000)
    storage = tensor.untyped_storage()
    first = storage.data_ptr()
    storages.see(tensor, kept=False)
    assert storages.alive(first)
    storage.resize_(0)
    assert not storages.alive(first)
    storages.see(tensor, kept=False)
    other = torch.zeros(1000)  # may lie where that was
    storage.resize_(8000)
    second = storage.data_ptr()
    storages.see(tensor, kept=False)
    assert storages.alive(second)
    assert [seen.address for seen in storages.take_seen()] == [first, second]
    del tensor, storage
    assert [died.address for died in storages.take_died()] == [second]
    assert other.numel() == 1000
