"""Drives CMake and Ninja for ldt._C and prints what was built. Sources and flags are in CMakeLists.txt."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "build_backend"))

from find_torch import Torch, find_torch  # noqa: E402
from native_tools import require_tool  # noqa: E402
from prove_module import prove  # noqa: E402

BUILD_INFO = "_build_info"
TOML = 'tomli>=2.0; python_version < "3.11"'  # later Pythons have tomllib
COMPILER_VARIABLES = ("CXX", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDACXX", "CUDAFLAGS", "CUDAHOSTCXX")


class BuildPy(build_py):
    """Keeps what earlier builds left out of the wheel: removed modules, and their build information."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[1] != BUILD_INFO]


class CMakeBuild(build_ext):
    """Builds and installs the module with CMake, into the source tree for an editable install."""

    def run(self) -> None:
        # setuptools resets `inplace` while it builds; CMake must know of it.
        self.editable = bool(self.inplace)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        torch = find_torch()
        cmake = require_tool("cmake")
        target = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        # What an editable install has compiled is used again, whatever wheels are built in between.
        kind = "editable" if self.editable else "wheel"
        build_dir = ROOT / "build" / f"{sysconfig.get_config_var('SOABI')}-torch-{torch.version}-{kind}"
        build_dir.mkdir(parents=True, exist_ok=True)
        fresh = ["--fresh"] if compiler_changed(build_dir) else []
        self._run(
            [cmake, *fresh, "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja", *self._options(torch)]
        )
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        self._run([cmake, "--build", str(build_dir), "--parallel", jobs])
        if self.editable:
            point_latest_to(build_dir)
        self._run([cmake, "--install", str(build_dir), "--prefix", str(target), "--component", "python"])
        prove(target, build_dir / "proven.txt", torch)
        print(f"ldt: built {ext.name} against torch {torch.version} in {target}")
        print((target / f"{BUILD_INFO}.py").read_text(encoding="utf-8"), flush=True)

    def copy_extensions_to_source(self) -> None:
        """Editable installs: put the build information into the source tree, next to the module."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = Path(self.build_lib, *ext.name.split(".")[:-1], f"{BUILD_INFO}.py")
            self.copy_file(str(built), str(Path(self.get_ext_fullpath(ext.name)).parent / built.name))

    def _options(self, torch: Torch) -> list[str]:
        options = [
            f"-DLDT_TORCH_DIR={torch.folder}",
            f"-DLDT_EXTRA_RPATH={torch.folder / 'lib' if self.editable else ''}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_MAKE_PROGRAM={require_tool('ninja')}",
            f"-DLDT_WITH_CUDA={os.environ.get('LDT_WITH_CUDA', 'auto').lower()}",
            f"-DLDT_UNITY={'folder' if self.editable else 'auto'}",  # an editable one is often built again
            f"-DLDT_BUILD_TESTS={os.environ.get('LDT_BUILD_TESTS', 'OFF')}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('LDT_BUILD_TYPE', 'Release')}",
        ]
        return options + shlex.split(os.environ.get("CMAKE_ARGS", ""))

    @staticmethod
    def _run(command: list[str]) -> None:
        print("ldt:", shlex.join(command), flush=True)
        status = subprocess.run(command, check=False).returncode
        if status != 0:
            raise SystemExit(f"ldt: `{shlex.join(command[:2])}` failed with status {status}; see above.")


def compiler_changed(build_dir: Path) -> bool:
    """Whether the environment names another compiler or other flags than CMake has kept in a build folder."""
    now = "".join(f"{name}={os.environ.get(name, '')}\n" for name in COMPILER_VARIABLES)
    note = build_dir / "compiler_environment.txt"
    before = note.read_text(encoding="utf-8") if note.exists() else now
    note.write_text(now, encoding="utf-8")
    return now != before


def point_latest_to(build_dir: Path) -> None:
    """Keeps build/latest a link to the last editable build, where ctest and clangd find it."""
    link = build_dir.parent / "latest"
    link.unlink(missing_ok=True)
    link.symlink_to(build_dir.name)


def requirements() -> list[str]:
    """The torch of the build, by minor version. A source archive has none: it is not bound to a torch."""
    if any(command in sys.argv for command in ("sdist", "clean")):
        return [TOML]
    return [TOML, find_torch().requirement]


setup(
    ext_modules=[Extension("ldt._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPy},
    install_requires=requirements(),
)
