"""Which file may import what: the law of CONTRIBUTING.md, read off the import statements.

Three laws, each checked without importing anything:

1. Order. A room imports itself and rooms before it in `ORDER`; `large_scale` sees of `wusharding`
   only its public names. A package's file without a room is a fault, not an exception.
2. Unstable JAX. `jax.extend` and `jax.interpreters` belong to `wusharding/jaxprs.py` among the
   packages' files, and private names (`jax._src`) to that file among all files.
3. No import inside a function of the packages: it would hide a circle.

Imports under `if TYPE_CHECKING` count: types are part of how rooms depend on each other.
"""

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A group may import the groups before it. Rooms of one group do not know each other, save that
# `BESIDE` allows it.
ORDER = (
    ("wusharding.errors", "wusharding.jaxprs"),
    ("wusharding.formats",),
    ("wusharding.analysis",),
    ("wusharding.transforms",),
    ("wusharding.checkpoint", "wusharding.integrations"),
    ("wusharding",),
    ("wusharding.cli", "wusharding.__main__", "large_scale"),
    ("benchmarks", "examples", "tests"),
)
BESIDE = {
    ("wusharding.jaxprs", "wusharding.errors"),  # to refuse by name what it cannot rebuild
    ("wusharding.__main__", "wusharding.cli"),
    ("tests", "benchmarks"),
    ("tests", "examples"),
}
GROUP = {room: group for group, rooms in enumerate(ORDER) for room in rooms}
PACKAGES = ("wusharding", "large_scale")
OURS = (*PACKAGES, "benchmarks", "examples", "tests")
UNSTABLE_JAX = ("jax.extend", "jax.interpreters")
UNSTABLE_JAX_ROOM = "wusharding.jaxprs"


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file: its dotted name and its parsed text."""

    name: str
    is_package: bool
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        """The room it lies in; a name that `GROUP` lacks where nobody gave it one."""
        return _room(self.name)

    def imports(self) -> Iterator[tuple[int, str, str, str]]:
        """Each `(line, module, name, local name)`; the name is empty for `import module`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name, "", alias.asname or ""
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield node.lineno, self._absolute(node), alias.name, alias.asname or alias.name

    def names(self) -> Iterator[tuple[int, str]]:
        """Each `(line, dotted name)` that is imported, or read through what was imported."""
        stands_for = {}
        for line, source, name, local in self.imports():
            full = f"{source}.{name}" if name else source
            top = full.partition(".")[0]
            stands_for |= {local: full} if local else {top: top}
            yield line, full
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and (full := _dotted(node, stands_for)):
                yield node.lineno, full

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*kept, node.module] if node.module else kept)


def _dotted(node: ast.expr, stands_for: Mapping[str, str]) -> str | None:
    """`jnp.linalg.norm` as `jax.numpy.linalg.norm`; None for what does not start at an import."""
    if isinstance(node, ast.Name):
        return stands_for.get(node.id)
    if isinstance(node, ast.Attribute) and (start := _dotted(node.value, stands_for)):
        return f"{start}.{node.attr}"
    return None


