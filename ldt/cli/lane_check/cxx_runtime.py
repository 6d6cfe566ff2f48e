"""Which C++ runtime a process has loaded, and whether a compiled module brought one of its own.

Two in one process do not mix: an exception, a locale or a stream of one crashes in the other. Run as a program, with
the path of a library, it prints the files of the runtime that come with it: the build links those.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

__all__ = ["loaded_runtimes", "runtime_problem"]

# One function of libstdc++ for each of its parts that hold state: exceptions, locales, streams, strings' errors.
_MARKERS = ("__cxa_throw", "__cxa_get_globals", "_ZNSt6localeC1Ev", "_ZNSt8ios_base4InitC1Ev")
_CXX_LIBRARY = re.compile(r"lib(stdc\+\+|c\+\+)\.so")
_RUNTIME = re.compile(r"lib(stdc\+\+|gcc_s)\.so")


class _Place(ctypes.Structure):
    """Dl_info of dladdr()."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def loaded_runtimes() -> list[str]:
    """Files of C++ libraries that this process has loaded; one, where all is well."""
    return _mapped(_CXX_LIBRARY)


def runtime_problem(module_file: str) -> str | None:
    """What is wrong with the C++ runtime of this process, in which the compiled module is loaded; else None."""
    own = [name for name in _MARKERS if _defining_file(module_file, name) == Path(module_file).resolve()]
    if own:
        return f"ldt._C contains a C++ runtime of its own (it defines {own[0]}) beside that of torch"
    loaded = loaded_runtimes()
    return f"two C++ runtimes are loaded: {' and '.join(loaded)}" if len(loaded) > 1 else None


def _mapped(pattern: re.Pattern[str]) -> list[str]:
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6}
    return sorted(path for path in paths if pattern.search(Path(path).name))


def _defining_file(library: str, symbol: str) -> Path | None:
    """The file whose definition of ``symbol`` a library finds among itself and what it needs."""
    try:
        address = ctypes.cast(getattr(ctypes.CDLL(library), symbol), ctypes.c_void_p)
    except AttributeError:
        return None
    place = _Place()
    if ctypes.CDLL(None).dladdr(address, ctypes.byref(place)) == 0 or place.file is None:
        return None
    return Path(place.file.decode(errors="surrogateescape")).resolve()


if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1])
    print(";".join(_mapped(_RUNTIME)))
