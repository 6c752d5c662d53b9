import doctest

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from large_scale import hlo

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"


def module(body: str) -> str:
    head = "HloModule m, is_scheduled=true, replica_count=2, num_partitions=4"
    return f"{head}\n{ADD}\nENTRY %main (p: f32[8,3]) -> f32[] {{\n{body}\n}}\n"


# What the operand is, the instruction, and (kind, dtype, operand bytes, result bytes, group size).
FORMS = {
    "plain": (
        "f32[8,3]{1,0}",
        f"%x = f32[2,3]{{1,0}} reduce-scatter(%p), channel_id=1, {GROUPS}, to_apply=%add",
        ("reduce-scatter", "f32", 96, 24, 4),
    ),
    "operand with its type": (
        "bf16[8,3]{1,0}",
        f"ROOT %x = bf16[32,3]{{1,0}} all-gather(bf16[8,3]{{1,0}} %p), {GROUPS}, dimensions={{0}}",
        ("all-gather", "bf16", 48, 192, 4),
    ),
    "tuple of several types": (
        "f32[8,3]{1,0}",
        "%x = (f32[8,3]{1,0}, s8[5]{0}) all-reduce(%p, s8[5]{0} %q), replica_groups={}",
        ("all-reduce", "f32+s8", 101, 101, 8),
    ),
    "tuple with a comment": (
        "f32[8,3]{1,0}",
        "%x = (f32[8,3]{1,0}, /*index=1*/f32[8,3]{1,0}) all-to-all(%p, /*index=1*/%p), "
        f"{GROUPS}",
        ("all-to-all", "f32", 192, 192, 4),
    ),
    "tiled layout, groups by iota": (
        "f32[8,3]{1,0:T(8,128)S(1)}",
        "%x = f32[8,3]{1,0:T(8,128)S(1)} all-reduce(%p), replica_groups=[4,2]<=[2,4]T(1,0)",
        ("all-reduce", "f32", 96, 96, 2),
    ),
    "all-reduce-start": (
        "f32[8,3]{1,0}",
        f"%x = f32[8,3]{{1,0}} all-reduce-start(%p), {GROUPS}, to_apply=%add",
        ("all-reduce", "f32", 96, 96, 4),
    ),
    "all-reduce-start of two": (
        "f32[8,3]{1,0}",
        f"%x = (f32[8,3]{{1,0}}, f32[8,3]{{1,0}}) all-reduce-start(%p, %p), {GROUPS}",
        ("all-reduce", "f32", 192, 192, 4),
    ),
    "all-gather-start": (
        "f32[8,3]{1,0}",
        f"%x = (f32[8,3]{{1,0}}, f32[32,3]{{1,0}}) all-gather-start(%p), {GROUPS}",
        ("all-gather", "f32", 96, 384, 4),
    ),
    "reduce-scatter-start with its context": (
        "f32[8,3]{1,0}",
        f"%x = ((f32[8,3]{{1,0}}), f32[2,3]{{1,0}}, u32[]) reduce-scatter-start(%p), {GROUPS}",
        ("reduce-scatter", "f32", 96, 24, 4),
    ),
    "collective-permute-start": (
        "f32[8,3]{1,0}",
        "%x = (f32[8,3]{1,0}, f32[8,3]{1,0}, u32[], u32[]) collective-permute-start(%p), "
        "source_target_pairs={{0,1},{1,0}}",
        ("collective-permute", "f32", 96, 96, 2),
    ),
    "groups along an axis of a mesh": (
        "f32[]",
        "%x = f32[] all-reduce(%p), replica_groups=mesh['a'=2,'b'=4] {'b'}, channel_id=3",
        ("all-reduce", "f32", 4, 4, 4),
    ),
    "groups of a mesh in another order": (
        "f32[5]{0}",
        "%x = f32[10]{0} all-gather(%p), replica_groups=mesh['a'=2,'b'=4], "
        "device_ids=([4,2]T(1,0)) {'a'}, dimensions={0}",
        ("all-gather", "f32", 20, 40, 2),
    ),
    "groups that are not known": (
        "f32[]",
        "%x = f32[] all-reduce(%p), replica_groups=somehow",
        ("all-reduce", "f32", 4, 4, 0),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    operand, instruction, expected = FORMS[form]
    found = hlo.collectives(module(f"  %p = {operand} parameter(0)\n  {instruction}"))
    assert [(c.kind, c.dtype, c.operand_bytes, c.result_bytes, c.group_size) for c in found] == [
        expected
    ]
    assert not found[0].in_loop


NOT_COLLECTIVES = {
    "the end of a pair": "%x = f32[8,3]{1,0} all-reduce-done(%p)",
    "a name": "%all-reduce.7 = f32[8,3]{1,0} negate(%p)",
    "an operand": "%x = f32[8,3]{1,0} negate(%all-gather), control-predecessors={%all-reduce}",
    "metadata": '%x = f32[8,3]{1,0} negate(%p), metadata={op_name="f = g all-reduce(%p)"}',
    "a scatter": "%x = f32[8,3]{1,0} scatter(%p, %i, %u), to_apply=%add",
}


@pytest.mark.parametrize("case", NOT_COLLECTIVES)
def test_negative_control(case):
    text = module(f"  %p = f32[8,3]{{1,0}} parameter(0)\n  {NOT_COLLECTIVES[case]}")
    assert hlo.collectives(text) == []


def test_async_computation_counts_once():
    wrapped = """
%wrapped (q: f32[8,3]) -> f32[2,3] {
  %q = f32[8,3]{1,0} parameter(0)
  ROOT %rs = f32[2,3]{1,0} reduce-scatter(%q), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""
    body = """  %p = f32[8,3]{1,0} parameter(0)
  %s = ((f32[8,3]{1,0}), f32[2,3]{1,0}) async-start(%p), calls=%wrapped
  ROOT %d = f32[2,3]{1,0} async-done(%s)"""
    found = hlo.collectives(wrapped + module(body))
    assert [(c.kind, c.result_bytes) for c in found] == [("reduce-scatter", 24)]


PHASES = """
%scaled (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %m = f32[8]{0} multiply(%a, %a)
}

%moved (b: f32[2,4]) -> f32[8] {
  %b = f32[2,4]{1,0} parameter(0)
  %c = f32[2,4]{0,1} copy(%b)
  ROOT %d = f32[8]{0} bitcast(%c)
}
"""


@pytest.mark.parametrize(
    ("between", "phase"),
    [
        ("reshape(%one)", 2),
        ("fusion(%one), kind=kLoop, calls=%moved", 2),
        ("convert(%one)", 2),
        ("reduce(%one, %zero), dimensions={0}, to_apply=%add", 2),  # see `one`: nothing is added
        ('custom-call(%one), custom_call_target="ConcatBitcast"', 2),
        ("fusion(%one), kind=kLoop, calls=%scaled", 1),
        ('custom-call(%one), custom_call_target="Sharding"', 1),
        ("negate(%one)", 1),
        ("reduce(%more, %zero), dimensions={0}, to_apply=%add", 1),
    ],
)
def test_the_phase_counts_what_a_collective_takes_in(between, phase):
    body = f"""  %p = f32[8,3]{{1,0}} parameter(0)
  %one = f32[1,8]{{1,0}} reduce-scatter(%p), {GROUPS}, to_apply=%add
  %more = f32[2,8]{{1,0}} pad(%one), padding=0_1x0_0
  %between = f32[8]{{0}} {between}
  %two = f32[2]{{0}} reduce-scatter(%between), {GROUPS}, to_apply=%add
  %three = f32[2]{{0}} all-reduce(%two), {GROUPS}, to_apply=%add
  %back = f32[8]{{0}} all-gather(%three), {GROUPS}
  %start = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(%back), {GROUPS}
  %done = f32[32]{{0}} all-gather-done(%start)
  ROOT %last = f32[128]{{0}} all-gather(%done), {GROUPS}"""
    found = hlo.collectives(PHASES + module(body))
    assert [c.phase for c in found] == [1, phase, phase + 1, 1, 2, 3]


def test_a_phase_in_fusions_and_asynchronous_steps():
    """The parts of one collective are not two phases; the next one takes in what the last gives."""
    part = """
%part{0} (q: f32[8]) -> f32[32] {{
  %q{0} = f32[8]{{0}} parameter(0)
  ROOT %g{0} = f32[32]{{0}} all-gather(%q{0}), channel_id={1}, {2}
}}
"""
    parts = "".join(part.format(i, channel, GROUPS) for i, channel in enumerate((3, 3, 4)))
    body = """  %p = f32[8]{0} parameter(0)
  %s = f32[32]{0} fusion(%p), kind=kCustom, calls=%part0
  %d = f32[32]{0} fusion(%s), kind=kCustom, calls=%part1
  %a = ((f32[32]{0}), f32[128]{0}) async-start(%d), calls=%part2
  ROOT %e = f32[128]{0} async-done(%a)"""
    found = hlo.collectives(parts + module(body))
    assert [(c.kind, c.phase) for c in found] == [("all-gather", 1), ("all-gather", 2)]
    assert [c.emitter for c in found] == ["asynchronous fusions", ""]


def test_asynchronous_ones_of_one_channel_are_told_by_their_chain():
    part = """
%part{0} (q: f32[8]) -> f32[32] {{
  %q{0} = f32[8]{{0}} parameter(0)
  ROOT %g{0} = f32[32]{{0}} all-gather(%q{0}), channel_id=1, {1}
}}
"""
    parts = "".join(
        part.format(i, f'{GROUPS}, frontend_attributes={{chain_id="{chain}"}}')
        for i, chain in enumerate((0, 1, 0, 1))
    )
    body = """  %p = f32[8]{0} parameter(0)
  %s0 = f32[32]{0} fusion(%p), kind=kCustom, calls=%part0
  %s1 = f32[32]{0} fusion(%p), kind=kCustom, calls=%part1
  %d0 = f32[32]{0} fusion(%s0), kind=kCustom, calls=%part2
  ROOT %d1 = f32[32]{0} fusion(%s1), kind=kCustom, calls=%part3"""
    found = hlo.collectives(parts + module(body))
    assert [(c.kind, c.phase, c.emitter) for c in found] == [
        ("all-gather", 1, "asynchronous fusions")
    ] * 2


@pytest.mark.parametrize(
    ("kind", "operand_bytes", "sent_bytes"),
    [
        ("all-reduce", 80, 120),
        ("reduce-scatter", 80, 60),
        ("all-gather", 20, 60),
        ("all-to-all", 80, 60),
        ("collective-permute", 80, 80),
    ],
)
def test_sent_bytes(kind, operand_bytes, sent_bytes):
    found = hlo.Collective(kind, "f32", operand_bytes, 0, "", ((0, 2, 4, 6),), False)
    assert found.sent_bytes == sent_bytes


def test_unknown_groups_are_not_guessed():
    found = hlo.Collective("all-reduce", "f32", 8, 8, "somehow", (), False)
    with pytest.raises(ValueError, match="all-reduce of 'somehow': unknown groups"):
        _ = found.sent_bytes
    with pytest.raises(ValueError, match="all-reduce of 'somehow': unknown groups"):
        found.crossed_axes({"data": 2})


# The text, and its groups among eight devices.
GROUPS_OF = {
    "{{0,1,2,3}, {4,5,6,7}}": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "{{3,1},{0}}": [[3, 1], [0]],
    "": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "[2,4]<=[8]": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "[2,4]<=[4,2]T(1,0)": [[0, 2, 4, 6], [1, 3, 5, 7]],
    "[4,2]<=[2,2,2]T(2,0,1)": [[0, 2], [4, 6], [1, 3], [5, 7]],
    "mesh['a'=2,'b'=4] {'a'}": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "mesh['a'=2,'b'=4] {'b'}": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "mesh[a=2,b=4] {b,a}": [[0, 4, 1, 5, 2, 6, 3, 7]],
    "mesh['a'=8] {'a':(1)2}": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "mesh['a'=8] {'a':(2)2}": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "mesh['a'=8] {'a':(4)2,'a':(1)2}": [[0, 4, 1, 5], [2, 6, 3, 7]],
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'b'}": [[3, 1], [0, 2]],
    "mesh['a'=8] {}": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "[2,4]<=somehow": [],
}


@pytest.mark.parametrize("text", GROUPS_OF)
def test_groups(text):
    assert hlo.groups_of(text, 8) == tuple(map(tuple, GROUPS_OF[text]))


def compiled(fun, mesh, *shapes) -> str:
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(mapped).lower(*args).compile().as_text()


def test_compiled_program(mesh8_auto):
    def fun(x):  # of shape (16, 5) on each device
        part = jax.lax.psum_scatter(x, "data", tiled=True)
        return jax.lax.all_gather(part**2, "data", tiled=True)

    found = hlo.collectives(compiled(fun, mesh8_auto, (128, 5)))
    assert [(c.kind, c.operand_bytes, c.result_bytes, c.sent_bytes) for c in found] == [
        ("reduce-scatter", 320, 40, 280),
        ("all-gather", 40, 320, 280),
    ]
    assert all(c.group_size == 8 and not c.in_loop for c in found)


def test_compiled_program_of_two_axes():
    """What `shard_map` asks for, and what the partitioner makes of a sum: it names a mesh."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=NamedSharding(mesh, P(*mesh.shape)))

    def along(axes):
        mapped = jax.shard_map(
            lambda x: jax.lax.psum(x, axes),
            mesh=mesh,
            in_specs=P(*mesh.shape),
            out_specs=P(),
            check_vma=False,
        )
        (found,) = hlo.collectives(jax.jit(mapped).lower(x).compile().as_text())
        return found

    assert along("data").groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert along("data").crossed_axes(mesh.shape) == {"data"}
    assert along("model").crossed_axes(mesh.shape) == {"model"}
    assert along(("data", "model")).crossed_axes(mesh.shape) == {"data", "model"}

    fun = jax.jit(lambda x: jnp.sum(x, 0), out_shardings=NamedSharding(mesh, P()))
    summed, gathered = hlo.collectives(fun.lower(x).compile().as_text())
    assert (summed.kind, summed.crossed_axes(mesh.shape)) == ("all-reduce", {"data"})
    assert (gathered.kind, gathered.crossed_axes(mesh.shape)) == ("all-gather", {"model"})
    assert (summed.sent_bytes, gathered.sent_bytes) == (2 * 48 * 3 // 4, 48)


def test_compiled_loop(mesh8_auto):
    def fun(x):
        def body(_, c):
            moved = jax.lax.ppermute(c, "data", [(i, (i + 1) % 8) for i in range(8)])
            return jax.lax.pmax(moved, "data") + c

        return jax.lax.fori_loop(0, 3, body, jax.lax.psum(x, "data"))

    found = hlo.collectives(compiled(fun, mesh8_auto, (24, 5)))
    assert sorted((c.kind, c.in_loop) for c in found) == [
        ("all-reduce", False),
        ("all-reduce", True),
        ("collective-permute", True),
    ]
    assert {c.operand_bytes for c in found} == {60}


def test_doctests():
    failed, attempted = doctest.testmod(hlo)
    assert attempted and not failed


def test_what_goes_between_slices_counts():
    told = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="r0",'
        '_xla_megascale_target="{1,2}x{0:1}",_xla_megascale_transfer_type="REDUCE_SCATTER"}'
    )
    (found,) = hlo.collectives(
        f"""
HloModule m, num_partitions=2
ENTRY %main (p: f32[4,3]) -> f32[2,3] {{
  %p = f32[4,3]{{1,0}} parameter(0)
  %t = token[] after-all()
  %send = (f32[4,3]{{1,0}}, u32[], token[]) send(%p, %t), channel_id=1, {told}
  %recv = (f32[2,3]{{1,0}}, u32[], token[]) recv(%t), channel_id=2, {told}
  %done = (f32[2,3]{{1,0}}, token[]) recv-done(%recv)
  ROOT %r = f32[2,3]{{1,0}} get-tuple-element(%done), index=0
}}"""
    )
    assert (found.kind, found.dtype, found.groups) == ("reduce-scatter", "f32", ((0, 2), (1, 3)))
    assert (found.operand_bytes, found.result_bytes, found.sent_bytes) == (48, 24, 24)
