"""The build backend: setuptools' own hooks behind one question, which torch does the target environment have.

torch is never a build requirement: a frontend would then download one (a CUDA build of gigabytes) that has
nothing to do with the torch that ldt will run beside. Every hook that leads to a wheel fails early, with one
sentence, when the target has none. setuptools, CMake and Ninja are taken from the target, too, and required where it
has none that will do: then a build needs no network.
"""

from __future__ import annotations

from typing import Any

from find_setuptools import missing_setuptools, require_setuptools
from find_torch import find_torch
from native_tools import missing_requirements


def _setuptools() -> Any:
    require_setuptools()
    from setuptools import build_meta

    return build_meta


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """setuptools, CMake and Ninja, as far as the machine has none."""
    find_torch()
    return [*missing_setuptools(), *missing_requirements()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """setuptools, CMake and Ninja, as far as the machine has none."""
    return get_requires_for_build_wheel(config_settings)


def get_requires_for_build_sdist(config_settings: dict[str, Any] | None = None) -> list[str]:
    """setuptools, if there is none: a source archive is made without torch and without a compiler."""
    return missing_setuptools()


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: dict[str, Any] | None = None
) -> str:
    """Metadata with the requirement on the torch that the wheel will be built against."""
    find_torch()
    result: str = _setuptools().prepare_metadata_for_build_wheel(metadata_directory, config_settings)
    return result


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: dict[str, Any] | None = None
) -> str:
    """Like prepare_metadata_for_build_wheel."""
    find_torch()
    result: str = _setuptools().prepare_metadata_for_build_editable(metadata_directory, config_settings)
    return result


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Builds a wheel for the target's torch and returns its file name."""
    find_torch()
    result: str = _setuptools().build_wheel(wheel_directory, config_settings, metadata_directory)
    return result


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Builds ldt._C into the source tree and returns the file name of a wheel that points there."""
    find_torch()
    result: str = _setuptools().build_editable(wheel_directory, config_settings, metadata_directory)
    return result


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    """Makes the source archive. Its metadata name no torch: which one is known only where it is built."""
    result: str = _setuptools().build_sdist(sdist_directory, config_settings)
    return result
