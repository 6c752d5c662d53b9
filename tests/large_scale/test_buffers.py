"""Which temporaries are alive at the peak, from kept notes of XLA and from real ones."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from large_scale import aot, make_mesh
from large_scale.buffers import Dump, op_names, peak

ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, page 0, parameter 0, shape |f32[1024]| at ShapeIndex {}:
 value: <1 p @0> (size=4096,offset=0): f32[1024]{0}
allocation 1: size 9000, page 0, preallocated-temp:
 value: <2 early @0> (size=3000,offset=0): f32[750]{0:T(128)}
 value: <3 wide @0> (size=5000,offset=3000): f32[10,125]{1,0:T(8,128)}
 value: <4 inplace @0> (size=5000,offset=3000): f32[10,125]{1,0:T(8,128)}
 value: <5 late{1} @0> (size=2500,offset=0): (f32[625]{0}, s32[]{:S(2)})
allocation 2: size 800000, color 1, page 0, preallocated-temp:
 value: <6 near @1> (size=800000,offset=0): f32[200000]{0:S(1)}
"""
LIVES = """HloLiveRange (max 6):
  InstructionSequence:
    0:p
    1:early
    2:wide
    3:inplace
    4:late
    5:near
  BufferLiveRange:
    p{}:0-6
    early{}:1-2
    wide{}:2-3
    inplace{}:3-5
    late{1}:4-6
    near{}:5-6
  Live ranges at 5 (peak):
    near{}: 800000 bytes (cumulative: 800000 bytes)
"""


def test_the_peak_of_a_kept_note():
    found = peak(ASSIGNMENT, LIVES, {"early": "jit(f)/sort"})
    assert found is not None
    assert (found.instruction, found.live_bytes, found.allocated_bytes) == ("wide", 8000, 9000)
    assert [(b.name, b.nbytes, b.type, b.op_name) for b in found.buffers] == [
        ("wide", 5000, "f32[10,125]", ""),
        ("early", 3000, "f32[750]", "jit(f)/sort"),
    ]


def test_what_shares_a_place_counts_once():
    """`wide` and `inplace` are both alive at 3; the peak moves there if `early` ends before."""
    found = peak(ASSIGNMENT, LIVES.replace("early{}:1-2", "early{}:1-1"), {})
    assert found is not None
    assert (found.instruction, found.live_bytes) == ("late", 7500)
    assert [b.name for b in found.buffers] == ["inplace", "late{1}"]
    assert found.buffers[1].type == "(f32[625], s32[])"


def test_a_program_without_temporaries_has_no_peak():
    assert peak(ASSIGNMENT.replace("preallocated-temp", "constant"), LIVES, {}) is None


def test_nothing_written_down_is_no_error():
    with Dump() as dump:
        assert dump.read() is None


def test_names_of_operations():
    text = """
  ROOT %a.1 = f32[8]{0} add(%p, %q), metadata={op_name="jit(f)/add" stack_frame_id=3}
  %b = f32[8]{0} copy(%p), metadata={op_name="grads[\\'w\\']"}
  %c = f32[8]{0} copy(%p)
"""
    assert op_names(text) == {"a.1": "jit(f)/add", "b": "grads['w']"}


@pytest.mark.parametrize("rows", [256, 384])
def test_a_real_program_names_its_temporaries(rows):
    mesh = make_mesh("cpu:8", axis_types=AxisType.Auto)
    whole = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((rows, 128), jnp.float32, sharding=whole)

    def step(x):
        return jnp.sort(x, axis=1) @ jnp.cumsum(x, axis=1).T

    found = aot.compile_step(step, x)
    assert found.peak is not None
    assert found.peak.allocated_bytes == found.temp_bytes
    assert 0 < found.peak.live_bytes <= found.peak.allocated_bytes
    of_sort = [b for b in found.peak.buffers if "sort" in b.op_name]
    assert of_sort and of_sort[0].type == f"f32[{rows},128]"
    assert of_sort[0].nbytes == rows * 128 * 4


def test_a_folder_that_is_still_written_to_hides_no_interruption(monkeypatch):
    """As where the compiler's threads outlive the call that was interrupted."""

    def still_written(*args, **kwargs):
        raise OSError(39, "Directory not empty")

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt), Dump():
        patched.setattr(os, "rmdir", still_written)
        raise KeyboardInterrupt
