"""`gymckpt export`: the results, sorted, in one file; or a checkpoint in the form of Gym's own participants."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, cast

import typer

from gymckpt.errors import UsageError

from .console import note
from .newfile import Sink, new_file

Format = Literal["jsonl", "jsonl.zst"]


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command("export", epilog="Example: gymckpt export runs/a --format jsonl.zst --output results.jsonl.zst")(export)


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="jsonl or jsonl.zst (zstd-compressed).")
    ] = "jsonl",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="A new file; - or nothing: standard output.")
    ] = None,
    gym: Annotated[
        Path | None,
        typer.Option("--gym", metavar="TARGET", help="Write a checkpoint in NeMo Gym's own form below TARGET instead."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="ID", help="With --gym: this one, not the newest.")
    ] = None,
) -> None:
    """Writes the row of each succeeded rollout, sorted by task and repeat, from the journal.

    Works while the run goes on and after any crash; exactly what counts at that moment.
    """
    if gym is not None:
        note(f"{asyncio.run(_export_checkpoint(directory, gym, checkpoint))} records in {gym}")
        return
    if format_ not in ("jsonl", "jsonl.zst"):
        raise UsageError(f"--format {format_[:40]!r} is not jsonl or jsonl.zst")
    with _sink(output) as sink:
        written = asyncio.run(_export(directory, sink, compress=format_ == "jsonl.zst"))
    note(f"{written} rows" + (f" in {output}" if output and str(output) != "-" else ""))


@contextlib.contextmanager
def _sink(output: Path | None) -> Iterator[Sink]:
    if output is None or str(output) == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with new_file(output) as file:
        yield file


async def _export(directory: Path, sink: Sink, *, compress: bool) -> int:
    import zstandard

    from gymckpt.collection.rundirectory import RunPaths
    from gymckpt.ports import ThreadOffload
    from gymckpt.report.export import export_rows
    from gymckpt.storage.files import LocalFileSystem

    written = 0
    with contextlib.ExitStack() as stack:
        if compress:
            compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
            sink = stack.enter_context(compressor.stream_writer(cast(BinaryIO, sink), closefd=False))
        async for line in export_rows(LocalFileSystem(), ThreadOffload(), RunPaths(directory)):
            sink.write(line)
            written += 1
    return written


async def _export_checkpoint(directory: Path, target: Path, checkpoint_id: str | None) -> int:
    from gymckpt.ports import ThreadOffload
    from gymckpt.report import inspection
    from gymckpt.report.plain import export_checkpoint
    from gymckpt.storage.files import LocalFileSystem

    fs, offload = LocalFileSystem(), ThreadOffload()
    source = await inspection.newest_checkpoint(fs, offload, inspection.find_target(fs, directory, checkpoint_id))
    return await export_checkpoint(fs, offload, source, target)
