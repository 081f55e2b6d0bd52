"""The messages and tables of ``ampmem profile`` once the script has ended."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from types import CodeType
from typing import TYPE_CHECKING

from ampmem.cli.options import ScriptOptions
from ampmem.cli.processes.messages import Audience
from ampmem.cli.processes.plan import Plan
from ampmem.errors import ModelElsewhere, NothingRecorded
from ampmem.failure import FailureRecord, failure_of
from ampmem.names import RAN_ON, RAN_ON_FAILED, RAN_ON_PREDICTED
from ampmem.output import sized
from ampmem.recorder.script import Target, texts_in
from ampmem.recording import add_ending
from ampmem.units import counted
from ampmem.vocabulary import Device, SourceKind

if TYPE_CHECKING:
    from ampmem.analysis.summary import Summary
    from ampmem.recorder.session import Session
    from ampmem.recorder.steering.stopping import Stopper
    from ampmem.simulator.start import Simulation

_DEVICE = {"device", "cuda", "accel", "accelerator", "gpu"}
_BESIDE = {"use", "with", "enable", "on", "no", "disable", "without", "type"}
"""Words that may accompany those: ``--use-cuda`` is such an option, ``--num-gpu`` and ``--ngpu`` are not."""
_OFF = {"no", "disable", "without"}
_FLAGS = {"store_true", "store_false", "store_const"}
_SAYS_DEVICE = re.compile(r"(.*\W)?(device|accelerator)")
_PLAIN = "move the model and the batch to the device cuda, as for a real GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """An option of the script's, such as ``--device`` or ``--accel``; a ``flag`` takes no value."""

    name: str
    flag: bool

    @property
    def words(self) -> set[str]:
        return set(self.name.lower().replace("_", "-").strip("-").split("-"))

    @property
    def off(self) -> bool:
        """Whether the option keeps the script off the GPU."""
        return bool(self.words & _OFF)


def how_to_use_the_gpu(script: str, arguments: Sequence[str]) -> str:
    """The suggestion to make ``script``, which ran with ``arguments``, use the GPU.

    It names an option only if the script's own code has it, or if it was given.
    """
    given = _sent_to_cpu(arguments)
    if given:
        return f"the script was given {given}: give it {given.removesuffix('cpu')}cuda"
    options = [option for file in _files(script) for option in _options(file)]
    for option in options:
        if option.off and option.name in arguments:
            return f"the script was given {option.name}: leave it out"
    # A flag is certain; of options with a value the best is one whose values are known.
    for option in sorted(options, key=lambda option: (not option.flag, "device" not in option.words)):
        if not option.off and not any(argument.partition("=")[0] == option.name for argument in arguments):
            value = " cuda" if not option.flag and "device" in option.words else ""
            return f"does the script need its option {option.name}{value}?"
    return _PLAIN


def _sent_to_cpu(arguments: Sequence[str]) -> str:
    """The argument that selects the CPU, such as ``--device cpu`` or ``trainer.device=cpu``; empty if there is none."""
    for argument, following in zip_longest(arguments, arguments[1:]):
        if _SAYS_DEVICE.fullmatch(argument.removesuffix("=cpu")):
            if argument.endswith("=cpu"):
                return argument
            if following == "cpu":
                return f"{argument} cpu"
    return ""


def _files(script: str) -> Iterator[Path]:
    """The script, and the modules from its own folder that it imported."""
    yield Path(script)
    folder = Path(script).absolute().parent
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and file != script and "site-packages" not in file:
            path = Path(file).absolute()
            if folder in path.parents:
                yield path


def _options(file: Path) -> Iterator[_Option]:
    """The device options that the code in ``file`` declares, found by calls with their names."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for text in _texts(node.args):
                option = _Option(name=text.partition("/")[0], flag=_is_flag(node, text))
                if text.startswith("--") and option.words & _DEVICE and option.words <= _DEVICE | _BESIDE:
                    yield option


def _texts(nodes: Iterable[ast.expr]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_flag(call: ast.Call, text: str) -> bool:
    """Whether the option that ``call`` declares takes no value in argparse or click."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    is_flag = given.get("is_flag")
    return (
        "/" in text
        or any(action in _FLAGS for action in _texts([given["action"]] if "action" in given else []))
        or (isinstance(is_flag, ast.Constant) and is_flag.value is True)
    )


_BACKEND_CHANGED = "allocator backend parsed at load time"
"""Part of torch's error if the CUDA allocator's backend was set after torch was imported."""
_ONLY_ON_A_GPU = "FSDP needs a non-CPU accelerator device"
"""Part of the error of torch's FullyShardedDataParallel without a GPU."""


def say_of_files(plan: Plan, failure: BaseException | None, audience: Audience) -> None:
    """Copy the files that the script has written to ``--keep-files``, and say so; ``failure`` ended the script."""
    if why := plan.protected.why(failure):
        audience.complain(why)
    if line := plan.keep_written():
        audience.say(line)


