from dataclasses import replace

from support.build import Story

from ampmem.analysis.analyse import analyse
from ampmem.analysis.parameters import parameters_of
from ampmem.events import Fact, Phase
from ampmem.vocabulary import Communication


def test_the_parts_at_each_position_add_up_what_is_alive() -> None:
    story = Story(begins=Phase.FORWARD)
    story.tensor(Fact.COMMUNICATION, 0x10, 8, "all_gather")
    story.alloc(0x20, 100)
    story.fact(Fact.COMMUNICATION, 0x20, "unsharded_parameters", "a")
    story.free(0x10)
    story.alloc(0x10, 30)
    story.fact(Fact.COMMUNICATION, 0x10, "unsharded_parameters", "b")
    story.tensor(Fact.COMMUNICATION, 0x30, 7, "a word of a later version")
    story.free(0x20)
    analysis = analyse(story.recording())
    nothing = dict.fromkeys(Communication, 0)
    gathered, whole = Communication.ALL_GATHER, Communication.UNSHARDED_PARAMETERS
    assert [analysis.communication.at(position) for position in range(7)] == [
        nothing,
        nothing | {gathered: 8},
        nothing | {gathered: 8, whole: 100},
        nothing | {whole: 100},
        nothing | {whole: 130},
        nothing | {whole: 130},
        nothing | {whole: 30},
    ]


def test_global_numbers_are_there_where_something_is_sharded() -> None:
    story = Story()
    story.parameter(0x10, "a.weight", 10)
    story.parameter(0x20, "b.weight", 0)
    recording = story.recording()
    alone = parameters_of(analyse(recording), None)
    assert (alone.count, alone.global_count, alone.global_bytes) == (10, None, None)
    first, second = recording.parameters
    sharded = (replace(first, global_elements=39), replace(second, global_elements=3))
    both = parameters_of(analyse(replace(recording, parameters=sharded)), None)
    assert (both.count, both.bytes, both.global_count, both.global_bytes) == (10, 40, 42, 168)
