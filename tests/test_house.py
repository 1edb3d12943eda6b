"""What several files of tests share stands in a module that is named for it, and no file of tests is imported."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests", "bench", "demo")


def imports_of_tests(source: str) -> list[str]:
    """Return the modules named `test_...` that this source imports, or imports from."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [f"{node.module or ''}.{each.name}" for each in node.names]
    return [module for module in modules if any(part.startswith("test_") for part in module.split("."))]


def test_no_file_imports_from_a_file_of_tests() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]

    found = {str(file.relative_to(ROOT)): imports_of_tests(file.read_text()) for file in files}

    assert {file: modules for file, modules in found.items() if modules} == {}
    assert len(files) > 400


def test_every_way_to_import_a_file_of_tests_is_found() -> None:
    source = "import tests.test_a\nfrom tests import test_b\nfrom tests.test_c import d\nfrom .test_e import f"

    assert imports_of_tests(source) == ["tests.test_a", "tests.test_b", "tests.test_c.d", "test_e.f"]
    assert imports_of_tests("from tests.support.eventually import eventually\nimport pytest") == []