def check_recorded(session: Session, target: Target) -> None:
    """Raise :class:`NothingRecorded`, and delete the recording, if nothing was recorded."""
    try:
        session.check()
    except ModelElsewhere as error:
        discard(session)
        if session.source.device_type != "cuda":
            raise
        remedy = how_to_use_the_gpu(target.file, session.options.arguments)
        raise ModelElsewhere(f"{error}; {remedy}") from None
    except NothingRecorded:
        # Steps without any memory events are worth nothing.
        if session.outcome.recorded == 0 or session.source.nothing() is not None:
            discard(session)
        raise


def discard(session: Session) -> None:
    """Delete an empty recording."""
    if session.writer is not None:
        session.writer.file.discard()


_CATCHES = "as a bare except does"


def cannot_be_stopped(path: Path) -> str:
    """The sentence that the script cannot be stopped."""
    return (
        f"the script catches every stop, {_CATCHES}, so it runs to completion and is no longer recorded; all "
        f"requested steps are in {path}, so Ctrl-C loses nothing"
    )


def why_not_stopped(path: Path, stopper: Stopper) -> str:
    """The sentence that the script is not stopped, and why."""
    there = f"all requested steps are in {path}; the script runs to completion and is no longer recorded"
    if stopper.device_failed:
        return f"{there}, because its device has failed and the script has not seen the error yet"
    return f"{there}, so that no rank waits for one that was stopped: {stopper.spared}"


def what_was_recorded(session: Session, path: Path, stopper: Stopper | None) -> str:
    """The sentence about the recorded steps and the script's end; ``stopper`` is ``None`` with ``--run-to-end``."""
    message = f"recorded {counted(session.outcome.recorded, 'step')} in {sized(path, session.options.path)}"
    if session.outcome.stopped_by:
        message += f"; then {session.outcome.stopped_by}"
    elif session.outcome.unfinished is not None:
        message += ", and the unfinished step in which the device ran out of memory; then the script ended"
    elif session.outcome.recorded != session.options.steps:
        message += "; then the script ended"
    elif stopper is not None:
        message += _stopped(stopper)
    if not session.options.path.exists():
        message += "; the file no longer exists"
    return message


def what_was_evaluated(session: Session, steps: Path) -> str:
    """The sentence about the recording of the evaluation after the recorded steps, beside theirs, ``steps``."""
    recording = session.options.path
    outcome, there = session.outcome, sized(steps.with_name(recording.name), recording)
    batches = f"{counted(outcome.recorded, 'step')}, one for each batch"
    said = f"recorded the first evaluation after these steps in {there}: {batches}"
    return said + ", and the batch in which the device ran out of memory" * (outcome.unfinished is not None)


def _stopped(stopper: Stopper) -> str:
    """The script's reaction to the stop, in words."""
    if stopper.spared or stopper.device_failed:
        return "; the script ran to completion"
    if not (stopper.caught or stopper.stopped):  # inference: only the end shows that no backward came
        return "; then the script ended"
    if not stopper.caught:
        return ", and stopped the script (--run-to-end lets it finish)"
    caught = f"caught the stop {_times(stopper.caught)}, {_CATCHES},"
    if stopper.stopped:
        return f"; the script {caught} went on, and was then stopped at {stopper.line} (--run-to-end lets it finish)"
    return f"; the script {caught} and ran to completion"


def left_by_failure(session: Session, path: Path, stopper: Stopper, *, later: bool = False) -> str:
    """The sentence about the recording of a script that failed; deletes an empty recording.

    ``later`` says that memory ran out after the recorded steps.
    """
    there, recorded = sized(path, session.options.path), session.outcome.recorded
    if stopper.caught:
        return (
            f"recorded {counted(recorded, 'step')} in {there}; the script caught the stop {_times(stopper.caught)}, "
            f"{_CATCHES}, went on, and then failed"
        )
    ended, show = counted(recorded, "finished step"), f"(ampmem show {quote(str(path))})"
    if session.outcome.unfinished is not None:
        rest = "what was recorded until then"
        said = f"{ended}, and {rest}, are" if recorded else f"{rest} is"
        return f"the script failed: out of memory; {said} in {there} {show}"
    if recorded and later:
        said = f"{counted(recorded, 'step')} and the request that failed later are in {there}"
        return f"the script failed after the recorded steps; {said} {show}"
    if recorded and session.outcome.interrupted:
        return f"interrupted after {counted(recorded, 'step')}; what was recorded is in {there} {show}"
    if recorded:
        return f"the script failed; {ended} {'is' if recorded == 1 else 'are'} in {there} {show}"
    discard(session)
    return f"the script failed before a step had finished: nothing was recorded{_instead(session)}"


def _instead(session: Session) -> str:
    """The suggestion for such a failure, if there is one."""
    failure = session.outcome.failure
    message = "" if failure is None else failure.message
    if _BACKEND_CHANGED in message:
        return (
            "; the script sets an allocator backend (PYTORCH_CUDA_ALLOC_CONF) after ampmem has imported torch, and "
            "only PyTorch's own allocator can be recorded: remove the backend from the script's settings"
        )
    if _ONLY_ON_A_GPU not in message:
        return ""
    return "; FullyShardedDataParallel (FSDP1) needs a GPU; torch's fully_shard (FSDP2) also trains on a CPU"


