"""Every name and link of the documentation leads somewhere."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [f for f in sorted(ROOT.rglob("*.*")) if f.suffix in (".py", ".md")]
FILES = [f for f in FILES if not any(x[0] == "." or x == "runs" for x in f.relative_to(ROOT).parts)]
THEORY = (ROOT / "theory.md").read_text()
ANCHORS = re.findall(r'<a id="([^"]+)"></a>', THEORY)
BLOCKS = dict(zip(ANCHORS, re.split(r'<a id="[^"]+"></a>', THEORY)[1:], strict=True))
HEADINGS = {"thm-3-2", "sharp"}  # what they announce is split over the anchors that follow
TEST_NAME = re.compile(r"tests/[\w/]+\.py::\w+")
CODE_NAME = re.compile(r"(?:dppo|toy(?:\.\w+)?)\.\w+")


def links(text, pattern):
    return re.findall(pattern, text)


@cache
def functions_of(path):
    if not (ROOT / path).is_file():
        return set()
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def resolves(name):
    """Is `name` a test function, a module, or an attribute of a module?"""
    if TEST_NAME.fullmatch(name):
        path, function = name.split("::")
        return function.startswith("test_") and function in functions_of(path)
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(import_module(module), attribute) or bool(import_module(name))
    except ImportError:
        return False


def test_every_link_to_theory_has_its_anchor():
    assert len(set(ANCHORS)) == len(ANCHORS)
    missing = {
        (f.name, anchor)
        for f in FILES
        for anchor in links(f.read_text(), r"theory\.md#([\w-]+)")
        if anchor not in ANCHORS
    }
    inside = set(links(THEORY, r"\]\(#([\w-]+)\)")) - set(ANCHORS)
    assert not missing and not inside


def test_every_anchor_is_linked_from_code_or_says_that_it_has_none():
    code = "\n".join(f.read_text() for f in FILES if f.suffix == ".py")
    linked = set(links(code, r"theory\.md#([\w-]+)"))
    assert [a for a in ANCHORS if a not in linked and "(no code)" not in BLOCKS[a]] == []


@pytest.mark.parametrize("anchor", ANCHORS)
def test_every_block_names_code_and_tests_that_exist(anchor):
    lines = [line for line in BLOCKS[anchor].splitlines() if line.startswith("code: ")]
    assert lines or anchor in HEADINGS
    for line in lines:
        assert re.fullmatch(r"code: (`[^`]+`(, )?)+; test: ((`[^`]+`(, )?)+|\(no code\))", line)
        code, tests = (re.findall(r"`([^`]+)`", part) for part in line.split("; test: "))
        assert all(CODE_NAME.fullmatch(name) for name in code)
        assert all(TEST_NAME.fullmatch(name) for name in tests)
        assert [name for name in code + tests if not resolves(name)] == []


def test_names_and_files_in_the_readme_exist():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md")
    names = re.findall(r"`([^`\n]+)`", readme.read_text())
    names = [n.removesuffix("()") for n in names]
    names = [n for n in names if TEST_NAME.fullmatch(n) or CODE_NAME.fullmatch(n)]
    names = [n for n in names if not n.endswith((".py", ".md"))]
    assert [n for n in names if not resolves(n)] == []
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", readme.read_text() + THEORY)
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_a_dangling_name_is_noticed():
    assert resolves("toy.mdp.J") and resolves("dppo.keep_mask") and resolves("toy.mdp")
    assert not resolves("toy.mdp.nothing") and not resolves("toy.nowhere.J")
    assert not resolves("tests/test_docs.py::test_nothing") and not resolves("dppo.nothing")
