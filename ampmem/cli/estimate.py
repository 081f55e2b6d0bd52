"""``ampmem estimate``: what training a known model takes of a GPU, without a script, by runs of one that is written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from click.shell_completion import CompletionItem

from ampmem.allocator.gpus import DEFAULT_GPU, GpuSpec, gpu_to_simulate
from ampmem.analysis.fine_tuning import EstimateCell, Method, Training, estimate_schema, next_runs
from ampmem.analysis.fine_tuning import estimate as estimate_of
from ampmem.analysis.fit import Vary
from ampmem.cli.estimate_script import SHAPES, configuration, imports_of, require, script_text, tokens
from ampmem.cli.fit import RunPlan, VariedArguments, run_points
from ampmem.cli.options import ScriptOptions, gpu_option, layout_option, schema_option
from ampmem.cli.processes.children import STEPS, chosen_precisions, default_jobs, for_several_runs, jobs_option
from ampmem.errors import UsageError
from ampmem.names import warning
from ampmem.output import check_output, say_written, write_text
from ampmem.reporters.text.fine_tuning import render_estimate
from ampmem.reporters.text.layout import Layout
from ampmem.vocabulary import Device, Precision

_PRECISIONS = (Precision.FP32, Precision.AMP, Precision.BF16)
_RANK = 16
_ENOUGH = "64TiB"
"""The memory of a GPU on which everything fits."""


def _complete_model(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shell completion of MODEL: the known names, and files."""
    known = [CompletionItem(name) for name in SHAPES if name.startswith(incomplete)]
    return known or [CompletionItem(incomplete, type="file")]