def _room(name: str) -> str:
    """The room of a dotted name: one level below `wusharding`, the package itself elsewhere."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "wusharding" else parts[0]


def read_modules(root: Path) -> dict[str, Module]:
    """All source files of the packages, benchmarks and tests under `root`, by dotted name."""
    modules = {}
    for top in OURS:
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
            modules[name] = Module(name, is_package, path.relative_to(root), tree)
    return modules


def find_faults(root: Path) -> list[str]:
    """Every breach of the three laws under `root`, as `path:line: what and why`."""
    modules = read_modules(root)
    faults = []
    for module in modules.values():
        where = module.path.as_posix()
        if module.room not in GROUP:
            faults.append(f"{where}:1: {module.room} has no room; give it one in ORDER")
            continue
        found = [
            *_order_faults(module, modules),
            *_jax_faults(module),
            *_nested_imports(module),
        ]
        faults += [f"{where}:{line}: {what}" for line, what in sorted(set(found))]
    return faults


def _order_faults(module: Module, modules: Mapping[str, Module]) -> Iterator[tuple[int, str]]:
    for line, source, name, _ in module.imports():
        # `from package import name` means the submodule of that name, where there is one.
        target = f"{source}.{name}" if f"{source}.{name}" in modules else source
        if target.partition(".")[0] not in OURS:
            continue
        room = _room(target)
        if room not in GROUP:
            yield line, f"imports {target}, which has no room; give it one in ORDER"
        elif module.room == "large_scale" and target.startswith("wusharding."):
            yield line, f"large_scale imports {target}; only wusharding's public names are its own"
        elif not (
            room == module.room or GROUP[room] < GROUP[module.room] or (module.room, room) in BESIDE
        ):
            yield line, f"{module.room} imports {target}, which does not come before it in ORDER"


def _jax_faults(module: Module) -> Iterator[tuple[int, str]]:
    if module.room == UNSTABLE_JAX_ROOM:
        return
    in_packages = module.name.partition(".")[0] in PACKAGES
    for line, name in module.names():
        top, *rest = name.split(".")
        if top != "jax":
            continue
        if any(part.startswith("_") and not part.endswith("__") for part in rest):
            yield line, f"private JAX name outside {UNSTABLE_JAX_ROOM}"
        elif in_packages and any(f"{name}.".startswith(f"{bad}.") for bad in UNSTABLE_JAX):
            yield line, f"unstable JAX module outside {UNSTABLE_JAX_ROOM}"


def _nested_imports(module: Module) -> Iterator[tuple[int, str]]:
    if module.name.partition(".")[0] not in PACKAGES:
        return
    for function in ast.walk(module.tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield node.lineno, "import inside a function; move it to the top of the file"


def test_import_contract():
    modules = read_modules(ROOT)
    assert {"wusharding", "tests.test_import_contract"} <= modules.keys(), (
        "the checker reads a tree"
    )
    assert find_faults(ROOT) == []


def _write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


GOOD_TREE = {
    "wusharding/__init__.py": "from wusharding.formats import Flat\nfrom . import checkpoint\n",
    "wusharding/__main__.py": "from wusharding.cli import main\n",
    "wusharding/cli.py": "from wusharding import Flat\nfrom .transforms import step\n",
    "wusharding/errors.py": "",
    "wusharding/jaxprs.py": (
        "import jax._src.core\nimport jax.extend as jex\n"
        "from wusharding.errors import Unsupported\ncore = jex.core\n"
    ),
    "wusharding/formats/__init__.py": "from wusharding.formats.flat import Flat\n",
    "wusharding/formats/flat.py": (
        "import jax\nfrom jax import numpy as jnp\nfrom ..errors import Unsupported\n"
        "x = jnp.ones, jax.__version__, jax.jit(f)._cache_size\n"
    ),
    "wusharding/transforms/__init__.py": "",
    "wusharding/transforms/step.py": "from .. import jaxprs\nfrom ..formats import flat\n",
    "wusharding/checkpoint.py": "from wusharding.transforms.step import shard_step\n",
    "large_scale/__init__.py": "from wusharding import Flat, shard_step\n",
    "benchmarks/update.py": "import wusharding.formats\nimport large_scale\n",
    "tests/test_x.py": (
        "import benchmarks.update\nfrom jax.extend import core\n"
        "def test():\n    import wusharding.formats.flat\n"
    ),
}


def test_good_tree_has_no_faults(tmp_path):
    _write(tmp_path, GOOD_TREE)
    assert find_faults(tmp_path) == []


BEFORE = "which does not come before it in ORDER"
BAD_FILES = [
    ("wusharding/formats/flat.py", "import wusharding.analysis.plan", BEFORE),
    ("wusharding/formats/flat.py", "from wusharding import shard_step", BEFORE),
    ("wusharding/formats/flat.py", "from .. import transforms", BEFORE),
    ("wusharding/formats/flat.py", "if TYPE_CHECKING:\n    from ..transforms import step", BEFORE),
    ("wusharding/formats/__init__.py", "from ..transforms.step import shard_step", BEFORE),
    ("wusharding/errors.py", "from wusharding.jaxprs import walk", BEFORE),
    ("wusharding/checkpoint.py", "from wusharding.integrations import flax", BEFORE),
    ("wusharding/__init__.py", "from wusharding.cli import main", BEFORE),
    ("wusharding/cli.py", "import large_scale.topology", BEFORE),
    ("wusharding/transforms/step.py", "from tests.laws import split_run_join", BEFORE),
    ("large_scale/mesh.py", "import benchmarks", BEFORE),
    (
        "large_scale/mesh.py",
        "from wusharding.formats import Flat",
        "only wusharding's public names",
    ),
    ("large_scale/mesh.py", "from wusharding import formats", "only wusharding's public names"),
    ("wusharding/helpers.py", "import jax", "has no room"),
    ("wusharding/formats/flat.py", "from wusharding.helpers import f", "has no room"),
    ("wusharding/formats/flat.py", "import jax._src.core", "private JAX name"),
    ("wusharding/formats/flat.py", "from jax import _src", "private JAX name"),
    ("wusharding/formats/flat.py", "import jax\nx = jax._src.core", "private JAX name"),
    ("wusharding/formats/flat.py", "import jax.numpy as np\nx = np._y", "private JAX name"),
    ("tests/test_x.py", "from jax._src import core", "private JAX name"),
    ("wusharding/formats/flat.py", "from jax.interpreters import ad", "unstable JAX module"),
    ("wusharding/formats/flat.py", "from jax import extend", "unstable JAX module"),
    ("wusharding/formats/flat.py", "import jax\nx = jax.extend.core", "unstable JAX module"),
    ("large_scale/mesh.py", "import jax.extend", "unstable JAX module"),
    ("wusharding/formats/flat.py", "def f():\n    import jax", "import inside a function"),
    ("wusharding/cli.py", "class A:\n  async def f(self):\n    import sys", "inside a function"),
]


@pytest.mark.parametrize(("path", "text", "fault"), BAD_FILES)
def test_negative_control(tmp_path, path, text, fault):
    _write(tmp_path, GOOD_TREE | {path: f"{text}\n"})
    faults = find_faults(tmp_path)
    assert len(faults) == 1, faults
    last_line = text.count("\n") + 1
    assert faults[0].startswith(f"{path}:{last_line}: ")
    assert fault in faults[0]
