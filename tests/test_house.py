"""What several files of tests share stands in a module that is named for it, and each drill says what it drills."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests", "bench", "demo")
LONGEST_NAME = 80


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each file of tests, benches and the demo, by its path."""
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def imports_of_tests(tree: ast.Module) -> list[str]:
    """Return the modules named `test_...` that a file imports, or imports from."""
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [f"{node.module or ''}.{each.name}" for each in node.names]
    return [module for module in modules if any(part.startswith("test_") for part in module.split("."))]


def each_test(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node


def silent_drills(tree: ast.Module) -> list[str]:
    """Return the tests marked `drills` that have no docstring."""
    marks = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    is_marked = any("mark.drills" in ast.unparse(mark.value) for mark in marks)
    return [
        test.name
        for test in each_test(tree)
        if is_marked or any("mark.drills" in ast.unparse(each) for each in test.decorator_list)
        if ast.get_docstring(test) is None
    ]


def literals_beside_parameters(tree: ast.Module) -> list[str]:
    """Return the values that are written as literals into a statement with parameters: there `%` has a meaning.

    A name of ours, an f-string that begins with the schema, is fine: no schema has such a sign.
    """
    takes_parameters = {
        ast.unparse(node.targets[0])
        for node in tree.body
        if isinstance(node, ast.Assign) and "SQL(" in ast.unparse(node.value) and "%(" in ast.unparse(node.value)
    }
    formats = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "format"
        and ast.unparse(node.func.value) in takes_parameters
    ]
    literals = [
        node.args[0]
        for call in formats
        for value in (*call.args, *(keyword.value for keyword in call.keywords))
        for node in ast.walk(value)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Literal"
    ]
    return [
        ast.unparse(value)
        for value in literals
        if not isinstance(value, ast.Constant) and "schema" not in ast.unparse(value)
    ]


def places_of_classes(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return the files in which each public class stands, by its name."""
    places: dict[str, list[str]] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(file)
    return places


def test_no_two_public_classes_have_one_name() -> None:
    """A reader who looks for a name finds one class."""
    files = sorted((ROOT / "relay").rglob("*.py"))
    trees = {str(file.relative_to(ROOT / "relay")): ast.parse(file.read_text()) for file in files}

    assert {name: files for name, files in places_of_classes(trees).items() if len(files) > 1} == {}


def test_a_name_is_found_in_each_file_and_in_each_class_that_has_it() -> None:
    first = ast.parse("class Entry: ...\nclass _Own: ...\ndef f():\n    class Local: ...")
    second = ast.parse("class Other:\n    class Entry: ...\nclass _Own: ...")

    places = places_of_classes({"a.py": first, "b.py": second})

    assert places == {"Entry": ["a.py", "b.py"], "Local": ["a.py"], "Other": ["b.py"]}


def test_no_file_imports_from_a_file_of_tests() -> None:
    found = {file: imports_of_tests(tree) for file, tree in trees().items()}

    assert {file: modules for file, modules in found.items() if modules} == {}
    assert len(found) > 400


def test_each_drill_says_which_fault_it_brings() -> None:
    assert [(file, name) for file, tree in trees().items() for name in silent_drills(tree)] == []


def test_no_name_of_a_test_is_too_long() -> None:
    names = [test.name for tree in trees().values() for test in each_test(tree)]

    assert [name for name in names if len(name) > LONGEST_NAME] == []
    assert len(names) > 1000


def test_every_way_to_import_a_file_of_tests_is_found() -> None:
    source = "import tests.test_a\nfrom tests import test_b\nfrom tests.test_c import d\nfrom .test_e import f"

    assert imports_of_tests(ast.parse(source)) == ["tests.test_a", "tests.test_b", "tests.test_c.d", "test_e.f"]
    assert imports_of_tests(ast.parse("from tests.support.eventually import eventually\nimport pytest")) == []


def test_a_drill_without_words_is_found_by_its_own_mark_and_by_that_of_its_file() -> None:
    marked = "@pytest.mark.drills\ndef test_a(): ...\n@pytest.mark.drills\ndef test_b(): 'A fault.'\ndef test_c(): ..."

    assert silent_drills(ast.parse(marked)) == ["test_a"]
    assert silent_drills(ast.parse("pytestmark = [pytest.mark.drills]\nasync def test_d(): ...")) == ["test_d"]


def test_no_statement_with_parameters_takes_a_literal() -> None:
    """A `%` in a replay's routing key, written as a literal next to parameters, ended all jobs of all consoles."""
    files = sorted((ROOT / "relay").rglob("*.py"))
    found = {str(file.relative_to(ROOT)): literals_beside_parameters(ast.parse(file.read_text())) for file in files}

    assert {file: values for file, values in found.items() if values} == {}
    assert literals_beside_parameters(
        ast.parse("READ = SQL('SELECT {} WHERE %(a)s')\nREAD.format(SQL('{}').format(Literal(job.key)))")
    ) == ["job.key"]
