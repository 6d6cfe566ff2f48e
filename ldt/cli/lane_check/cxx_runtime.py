"""Finds the C++ runtimes that a process has loaded, and whether a compiled module contains another one.

Two runtimes in one process do not mix: an exception, a locale or a stream of one crashes in the other. Run as a program
with the path of a library, it prints the runtime files that the library loads: the build links those.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

__all__ = ["loaded_runtimes", "runtime_problem"]

# One function of each stateful part of libstdc++: exceptions, locales, streams, string errors.
_MARKERS = ("__cxa_throw", "__cxa_get_globals", "_ZNSt6localeC1Ev", "_ZNSt8ios_base4InitC1Ev")
_CXX_LIBRARY = re.compile(r"lib(stdc\+\+|c\+\+)\.so")
_RUNTIME = re.compile(r"lib(stdc\+\+|gcc_s)\.so")


class _DlInfo(ctypes.Structure):
    """Dl_info of dladdr()."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def loaded_runtimes() -> list[str]:
    """Return the C++ library files that this process has loaded; normally one."""
    return _mapped(_CXX_LIBRARY)


def runtime_problem(module_file: str) -> str | None:
    """Return what is wrong with the C++ runtime of this process, which has loaded ldt._C; None if nothing is."""
    own = [name for name in _MARKERS if _defining_file(module_file, name) == Path(module_file).resolve()]
    if own:
        return f"ldt._C contains its own C++ runtime (it defines {own[0]}) besides that of torch"
    loaded = loaded_runtimes()
    return f"two C++ runtimes are loaded: {' and '.join(loaded)}" if len(loaded) > 1 else None


def _mapped(pattern: re.Pattern[str]) -> list[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6}
    return sorted(path for path in paths if pattern.search(Path(path).name))


def _defining_file(library: str, symbol: str) -> Path | None:
    """The file that defines ``symbol`` for a library: itself or one of its dependencies."""
    try:
        address = ctypes.cast(getattr(ctypes.CDLL(library), symbol), ctypes.c_void_p)
    except AttributeError:
        return None
    info = _DlInfo()
    if ctypes.CDLL(None).dladdr(address, ctypes.byref(info)) == 0 or info.file is None:
        return None
    return Path(info.file.decode(errors="surrogateescape")).resolve()


if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])
    print(";".join(_mapped(_RUNTIME)))
