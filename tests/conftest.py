"""Fixtures that all tests share; the devices themselves are set up in the root's conftest.py."""

import os

import hypothesis
import jax
import pytest
from jax.sharding import AxisType, Mesh

# The oracles assert too, and their failures should show values as a test's do.
pytest.register_assert_rewrite("tests.laws")

# The first example of a property compiles, so a deadline says nothing. In CI the examples are the
# same each time: a change turns red for what it changed.
hypothesis.settings.register_profile(
    "wusharding", deadline=None, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.load_profile("wusharding")


@pytest.fixture(scope="session")
def mesh8_explicit() -> Mesh:
    """Eight devices along `data`, shardings carried in types."""
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))


@pytest.fixture(scope="session")
def mesh8_auto() -> Mesh:
    """Eight devices along `data`, shardings left to the compiler."""
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
