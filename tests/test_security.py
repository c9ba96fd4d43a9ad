"""What no source file of the package may use: pickle in any form, evaluation, a shell."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "epdecode"
FILES = sorted(PACKAGE.rglob("*.py"))

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    "torch.load",
    "torch.save",
    "torch.package",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "np.load",
    "numpy.load",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def dotted(node):
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def found(tree):
    """(line, what) of everything forbidden."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(node)
        elif isinstance(node, ast.Call):
            yield from _calls(node)


def _imports(node):
    names = [alias.name for alias in node.names]
    modules = names if isinstance(node, ast.Import) else [node.module or "", *names]
    yield from ((node.lineno, name) for name in modules if name.split(".")[0] in MODULES)


def _calls(node):
    name = dotted(node.func)
    if name in NAMES or name.rsplit(".", 1)[-1] in OBJECT_COLLECTIVES:
        yield node.lineno, name
    if name in ATTRIBUTES and not _without_pickle(node):
        yield node.lineno, name
    for keyword in node.keywords:
        if keyword.arg in ("shell", "allow_pickle") and not _is(keyword.value, False):
            yield node.lineno, f"{name}({keyword.arg}=...)"


def _is(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def _without_pickle(call):
    """numpy.load that says allow_pickle=False."""
    return any(k.arg == "allow_pickle" and _is(k.value, False) for k in call.keywords)


def test_package_is_found():
    assert PACKAGE / "watch" / "__init__.py" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_forbidden(file):
    assert list(found(ast.parse(file.read_text()))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "yaml.load(text)",
        "eval('1')",
        "np.load('x.npy')",
        "np.load('x.npy', allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
        "dist.all_gather_object(a, b)",
        "from shelve import open",
    ],
)
def test_each_would_be_found(source):
    assert list(found(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["np.load('x.npy', allow_pickle=False)", "yaml.safe_load(t)", "re.compile('x')"]
)
def test_harmless_ones_are_not(source):
    assert list(found(ast.parse(source))) == []
