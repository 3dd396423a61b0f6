"""Checks of the repository: layout, length of files, layers, stray paths, plain language."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import prose
import pytest
from layers import CSRC, R2SERVE

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"bench", "csrc", "deploy", "docs", "kernels", "r2serve", "tests"}
FILES = {
    "CHANGELOG.md",
    "CMakeLists.txt",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
}
LONGEST_FILE = 480  # lines; most files have fewer than 400
LONGEST_TEST = 700  # tables of cases are long
SOURCES = {".py", ".cc", ".hpp", ".h", ".sh"}


@cache
def tracked() -> tuple[Path, ...]:
    """Returns every file in git or not yet added, so that files are checked before the commit."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    names = [Path(name) for name in listing.stdout.split("\0") if name]
    return tuple(name for name in names if (ROOT / name).is_file())


def text_of(path: Path) -> str | None:
    """Returns the text of a file; None = binary."""
    data = (ROOT / path).read_bytes()
    return None if b"\0" in data or "corpus" in path.parts else data.decode()


def python_files(*folders: str) -> list[Path]:
    return [path for path in tracked() if path.suffix == ".py" and path.parts[0] in folders]


def test_only_the_folders_of_the_architecture() -> None:
    for path in tracked():
        top = path.parts[0]
        if not top.startswith("."):
            assert top in (FOLDERS if len(path.parts) > 1 else FILES), path


def test_files_have_a_sane_length() -> None:
    for path in tracked():
        if path.suffix in SOURCES:
            lines = len((text_of(path) or "").splitlines())
            longest = LONGEST_TEST if path.parts[0] == "tests" else LONGEST_FILE
            assert lines <= longest, f"{path} has {lines} lines: split it"


def test_no_paths_of_a_particular_machine() -> None:
    # The words are split, so that this file does not match.
    roots = "|".join(("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/op" + "t/", "/Us" + "ers/"))
    for path in tracked():
        for number, line in enumerate((text_of(path) or "").splitlines(), start=1):
            assert not re.search(rf"(?<![\w.~-])(?:{roots})", line), f"{path}:{number}: {line}"


def test_no_unfinished_work() -> None:
    words = re.compile(r"\b(?:TO" + "DO|FIX" + "ME|XX" + r"X|TB" + r"D)\b")
    for path in tracked():
        if path.name != "LICENSE":
            found = words.search(text_of(path) or "")
            assert found is None, f"{path}: {found}"


def test_text_files_end_in_one_newline_and_have_no_trailing_blanks() -> None:
    for path in tracked():
        text = text_of(path)
        if text and path.suffix not in (".jsonl", ".json", ".svg"):
            assert text.endswith("\n"), path
            assert not text.endswith("\n\n"), path
            assert not re.search(r"[ \t]+$", text, re.MULTILINE) or path.name == "LICENSE", path


def test_errors_are_not_swallowed() -> None:
    for path in python_files("r2serve", "kernels", "bench", "tests", "deploy"):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}: bare except"
                only = node.body[0] if len(node.body) == 1 else None
                silent = isinstance(only, ast.Pass)
                assert not silent, f"{path}:{node.lineno}: say why with contextlib.suppress"


def test_no_print_outside_the_command_line() -> None:
    for path in python_files("r2serve", "kernels", "bench"):
        if "cli" in path.parts or path.stem == "cli":
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{path}:{node.lineno}: log, or take a console"


def test_one_logger_tree() -> None:
    """Loggers are named after their module, so a single level and handler control all."""
    for path in python_files("r2serve", "kernels"):
        for name in re.findall(r"getLogger\(([^)]*)\)", (ROOT / path).read_text()):
            engine = path.parts[2] if path.parts[:2] == ("r2serve", "engines") else None
            right = name == "__name__" or name.startswith('"r2serve') or name == f'"{engine}"'
            assert right, f"{path}: getLogger({name})"


def test_engines_are_imported_only_where_they_belong() -> None:
    for path in python_files("r2serve", "kernels"):
        if path.parts[:2] == ("r2serve", "engines"):
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & {"vllm", "sglang"}, path


IMPORTED_AS = {"r2serve": "r2serve", "bench": "r2serve.bench", "kernels": "r2serve.kernels"}


@cache
def modules() -> dict[str, Path]:
    """Returns each module of the package by dotted name."""
    found = {}
    for path in python_files(*IMPORTED_AS):
        parts = [part for part in path.with_suffix("").parts[1:] if part != "__init__"]
        found[".".join([IMPORTED_AS[path.parts[0]], *parts])] = path
    return found


def layer_of(module: str) -> str:
    """Returns the entry of the map with this module."""
    if module == "r2serve._core":
        return "_core"
    parts = modules()[module].parts
    within = parts[1:] if parts[0] == "r2serve" else parts
    if within == ("__init__.py",):
        return "r2serve"
    return "/".join(within[:-1]) or within[0].removesuffix(".py")


