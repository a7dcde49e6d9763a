"""The command: see `--help`."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("example_project", "kfs_credentials", "tests", "manage.py", "pyproject.toml")
FOUND, NOT_FOUND = 0, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description="Make one mistake after the other in a copy of the package, and see whether it is found.",
        epilog="The exit code is 1 if one was not found, or not for the reason that counts.",
    )
    parser.add_argument("by", choices=["model", "torture"], help="who looks for the mistakes")
    parser.add_argument("names", nargs="*", metavar="WORDS", help="only those whose name has these words")
    parser.add_argument("--examples", type=int, default=200, help="examples that the model may try (default: 200)")
    parser.add_argument("--seconds", type=int, default=120, help="seconds that the torture runs (default: 120)")
    options = parser.parse_intermixed_args(arguments)
    chosen = [one for one in MUTANTS if options.by == "model" or one.torture]
    if options.names:
        chosen = [one for one in chosen if any(words in one.name for words in options.names)]
    if not chosen:
        parser.error(f"no mistake has these words in its name: {', '.join(options.names)}")
    missed = 0
    for mutant in chosen:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kfs-mutant-") as directory:
            make(mutant, Path(directory))
            if options.by == "model":
                found = by_the_model(Path(directory), options.examples)
            else:
                found = by_the_torture(Path(directory), options.seconds)
        missed += found is None
        how = "NOT FOUND" if found is None else found
        print(f"{mutant.name}: {how} ({time.monotonic() - started:.0f} s)", flush=True)  # noqa: T201
    print(f"{len(chosen)} mistakes, {len(chosen) - missed} found")  # noqa: T201
    return NOT_FOUND if missed else FOUND


def make(mutant: Mutant, directory: Path) -> None:
    """Copy the project, and make this mistake in it."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, directory)
    path = directory / "kfs_credentials" / mutant.file
    path.write_text(path.read_text().replace(mutant.old, mutant.new))


def by_the_model(directory: Path, examples: int) -> str | None:
    """Return after how many examples the model finds it; None if it does not."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/model/test_model.py"],
        cwd=directory,
        env={**os.environ, "KFS_QUICK": "1", "KFS_EXAMPLES": str(examples)},
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return None
    told = re.search(r"^(?:example that failed|examples): (\d+)", done.stdout, re.MULTILINE)
    # Where it is a matter of moments, Hypothesis may not see the same again, and says that it is flaky.
    if told is None or not re.search(r"state = Machine\(\)|Flaky", done.stdout):
        raise SystemExit(f"it did not come to an example:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return f"found in example {told[1]}"


def by_the_torture(directory: Path, seconds: int) -> str | None:
    """Return the last line of the torture if it finds it; None if it does not."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.torture", "--seconds", str(seconds)],
        cwd=directory,
        capture_output=True,
        text=True,
    )
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    if not last.startswith("kills "):
        raise SystemExit(f"it did not come to its end:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return last if done.returncode else None


if __name__ == "__main__":
    sys.exit(main())
