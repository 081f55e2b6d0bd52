"""A side of a difference, from a recording, or from a file with a recording or with the JSON of a summary."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from ampmem.analysis.analyse import analyse
from ampmem.analysis.difference.groups import groups_of
from ampmem.analysis.difference.side import Side
from ampmem.analysis.json.from_json import from_json, parsed
from ampmem.analysis.ranks.arms import merge_all
from ampmem.analysis.ranks.reading import read_runs
from ampmem.analysis.summary import Summary, require_training, summary_of
from ampmem.errors import NothingRecorded, RecordingError, UsageError
from ampmem.events import Recording
from ampmem.recording import SUFFIX, rank_of, read

_SPACE = b" \t\r\n\xef\xbb\xbf"


def side_of(recording: Recording, label: str, *, file: Path | None = None) -> Side:
    """``recording``, which is in ``file`` if it is in one, as a side.

    Raises :class:`~ampmem.errors.NothingRecorded` and :class:`~ampmem.errors.RecordingError` as
    :func:`~ampmem.analysis.summary.summarize` does.
    """
    require_training(recording)
    analysis = analyse(recording)
    arguments = recording.run.arguments
    return Side(label=label, summary=summary_of(analysis), groups=groups_of(analysis), arguments=arguments, file=file)


def side_given(given: object, label: str) -> Side:
    """A side from a recording, a summary, or a file that holds one; what is in no file is called ``label``.

    Raises :class:`~ampmem.errors.UsageError` for anything else, and what :func:`side_of` and :func:`read_side` raise.
    """
    if isinstance(given, Recording):
        return side_of(given, label)
    if isinstance(given, Summary):
        return Side(label=label, summary=given, groups=None)
    return read_side(path_given(given))


def path_given(given: object) -> Path:
    """The path that ``given`` is. Raises :class:`~ampmem.errors.UsageError` for what is none."""
    if isinstance(given, str | PathLike):
        return Path(given)
    raise UsageError(
        f"{type(given).__name__} holds no run: give a recording, a file with one, or a summary, such as "
        "profile.recording()"
    )


def read_side(path: Path) -> Side:
    """The run at ``path`` as a side: of a recording, of a summary as JSON, or of a job.

    Of a job, whose ranks have a file each and which ``path`` would name if it ran alone, it is the rank that needs the
    most. Raises :class:`~ampmem.errors.UsageError` where there is no file, and what :func:`side_of` raises.
    """
    if not path.exists() and (ranks := _ranks_of(path)):
        worst = _worst(ranks)
        return _recorded(worst, f"{path}, rank {_rank(worst)}")
    return _summed_up(path) if is_json(path) else _recorded(path, str(path))


def _recorded(path: Path, label: str) -> Side:
    try:
        return side_of(read(path), label, file=path)
    except NothingRecorded as error:
        raise NothingRecorded(f"{path}: {error}") from error


def _ranks_of(job: Path) -> list[Path]:
    """The files of the ranks of ``job``; none where there are none."""
    stem = job.name.removesuffix(SUFFIX)
    try:
        beside = [path for path in job.parent.iterdir() if path.name.startswith(f"{stem}.rank")]
    except OSError:
        return []
    named = {path: found for path in sorted(beside) if (found := rank_of(path)) is not None}
    return [path for path, found in named.items() if found.job.name in (job.name, f"{job.name}{SUFFIX}")]


def _worst(ranks: list[Path]) -> Path:
    """The rank with the largest peak. Raises :class:`UsageError` where these are not the ranks of one job."""
    runs = read_runs(ranks)
    jobs = merge_all(runs).jobs
    if len(jobs) > 1:
        raise UsageError(f"{ranks[0]} and those beside it are of jobs in several precisions; name one rank of one")
    peaks = {run.path: run.summary.whole.bytes for run in runs if run.summary is not None}
    return max(peaks, key=lambda path: peaks[path])


def _rank(path: Path) -> int:
    found = rank_of(path)
    return 0 if found is None else found.rank


def is_json(path: Path) -> bool:
    """Whether the file at ``path`` begins as JSON does, and not as a recording."""
    try:
        with path.open("rb") as stream:
            return stream.read(64).lstrip(_SPACE)[:1] in (b"{", b"[")
    except OSError:
        return False


def _summed_up(path: Path) -> Side:
    """Raises :class:`RecordingError` for JSON that is no summary."""
    try:
        value = parsed(path.read_text(encoding="utf-8-sig"))
        found = value if isinstance(value, list) else [value]
        if len(found) != 1:
            raise UsageError(f"{path} has {len(found)} summaries, and a side is one; write each to a file of its own")
        summary = from_json(Summary, found[0])
    except ValueError as error:
        raise RecordingError(
            f"{path} is not a summary of this version of ampmem ({_in_short(error)}); "
            "make one anew with ampmem show --json"
        ) from None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
    return Side(label=str(path), summary=summary, groups=None)


def _in_short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:199]}…"