@cache
def imports_of(module: str) -> tuple[tuple[str, int], ...]:
    """Returns the package's modules imported by a module, with lines; TYPE_CHECKING included."""
    known = modules().keys() | {"r2serve._core"}
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse((ROOT / modules()[module]).read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: write the whole name of the module"
            base = node.module or ""
            each = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in known else base for name in each]
        ours = [name for name in names if name.split(".")[0] == "r2serve" and name != module]
        assert set(ours) <= known, f"{module}:{node.lineno}: {ours}"
        found += [(name, node.lineno) for name in ours]
    return tuple(found)


def test_python_imports_only_allowed_layers() -> None:
    used: dict[str, set[str]] = {}
    for module, path in modules().items():
        layer = layer_of(module)
        for name, line in imports_of(module):
            if (other := layer_of(name)) != layer:
                assert other in R2SERVE.get(layer, ()), f"{path}:{line}: {layer} imports {other}"
                used.setdefault(layer, set()).add(other)
    assert {layer_of(module) for module in modules()} | {"_core"} == set(R2SERVE)
    for layer, allowed in R2SERVE.items():
        assert set(allowed) == used.get(layer, set()), f"{layer}: the map allows what nothing uses"


def test_the_layers_have_no_circle() -> None:
    below: set[str] = set()
    for layer, allowed in R2SERVE.items():
        assert set(allowed) <= below, f"{layer} stands above {set(allowed) - below}"
        below.add(layer)


def test_python_files_import_each_other_in_one_direction() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module in done or module not in modules():
            return
        for name, _ in imports_of(module):
            visit(name, (*above, module))
        done.add(module)

    for module in modules():
        visit(module, ())


def test_the_page_prints_the_layers() -> None:
    rows = [
        f"| `{layer}` | {', '.join(f'`{name}`' for name in allowed) or 'nothing'} |"
        for layer, allowed in R2SERVE.items()
    ]
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert "\n".join(["| layer of Python | imports |", "|---|---|", *rows, ""]) in page


def test_a_term_of_the_architecture_names_one_type() -> None:
    """A type named by a bare term, such as Node, is the only type of this name."""
    section = (ROOT / "docs/architecture.md").read_text().split("\n## Words\n")[1].split("\n#")[0]
    terms = re.findall(r"^\| ([a-z][\w -]*) \|", section, re.MULTILINE)
    names = {"".join(map(str.capitalize, re.split("[ -]", term))) for term in terms}
    assert {"Node", "LocalRank"} <= names
    found: dict[str, list[str]] = {}
    for path in python_files(*IMPORTED_AS):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef) and node.name in names:
                found.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert found, "no type has the name of a term"
    for name, places in found.items():
        assert len(places) == 1, f"types {name}: {places}"


PROOF = ("r2serve/lab/", "r2serve/demo/", "bench/")


def test_only_demo_and_benchmarks_use_the_lab() -> None:
    """Code for users runs without the lab, which simulates nodes and cables."""
    for path in python_files("r2serve", "kernels", "bench"):
        if not str(path).startswith(PROOF):
            named = re.search(
                r"\br2serve\.lab\b|\bfrom r2serve import .*\blab\b", text_of(path) or ""
            )
            assert named is None, f"{path}: {named}"


def includes_of(path: Path) -> list[str]:
    return re.findall(r'#include "([^"]+)"', (ROOT / path).read_text())


def arrows_of_the_core() -> set[tuple[str, str]]:
    """Returns which folder of the core includes which other folder."""
    arrows = set()
    for path in tracked():
        if path.parts[0] == "csrc":
            for included in includes_of(path):
                used = included.split("/")[0] if "/" in included else path.parts[1]
                arrows.add((path.parts[1], used))
    return {(user, used) for user, used in arrows if user != used}


def test_the_map_of_layers_has_all_folders_of_the_core_and_no_arrow_back() -> None:
    assert set(CSRC) == {path.parts[1] for path in tracked() if path.parts[0] == "csrc"}
    below: set[str] = set()
    for folder, used in CSRC.items():
        assert set(used) <= below, f"{folder} uses a folder that is not below it"
        below.add(folder)


def test_the_core_includes_what_the_map_of_layers_allows() -> None:
    allowed = {(folder, used) for folder, below in CSRC.items() for used in below}
    for path in tracked():
        if path.parts[0] == "csrc":
            for included in includes_of(path):
                folder = included.split("/")[0] if "/" in included else path.parts[1]
                arrow = (path.parts[1], folder)
                own = folder == path.parts[1]
                assert own or arrow in allowed, f"{path} includes {included}"
    assert allowed == arrows_of_the_core(), "the map allows what nothing uses"


def test_the_architecture_prints_the_map_of_layers() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.split("\n## Layers\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `csrc/(\w+)` \|[^|]+\|([^|]+)\|$", section, re.MULTILINE)
    printed = {folder: tuple(re.findall(r"\w+", used)) for folder, used in rows}
    assert printed == CSRC
    assert list(printed) == list(reversed(CSRC)), "the topmost layer comes first"


def test_the_state_machine_knows_no_socket_thread_or_clock() -> None:
    forbidden = ("<sys/socket.h>", "<netinet/", "<thread>", "<poll.h>", "<ctime>", "<time.h>")
    for path in tracked():
        if path.parts[:2] == ("csrc", "link"):
            text = (ROOT / path).read_text()
            for word in (*forbidden, "_clock::now", "base/clock.hpp"):
                assert word not in text, f"{path}: {word}"