@click.command("estimate", short_help="Predict what training a model takes, without a script.")
@click.argument("model", metavar="MODEL", shell_complete=_complete_model)
@gpu_option
@click.option(
    "--lora",
    type=click.IntRange(min=1),
    metavar="RANK",
    help="Also train adapters of this rank (LoRA, of the package peft) beside all linear layers but the head.",
)
@click.option(
    "--quantize",
    type=click.Choice([Method.NF4.value, Method.INT8.value]),
    help=f"Also train adapters on weights of 4 or 8 bits (of the package bitsandbytes); their rank is {_RANK} without "
    "--lora.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["adamw", "adamw8bit", "sgd", "adafactor", "muon"]),
    default="adamw",
    show_default=True,
    help="The optimizer; adamw8bit is bitsandbytes', sgd has momentum.",
)
@click.option(
    "--precision",
    "precisions",
    metavar="PRECISION,...",
    help=f"Which precisions to run: {', '.join(_PRECISIONS)}, which has weights in bfloat16.  [default: all of them, "
    f"and {Precision.BF16} alone with quantized weights]",
)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Samples in a batch.")
@click.option(
    "--seq",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Tokens in a sample.  [default: as many as the model has positions, at most 2048]",
)
@click.option("--checkpointing", is_flag=True, help="Compute the activations of each block again in backward.")
@click.option(
    "--world-size", type=click.IntRange(min=2), metavar="N", help="With --fsdp: on how many GPUs; rank 0 is simulated."
)
@click.option("--fsdp", is_flag=True, help="Share the model among the GPUs of --world-size, block by block (FSDP2).")
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write the training script, to go on with: with profile, fit, advise and compare, or on a GPU.",
)
@jobs_option()
@layout_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table, schema ampmem.estimate/1.")
@schema_option(estimate_schema)
@click.option("--force", is_flag=True, help="Replace an existing FILE.")
def estimate(
    model: str,
    gpu: str | None,
    lora: int | None,
    quantize: str | None,
    optimizer: str,
    precisions: str | None,
    batch: int,
    seq: int | None,
    checkpointing: bool,
    world_size: int | None,
    fsdp: bool,
    write: Path | None,
    jobs: int | None,
    layout: Layout,
    as_json: bool,
    force: bool,
) -> None:
    """Predict what training a model takes of a GPU's memory, without a script.

    MODEL is a known name (such as llama-3.1-8b, gpt2, bert-large, vit-l), a folder with a config.json of transformers
    or such a file, or a name on the Hugging Face hub. A training script is written for it, with random weights and
    random batches, and run on a simulated GPU: every size in the table is the peak of a run, every largest batch is
    found by runs. The table goes to stdout, a line for each run to stderr.

    \b
    ampmem estimate llama-3.1-8b --gpu 24GiB --lora 16 --quantize nf4
    ampmem estimate bert-large --gpu rtx4090 --batch 16 --write train.py
    ampmem estimate llama-3.1-8b --gpu h100 --world-size 8 --fsdp
    """
    if fsdp != (world_size is not None):
        raise UsageError("--fsdp and --world-size N belong together: give both, or neither")
    if fsdp and quantize:
        raise UsageError("--quantize is for one GPU: leave --fsdp out")
    if write is not None:
        check_output(write, force=force, option="--write")
    device = gpu_to_simulate(gpu or DEFAULT_GPU, "--gpu ")
    methods = [Method.FULL, *([Method.LORA] if lora or quantize else []), *([Method(quantize)] if quantize else [])]
    config = configuration(model)
    require("transformers", 5)
    if len(methods) > 1:
        require("peft")
    if quantize or optimizer == "adamw8bit":
        require("bitsandbytes")
    training = Training(
        model=model,
        methods=tuple(methods),
        optimizer=optimizer,
        lora=lora or _RANK,
        batch=batch,
        seq=tokens(model, config, seq),
        checkpointing=checkpointing,
        world_size=world_size,
    )
    script = for_several_runs(
        ScriptOptions(
            script_or_module="train.py",
            as_module=False,
            arguments=(),
            named="train.py" if write is None else str(write),
            device=Device.SIMULATED,
            gpu=device,
            world_size=world_size,
            steps=STEPS,
            stacks=False,
            seed=0,
        )
    )
    cells = _cells(methods, precisions, script)
    text = script_text(training, config)
    if write is not None:
        write_text(write, text, force=force)
        say_written(write)

    due = partial(next_runs, batch=batch, total=device.total_memory)
    with TemporaryDirectory(prefix="ampmem-estimate-") as folder:
        path = Path(folder) / "train.py"
        path.write_text(text, encoding="utf-8")
        scripts = {cell: _script_of(cell, replace(script, script_or_module=str(path)), device) for cell in cells}
        plan = RunPlan(scripts=scripts, varied=_VARIED, jobs=jobs or default_jobs(), imports=imports_of(text))
        points, notes, interrupted = run_points(plan, due, lambda points: _left(due(points)))
    if interrupted:
        notes = (warning("interrupted before the search ended"), *notes)
    found = estimate_of(points, training, gpu=device.name, total=device.total_memory, notes=notes)
    if found.cells:
        click.echo(found.to_json() if as_json else layout.shown(render_estimate(found, write, layout)))
    if interrupted:
        raise KeyboardInterrupt


_VARIED = VariedArguments(vary=Vary(name="--batch", low=1, high=None, separator=" "), before=(), after=())


def _cells(methods: list[Method], precisions: str | None, script: ScriptOptions) -> list[EstimateCell]:
    """The methods in the precisions that were asked, on the GPU and on one with enough memory."""
    chosen = _PRECISIONS if precisions is None else chosen_precisions(precisions, script)
    unknown = next((each for each in chosen if each not in _PRECISIONS), None)
    if unknown is not None:
        raise UsageError(f"--precision: estimate cannot run {unknown}; choose from {', '.join(_PRECISIONS)}")
    quantized = (Precision.BF16,) if precisions is None else chosen
    asked = [
        (method, precision)
        for method in methods
        for precision in (chosen if method in (Method.FULL, Method.LORA) else quantized)
    ]
    return [EstimateCell(*each, roomy) for each in asked for roomy in (False, True)]


def _script_of(cell: EstimateCell, script: ScriptOptions, gpu: GpuSpec) -> ScriptOptions:
    """The ``script`` of ``cell``, without its batch."""
    roomy = replace(gpu, name=f"{gpu.name}@{_ENOUGH}")
    return replace(script, arguments=cell.arguments, gpu=roomy if cell.roomy else gpu)


def _left(due: list[tuple[EstimateCell, int]]) -> str:
    """The searches that are left, to follow a finished run; empty at the end."""
    return f"; still to find: {', '.join(str(cell) for cell, _ in due)}" if due else ""
