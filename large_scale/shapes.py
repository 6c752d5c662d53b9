"""Shapes of the parameters of models that the literature measures sharding on.

The trees hold `jax.ShapeDtypeStruct`s, so a plan can be made without any memory.
"""

import jax
import jax.numpy as jnp

Shapes = dict[str, jax.ShapeDtypeStruct]

_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks and width of ResNet-50's stages
_EXPANSION = 4


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def resnet50(
    classes: int = 1000, stages: tuple[tuple[int, int], ...] = _STAGES, stem: int = 64
) -> Shapes:
    """ResNet-50 version 1.5: convolutions as height, width, in, out; batch norm scales and biases.

    >>> sum(x.size for x in resnet50().values())
    25557032
    """
    params = {"stem/kernel": _array(7, 7, 3, stem), **_norm("stem", stem)}
    channels = stem
    for stage, (blocks, width) in enumerate(stages):
        for block in range(blocks):
            name = f"stage{stage}/block{block}"
            out = _EXPANSION * width
            convs = [(1, channels, width), (3, width, width), (1, width, out)]
            for i, (size, a, b) in enumerate(convs):
                params[f"{name}/conv{i}/kernel"] = _array(size, size, a, b)
                params |= _norm(f"{name}/conv{i}", b)
            if block == 0:
                params[f"{name}/shortcut/kernel"] = _array(1, 1, channels, out)
                params |= _norm(f"{name}/shortcut", out)
            channels = out
    return params | {"head/kernel": _array(channels, classes), "head/bias": _array(classes)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}/scale": _array(width), f"{name}/bias": _array(width)}


def transformer_big(
    layers: int = 6, width: int = 1024, hidden: int = 4096, vocabulary: int = 33_708
) -> Shapes:
    """The big Transformer: encoder and decoder of `layers` each, one shared embedding.

    >>> sum(x.size for x in transformer_big().values())
    210800640
    """
    params = {"embedding": _array(vocabulary, width)}
    for i in range(layers):
        for side, attentions in (("encoder", 1), ("decoder", 2)):
            name = f"{side}{i}"
            for a in range(attentions):
                for matrix in ("query", "key", "value", "out"):
                    params[f"{name}/attention{a}/{matrix}"] = _array(width, width)
                params |= _norm(f"{name}/norm{a}", width)
            params |= {
                f"{name}/mlp/up/kernel": _array(width, hidden),
                f"{name}/mlp/up/bias": _array(hidden),
                f"{name}/mlp/down/kernel": _array(hidden, width),
                f"{name}/mlp/down/bias": _array(width),
            }
            params |= _norm(f"{name}/norm", width)
    return params


def bert_large(
    layers: int = 24,
    width: int = 1024,
    hidden: int = 4096,
    vocabulary: int = 30_522,
    positions: int = 512,
) -> Shapes:
    """BERT-large without a head: 24 layers of width 1,024, vocabulary 30,522.

    >>> sum(x.size for x in bert_large().values())
    335141888
    """
    params = {
        "embedding/word": _array(vocabulary, width),
        "embedding/position": _array(positions, width),
        "embedding/type": _array(2, width),
    } | _norm("embedding/norm", width)
    for i in range(layers):
        name = f"layer{i}"
        for matrix in ("query", "key", "value", "out"):
            params |= _dense(f"{name}/attention/{matrix}", width, width)
        params |= _dense(f"{name}/mlp/up", width, hidden) | _dense(
            f"{name}/mlp/down", hidden, width
        )
        params |= _norm(f"{name}/norm0", width) | _norm(f"{name}/norm1", width)
    return params | _dense("pooler", width, width)


def gpt2(
    layers: int = 12, width: int = 768, vocabulary: int = 50_257, positions: int = 1024
) -> Shapes:
    """The smallest GPT-2: 12 layers of width 768, vocabulary 50,257, which no power of 2 divides.

    >>> sum(x.size for x in gpt2().values())
    124439808
    """
    params = {
        "embedding/token": _array(vocabulary, width),
        "embedding/position": _array(positions, width),
    }
    for i in range(layers):
        name = f"layer{i}"
        params |= _dense(f"{name}/attention/qkv", width, 3 * width)
        params |= _dense(f"{name}/attention/out", width, width)
        params |= _dense(f"{name}/mlp/up", width, 4 * width)
        params |= _dense(f"{name}/mlp/down", 4 * width, width)
        params |= _norm(f"{name}/norm0", width) | _norm(f"{name}/norm1", width)
    return params | _norm("norm", width)


def _dense(name: str, width_in: int, width_out: int) -> Shapes:
    return {f"{name}/kernel": _array(width_in, width_out), f"{name}/bias": _array(width_out)}
