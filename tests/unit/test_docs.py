"""What the documents claim is there: modules, commands, flags, links; and nothing of the machine that wrote them."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import flashrec.cli
import flashrec_harness.cli
from flashrec import EngineConfig

ROOT = Path(__file__).parents[2]
PACKAGES = {"flashrec": ROOT / "engine" / "flashrec", "flashrec_harness": ROOT / "harness" / "flashrec_harness"}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def modules() -> set[str]:
    """Every module with its package's path, ``flashrec/search/expand.py``, but for the packages' own files."""
    return {
        path.relative_to(root.parent).as_posix()
        for root in PACKAGES.values()
        for path in root.rglob("*.py")
        if path.name != "__init__.py"
    }


def described_modules(text: str) -> list[tuple[str, str]]:
    """(module, description) of every line of the architecture's last section, in its order."""
    found, folder = [], ""
    for line in text.split("## Every module", 1)[1].splitlines():
        if heading := re.fullmatch(r"### `([\w/]+)`", line):
            folder = heading[1]
        elif entry := re.fullmatch(r"- `(\w+\.py)`: (.+)", line):
            found.append((f"{folder}/{entry[1]}", entry[2]))
        else:
            assert not line.startswith(("-", "#")), f"not a module's line: {line}"
    return found


def test_architecture_names_every_module_once_and_no_other() -> None:
    described = described_modules((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    names = [name for name, _ in described]
    assert len(names) == len(set(names))
    assert sorted(modules() - set(names)) == [], "add a line for these to docs/architecture.md"
    assert sorted(set(names) - modules()) == [], "these are gone: remove their lines from docs/architecture.md"
    assert all(len(text) > 10 for _, text in described)


def test_a_module_that_is_left_out_would_be_seen() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = {name for name, _ in described_modules(text.replace("- `expand.py`", "  `expand.py`"))}
    assert modules() - names == {"flashrec/search/expand.py"}


TIERS = [
    {"errors", "device", "request", "config", "transfer", "profiler", "torch_trace", "assets", "logs"},
    {"sid", "kernels"},
    {"batch", "layers", "kvcache"},
    {"models", "attention"},
    {"search"},
    {"runtime"},
    {"server"},
    {"front"},
    {"console", "command_line", "cli", "catalog_cli", "__main__"},
]
"""Packages and modules of the engine; one may import those of its own tier and of the tiers before it."""


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module or ""


def test_imports_run_one_way() -> None:
    tier = {name: rank for rank, names in enumerate(TIERS) for name in names}
    root = PACKAGES["flashrec"]
    upward = []
    for path in sorted(root.rglob("*.py")):
        own = path.relative_to(root).with_suffix("").parts[0]
        if own == "__init__":
            continue
        for name in imported(path):
            package, _, rest = name.partition(".")
            assert package != "flashrec_harness", path
            if package == "flashrec" and rest and tier[rest.split(".")[0]] > tier[own]:
                upward.append(f"{path.relative_to(ROOT)} imports {name}")
    assert upward == []


def code(text: str) -> str:
    """The fenced blocks, but for Python's, and the inline code of a document, a line each."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    blocks = [body for language, body in fenced if language != "python"]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    return "\n".join([*blocks, *inline])


@functools.cache
def commands(app: typer.Typer) -> dict[str, set[str]]:
    """The options of every subcommand, those of a group's as ``group subcommand``."""

    def below(group: Any, prefix: str) -> Iterator[tuple[str, set[str]]]:
        for name, command in group.commands.items():
            names = (name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))
            yield prefix + name, set(names)
            if hasattr(command, "commands"):
                yield from below(command, f"{prefix}{name} ")

    return dict(below(typer.main.get_command(app), ""))


def sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


FLAG = re.compile(r"--[a-z][a-z-]+")


def problems(line: str) -> list[str]:
    """What a line of code in a document calls that does not exist."""
    line = line.split(" #", 1)[0]
    suites, found = commands(flashrec_harness.cli.app), []
    for program, known in (("flashrec-harness", suites), ("flashrec", commands(flashrec.cli.app))):
        for match in re.finditer(rf"(?<![\w/-]){program} ([a-z][a-z-]*)([^|]*)", line):
            name, rest = match.groups()
            inner = rest.split()[:1]
            if inner and any(other.startswith(f"{name} ") for other in known):
                name = f"{name} {inner[0]}"
            if name not in known:
                found.append(f"{program} {name}")
            else:
                passed_on = known.get(rest.split()[0], set()) if name == "bisect" and rest else set()
                allowed = known[name] | passed_on
                found += [f"{program} {name} {flag}" for flag in FLAG.findall(rest) if flag not in allowed]
    for match in re.finditer(r"(?:\./dev|nox -s)((?: [a-z]+)+)(?: -- (.*))?", line):
        names, rest = match[1].split(), match[2] or ""
        found += [f"session {name}" for name in names if name not in sessions()]
        for name in set(names) & set(suites):
            found += [f"{name} {flag}" for flag in FLAG.findall(rest) if flag not in suites[name]]
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_exist(document: Path) -> None:
    lines = code(document.read_text(encoding="utf-8")).replace("\\\n", " ").splitlines()
    assert [problem for line in lines for problem in problems(line)] == []


def test_commands_that_do_not_exist_are_seen() -> None:
    assert problems("flashrec launch --model-path DIR") == ["flashrec launch"]
    assert problems("flashrec serve --model DIR --port 1") == ["flashrec serve --model"]
    assert problems("flashrec-harness judge") == ["flashrec-harness judge"]
    assert problems("flashrec-harness baseline write NAME --reason WHY") == []
    assert problems("flashrec-harness baseline write --why WHY") == ["flashrec-harness baseline write --why"]
    assert problems("flashrec-harness golden guess") == ["flashrec-harness golden guess"]
    assert problems("./dev accept lints -- --quick --fast") == ["session lints", "accept --fast"]
    assert problems("nox -s perf -- --workload NAME") == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_in_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert [link for link in links if link and not (document.parent / link).exists()] == []
    paths = re.findall(r"`((?:engine|harness|docs|tests|kernels|models|runtime|search|server)/[\w./]+)`", text)
    bases = (ROOT, *PACKAGES.values())
    assert [path for path in paths if not any((base / path).exists() for base in bases)] == []


def test_python_in_the_readme_imports_what_exists() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    for node in ast.parse(block).body:
        if isinstance(node, ast.ImportFrom):
            assert node.module == "flashrec"
            assert {alias.name for alias in node.names} <= set(flashrec.__all__)


def test_every_setting_is_described() -> None:
    assert [name for name, field in EngineConfig.model_fields.items() if not field.description] == []


TEXT = {".py", ".md", ".toml", ".txt", ".json", ".yml", ".yaml", ".sh", ".j2", ".tsv", ".csv", ".cfg", ""}
FOLDERS = ("engine", "harness", "tests", "docs", "baselines", "constraints", "reports/published", ".ci", ".github")
MACHINE_PATH = re.compile(r"(?<![\w./:~$}-])/(?:root|home|work|workspace|mnt|tmp|Users)/[\w.-]")
PACKAGE_HOST = re.compile(
    r"https?://[^\s/\"'`]*(?:pypi|pythonhosted|registry|mirror|artifactory|nexus)|--(?:extra-)?index-url|trusted-host",
    re.I,
)


def text_files() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT and path.name != ".git")
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts and path != Path(__file__):
                yield path


def foreign(text: str) -> list[str]:
    return [match[0] for pattern in (MACHINE_PATH, PACKAGE_HOST) for match in pattern.finditer(text)]


def test_no_file_names_the_machine_or_where_its_packages_came_from() -> None:
    found = {
        str(path.relative_to(ROOT)): hits
        for path in text_files()
        if (hits := foreign(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert found == {}


def test_machine_paths_and_package_hosts_are_seen() -> None:
    for text in ("see /home/me/x", "'/tmp/run.json'", "https://pypi.example.org/simple", "pip --index-url=x"):
        assert foreign(text), text
    for text in ("/v1/models", "https://github.com/a/b", "a/tmp/b", "docs/work/x", "`/metrics`"):
        assert not foreign(text), text
