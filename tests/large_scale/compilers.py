"""Marks of tests that need a compiler which an extra installs."""

import importlib.util

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="XLA's TPU compiler is not installed: pip install 'wusharding[tpu-aot]'",
)
