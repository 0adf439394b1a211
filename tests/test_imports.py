"""The tree shows the architecture: imports run one way."""

import ast
from pathlib import Path

import pfml

SOURCE = Path(pfml.__file__).parent

#: Every layer may import from those before it, and from nothing after it.
LAYERS = [
    "version",
    "lazy",
    "packages",
    "own_code",
    "typos",
    "terminal",
    "memory",
    "precision",
    "tracing",
    "templates",
    "storage",
    "half_precision",
    "field",
    "sphere",
    "hyperbolic",
    "superposition",
    "backends",
    "energy",
    "losses",
    "distributed",
    "labels",
    "data",
    "models",
    "evaluation",
    "methods",
    "runs",
    "training",
    "suggest",
    "ladder",
    "search",
    "audit",
    "ensemble",
    "export",
    "plots",
    "pages",
    "paper",
    "theory",
    "experiments",
    "serving",
    "cli",
    "__main__",
]


def module_name(path):
    """The dotted name of a source file, such as "pfml.runs.config"; that of its folder for an __init__.py."""
    parts = ("pfml", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imported_by(module):
    """The modules of pfml that `module` imports: anywhere in it, also under TYPE_CHECKING or within a function."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "pfml":
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES.keys()
    return found - {module}


def first_cycle(imports):
    """A shortest list of modules of which each imports the next and the last the first; empty if there is none."""
    shortest = []
    for start in imports:
        came_from = {start: None}
        queue = [start]
        for module in queue:
            if start in imports[module]:
                cycle = [module]
                while came_from[cycle[-1]] is not None:
                    cycle.append(came_from[cycle[-1]])
                if not shortest or len(cycle) < len(shortest):
                    shortest = cycle[::-1]
                break
            for other in imports[module] - came_from.keys():
                came_from[other] = module
                queue.append(other)
    return shortest


def test_imports_run_one_way():
    # the package itself offers names of all layers, which are loaded when they are used
    imports = {module: imported_by(module) for module in MODULES if module != "pfml"}
    upward = [
        f"{module} imports {other}, of a later layer"
        for module in imports
        for other in sorted(imports[module] - {"pfml"})
        if LAYERS.index(other.split(".")[1]) > LAYERS.index(module.split(".")[1])
    ]
    upward += [f"{module} imports pfml itself" for module in imports if "pfml" in imports[module]]
    assert not upward, "imports must run from later layers to earlier ones:\n" + "\n".join(upward)
    cycle = first_cycle({module: {other for other in imports[module] if other != "pfml"} for module in imports})
    assert not cycle, "modules import each other in a circle: " + " -> ".join([*cycle, cycle[0]])
