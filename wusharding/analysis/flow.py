"""How values flow between a control-flow operation and its bodies."""

from __future__ import annotations

from wusharding.jaxprs import Op


def turns_of(op: Op) -> int:
    """How often the bodies of a control-flow operation run; a `while` counts as one turn."""
    return op.params["length"] if op.name == "scan" else 1


def control_links(op: Op) -> list[list[tuple[int, int, int]]]:
    """For each body of a control-flow operation: (outer value, inner value, dim shift)."""
    if op.name == "cond":
        return [
            [(a, b, 0) for a, b in zip(op.ins[1:], sub.inputs, strict=True)]
            + [(a, b, 0) for a, b in zip(op.outs, sub.outputs, strict=True)]
            for sub in op.subs
        ]
    if op.name == "scan":
        (body,) = op.subs
        fixed = op.params["num_consts"] + op.params["num_carry"]
        carry = op.params["num_carry"]
        ins = [
            (a, b, -(i >= fixed)) for i, (a, b) in enumerate(zip(op.ins, body.inputs, strict=True))
        ]
        outs = [
            (a, b, -(i >= carry))
            for i, (a, b) in enumerate(zip(op.outs, body.outputs, strict=True))
        ]
        return [ins + outs]
    if op.name != "while":  # a call that was kept: its body is the operation itself
        (body,) = op.subs
        pairs = zip((*op.ins, *op.outs), (*body.inputs, *body.outputs), strict=True)
        return [[(a, b, 0) for a, b in pairs]]
    cond, body = op.subs
    c, b = op.params["cond_nconsts"], op.params["body_nconsts"]
    carry = op.ins[c + b :]
    return [
        [(x, y, 0) for x, y in zip((*op.ins[:c], *carry), cond.inputs, strict=True)],
        [(x, y, 0) for x, y in zip((*op.ins[c : c + b], *carry), body.inputs, strict=True)]
        + [(x, y, 0) for x, y in zip(op.outs, body.outputs, strict=True)],
    ]


def carries(op: Op) -> list[list[tuple[int, int]]]:
    """What goes round a loop: for each body, its positions among the inputs and the outputs."""
    if op.name == "scan":
        start = op.params["num_consts"]
        return [[(start + i, i) for i in range(op.params["num_carry"])]]
    if op.name == "while":
        start = op.params["body_nconsts"]
        return [[], [(start + i, i) for i in range(len(op.outs))]]
    return [[] for _ in op.subs]


def body_ties(op: Op) -> list[list[tuple[int, int]]]:
    """Values of a body that go round its loop."""
    return [
        [(body.inputs[i], body.outputs[o]) for i, o in kept]
        for body, kept in zip(op.subs, carries(op), strict=True)
    ]
