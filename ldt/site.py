"""Sites: which stages are in one place, and so share one pipe to each other place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ldt.errors import TopologyError

__all__ = ["SITES", "Site", "check_sites", "parse_sites", "sites_text"]

Site = int | str

_NUMBER, _NAME = "[0-9]{1,6}", "[A-Za-z_][A-Za-z0-9_.-]{0,31}"
_SITE = re.compile(f"{_NUMBER}|{_NAME}")
SITES = f"(?:{_SITE.pattern})(?:,(?:{_SITE.pattern}))*"  # a regular expression of ``sites_text``


def check_sites(sites: Any, num_stages: int) -> tuple[Site, ...]:
    """Return the site of each stage as a tuple; by default the edge is one site and the cloud another.

    Raises TopologyError, which names the entry, unless there is one site per stage and the edge's is its own.
    """
    if sites is None:
        return (0,) + (1,) * (num_stages - 1)
    if not isinstance(sites, Sequence) or isinstance(sites, (str, bytes)) or len(sites) != num_stages:
        raise TopologyError(
            f"sites needs the site of each of the {num_stages} stages, for example sites=[0, 1, 1] for three: "
            f"got {repr(sites)[:80]}"
        )
    for stage, site in enumerate(sites):
        number = isinstance(site, int) and not isinstance(site, bool)
        if not (number or isinstance(site, str)) or not _SITE.fullmatch(str(site)):
            raise TopologyError(
                f"sites[{stage}] must be a number from 0 to 999999 or a name of up to 32 of A-Z, a-z, 0-9, '_', '.' "
                f"and '-' that begins with a letter or '_', got {repr(site)[:80]}"
            )
        if isinstance(site, str) and site.isdigit():
            raise TopologyError(
                f"sites[{stage}] must be a number or a name, got the text {site!r}: give {int(site)}"
            )
        if stage and site == sites[0]:
            raise TopologyError(
                f"sites[{stage}] is that of stage 0, {site!r}: the edge needs a site of its own"
            )
    return tuple(sites)


def sites_text(sites: Sequence[Site]) -> str:
    """For example ``0,1,1`` or ``office,cloud,cloud``."""
    return ",".join(map(str, sites))


def parse_sites(text: str) -> list[Site]:
    """Parse the text of ``sites_text``; whether the sites are valid, ``check_sites`` says."""
    return [int(site) if re.fullmatch(_NUMBER, site) else site for site in text.split(",")]
