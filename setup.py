"""Packaging entry point; every fact about the package is in pyproject.toml."""

from setuptools import setup

setup()