def test_source_files_of_the_core_are_header_or_implementation() -> None:
    for path in tracked():
        if path.parts[0] == "csrc":
            assert path.suffix in (".cc", ".hpp", ".cu", ".cuh"), path
            if path.suffix == ".hpp":
                assert "#pragma once" in (ROOT / path).read_text(), path


# ---- plain language ----


@cache
def comments() -> dict[Path, list[prose.Comment]]:
    """The comments of each folder."""
    files = [path for path in tracked() if path.suffix in prose.SOURCES]
    return prose.by_folder({path: text_of(path) or "" for path in files})


def pages() -> list[Path]:
    found = [path for path in tracked() if path.suffix == ".md"]
    return [path for path in found if len(path.parts) == 1 or path.parts[0] == "docs"]


def test_comments_name_things_by_nouns() -> None:
    over = {}
    for folder, found in comments().items():
        per_100 = prose.proforms_per_100(" ".join(comment.text for comment in found))
        if per_100 > prose.COMMENT_PROFORMS:
            over[str(folder)] = round(per_100, 1)
    assert not over, f"pro-forms per 100 words, at most {prose.COMMENT_PROFORMS}: {over}"


def test_comments_do_not_hang_on_the_line_before() -> None:
    over = {}
    for folder, found in comments().items():
        percent = prose.leading_percent(comment.text for comment in found)
        if percent > prose.LEADING_PERCENT:
            over[str(folder)] = round(percent, 1)
    assert not over, f"comments that begin with a preposition, in percent: {over}"


def test_comments_use_the_words_of_the_field() -> None:
    found = [
        f"{comment.path}: {word!r} in {comment.text!r}"
        for comments_of_folder in comments().values()
        for comment in comments_of_folder
        for word in prose.banned_words(comment.text)
        if comment.path.name != "prose.py"
    ]
    assert not found, "\n".join(found)


def test_pages_are_in_plain_language() -> None:
    over = []
    for path in pages():
        text = prose.prose_of(text_of(path) or "")
        sentences = prose.sentences_of(text)
        words = prose.banned_words(text)
        if words:
            over.append(f"{path}: {words}")
        if len(sentences) < prose.FEWEST_SENTENCES:
            continue
        lengths = [len(sentence.split()) for sentence in sentences]
        mean, longest = sum(lengths) / len(lengths), max(sentences, key=lambda s: len(s.split()))
        if (per_100 := prose.proforms_per_100(text)) > prose.PAGE_PROFORMS:
            over.append(f"{path}: {per_100:.1f} pro-forms per 100 words")
        if mean > prose.MEAN_WORDS:
            over.append(f"{path}: {mean:.1f} words a sentence")
        if max(lengths) > prose.LONGEST_WORDS:
            over.append(f"{path}: {max(lengths)} words: {longest}")
    assert not over, "\n".join(over)


def test_the_counts_see_what_they_are_to_see() -> None:
    assert prose.proforms_per_100("the rail that it took") == 40
    assert prose.leading_percent(["Of a rail.", "Rails of a link.", "For example", "By 2"]) == 50
    assert prose.banned_words("Users who wait, and ranks who wait for ever") == ["for ever", "who"]
    sources = {
        Path("csrc/a/x.cc"): "int a;  // three words here\n// two\n// lines of it\n",
        Path("csrc/y.py"): '"""A docstring of y."""\n# short\n',
    }
    grouped = prose.by_folder(sources)
    assert [each.text for each in grouped[Path("csrc")]] == [
        "A docstring of y.",
        "three words here",
        "two  lines of it",
    ]
    page = "# A title\n\nOne sentence here. Another one: Here.\n\n| a | table |\n- item of a list\n"
    assert len(prose.sentences_of(prose.prose_of(page))) == 2


RULER = re.compile(r"^\s*(?://|#) ?-{2,}")
GOOD_RULER = re.compile(r"^\s*(?://|#) ---- [^-].*[^-] ----$")


def test_rulers_are_one_line_that_a_formatter_leaves_alone() -> None:
    for path in tracked():
        if path.suffix in prose.SOURCES:
            for number, line in enumerate((text_of(path) or "").splitlines(), start=1):
                if RULER.match(line):
                    assert GOOD_RULER.match(line), f"{path}:{number}: write `---- name ----`"


def test_diagrams_in_comments_fit_without_a_formatter() -> None:
    """A line of a diagram is indented and short, so no formatter joins or wraps it."""
    drawn = re.compile(r"^\s*(?://|#)(?P<body>.*(?:-->|<--|──|\+--).*)$")
    for path in tracked():
        if path.suffix in prose.SOURCES and path.parts[0] != "tests":
            for number, line in enumerate((text_of(path) or "").splitlines(), start=1):
                if found := drawn.match(line):
                    assert found["body"].startswith("  "), f"{path}:{number}: {line}"
                    assert len(line) <= 100, f"{path}:{number}: {line}"
