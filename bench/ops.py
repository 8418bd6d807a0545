"""Runs the sweeps over single operations one after the other and keeps their results together.

    python bench/ops.py
    python bench/ops.py --only linear delta --output ops.json

A sweep is a script bench/NAME_sweep.py that writes what it measured, as JSON, to the file named by
--out. Each runs in a process of its own, so that one that fails takes nothing with it; those that
are not there are left out. What follows -- is handed to each of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.bench_report import now, versions

SWEEPS = ("linear", "attention", "delta", "small", "sampling")
FOLDER = Path(__file__).parent


def run_sweep(name: str, folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """What became of one sweep: its status, its seconds, and what it wrote."""
    script = folder / f"{name}_sweep.py"
    if not script.exists():
        return {"status": "missing"}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [sys.executable, str(script), "--out", str(out), *arguments]
        done = subprocess.run(command, check=False)
        outcome: dict[str, Any] = {
            "status": "ok" if done.returncode == 0 else f"exit code {done.returncode}",
            "seconds": round(time.perf_counter() - begin, 1),
        }
        try:
            outcome["results"] = read_results(out)
        except (OSError, ValueError) as error:  # one that failed may have written half a file
            if done.returncode == 0:
                outcome["status"] = f"no results ({error})"
    return outcome


def read_results(path: Path) -> Any:
    """The JSON in a file, or the list of its lines where each is an object of its own."""
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def main(argv: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    """Run the sweeps of a folder; returns 1 where one failed."""
    parser = argparse.ArgumentParser(description="Run the sweeps over single operations.")
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=SWEEPS, metavar="NAME")
    parser.add_argument(
        "--output", type=Path, help="file to write (default: a dated one in bench/results)"
    )
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    output: Path = args.output or folder / "results" / f"{datetime.date.today()}-ops.json"

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report: dict[str, Any] = {
        "command": shlex.join(["python", "bench/ops.py", *words]),
        "date": now(),
        "versions": versions(device),
        "sweeps": {},
    }
    for name in args.only:
        print(f"--- {name}", flush=True)
        outcome = report["sweeps"][name] = run_sweep(name, folder, words[cut + 1 :])
        print(f"--- {name}: {outcome['status']}", flush=True)
        # After each, so that what was measured is kept when a later one takes too long.
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    statuses = [outcome["status"] for outcome in report["sweeps"].values()]
    print(f"written to {output}")
    return int(any(status not in ("ok", "missing") for status in statuses))


if __name__ == "__main__":
    raise SystemExit(main())
