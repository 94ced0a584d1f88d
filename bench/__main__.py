"""`python -m bench [names] [--quick] [--json FILE]`: measure, show a table, and say whether the goals are met."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import MEASUREMENTS
from bench.figures import Figure, told
from bench.markdown import tables

EXAMPLES = """\
examples:
  make bench                                    everything, ten minutes on two idle cores
  make bench ARGS="saving startup"              some of it
  make bench ARGS="--json figures.json"         the figures as JSON too
  python -m bench --quick                       tiny sizes: whether it runs; the figures mean nothing

Every measurement runs in a process of its own, in a temporary folder that is removed.

exit codes:
  0  everything was measured, whether or not a goal was met
  1  a measurement failed
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure what the extension costs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(MEASUREMENTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see whether it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the figures there as tables")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to write while measuring (default: TMPDIR)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in MEASUREMENTS:
            parser.error(f"there is no measurement {name!r}; there are {', '.join(MEASUREMENTS)}")
    if args.dir and not args.child and not args.dir.is_dir():
        parser.error(f"--dir: there is no folder {args.dir}")
    if args.child:
        return _measure_here(args)
    return _measure_all(args)


def _measure_here(args: argparse.Namespace) -> int:
    """In the process of one measurement: write its figures."""
    (name,) = args.names
    figures = importlib.import_module(f"bench.{name}").measure(args.dir, quick=args.quick)
    args.json.write_text(json.dumps([figure.to_json() for figure in figures]))
    return 0


def _measure_all(args: argparse.Namespace) -> int:
    figures: list[Figure] = []
    failed: list[str] = []
    for name in args.names or MEASUREMENTS:
        started = time.monotonic()
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        try:
            figures += _in_child(name, args)
        except RuntimeError as error:
            failed.append(name)
            print(error, file=sys.stderr)
        print(f"  {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if args.json:
        values = {"machine": machine(), "quick": args.quick, "figures": [figure.to_json() for figure in figures]}
        args.json.write_text(json.dumps(values, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(tables(figures))
    _show(figures)
    return 1 if failed else 0


def _in_child(name: str, args: argparse.Namespace) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="agl-bench-", dir=args.dir, ignore_cleanup_errors=True) as room:
        found, log = Path(room) / "figures.json", Path(room) / "log"
        command = [sys.executable, "-W", "ignore", "-m", "bench", name, "--child", "--json", str(found)]
        command += ["--dir", f"{room}/files", *(["--quick"] if args.quick else [])]
        with log.open("w") as output:
            # Frameworks print a lot; nothing of it is wanted unless the measurement fails.
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TQDM_DISABLE": "1"},
                cwd=Path(__file__).resolve().parents[1],
                check=False,
            )
        if done.returncode or not found.exists():
            end = "\n".join(f"    {line[:200]}" for line in log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"{name} failed with exit code {done.returncode}; its output ends with\n{end}")
        return [Figure.from_json(values) for values in json.loads(found.read_text())]


def machine() -> dict[str, Any]:
    """What the figures were measured on, as far as it matters."""
    import torch

    return {
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _show(figures: list[Figure]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for header, justify in (("figure", "left"), ("value", "right"), ("goal", "right"), ("", "left"), ("", "left")):
        table.add_column(header, justify=justify)  # pyright: ignore[reportArgumentType]
    last = ""
    for figure in figures:
        if figure.measurement != last:
            last = figure.measurement
            table.add_section()
            table.add_row(f"[bold]{importlib.import_module(f'bench.{last}').TITLE}")
        goal = "" if figure.at_most is None else f"≤ {told(figure.at_most, figure.unit)}"
        verdict = {None: "", True: "[green]met", False: "[red]missed"}[figure.met]
        table.add_row(f"  {figure.what}", told(figure.value, figure.unit), goal, verdict, f"[dim]{figure.against}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