def predicted(simulation: Simulation, failed: FailureRecord | None) -> str:
    """The memory that the run would have needed, in one line; a run that ``failed`` otherwise has no verdict."""
    from ampmem.analysis.estimate import prediction_of, until
    from ampmem.reporters.text.estimate import prediction_headline

    record, failure = simulation.end()
    found = prediction_of(record, stopped=until(failed))
    return prediction_headline(found, simulation.device.gpu.name, failure=failure)


def complete(session: Session, simulation: Simulation | None, *, ran_on: bool) -> bool:
    """Add the rest of the run to a recording that ended before its script; returns whether memory ran out in the rest.

    A simulated device saw the whole run: its prediction, a failed request and the script's failure are added, and notes
    that say which numbers are about the whole run. For other devices ``ran_on`` says that the script was not stopped,
    which a note then says.
    """
    outcome, path, writer = session.outcome, session.options.path, session.writer
    if writer is None or not outcome.recorded or outcome.recorded != session.options.steps or not path.exists():
        return False
    if simulation is None:
        if ran_on:
            add_ending(path, [RAN_ON])
        return False
    record, _ = simulation.end()
    ooms, failure = session.source.take_ooms(), outcome.failure
    if record != writer.file.prediction or ooms or failure is not None:
        said = [RAN_ON_PREDICTED] if failure is None else [failure.note, RAN_ON_FAILED]
        add_ending(path, [*session.source.notes(), *said], prediction=record, failure=failure, ooms=ooms)
    return bool(ooms)


def show_tables(recording: Path, named: Path, audience: Audience, *, short: bool = False) -> None:
    """Show the tables of ``recording``, whose name on the command line is ``named``.

    ``short`` says that memory ran out, which has a report of its own.
    """
    from ampmem.cli.show import report_of
    from ampmem.reporters.text.layout import layout_for
    from ampmem.reporters.text.out_of_memory import render_out_of_memory
    from ampmem.reporters.text.table import render_reports

    report, layout = replace(report_of(recording), file=str(named)), layout_for(audience.screen)
    audience.show(render_out_of_memory(report.summary, layout) if short else render_reports([report], layout=layout))
    if not short and (line := _cheaper(report.summary)):
        audience.say(line)


_MANY_EVENTS = 3000
"""The events of a step from which on recording it costs about a tenth of a second."""
_RATIOS = {SourceKind.CPU: ("1.5 to 5.2", "2.2 to 8.8"), SourceKind.CUDA: ("2.1 to 5.5", "5.4 to 9.0")}
"""The cost of recorded steps of small models with the extension and without, as measured in docs/benchmarks.md."""


def _cheaper(summary: Summary) -> str:
    """The sentence about ``ampmem extension``, if recorded steps were slow and it can be compiled; else empty."""
    if summary.source not in _RATIOS or summary.conservation.events < _MANY_EVENTS * len(summary.steps):
        return ""
    from ampmem.recorder.sources import extension

    if not extension.is_missing():
        return ""
    compiled, now = _RATIOS[summary.source]
    return (
        "recording made these steps slower: ampmem extension compiles once, in half a minute, and then a recorded step "
        f"of a small model takes {compiled} times its plain time, not {now} (ampmem docs 'the c++ extension')"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


# Scripts for a GPU, where torch sees none.

_NO_GPU = (
    "Torch not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "Found no NVIDIA driver",
    "torch.cuda.is_available() is False",
)
"""What torch's errors say where a script needs CUDA and there is none."""


_PICK_A_GPU = ("cuda", "accelerat", "lightning", "Trainer")
"""Words in a script that uses CUDA, or a library that picks a device itself."""


def say_if_on_the_cpu(
    script: ScriptOptions, code: CodeType, say: Callable[[str], None], command: str = "profile"
) -> None:
    """Say that the run of a script with this ``code`` records the CPU only because torch sees no GPU, if it does.

    ``command`` is the one to predict a GPU with.
    """
    from ampmem.recorder.sources.cuda.device import cuda_available  # torch, which takes a second, if it must be asked

    asks = script.device is Device.AUTO and any(word in text for text in texts_in(code) for word in _PICK_A_GPU)
    if asks and not cuda_available():
        say(f"the memory is the CPU's, because torch sees no GPU: {_simulating(script, command)} simulates one")


def without_gpu(script: ScriptOptions, failure: BaseException) -> str:
    """The hint for a script that failed because torch sees no GPU; empty for any other failure."""
    said = failure_of(failure).message
    return f"; torch sees no GPU: {_simulating(script)} simulates one" if any(each in said for each in _NO_GPU) else ""


def _simulating(script: ScriptOptions, command: str = "profile") -> str:
    words = ("ampmem", command, "--gpu", "24GiB", *["-m"] * script.as_module, script.script_or_module)
    return " ".join(map(quote, (*words, *script.arguments)))
