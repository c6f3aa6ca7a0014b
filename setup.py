"""Metadata lives in setup.cfg; this file exists for tools that still call setup.py."""

import sys

# pip compares python_requires of a folder with its Python only after it has fetched all that the folder asks for, torch among it.
if sys.version_info < (3, 11):  # noqa: UP036
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(f"bigtrain needs Python 3.11 or later, this is {found} ({sys.executable})")

from setuptools import setup

setup()
