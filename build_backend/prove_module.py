"""Tries a module that was just linked: two processes load it beside torch and exchange messages over loopback.

The build calls `prove`, which starts this file as a program, `prove_module.py FOLDER`, with the target's interpreter.
That prints nothing and ends with status 0, or prints one sentence and ends with status 1.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from find_torch import Torch, candidate_folders, find_torch

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300.0  # for each phase: a machine that compiles may be busy
MODULES = "_C.*.so"


def prove(folder: Path, note: Path, torch: Torch) -> None:
    """Moves bytes with the module in ``folder``. Raises SystemExit, and takes the module away, if it does not work.

    ``note`` keeps what was proven last: a module that did not change is not tried again. ``LDT_PROVE=off`` tries none.
    """
    modules = list(folder.glob(MODULES))
    digest = hashlib.sha256(b"".join(module.read_bytes() for module in modules)).hexdigest()
    tried = f"{digest} beside torch {torch.version} in {torch.folder}\n"
    proven = note.read_text(encoding="utf-8") if note.exists() else ""
    if proven == tried or os.environ.get("LDT_PROVE", "on").lower() == "off":
        return
    done = subprocess.run(
        [sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        for module in modules:
            module.unlink()
        raise SystemExit(done.stdout.strip() or f"ldt: the module in {folder} could not be tried; see above.")
    note.write_text(tried, encoding="utf-8")


def problem_of(folder: Path) -> str | None:
    """What is wrong with the module in ``folder``, and the way out; None if it works."""
    see_torch()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    sys.path.insert(0, str(ROOT))
    import ldt

    ldt.__path__.insert(0, str(folder))  # the new module, and ldt's Python as it is in the source
    from ldt.cli.lane_check import HOST, try_lane

    try:
        trial = try_lane(HOST, SECONDS)
    except ImportError as error:
        return f"torch cannot be imported ({error}); reinstall torch"
    return None if trial.problem is None else f"{trial.problem}; {trial.remedy}"


def see_torch() -> None:
    """Extends sys.path, which an isolated build cuts, so that torch and what it needs can be imported."""
    packages = find_torch().folder.parent
    others = [entry for entry in sys.path if not (Path(entry) / "torch").exists()]
    sys.path[:] = [
        *others,
        str(packages),
        *(str(folder) for folder in candidate_folders() if folder.is_dir()),
    ]


def main() -> int:
    """Prints the sentence, if there is one to say."""
    problem = problem_of(Path(sys.argv[1]).resolve())
    if problem is None:
        return 0
    print(
        f"ldt: the module is built, but does not work: {problem} (or install it all the same with LDT_PROVE=off)."
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
