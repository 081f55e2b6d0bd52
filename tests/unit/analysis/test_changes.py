"""Each change of ``Forced`` has one entry, and what forces it."""

from dataclasses import fields

from ampmem.analysis.changes import CHANGES
from ampmem.recorder.steering.changes import HOOKS
from ampmem.vocabulary import Forced, forced_options

BY_THE_ENVIRONMENT = {"allocator", "workspace"}


def test_each_change_has_one_entry_and_one_thing_that_forces_it() -> None:
    names = [field.name for field in fields(Forced)]
    assert sorted(change.field for change in CHANGES) == sorted(names)
    by_precision = {name for name, option in forced_options().items() if not option.help}
    forced = [*HOOKS, *BY_THE_ENVIRONMENT, *by_precision]
    assert sorted(forced) == sorted(names)


def test_an_option_is_written_as_it_is_given() -> None:
    every = Forced(checkpoint=("a.*", "b"), foreach=False, loss_chunks=2, allocator="A:True", batch_size=0, policy=True)
    assert every.options() == [
        *("--force-checkpoint", "a.*,b", "--force-foreach", "false", "--force-chunked-loss", "2"),
        *("--force-allocator", "A:True", "--force-policy"),
    ]
