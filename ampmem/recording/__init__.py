"""The ``.ampmem`` file: one SQLite database per process, appended to during the run, and read whole."""

from ampmem.recording.bounds import MOST_STEPS
from ampmem.recording.database import FORMAT_VERSION, SUFFIX, is_watched
from ampmem.recording.rank_files import (
    RankFile,
    claimed_for,
    evaluation_file,
    make_claim,
    rank_file,
    rank_of,
    rank_pattern,
    remove_claim,
    remove_left_over,
    without_journals,
)
from ampmem.recording.reader import check_recording, is_recording, job_of, read, taken_for_script, world_size_of
from ampmem.recording.writer import (
    PACKED,
    Batch,
    Description,
    RecordingWriter,
    add_ending,
    add_plain_steps,
    pack,
    unpack,
    write_recording,
)
